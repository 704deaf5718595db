# Decides whether the CUDA kernels are built, and says so. Sets LLA_HAVE_CUDA and the target lla_cutlass (headers).
set(LLA_HAVE_CUDA OFF)
set(lla_cuda_reason "LLA_CUDA is OFF")
if(NOT LLA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Each source names its architectures itself (sm_80 with PTX for the portable kernels, sm_90a for Hopper's).
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    # The nvidia-cutlass wheel (installed without its dependencies) carries the headers: in this checkout's environment, the
    # active one, or that of the Python the operators are built for.
    set(lla_environments ${CMAKE_CURRENT_SOURCE_DIR}/.venv $ENV{VIRTUAL_ENV})
    if(Python_EXECUTABLE)
      cmake_path(GET Python_EXECUTABLE PARENT_PATH lla_python_folder)
      list(APPEND lla_environments ${lla_python_folder}/..)
    endif()
    find_path(LLA_CUTLASS_INCLUDE_DIR cute/tensor.hpp
      HINTS ENV LLA_CUTLASS_INCLUDE_DIR ${lla_environments}
      PATH_SUFFIXES lib/python3.11/site-packages/cutlass_library/source/include
                    lib/python3.12/site-packages/cutlass_library/source/include
                    lib/python3.13/site-packages/cutlass_library/source/include)
    if(LLA_CUTLASS_INCLUDE_DIR)
      set(LLA_HAVE_CUDA ON)
      set(CMAKE_CUDA_STANDARD 20)
      if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      endif()
      add_library(lla_cutlass INTERFACE)
      target_include_directories(lla_cutlass SYSTEM INTERFACE ${LLA_CUTLASS_INCLUDE_DIR})
    else()
      set(lla_cuda_reason "the CUTLASS headers were not found (pip install --no-deps nvidia-cutlass==4.2.0.0, or set LLA_CUTLASS_INCLUDE_DIR)")
    endif()
  else()
    set(lla_cuda_reason "no CUDA compiler was found")
  endif()
endif()
if(LLA_HAVE_CUDA)
  message(STATUS "CUDA kernels: built with nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
elseif(LLA_CUDA STREQUAL "ON")
  message(FATAL_ERROR "LLA_CUDA is ON but ${lla_cuda_reason}")
else()
  message(STATUS "CUDA kernels: not built (${lla_cuda_reason})")
endif()
