// CUDA C++ as far as the kernels go: every name has its meaning in emulated_gpu/device.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "emulated_gpu/device.hpp"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (::emulated::now->index)
#define blockIdx (::emulated::block_index())
inline const emulated::Index &blockDim = emulated::block_dim, &gridDim = emulated::grid_dim;

// --- Launching ---
namespace emulated {
void enqueue(cudaStream_t stream, Launch launch);  // now, or when the graph is replayed
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  emulated::Launch launch;
  launch.grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  launch.block = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  launch.shared_bytes = config->dynamicSmemBytes;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
    }
  }
  launch.thread = [=] { kernel(arguments...); };
  emulated::enqueue(config->stream, std::move(launch));
  return cudaSuccess;
}

// --- Numbers ---
using std::isfinite;
using std::isinf;
using std::isnan;
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline double __hiloint2double(int high, int low) {
  const uint64_t bits = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}
inline float __frcp_rn(float x) { return 1 / x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
template <int kBits>
unsigned emulated_max_of_parts(unsigned a, unsigned b) {
  unsigned out = 0;
  constexpr unsigned kMask = (1u << kBits) - 1;
  for (int i = 0; i < 32; i += kBits) {
    const unsigned x = a >> i & kMask, y = b >> i & kMask;
    out |= (x > y ? x : y) << i;
  }
  return out;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return emulated_max_of_parts<16>(a, b); }
inline unsigned __vmaxu4(unsigned a, unsigned b) { return emulated_max_of_parts<8>(a, b); }
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// --- Memory ---
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
// Threads take turns only where they wait: what they do in between is one step.
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> x) {
  const T old = *at;
  *at = old + x;
  return old;
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> x) {
  const T old = *at;
  *at = old < x ? x : old;
  return old;
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> x) {
  const T old = *at;
  *at = old | x;
  return old;
}
inline void __nanosleep(unsigned) {}

// --- Threads together ---
inline void __syncthreads() { emulated::barrier_sync(0, emulated::kWholeBlock, false); }
inline int __syncthreads_or(int mine) { return emulated::barrier_sync(0, emulated::kWholeBlock, mine != 0); }
inline int __syncthreads_and(int mine) { return !emulated::barrier_sync(0, emulated::kWholeBlock, mine == 0); }

namespace emulated {
template <class T>
struct Exchange {
  T own, result;
  int argument;
};
// `work(all, lane)`: what a lane gets, from all exchanges (null: the thread has ended).
template <class T, class Work>
T exchange(const char* what, T own, int argument, Work) {
  Exchange<T> slot{own, own, argument};
  together(what, &slot, [](void* const* slots) {
    const auto* const all = reinterpret_cast<Exchange<T>* const*>(slots);
    for (int lane = 0; lane < kWarp; ++lane) {
      if (all[lane] != nullptr) all[lane]->result = Work{}(all, lane);
    }
  });
  return slot.result;
}
template <class T, class Op>
T reduce(const char* what, T own, Op) {
  return exchange(what, own, 0, [](auto all, int) {
    T result{};
    bool any = false;
    for (int i = 0; i < kWarp; ++i) {
      if (all[i] == nullptr) continue;
      result = any ? Op{}(result, all[i]->own) : all[i]->own;
      any = true;
    }
    return result;
  });
}
inline void all_threads(unsigned mask) {
  if (mask != ~0u) fail("a mask of part of a warp, which nothing here has met before");
}
}  // namespace emulated

inline void __syncwarp(unsigned mask = ~0u) {
  emulated::all_threads(mask);
  emulated::together("__syncwarp", nullptr, [](void* const*) {});
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  emulated::all_threads(mask);
  return emulated::exchange("__shfl_sync", x, from, [](auto all, int lane) {
    const auto* const other = all[all[lane]->argument & 31];
    return other != nullptr ? other->own : all[lane]->own;
  });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int by) {
  emulated::all_threads(mask);
  return emulated::exchange("__shfl_xor_sync", x, by, [](auto all, int lane) {
    const auto* const other = all[(lane ^ all[lane]->argument) & 31];
    return other != nullptr ? other->own : all[lane]->own;
  });
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by) {
  emulated::all_threads(mask);
  return emulated::exchange("__shfl_up_sync", x, static_cast<int>(by), [](auto all, int lane) {
    const int from = lane - all[lane]->argument;
    return from >= 0 && all[from] != nullptr ? all[from]->own : all[lane]->own;
  });
}
inline unsigned __ballot_sync(unsigned mask, int mine) {
  emulated::all_threads(mask);
  return emulated::exchange("__ballot_sync", mine != 0 ? 1u : 0u, 0, [](auto all, int) {
    unsigned bits = 0;
    for (int i = 0; i < emulated::kWarp; ++i) bits |= (all[i] != nullptr ? all[i]->own : 0) << i;
    return bits;
  });
}
inline int __any_sync(unsigned mask, int mine) { return __ballot_sync(mask, mine) != 0; }
template <class T>
T __reduce_max_sync(unsigned mask, T x) {
  emulated::all_threads(mask);
  return emulated::reduce("__reduce_max_sync", x, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T x) {
  emulated::all_threads(mask);
  return emulated::reduce("__reduce_min_sync", x, [](T a, T b) { return b < a ? b : a; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  emulated::all_threads(mask);
  return emulated::reduce("__reduce_or_sync", x, [](unsigned a, unsigned b) { return a | b; });
}
