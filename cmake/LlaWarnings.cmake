# Warnings for our own code. Errors where asked (the tidy preset): a compiler newer than ours must not stop a user's build.
option(LLA_WERROR "Treat warnings as errors" OFF)
function(lla_warnings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX,C>:-Wall -Wextra -Wno-psabi $<$<BOOL:${LLA_WERROR}>:-Werror>>
    # GCC 12 sees overflows in std::sort and std::string that are not there (GCC bugs 107852, 105329).
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-array-bounds -Wno-restrict -Wno-stringop-overflow>)
endfunction()
