// Warpgroup products C (64 x N, fp32 registers) += A (64 x 16k) B (16k x N) on 128-byte-swizzled fp16 tiles.
//
// A tile in shared memory is what the copy engine writes with a 128-byte swizzle: columns in boxes of 64 (128 bytes),
// each box `rows` x 128 bytes. Read along its rows it is a K-major operand (Q, P, and K in Q Kᵀ); read across them it
// is an MN-major B operand (K and V in U K, S V): both from the same bytes.
#pragma once

#include <cuda_fp16.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <utility>

#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90 {

// Before the first product of a batch. Products need converged warps, and waiting for a tile may have split them.
__device__ __forceinline__ void mma_fence() {
  __syncwarp();
  products_fence();
}

// A product that overwrites its registers still names them as inputs. Left undefined before it, they would count as in
// use from the kernel's start on.
template <int kCount>
__device__ __forceinline__ void define(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) registers[i] = 0;
}

namespace detail {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;

template <int kColumns, Major kMajorB>
struct Atom;
template <Major kMajorB>
struct Atom<64, kMajorB> {
  using SS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, kMajorB>;
  using RS = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<Major::K, kMajorB>;
};
template <Major kMajorB>
struct Atom<72, kMajorB> {
  using SS = cute::SM90::GMMA::MMA_64x72x16_F32F16F16_SS<Major::K, kMajorB>;
  using RS = cute::SM90::GMMA::MMA_64x72x16_F32F16F16_RS<Major::K, kMajorB>;
};
template <Major kMajorB>
struct Atom<80, kMajorB> {
  using SS = cute::SM90::GMMA::MMA_64x80x16_F32F16F16_SS<Major::K, kMajorB>;
  using RS = cute::SM90::GMMA::MMA_64x80x16_F32F16F16_RS<Major::K, kMajorB>;
};
template <Major kMajorB>
struct Atom<136, kMajorB> {
  using SS = cute::SM90::GMMA::MMA_64x136x16_F32F16F16_SS<Major::K, kMajorB>;
  using RS = cute::SM90::GMMA::MMA_64x136x16_F32F16F16_RS<Major::K, kMajorB>;
};
template <Major kMajorB>
struct Atom<128, kMajorB> {
  using SS = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<Major::K, kMajorB>;
  using RS = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<Major::K, kMajorB>;
};

template <class Instruction, int kCount, size_t... kIndex>
__device__ __forceinline__ void issue_ss(float (&c)[kCount], uint64_t a, uint64_t b, ScaleOut scale,
                                         std::index_sequence<kIndex...>) {
  Instruction::fma(a, b, c[kIndex]..., scale);
}
template <class Instruction, int kCount, size_t... kIndex>
__device__ __forceinline__ void issue_rs(float (&c)[kCount], const uint32_t* a, uint64_t b,
                                         std::index_sequence<kIndex...>, ScaleOut scale = ScaleOut::One) {
  Instruction::fma(a[0], a[1], a[2], a[3], b, c[kIndex]..., scale);
}

// Where an operand begins, as the low word of its descriptor; the high word is the same for all. Opaque, so that it is
// added to beside each product and not kept in registers for every one of them.
struct Operand {
  uint32_t low;

  __device__ __forceinline__ Operand(const void* tile, uint32_t leading_bytes)
      : low(opaque((shared_address(tile) >> 4) | (leading_bytes >> 4) << 16)) {}
  __device__ __forceinline__ uint64_t at(int offset_in_16_bytes) const {
    constexpr uint32_t kHigh = (1024 >> 4) | 1u << 30;  // 8 rows of 128 bytes, 128-byte swizzle
    return static_cast<uint64_t>(kHigh) << 32 | (low + offset_in_16_bytes);
  }
};

}  // namespace detail

// C (+)= A Bᵀ: A holds 64 rows, B kColumns rows, both kDim wide. C is overwritten unless kAccumulate.
template <int kDim, int kColumns, bool kAccumulate = false>
__device__ __forceinline__ void product_transposed(float (&c)[kColumns / 2], const __half* a, const __half* b) {
  using Instruction = typename detail::Atom<kColumns, detail::Major::K>::SS;
  const detail::Operand left(a, 16), right(b, 16);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const int box = k / 4, within = (k % 4) * 2;  // in units of 16 bytes
    detail::issue_ss<Instruction>(c, left.at(box * (64 * 8) + within), right.at(box * (kColumns * 8) + within),
                                  k == 0 && !kAccumulate ? detail::ScaleOut::Zero : detail::ScaleOut::One,
                                  std::make_index_sequence<kColumns / 2>{});
  }
}

// The same with A in registers (4 words per 16 columns).
template <int kDim, int kColumns, bool kAccumulate = false>
__device__ __forceinline__ void product_transposed(float (&c)[kColumns / 2], const uint32_t (&a)[kDim / 4],
                                                   const __half* b) {
  using Instruction = typename detail::Atom<kColumns, detail::Major::K>::RS;
  const detail::Operand right(b, 16);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    detail::issue_rs<Instruction>(c, &a[4 * k], right.at((k / 4) * (kColumns * 8) + (k % 4) * 2),
                                  std::make_index_sequence<kColumns / 2>{},
                                  k == 0 && !kAccumulate ? detail::ScaleOut::Zero : detail::ScaleOut::One);
  }
}

// C += A B: A is 64 x kKeys in registers (4 words per 16 keys), B the kKeys rows of a tile, kDim wide.
template <int kDim, int kKeys>
__device__ __forceinline__ void product(float (&c)[kDim / 2], const uint32_t (&a)[kKeys / 4], const __half* b) {
  using Instruction = typename detail::Atom<kDim, detail::Major::MN>::RS;
  const detail::Operand right(b, kKeys * 128);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    detail::issue_rs<Instruction>(c, &a[4 * k], right.at(k * (16 * 128 / 16)), std::make_index_sequence<kDim / 2>{});
  }
}

// The same, 64 wide, and the row sums of A, four times over: C's last columns are A times ones. An operand's next 64
// columns lie its leading offset behind its start, so the offset leads to `ones` (16 rows of 128 bytes) from each step.
template <int kKeys>
__device__ __forceinline__ void product_with_sums(float (&c)[36], const uint32_t (&a)[kKeys / 4], const __half* b,
                                                  const void* ones) {
  using Instruction = typename detail::Atom<72, detail::Major::MN>::RS;
  constexpr int kStep = 16 * 128 / 16;
  const detail::Operand right(b, shared_address(ones) - shared_address(b));
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    detail::issue_rs<Instruction>(c, &a[4 * k], right.at(k * (kStep - (kStep << 16))), std::make_index_sequence<36>{});
  }
}

// Of `product`, the part of 16 keys.
template <int kDim, int kKeys>
__device__ __forceinline__ void product_step(float (&c)[kDim / 2], const uint32_t (&a)[4], const __half* b, int step) {
  using Instruction = typename detail::Atom<kDim, detail::Major::MN>::RS;
  detail::issue_rs<Instruction>(c, a, detail::Operand(b, kKeys * 128).at(step * (16 * 128 / 16)),
                                std::make_index_sequence<kDim / 2>{});
}

}  // namespace lla::cuda::sm90
