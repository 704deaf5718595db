// The records the backward kernels pass to each other through the workspace. Plain C++: planned and tested without a
// GPU.
#pragma once

#include <cstdint>

#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::tensor {

// Per query: what turns the accumulators of a tile into operands. With P the weights that sum to one and W = 2^15 exp2:
//   W = exp2(score * logit + shift)    a' = E * edge + a0    b' = B * edge + b0    (a' = a alpha, b' = b beta, both <=
//   1) 2^15 P a' = W inverse a'           2^15 P b' = W inverse b'           dS = W inverse_ds (a' b' + minus_c)
// alpha and beta are powers of two; their inverses are in the rows of the other operand.
struct alignas(16) RowConstants {
  float a0, b0, inverse, minus_c;
  float logit, shift, edge, inverse_ds;
};

// Per (batch, key head), packed per key head: exponents e with 2^e above what they name, over the rows of its query
// heads. Stored plus kExponentBias so that unsigned maxima work on zeroed memory.
inline constexpr int kExponentBias = 1024;
struct HeadBounds {
  uint32_t q, g, x, y;        // largest elements
  uint32_t alpha, beta;       // bounds of |a| and |b|
  uint32_t g_alpha, y_alpha;  // of a row's G times its bound of a, ...
  uint32_t x_beta, q_both;
  uint32_t both;  // bound of P |a b|
  uint32_t unused;
};

// Units of a row. Gradients may be as small or large as floats go, so what is linear in G is kept in units of the row:
// b, c, tau and t in 2^row_unit, y in 2^row_unit κ with κ the keys' scale. Only the last multiplication before a result
// is written leaves them. So a gradient times a power of two gives the same bits, times that power.

// Per query, what the solve knows of it before it begins: exponents above the largest elements of q and G, above |G|
// and of the weight of all keys but the heaviest; tau of the scaled G and values, of which 2^norm is the row's unit.
struct alignas(16) RowStart {
  int16_t q, g, g_norm, rest;
  float tau;
  int16_t norm, row_unit;
};

// Per query, by whoever has seen its vectors first (the solve, or a kernel of its own where x is given): all that
// making its operands needs beside them.
struct alignas(16) RowSizes {
  int16_t alpha, beta, both;  // exponents of the bounds of |a|, |b| and P |a b|
  int16_t row_unit;
  float tau, c;  // in the row's unit
  float low;     // x and y get low parts unless x·(q - mean key) reaches this: LowParts
};
inline constexpr int16_t kBadRow = INT16_MIN;       // alpha of a row that is not finite
inline constexpr int16_t kZeroRow = INT16_MIN + 1;  // of one whose gradient is zero: it takes part in nothing

// Per query: what gives the sums of the row pass their units.
struct alignas(16) RowUnits {
  float scale;     // of the sum behind dq, in what dq_exponent undoes
  float one;       // 2^-alpha: 1 in units of a'
  float lift = 1;  // what W (a' b' - c') is multiplied by, so that it makes use of fp16: with a solve only
  int32_t dq_exponent, dx_exponent;
};

// The six fp16 operands that run over queries, rows as in the saved vector, padded to the kernels' head dimension.
enum QueryOperand : int { kOpQ = 0, kOpG, kOpXHigh, kOpXLow, kOpYHigh, kOpYLow, kQueryOperands };

// Query rows of one block of the kernels that make them, all of one head; each such block has a flag that says whether
// its rows have low parts.
inline constexpr int kOperandRows = 64;
constexpr int64_t operand_block(const Shape& s, int64_t batch, int64_t head, int32_t row) {
  return (batch * s.heads_q + head) * ((int64_t{s.seqlen_q} + kOperandRows - 1) / kOperandRows) + row / kOperandRows;
}
constexpr int64_t operand_blocks(const Shape& s) {
  return (int64_t{s.seqlen_q} + kOperandRows - 1) / kOperandRows * s.batch * s.heads_q;
}

}  // namespace lla::cuda::tensor
