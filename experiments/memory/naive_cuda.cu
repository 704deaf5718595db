// A block a query, in three kernels with everything between them in memory, as a transcription of the formulas in a
// tensor library would have it.
#include <cuda_bf16.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "memory/naive_cuda.hpp"

namespace lla::experiments {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ float wide(float x) { return x; }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void narrow(float x, float& to) { to = x; }
__device__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

__device__ float warp_sum(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// The sum over the block, for every thread; `shared` has kWarps numbers.
__device__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[w];
  return sum;
}

// w_ij = exp(logit - largest logit) and z_ij = k_j - q_i for the keys j up to the query's own position, `last`.
template <class T>
__global__ void weights_kernel(int64_t queries, int64_t n, int d, float scale, const T* q, const T* k, T* weights,
                               T* differences) {
  const int64_t row = blockIdx.y * queries + blockIdx.x, last = blockIdx.x + n - queries;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ float query[kNaiveMaxDim], tops[kWarps];
  for (int c = threadIdx.x; c < d; c += kThreads) query[c] = wide(q[row * d + c]);
  __syncthreads();
  const T* keys = k + blockIdx.y * n * d;
  const auto logit = [&](int64_t j) {
    float dot = 0;
    for (int c = lane; c < d; c += 32) dot += query[c] * wide(keys[j * d + c]);
    return scale * warp_sum(dot);
  };
  float top = -INFINITY;
  for (int64_t j = warp; j <= last; j += kWarps) top = fmaxf(top, logit(j));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w]);
  for (int64_t j = warp; j <= last; j += kWarps) {
    const float w = expf(logit(j) - top);
    if (lane == 0) narrow(w, weights[row * n + j]);
    for (int c = lane; c < d; c += 32) narrow(wide(keys[j * d + c]) - query[c], differences[(row * n + j) * d + c]);
  }
}

// The matrix of a query: sum of w z z', over tiles of keys; each thread has 8 x 8 of its elements in registers.
constexpr int kSide = 8, kTile = 16;

template <class T>
__global__ void matrix_kernel(int64_t queries, int64_t n, int d, const T* weights, const T* differences,
                              float* matrices) {
  const int64_t row = blockIdx.y * queries + blockIdx.x, last = blockIdx.x + n - queries;
  __shared__ float z[kTile][kNaiveMaxDim], wz[kTile][kNaiveMaxDim];
  const int a = threadIdx.x / 16, b = threadIdx.x % 16;  // rows a, a + 16, ..., columns b, b + 16, ...
  float sum[kSide][kSide] = {};
  for (int64_t first = 0; first <= last; first += kTile) {
    for (int at = threadIdx.x; at < kTile * kNaiveMaxDim; at += kThreads) {
      const int t = at / kNaiveMaxDim, c = at % kNaiveMaxDim;
      const int64_t j = first + t;
      const bool there = j <= last && c < d;
      z[t][c] = there ? wide(differences[(row * n + j) * d + c]) : 0.0f;
      wz[t][c] = there ? wide(weights[row * n + j]) * z[t][c] : 0.0f;
    }
    __syncthreads();
    for (int t = 0; t < kTile; ++t) {
      float left[kSide], right[kSide];
      for (int r = 0; r < kSide; ++r) left[r] = wz[t][a + 16 * r], right[r] = z[t][b + 16 * r];
      for (int r = 0; r < kSide; ++r) {
        for (int c = 0; c < kSide; ++c) sum[r][c] += left[r] * right[c];
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < kSide; ++r) {
    for (int c = 0; c < kSide; ++c) {
      if (a + 16 * r < d && b + 16 * c < d) matrices[(row * d + a + 16 * r) * d + b + 16 * c] = sum[r][c];
    }
  }
}

// omega, mu, rho by Cholesky in shared memory, then o = sum of w (1 - z.rho) / (omega - mu.rho) v.
template <class T>
__global__ void output_kernel(int64_t queries, int64_t n, int d, float ridge, const T* weights, const T* differences,
                              const float* matrices, const T* v, T* o) {
  extern __shared__ float a[];  // (d, d)
  __shared__ float mu[kNaiveMaxDim], rho[kNaiveMaxDim], scratch[kWarps], partial[kWarps][kNaiveMaxDim];
  const int64_t row = blockIdx.y * queries + blockIdx.x, last = blockIdx.x + n - queries;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* w = weights + row * n;
  const T* z = differences + row * n * d;
  float part = 0;
  for (int64_t j = threadIdx.x; j <= last; j += kThreads) part += wide(w[j]);
  const float omega = block_sum(part, scratch);
  for (int c = threadIdx.x; c < d; c += kThreads) {
    float sum = 0;
    for (int64_t j = 0; j <= last; ++j) sum += wide(w[j]) * wide(z[j * d + c]);
    mu[c] = rho[c] = sum;
  }
  for (int at = threadIdx.x; at < d * d; at += kThreads) {
    a[at] = matrices[row * d * d + at] + (at / d == at % d ? ridge * omega : 0.0f);
  }
  __syncthreads();
  for (int p = 0; p < d; ++p) {  // a = L L', L in the lower triangle
    if (threadIdx.x == 0) a[p * d + p] = sqrtf(a[p * d + p]);
    __syncthreads();
    for (int r = p + 1 + threadIdx.x; r < d; r += kThreads) a[r * d + p] /= a[p * d + p];
    __syncthreads();
    for (int r = p + 1 + warp; r < d; r += kWarps) {
      for (int c = p + 1 + lane; c <= r; c += 32) a[r * d + c] -= a[r * d + p] * a[c * d + p];
    }
    __syncthreads();
  }
  for (int p = 0; p < d; ++p) {  // L y = mu
    if (threadIdx.x == 0) rho[p] /= a[p * d + p];
    __syncthreads();
    for (int r = p + 1 + threadIdx.x; r < d; r += kThreads) rho[r] -= a[r * d + p] * rho[p];
    __syncthreads();
  }
  for (int p = d - 1; p >= 0; --p) {  // L' rho = y
    if (threadIdx.x == 0) rho[p] /= a[p * d + p];
    __syncthreads();
    for (int r = threadIdx.x; r < p; r += kThreads) rho[r] -= a[p * d + r] * rho[p];
    __syncthreads();
  }
  part = 0;
  for (int c = threadIdx.x; c < d; c += kThreads) part += mu[c] * rho[c];
  const float delta = omega - block_sum(part, scratch);
  float out[kNaiveMaxDim / 32] = {};
  const T* values = v + blockIdx.y * n * d;
  for (int64_t j = warp; j <= last; j += kWarps) {
    float dot = 0;
    for (int c = lane; c < d; c += 32) dot += wide(z[j * d + c]) * rho[c];
    const float share = wide(w[j]) * (1 - warp_sum(dot)) / delta;
    for (int c = lane, r = 0; c < d; c += 32, ++r) out[r] += share * wide(values[j * d + c]);
  }
  for (int c = lane, r = 0; c < d; c += 32, ++r) partial[warp][c] = out[r];
  __syncthreads();
  for (int c = threadIdx.x; c < d; c += kThreads) {
    float sum = 0;
    for (int t = 0; t < kWarps; ++t) sum += partial[t][c];
    narrow(sum, o[row * d + c]);
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: the naive form failed: ") + cudaGetErrorString(error));
}

template <class T>
void launch(const NaiveProblem& p, cudaStream_t stream, T* weights, T* differences, float* matrices) {
  const dim3 grid(static_cast<unsigned>(p.queries), static_cast<unsigned>(p.batch));
  const int d = static_cast<int>(p.dim);
  const size_t shared = p.dim * p.dim * sizeof(float);
  weights_kernel<<<grid, kThreads, 0, stream>>>(p.queries, p.keys, d, p.scale, static_cast<const T*>(p.q),
                                                static_cast<const T*>(p.k), weights, differences);
  check(cudaGetLastError());
  matrix_kernel<<<grid, kThreads, 0, stream>>>(p.queries, p.keys, d, weights, differences, matrices);
  check(cudaGetLastError());
  check(cudaFuncSetAttribute(output_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  output_kernel<<<grid, kThreads, shared, stream>>>(p.queries, p.keys, d, p.ridge, weights, differences, matrices,
                                                    static_cast<const T*>(p.v), static_cast<T*>(p.o));
  check(cudaGetLastError());
}

}  // namespace

void naive_lla_cuda(DeviceMemory& memory, const NaiveProblem& p, void* weights, void* differences, float* matrices) {
  if (p.dim > kNaiveMaxDim) throw std::runtime_error("the naive form on a GPU takes head dimensions up to 128");
  const auto stream = static_cast<cudaStream_t>(memory.stream());
  if (p.bf16) {
    launch(p, stream, static_cast<__nv_bfloat16*>(weights), static_cast<__nv_bfloat16*>(differences), matrices);
  } else {
    launch(p, stream, static_cast<float*>(weights), static_cast<float*>(differences), matrices);
  }
}

}  // namespace lla::experiments
