// The chunked form of linear recurrences: products within chunks of positions, a state carried between them. All of it
// is dense products and elementwise operations; no scan, no atomics.
//
// Layout: heads first, (Z, n, C, width) with Z = runs * batch * heads, n chunks of C positions; log decays are (Z, n,
// C), fp32 (or fp64) and never positive.
#pragma once

#include <cstdint>

#include "torch.hpp"

namespace lla::trained {

struct Chunks {
  int64_t length, size, count;
  int64_t padding() const { return size * count - length; }
  // The first chunk that holds one of the last `rows` positions.
  int64_t first(int64_t rows) const { return (length - rows) / size; }
};
// About `preferred` positions each; a size that divides the length where there is one near it, so that nothing is
// padded.
Chunks make_chunks(int64_t length, int64_t preferred);

// (N, L, H, width) to (Z, n, C, width), (N, L, H) to (Z, n, C); what is padded is zero.
at::Tensor to_chunks(const at::Tensor& x, const Chunks& chunks);
// The last `rows` positions of (Z, chunks from first on, C, width) as (N, rows, H, width).
at::Tensor from_chunks(const at::Tensor& x, int64_t heads, const Chunks& chunks, int64_t rows);

// The chunks from `first` on, and the first `count`: x itself where that is all, as the gradient of a part is a copy
// into zeros.
at::Tensor chunks_from(const at::Tensor& x, int64_t first);
at::Tensor chunks_until(const at::Tensor& x, int64_t count);

// Sums up to and including each position of a chunk, along dimension 2 (C).
at::Tensor cumulative(const at::Tensor& x);

// scores (Z, n, C, C) times exp(sums_i - sums_j) where j <= i (strict: j < i), else 0; sums (Z, n, C).
at::Tensor decayed_scores(const at::Tensor& scores, const at::Tensor& sums, bool strict = false);

// (I + L)^-1 for the strictly lower triangles L of the last two dimensions, in the dtype of L; its gradient's products
// in `precision`.
at::Tensor unit_lower_inverse(const at::Tensor& lower, at::ScalarType precision);

// y_i = sum over j <= i of exp(decay from j to i) (q_i . k_j) v_j for one k, v, decay and any number of q, for the
// chunks from `first` on.
class DecayedSum {
 public:
  // log_decay may be undefined: no decay.
  DecayedSum(const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay, int64_t first);
  at::Tensor operator()(const at::Tensor& q) const;  // (Z, n - first, C, width of k) to (..., width of v)

 private:
  at::Tensor k_, v_;     // of the chunks from first on
  at::Tensor sums_;      // of their log decays; undefined without decay
  at::Tensor entering_;  // exp(sums), undefined without decay
  at::Tensor state_;     // before each chunk (Z, n - first, Dk, Dv); undefined where there is only the first
};

}  // namespace lla::trained
