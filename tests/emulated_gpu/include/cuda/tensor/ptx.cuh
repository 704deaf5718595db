// What stands for src/cuda/tensor/ptx.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

inline uint32_t shared_address(const void* pointer) { return emulated::shared_address(pointer); }

inline void copy_ahead(void* to, const void* from, bool there) { emulated::copy_ahead(to, there ? from : nullptr, 16); }
inline void wait_copied_ahead() { emulated::wait_copied_ahead(); }
inline void end_group_ahead() { emulated::end_group_ahead(); }
template <int kPending>
void wait_groups_ahead() {
  emulated::wait_groups_ahead(kPending);
}

enum NamedBarrier : int { kWarpgroupBarrier = 1, kConverterBarrier = 1, kPublishedBarrier = 1, kEliminatedBarrier = 2 };
inline void named_sync(int id, int threads) { emulated::barrier_sync(id, threads, false); }
inline void named_arrive(int id, int threads) { emulated::barrier_arrive(id, threads); }
inline bool named_any(int id, int threads, bool mine) { return emulated::barrier_sync(id, threads, mine); }

inline void wait_for_last_kernel() {}
inline void let_next_kernel_begin() {}
inline int thread_read_again() { return static_cast<int>(threadIdx.x); }

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(flushed(x))); }
inline float fast_sqrt(float x) { return std::sqrt(flushed(x)); }
inline float fast_reciprocal(float x) { return flushed(1 / flushed(x)); }

inline uint32_t pack_saturated(float a, float b) {
  const auto bounded = [](float x) { return std::isnan(x) ? x : std::fmin(std::fmax(x, -65504.0f), 65504.0f); };
  const __half2 h = __floats2half2_rn(bounded(a), bounded(b));
  uint32_t word;
  std::memcpy(&word, &h, 4);
  return word;
}
template <class Op>
uint32_t of_pairs(Op op) {
  uint32_t word = 0;
  for (int i = 0; i < 2; ++i) word |= static_cast<uint32_t>(__float2bfloat16_rn(op(16 * i)).bits) << 16 * i;
  return word;
}
inline float part_of(uint32_t pair, int shift) { return __uint_as_float((pair >> shift & 0xffff) << 16); }
inline uint32_t times(uint32_t a, uint32_t b) {
  return of_pairs([=](int i) { return part_of(a, i) * part_of(b, i); });
}
inline uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
  return of_pairs(
      [=](int i) { return static_cast<float>(static_cast<double>(part_of(a, i)) * part_of(b, i) + part_of(c, i)); });
}

inline void keep_order() {}
inline uint32_t opaque(uint32_t x) { return x; }
inline void keep_branch() {}
inline void exit_thread() { emulated::exit_thread(); }
inline void touch(const void* there) {
  [[maybe_unused]] const volatile char read = *static_cast<const volatile char*>(there);
}
inline void prefetch_to_l2(const void*) {}

inline void add_four(float4* at, float4 v) { at->x += v.x, at->y += v.y, at->z += v.z, at->w += v.w; }
inline void store_four(float4* at, float4 v) { *at = v; }

inline void load_matrices(uint32_t (&to)[4], uint32_t address) { emulated::load_matrices(to, address, false); }
inline void load_transposed(uint32_t (&to)[4], uint32_t address) { emulated::load_matrices(to, address, true); }
inline void store_matrices(uint32_t address, const uint32_t (&x)[4]) { emulated::store_matrices(address, x); }

template <bool kBf16>
void warp_product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  emulated::WarpProduct p{c, a, b};
  kBf16 ? emulated::multiply_bf16(p) : emulated::multiply_f16(p);
}
inline void warp_product_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  emulated::WarpProduct p{c, a, b};
  emulated::multiply_tf32(p);
}

}  // namespace lla::cuda::tensor
