// What the CPU backend offers to the layers above: its entry in the implementation list, its threads, its SIMD target.
#pragma once

#include <string>

#include "plan/implementation.hpp"

namespace lla::cpu {

extern const core::Implementation implementation;

inline constexpr int kMaxThreads = 1024;

// Threads a call may use. Results do not depend on it. 0 restores the default: LLA_NUM_THREADS, or the cores this
// process may use.
int num_threads();
void set_num_threads(int threads);
// Fails while LLA_NUM_THREADS decides on the number of threads and is none.
Status check_environment();

// The instruction set the kernels were dispatched to on this machine, e.g. "AVX3".
std::string simd_target_name();

}  // namespace lla::cpu
