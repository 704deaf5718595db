// The elimination (eliminate.hpp) by one block, and the solve that comes with it.
#pragma once

#include "cuda/sm90/decode/eliminate.hpp"
#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90::decode {

// How a warp multiplies (Tiles): m16n8k8 of TF32, three times.
struct TensorProducts {
  struct Left {
    uint32_t leading[4], rest[4];
  };
  struct Right {
    uint32_t at[4];  // two leading parts, two rests
  };
  template <int kDim>
  __device__ __forceinline__ Left left(const Operand<kDim>& l, unsigned row, unsigned lane) const {
    const uint32_t at = opaque(shared_address(l.leading + l.left_place(lane))) + bytes(row);
    Left left;
    load_matrices(left.leading, at);
    load_matrices(left.rest, at + sizeof(l.leading));
    return left;
  }
  template <int kDim>
  __device__ __forceinline__ Right right(const Operand<kDim>& u, unsigned row, unsigned lane) const {
    const float* const part = lane < 16 ? u.leading : u.rest;
    Right right;
    load_matrices(right.at, opaque(shared_address(part + u.right_place(lane))) + bytes(row));
    return right;
  }
  __device__ __forceinline__ void take_off(float (&from)[4], float (&from_next)[4], const Left& l, const Left& l_next,
                                           const Right& r, unsigned) const {
    float product[4]{}, next[4]{};
    warp_product_tf32(product, l.rest, r.at[0], r.at[1]), warp_product_tf32(next, l_next.rest, r.at[0], r.at[1]);
    warp_product_tf32(product, l.leading, r.at[2], r.at[3]), warp_product_tf32(next, l_next.leading, r.at[2], r.at[3]);
    warp_product_tf32(product, l.leading, r.at[0], r.at[1]), warp_product_tf32(next, l_next.leading, r.at[0], r.at[1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) from[e] -= product[e], from_next[e] -= next[e];
  }

 private:
  __device__ __forceinline__ static unsigned bytes(unsigned rows) { return rows * kPanel * sizeof(float); }
};

template <int kDim>
struct EliminationBarriers {
  using Threads = Elimination<kDim>;
  __device__ __forceinline__ void wait_published(unsigned) const {
    named_sync(kPublishedBarrier, Threads::kAtPublished);
  }
  __device__ __forceinline__ void published(unsigned) const { named_arrive(kPublishedBarrier, Threads::kAtPublished); }
  __device__ __forceinline__ void wait_eliminated(unsigned) const {
    named_sync(kEliminatedBarrier, Threads::kAtEliminated);
  }
  __device__ __forceinline__ void eliminated(unsigned) const {
    named_arrive(kEliminatedBarrier, Threads::kAtEliminated);
  }
};

// Begins and ends with a barrier.
template <int kDim>
__device__ void factor(Matrix<kDim>& m) {
  __syncthreads();
  Elimination<kDim>::run(m, threadIdx.x, EliminationBarriers<kDim>{}, fast_reciprocal, TensorProducts{});
  __syncthreads();
}

// The smallest pivot over its start, by a whole warp.
template <int kDim>
__device__ __forceinline__ float smallest_pivot(const Matrix<kDim>& m) {
  float smallest = 1;
  for (int d = threadIdx.x % 32; d < kDim; d += 32) {
    if (m.start[d] > 0) smallest = fminf(smallest, m.pivot[d] / m.start[d]);
  }
#pragma unroll
  for (int by = 1; by < 32; by *= 2) smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, by));
  return smallest;
}

// x = L^-T (what the elimination has made of the right-hand side), 32 elements by a warp, a lane for each, the last 32
// first. Ends with a barrier.
template <int kDim>
__device__ void back_substitute(const Matrix<kDim>& m, float* x) {
  constexpr int kBlocks = kDim / 32;
  const int block = threadIdx.x / 32, lane = threadIdx.x % 32, element = threadIdx.x;
  // Of this thread's column of L the 32 rows of a block; what is above the diagonal is another row's.
  const auto load = [&](float(&l)[32], int of) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const unsigned panel = 4 * of + j / kPanel;
      l[j] = (&m.at(kPanel * panel, element))[j % kPanel * m.row_floats(panel)];
    }
  };
  float own = 0, within[32];
  if (block < kBlocks) {
    own = m.rhs[element];
    load(within, block);
#pragma unroll
    for (int j = 0; j < 32; ++j) within[j] = lane < j ? within[j] : 0;
  }
#pragma unroll 1
  for (int solved = kBlocks - 1;; --solved) {
    if (block == solved) {
#pragma unroll
      for (int j = 31; j > 0; --j) own = fmaf(-within[j], __shfl_sync(0xffffffffu, own, j), own);
      x[element] = own;
    }
    __syncthreads();
    if (solved == 0) break;
    if (block >= solved) continue;
    float beside[32], more = 0;
    load(beside, solved);
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      const Four four = load_floats<Four>(x + 32 * solved + j);
      own = fmaf(-beside[j], four.at[0], fmaf(-beside[j + 1], four.at[1], own));
      more = fmaf(beside[j + 2], four.at[2], fmaf(beside[j + 3], four.at[3], more));
    }
    own -= more;
  }
}

}  // namespace lla::cuda::sm90::decode
