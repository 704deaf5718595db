// LLA as a direct transcription of its formulas would compute it, everything materialised: weights (queries, keys),
// differences k_j - q_i (queries, keys, d) and one matrix (d, d) per query, for every sequence of a batch. What this
// library's way is measured against.
#pragma once

#include <cstdint>

namespace lla::experiments {

struct NaiveSizes {
  int64_t batch, queries, keys, dim;  // the queries are the last positions of the keys
};

// Bytes it will allocate.
double naive_bytes(const NaiveSizes&);

// q, o (batch, queries, dim), k, v (batch, keys, dim), causal. Threads over queries.
void naive_lla(const NaiveSizes&, double scale, double ridge, const float* q, const float* k, const float* v, float* o,
               int threads);

}  // namespace lla::experiments
