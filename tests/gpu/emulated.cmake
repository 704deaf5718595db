# What of the GPU's tests `make test` runs on the emulated GPU: every kernel, and what has gone wrong before. A second of
# an H200 is an hour here, so not all of it; `build/emulated/bin/gpu_test` has the whole list.
function(lla_emulated_test name)
  list(JOIN ARGN ":" filter)
  add_test(NAME emulated_${name} COMMAND gpu_test --gtest_brief=1 --gtest_filter=${filter})
  set_tests_properties(emulated_${name} PROPERTIES LABELS emulated TIMEOUT 1800)
endfunction()

set(decode Gpu/GpuDecode)
lla_emulated_test(decode_rows ${decode}.PagesOfAnySize/sm90 ${decode}.StridesTypesAndHeadDimensions/sm90
  ${decode}.RidgeShapes/sm90 ${decode}.RowsWithFewKeys/sm90 ${decode}.LengthsOutOfBounds/sm90
  Implementations/Decode.OutputsBeyondTheirType/sm90)
# The kernel for short caches wants a machine with room for clusters.
lla_emulated_test(decode_short ${decode}.ShortCaches/sm90 ${decode}.TheBoundOfShortCachesChangesNoBit/sm90
  ${decode}.ALongCacheBesideShortOnes/sm90 ${decode}.RowsWithFewKeys/sm90 ${decode}.LengthsOutOfBounds/sm90
  ${decode}.NotFiniteAnywhere/sm90 ${decode}.RealHeads/sm90)
set_tests_properties(emulated_decode_short PROPERTIES ENVIRONMENT LLA_EMULATED_MULTIPROCESSORS=66)
# With few blocks each has whole rows.
lla_emulated_test(decode_whole_rows ${decode}.RowsThatABlockHasAllOf/sm90)
set_tests_properties(emulated_decode_whole_rows PROPERTIES ENVIRONMENT LLA_EMULATED_MULTIPROCESSORS=3)
lla_emulated_test(decode_bundles ${decode}.SeveralQueriesGroupsWindowsAndPadding/sm90 ${decode}.QueriesOfEveryNumber/sm90)
lla_emulated_test(decode_bits ${decode}.RowsOfAKeyHeadKeepTheirBits/sm90 ${decode}.SameBitsAgain/sm90)
lla_emulated_test(decode_statuses ${decode}.StatusesAreTrue/sm90 ${decode}.StatusesOfManyKeyHeadsAreTrue/sm90)
lla_emulated_test(decode_values ${decode}.NotFiniteAnywhere/sm90 ${decode}.RealHeads/sm90)
lla_emulated_test(decode_peaked ${decode}.GroupsOfPeakedKinds/sm90)
set(huge Kinds/ResidualTruth.OfOkRowsWithHugeLogits)
lla_emulated_test(residuals ${huge}/sink ${huge}/two_channels ${huge}/queries20)
lla_emulated_test(caches GpuCacheAppend.* Fuzz.RandomCaches)
lla_emulated_test(drawn Fuzz.RandomProblems)
lla_emulated_test(forward Gpu/GpuShapes.OddLengths/sm90 Gpu/GpuShapes.Windows/sm90 Gpu/GpuShapes.RidgeShapes/sm90
  Gpu/GpuGivenX.LargeCommonMean/sm90 Gpu/GpuGivenX.SavedStatistics/sm90 Implementations/BeyondTheType.SolvedAndGiven/sm90)
lla_emulated_test(backward Gpu/Sanitize.*/sm90 Gpu/GpuGivenX.Gradients/sm90 Range.*)
lla_emulated_test(portable Gpu/Sanitize.*/cuda_portable ${decode}.RidgeShapes/cuda_portable)
