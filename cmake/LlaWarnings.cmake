# Warnings for our own code; errors in CI (LLA_WERROR).
option(LLA_WERROR "Treat warnings as errors" OFF)
function(lla_warnings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX,C>:-Wall -Wextra -Wno-psabi $<$<BOOL:${LLA_WERROR}>:-Werror>>)
endfunction()
