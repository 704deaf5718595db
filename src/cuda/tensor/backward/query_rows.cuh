// What the kernels share that go through query rows, a few threads a row, eight elements a thread.
#pragma once

#include "cuda/tensor/backward/bounds.cuh"
#include "cuda/tensor/backward/operands.hpp"
#include "cuda/tensor/rows.cuh"

namespace lla::cuda::tensor {

inline constexpr int kOperandThreads = 256;
inline constexpr float kLog2E = 1.44269504088896340736f;

// The head and rows of a block.
struct BlockRows {
  int32_t batch, head, kv_head, copy_index;
  int32_t first, length_q, start_q;
  int64_t row0;  // saved row of position 0 of the sequence

  __device__ __forceinline__ explicit BlockRows(const OperandParams& params) {
    const Shape& s = params.shape;
    const int32_t chunks = (s.seqlen_q + kOperandRows - 1) / kOperandRows;
    const int32_t pair = blockIdx.x / chunks;
    first = (blockIdx.x - pair * chunks) * kOperandRows;
    batch = pair / s.heads_q;
    head = pair - batch * s.heads_q;
    kv_head = head / s.group;
    copy_index = kv_copy(s, params.heads_kv, batch, kv_head);
    start_q = s.packed ? params.cu_q[batch] : 0;
    length_q = s.packed ? params.cu_q[batch + 1] - start_q : s.seqlen_q;
    row0 = query_row(s, batch, head, start_q, 0);
  }
};

// Eight elements of a row, zeros where it is not there or has ended. kFast: the row has 16-byte vectors, of f32 if
// kWide and else of 16-bit numbers; then all rows fetched before the first is used are under way at once, which no test
// of type or stride stands between. Otherwise any row is read as it comes.
template <bool kFast, bool kWide>
struct RowPiece {
  uint4 vectors[kWide ? 2 : 1];

  __device__ __forceinline__ void fetch(const Rows& rows, const BlockRows& block, int32_t position, int column,
                                        bool there) {
    const auto* row = static_cast<const uint4*>(row_pointer(rows, block.batch, block.start_q + position, block.head));
#pragma unroll
    for (int i = 0; i < (kWide ? 2 : 1); ++i) {
      vectors[i] = there ? __ldg(row + (kWide ? column / 4 : column / 8) + i) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void get(float (&to)[8], const Rows& rows) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(vectors);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kWide) {
        to[i] = __uint_as_float(words[i]);
      } else {
        to[i] = widen16(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)), rows.dtype);
      }
    }
  }
};
template <bool kWide>
struct RowPiece<false, kWide> {
  float values[8];

  __device__ __forceinline__ void fetch(const Rows& rows, const BlockRows& block, int32_t position, int column,
                                        bool there) {
#pragma unroll
    for (float& v : values) v = 0;
    if (there) {
      load_eight(values, row_pointer(rows, block.batch, block.start_q + position, block.head), column, rows);
    }
  }
  __device__ __forceinline__ void get(float (&to)[8], const Rows&) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = values[i];
  }
};
using SavedPiece = RowPiece<true, true>;  // saved sections and y are dense f32

// How a kernel takes the caller's rows: as they come, or in vectors of one kind.
enum class RowKind { any, narrow, wide };
template <RowKind kKind>
using PieceOf = RowPiece<kKind != RowKind::any, kKind == RowKind::wide>;
inline RowKind row_kind(const Rows& rows) {
  return !rows.vectors ? RowKind::any : rows.dtype == DType::f32 ? RowKind::wide : RowKind::narrow;
}

// Of q, G and, where it is the caller's, x.
inline RowKind common_kind(const OperandParams& params, bool solve) {
  const RowKind kind = row_kind(params.q);
  return row_kind(params.g) == kind && (solve || row_kind(params.x) == kind) ? kind : RowKind::any;
}

template <int kLanes>
__device__ __forceinline__ float row_sum(float x) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

}  // namespace lla::cuda::tensor
