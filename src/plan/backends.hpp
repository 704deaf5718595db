// Temporary: includes those backends that exist already. Goes away once all have landed.
#pragma once

#include <string>

#include "reference/implementation.hpp"
#if __has_include("cpu/cpu.hpp")
#include "cpu/cpu.hpp"
#define LLA_HAVE_CPU 1
#else
namespace lla::cpu {
inline int num_threads() { return 1; }
inline void set_num_threads(int) {}
inline std::string simd_target_name() { return "none"; }
}  // namespace lla::cpu
#endif
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
