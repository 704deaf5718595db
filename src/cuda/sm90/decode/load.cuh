// From the cache into a warp's own shared memory: sixteen keys and their values, wherever they lie.
#pragma once

#include "cuda/sm90/decode/shared.cuh"

namespace lla::cuda::sm90::decode {

// Where the rows of a unit are found.
struct Source {
  int32_t batch, head;  // key head
};

// Raw rows lie 16-byte chunk by chunk, chunk c of row r at c ^ (r % 8): reading across rows meets no bank twice.
template <class C>
__device__ __forceinline__ int raw_offset(int row, int chunk) {
  return (row * C::kChunks + (chunk ^ (row & 7))) * 16;
}

// Keeps what is made of x beside its use: a few instructions cost less than the registers that would hold them all.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ void copy_to(uint32_t address, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// Page and slot of a key; page -1 where the table is wrong.
__device__ __forceinline__ int2 page_of(const Cache& cache, const Source& from, int key) {
  if (!cache.table) return {from.batch, key};
  const int page = cache.table[from.batch * cache.table_stride + key / cache.page_size];
  return {page >= 0 && page < cache.pages ? page : -1, key % cache.page_size};
}

// Where lane's row begins, in units of 16 bytes: keys in lanes 0 to 15, values in 16 to 31; ~0: nowhere, zeros.
__device__ __forceinline__ uint32_t row_start(const Cache& cache, const Source& from, int first, int count,
                                              bool& invalid) {
  const int lane = threadIdx.x % 32, row = lane % kWarpKeys;
  if (row >= count) return ~0u;
  const int2 at = page_of(cache, from, first + row);
  if (at.x < 0) {
    invalid = true;
    return ~0u;
  }
  const int64_t* stride = lane < kWarpKeys ? cache.k.stride : cache.v.stride;
  return static_cast<uint32_t>((at.x * stride[0] + at.y * stride[1] + from.head * stride[2]) / 8);
}

// Starts the copies of keys [first, first + count), count up to 16; rows beyond are zeros. `start` is row_start's.
template <class C>
__device__ __forceinline__ void load_rows(unsigned char (&to)[2][C::kRawBytes], const Params& p, uint32_t start) {
  const int lane = threadIdx.x % 32;
  constexpr int kRowsAtATime = 32 / C::kChunks;
  const int chunk = lane % C::kChunks, row_in = lane / C::kChunks;
  const uint32_t place = opaque(shared_address(to[0]) + row_in * C::kChunks * 16 + (chunk ^ row_in) * 16);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const unsigned char* base = static_cast<const unsigned char*>(which == 0 ? p.cache.k.data : p.cache.v.data);
    const bool column = chunk * 8 < (which == 0 ? p.dim : p.value_dim);
#pragma unroll
    for (int i = 0; i < kWarpKeys / kRowsAtATime; ++i) {
      const int row = i * kRowsAtATime + lane / C::kChunks;
      const uint32_t at = __shfl_sync(0xffffffffu, start, which * kWarpKeys + row);
      const bool there = at != ~0u && column;
      copy_to(((place ^ (((i * kRowsAtATime) & 7) * 16)) + which * C::kRawBytes + i * 512),
              there ? base + (uint64_t{at} + chunk) * 16 : base, there);
    }
  }
}

// The same for rows that do not lie in 16-byte pieces: element by element, and not ahead.
template <class C>
__device__ __forceinline__ void load_rows_slowly(unsigned char (&to)[2][C::kRawBytes], const Params& p, const Source& from,
                                              int first, int count, bool& invalid) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const core::Operand& operand = which == 0 ? p.cache.k : p.cache.v;
    const uint16_t* base = static_cast<const uint16_t*>(operand.data);
#pragma unroll 1
    for (int row = 0; row < kWarpKeys; ++row) {
      int2 at{-1, 0};
      if (row < count) {
        at = page_of(p.cache, from, first + row);
        invalid |= at.x < 0;
      }
#pragma unroll 1
      for (int d = lane; d < C::kDim; d += 32) {
        const bool there = at.x >= 0 && d < (which == 0 ? p.dim : p.value_dim);
        const int64_t element =
            at.x * operand.stride[0] + at.y * operand.stride[1] + from.head * operand.stride[2] + d * operand.stride[3];
        *reinterpret_cast<uint16_t*>(to[which] + raw_offset<C>(row, d / 8) + d % 8 * 2) = there ? base[element] : 0;
      }
    }
  }
}

}  // namespace lla::cuda::sm90::decode
