// LLA as a direct transcription of its formulas would compute it, everything materialised: weights (n, n), differences
// k_j - q_i (n, n, d) and one matrix (d, d) per query. What blockwise computation is measured against.
#pragma once

#include <cstdint>

namespace lla::experiments {

// Bytes it will allocate.
double naive_bytes(int64_t n, int64_t d);

// q, k, v, o (n, d), causal. Threads over queries.
void naive_lla(int64_t n, int64_t d, double scale, double ridge, const float* q, const float* k, const float* v,
               float* o, int threads);

}  // namespace lla::experiments
