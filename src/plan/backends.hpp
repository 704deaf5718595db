// Temporary: includes those backends that exist already. Goes away once all have landed.
#pragma once

#include "cpu/cpu.hpp"
#include "reference/implementation.hpp"
#if LLA_HAVE_CUDA
#if __has_include("cuda/portable/portable.hpp")
#include "cuda/portable/portable.hpp"
#define LLA_HAVE_PORTABLE 1
#endif
#if __has_include("cuda/sm90/sm90.hpp")
#include "cuda/sm90/sm90.hpp"
#define LLA_HAVE_SM90 1
#endif
#endif
