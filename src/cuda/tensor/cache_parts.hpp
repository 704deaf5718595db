// A call over a cache has two parts: decode takes the sequences with few rows, the forward those with many. Which of
// them takes a sequence is asked for here by both, on the host and on the device: a matter of its own rows and of the
// call's shape, never of what else is in the batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

// Where the two cross, measured by bench/chunks_over_caches.py --parts crossing. Decode splits the keys of a row over
// the whole GPU, so that its time grows with the rows of all key heads; the forward gives up to 64 queries of a query
// head one multiprocessor, so that its time grows with the rounds in which these get through all query heads. They are
// equal at about `rows_per_round` rows of all key heads for each round. Up to `fewest` rows of its own every sequence
// decodes, whatever the call's shape: decoders keep their bits. Above `most` none does. With x given eight rows share a
// pass, so that decode wins for longer.
struct Crossing {
  int64_t rows_per_round, fewest, most;
};
inline constexpr Crossing kSolvedCrossing{660, 16, 128}, kGivenXCrossing{2720, 32, 128};
inline constexpr int64_t kBlocksInARound = 132;  // multiprocessors of an H200
inline constexpr int64_t kInvariantRows = 32;    // where not even the call's shape may matter

// Rows of a key head (queries times query heads) up to which a sequence is decoded.
constexpr int64_t most_rows(const core::Problem& p) {
  if (p.batch_invariant) return kInvariantRows;
  const Crossing at = p.given_x() ? kGivenXCrossing : kSolvedCrossing;
  if (p.solver == Solver::direct) return at.most;  // the forward has no such solver
  // What decode refuses is better off in the forward than with another implementation.
  if (p.dtype == DType::f32 || p.solver == Solver::cg || p.weights == Weights::cached) return at.fewest;
  const int64_t key_heads = std::max<int64_t>(p.batch * p.heads_kv, 1);
  const int64_t rounds = (key_heads * p.group() + kBlocksInARound - 1) / kBlocksInARound;
  return std::clamp(at.rows_per_round * rounds / key_heads, at.fewest, at.most);
}

constexpr bool decodes(int64_t length_q, int64_t group, int64_t most_rows) { return length_q * group <= most_rows; }

// The parts of a call by what the host knows. Where it knows that no sequence has many rows, decode takes all, also
// those that claim more rows than their bound and are invalid for it.
constexpr bool has_forward_part(const core::Problem& p) {
  return !p.cache || !decodes(p.seqlen_q, p.group(), most_rows(p));
}
constexpr bool has_decode_part(const core::Problem& p) { return p.cache && (p.packed || !has_forward_part(p)); }

// Bounds of what each part may get.
constexpr int64_t most_decoded_rows(const core::Problem& p) {
  if (!has_forward_part(p)) return p.rows();
  return std::min(p.total_q, p.batch * (most_rows(p) / p.group())) * p.heads_q;
}
constexpr int64_t most_forward_sequences(const core::Problem& p) {
  if (!p.cache || !p.packed) return p.batch;
  return std::min(p.batch, p.total_q / (most_rows(p) / p.group() + 1));
}

}  // namespace lla::cuda::tensor
