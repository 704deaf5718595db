// A row's matrix solved by one block: conjugate gradients (conjugate.hpp) where they will do, else the elimination.
#pragma once

#include "cuda/sm90/decode/conjugate.hpp"
#include "cuda/sm90/decode/factor.cuh"

namespace lla::cuda::sm90::decode {

// What the threads of a block tell one another.
template <int kDim>
struct GradientsShared {
  alignas(16) float u[kDim];
  alignas(16) Two sums[kSolveThreads / 32];
};

template <int kDim>
struct GradientsBlock {
  using Part = MatrixPart<kDim>;
  GradientsShared<kDim>& s;

  // Everyone has read the last one before the barrier of `sum`.
  __device__ __forceinline__ const float* publish(float u, unsigned thread) const {
    if (Part::speaks(thread)) s.u[Part::own_row(thread)] = u;
    __syncthreads();
    return s.u;
  }
  __device__ __forceinline__ float own(const Two& products, unsigned thread) const {
    const bool odd = thread % 2 != 0;
    float sum = odd ? products.at[1] : products.at[0];
    sum += __shfl_xor_sync(0xffffffffu, odd ? products.at[0] : products.at[1], 1);
#pragma unroll
    for (unsigned by = 2; by < Part::kLanes; by *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    return sum;
  }
  __device__ __forceinline__ Two sum(Two of_row, unsigned thread) const {
    const auto add = [&](unsigned by) {
      of_row.at[0] += __shfl_xor_sync(0xffffffffu, of_row.at[0], by);
      of_row.at[1] += __shfl_xor_sync(0xffffffffu, of_row.at[1], by);
    };
    add(1);
#pragma unroll
    for (unsigned by = Part::kLanes; by < 32; by *= 2) add(by);
    if (thread % 32 == 0) store_floats(reinterpret_cast<float*>(&s.sums[thread / 32]), of_row);
    __syncthreads();
    Two total{};
#pragma unroll
    for (unsigned i = 0; i < kSolveThreads / 32; i += 2) {
      const Four two = load_floats<Four>(reinterpret_cast<const float*>(&s.sums[i]));
      total.at[0] += two.at[0] + two.at[2], total.at[1] += two.at[1] + two.at[3];
    }
    return total;
  }
};

// What a thread knows of its element of a row: the ridge, as it is and in the units of the matrix, the right-hand side, and
// the matrix's diagonal as it was summed up.
struct Element {
  float ridge = INFINITY, scaled = INFINITY, rhs = 0, uncentred = 0;
};

// Ridge, right-hand side and limits of the pivots; an infinite ridge takes its element out. `flags`: room for one number
// of each. Returns whether no pivot can come near to what is reported: each is at least its ridge.
template <int kDim>
__device__ bool prepare_row(Square<kDim>& square, Matrix<kDim>& m, const Element& own, float* flags) {
  const int d = threadIdx.x;
  bool removed = false, safe = true;
  if (d < kDim) {
    removed = !(own.scaled <= 3e38f) && own.ridge >= 0;
    square.at(d, d) = removed ? 1 : square.at(d, d) + own.scaled;
    m.rhs[d] = removed ? 0 : own.rhs;
    m.start[d] = removed ? 1 : own.uncentred + own.scaled;
    m.limit[d] = m.start[d] * (own.ridge > 0 ? 0x1p-20f : 0x1p-16f);
    flags[d] = removed;
    safe = removed || own.scaled > 2 * kLeastPivot * m.start[d];
  }
  const bool all_safe = __syncthreads_and(safe);
  if (__syncthreads_or(removed)) {
#pragma unroll 1
    for (int e = threadIdx.x; e < kDim * kDim; e += kSolveThreads) {
      const int row = e / kDim, column = e % kDim;
      if (column != row && (flags[row] != 0 || flags[column] != 0)) square.at(row, column) = 0;
    }
  }
  return all_safe;
}

// The size of the terms of E = (k - mean).x, by a warp. `mean`: of the keys as they are, where E is summed up from those.
template <int kDim>
__device__ __forceinline__ float size_of_terms(const Matrix<kDim>& m, const float* x, const float* mean = nullptr) {
  float squares = 0;
#pragma unroll
  for (int d = threadIdx.x % 32; d < kDim; d += 32) {
    const float square = mean ? fmaf(mean[d], mean[d], m.start[d]) : m.start[d];
    squares = fmaf(square * x[d], x[d], squares);
  }
  return sqrtf(warp_sum(squares));
}

// x = A⁻¹ rhs. `square` lies over the parts of `m` that the elimination makes. Begins and ends with a barrier. Returns
// whether it took the elimination, whose pivots then tell of the matrix.
template <int kDim>
__device__ bool solve_matrix(const Square<kDim>& square, Matrix<kDim>& m, GradientsShared<kDim>& gradients, bool gentle,
                             float* x) {
  using Part = MatrixPart<kDim>;
  const unsigned thread = threadIdx.x, row = Part::own_row(thread);
  __syncthreads();
  const Part part(square, thread);
  if (gentle) {
    GradientsBlock<kDim> block{gradients};
    float own;
    if (conjugate_gradients(part, m.rhs[row], square.at(row, row), thread, block, fast_reciprocal, own)) {
      if (Part::speaks(thread)) x[row] = own;
      __syncthreads();
      return false;
    }
  }
  __syncthreads();
  part.put(m, thread);
  factor(m);
  back_substitute(m, x);
  return true;
}

}  // namespace lla::cuda::sm90::decode
