// Everything here is bound by memory: each kernel reads its inputs once, 16 bytes a thread, keeps them in registers
// between the reduction and the result, and writes once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "kernels/fused.hpp"

namespace lla::trained::kernels {
namespace {

constexpr int kVector = 8;  // elements of 16 bytes
constexpr int kThreads = 256;

struct alignas(16) Raw {
  uint4 bits;
};

__device__ void load(const void* from, int64_t vector, float (&out)[kVector]) {
  const Raw raw = static_cast<const Raw*>(from)[vector];
  const auto* halves = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 two = __bfloat1622float2(halves[i]);
    out[2 * i] = two.x, out[2 * i + 1] = two.y;
  }
}

__device__ void store(void* to, int64_t vector, const float (&in)[kVector]) {
  Raw raw;
  auto* halves = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) halves[i] = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
  static_cast<Raw*>(to)[vector] = raw;
}

// Over the kLanes neighbours that share a row.
template <int kLanes>
__device__ float row_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// kLanes threads a row, kCount vectors each.
template <int kLanes, int kCount>
__global__ void __launch_bounds__(kThreads)
    norm_forward_kernel(const void* x, const void* added, void* sum, void* y, float* inverse, int64_t rows, int vectors,
                        float scale, float epsilon) {
  const int64_t row = blockIdx.x * int64_t{kThreads / kLanes} + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool in_range = row < rows;  // every lane takes part in the sums
  float values[kCount][kVector] = {};
  float squares = 0;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int vector = lane + c * kLanes;
    if (!in_range || vector >= vectors) continue;
    load(x, row * vectors + vector, values[c]);
    if (added != nullptr) {
      float more[kVector];
      load(added, row * vectors + vector, more);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        // As stored: the norm is of what the next layer sees.
        values[c][i] = __bfloat162float(__float2bfloat16_rn(values[c][i] + more[i]));
      }
      store(sum, row * vectors + vector, values[c]);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares += values[c][i] * values[c][i];
  }
  squares = row_sum<kLanes>(squares);
  if (!in_range) return;
  const float inv = rsqrtf(squares / static_cast<float>(vectors * kVector) + epsilon);
  if (lane == 0) inverse[row] = inv;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int vector = lane + c * kLanes;
    if (vector >= vectors) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[c][i] *= inv * scale;
    store(y, row * vectors + vector, values[c]);
  }
}

template <int kLanes, int kCount>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(const void* dy, const void* dsum, const void* y, const float* inverse, void* dx, int64_t rows,
                         int vectors, float scale) {
  const int64_t row = blockIdx.x * int64_t{kThreads / kLanes} + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool in_range = row < rows;
  float slopes[kCount][kVector] = {}, normed[kCount][kVector] = {};
  float dot = 0;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int vector = lane + c * kLanes;
    if (!in_range || vector >= vectors) continue;
    load(dy, row * vectors + vector, slopes[c]);
    load(y, row * vectors + vector, normed[c]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) dot += slopes[c][i] * normed[c][i];
  }
  dot = row_sum<kLanes>(dot);
  if (!in_range) return;
  const float factor = inverse[row] * scale, along = dot / (static_cast<float>(vectors * kVector) * scale * scale);
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int vector = lane + c * kLanes;
    if (vector >= vectors) continue;
    float more[kVector] = {};
    if (dsum != nullptr) load(dsum, row * vectors + vector, more);
#pragma unroll
    for (int i = 0; i < kVector; ++i) more[i] += factor * (slopes[c][i] - normed[c][i] * along);
    store(dx, row * vectors + vector, more);
  }
}

// Over a block of kThreads; the result reaches every thread.
template <class Combine>
__device__ float block_reduce(float x, Combine combine) {
  __shared__ float parts[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();  // the parts of an earlier call have been read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) x = combine(x, parts[i]);
  return x;
}

template <int kCount>
__global__ void __launch_bounds__(kThreads)
    label_slopes_kernel(void* logits, const int64_t* labels, float* loss, int vectors) {
  const int64_t row = blockIdx.x, first = row * vectors;
  float values[kCount][kVector];
  float highest = -INFINITY;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int vector = threadIdx.x + c * kThreads;
    if (vector >= vectors) continue;
    const Raw raw = static_cast<const Raw*>(logits)[first + vector];
    const auto* halves = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float2 two = __half22float2(halves[i]);
      values[c][2 * i] = two.x, values[c][2 * i + 1] = two.y;
      highest = fmaxf(highest, fmaxf(two.x, two.y));
    }
  }
  highest = block_reduce(highest, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    if (static_cast<int>(threadIdx.x) + c * kThreads >= vectors) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += __expf(values[c][i] - highest);
  }
  sum = block_reduce(sum, [](float a, float b) { return a + b; });
  const float log_sum = highest + logf(sum);
  const int64_t label = labels[row];
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const int vector = threadIdx.x + c * kThreads;
    if (vector >= vectors) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float chance = values[c][i] - log_sum;
      values[c][i] = __expf(chance);
      if (vector * kVector + i == label) {
        loss[row] = -chance;
        values[c][i] = expm1f(chance);  // near certainty a small difference of near equals
      }
    }
    store(logits, first + vector, values[c]);
  }
}

__device__ void load(const float* from, float (&out)[kVector]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

__global__ void __launch_bounds__(kThreads) ridge_forward_kernel(const void* logits, int64_t stride_vectors,
                                                                 float* ridge, int64_t rows, int vectors, float floor) {
  const int64_t place = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (place >= rows * vectors) return;
  float values[kVector];
  load(logits, place / vectors * stride_vectors + place % vectors, values);
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = floor + (1 - floor) / (1 + __expf(-values[i]));
  float4* to = reinterpret_cast<float4*>(ridge + place * kVector);
  to[0] = make_float4(values[0], values[1], values[2], values[3]);
  to[1] = make_float4(values[4], values[5], values[6], values[7]);
}

__global__ void __launch_bounds__(kThreads)
    ridge_backward_kernel(const float* dridge, const float* ridge, void* dlogits, int64_t rows, int heads, int vectors,
                          float floor) {
  const int64_t place = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (place >= rows * vectors) return;
  const int64_t row = place / vectors, column = place % vectors;
  float sum[kVector] = {}, lambda[kVector];
  for (int head = 0; head < heads; ++head) {
    float more[kVector];
    load(dridge + ((row * heads + head) * vectors + column) * kVector, more);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += more[i];
  }
  load(ridge + place * kVector, lambda);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float sigmoid = (lambda[i] - floor) / (1 - floor);
    sum[i] *= (1 - floor) * sigmoid * (1 - sigmoid);
  }
  store(dlogits, place, sum);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Calls f with the number of lanes a row and of vectors a lane that suit the width.
template <class F>
void for_width(int64_t width, F f) {
  const auto vectors = static_cast<int>(width / kVector);
  if (width % norm_width_unit != 0 || width > norm_width_limit)
    throw std::invalid_argument("norm: this width has no kernel");
  const auto call = [&]<int kLanes, int kCount>() { f.template operator()<kLanes, kCount>(vectors); };
  if (vectors <= 8) return call.template operator()<8, 1>();
  if (vectors <= 16) return call.template operator()<16, 1>();
  if (vectors <= 32) return call.template operator()<32, 1>();
  if (vectors <= 64) return call.template operator()<32, 2>();
  return call.template operator()<32, 4>();
}

unsigned blocks_for(int64_t rows, int lanes) {
  const int64_t each = kThreads / lanes;
  return static_cast<unsigned>((rows + each - 1) / each);
}

}  // namespace

void norm_forward(const void* x, const void* added, void* sum, void* y, float* inverse, int64_t rows, int64_t width,
                  float scale, float epsilon, Stream stream) {
  if (rows == 0) return;
  for_width(width, [&]<int kLanes, int kCount>(int vectors) {
    norm_forward_kernel<kLanes, kCount><<<blocks_for(rows, kLanes), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        x, added, sum, y, inverse, rows, vectors, scale, epsilon);
  });
  check_launch("norm_forward");
}

void norm_backward(const void* dy, const void* dsum, const void* y, const float* inverse, void* dx, int64_t rows,
                   int64_t width, float scale, Stream stream) {
  if (rows == 0) return;
  for_width(width, [&]<int kLanes, int kCount>(int vectors) {
    norm_backward_kernel<kLanes, kCount><<<blocks_for(rows, kLanes), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        dy, dsum, y, inverse, dx, rows, vectors, scale);
  });
  check_launch("norm_backward");
}

void label_slopes(void* logits, const int64_t* labels, float* loss, int64_t rows, int64_t vocabulary, Stream stream) {
  if (rows == 0) return;
  if (vocabulary % vocabulary_unit != 0 || vocabulary > vocabulary_limit) {
    throw std::invalid_argument("label_slopes: this vocabulary has no kernel");
  }
  const auto vectors = static_cast<int>(vocabulary / kVector);
  const auto blocks = static_cast<unsigned>(rows);
  const auto on = static_cast<cudaStream_t>(stream);
  if (vectors <= kThreads) {
    label_slopes_kernel<1><<<blocks, kThreads, 0, on>>>(logits, labels, loss, vectors);
  } else if (vectors <= 4 * kThreads) {
    label_slopes_kernel<4><<<blocks, kThreads, 0, on>>>(logits, labels, loss, vectors);
  } else {
    label_slopes_kernel<8><<<blocks, kThreads, 0, on>>>(logits, labels, loss, vectors);
  }
  check_launch("label_slopes");
}

void ridge_forward(const void* logits, int64_t stride, float* ridge, int64_t rows, int64_t width, float floor,
                   Stream stream) {
  if (rows == 0) return;
  const auto vectors = static_cast<int>(width / kVector);
  ridge_forward_kernel<<<blocks_for(rows * vectors, 1), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      logits, stride / kVector, ridge, rows, vectors, floor);
  check_launch("ridge_forward");
}

void ridge_backward(const float* dridge, const float* ridge, void* dlogits, int64_t rows, int64_t heads, int64_t width,
                    float floor, Stream stream) {
  if (rows == 0) return;
  const auto vectors = static_cast<int>(width / kVector);
  ridge_backward_kernel<<<blocks_for(rows * vectors, 1), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      dridge, ridge, dlogits, rows, static_cast<int>(heads), vectors, floor);
  check_launch("ridge_backward");
}

}  // namespace lla::trained::kernels
