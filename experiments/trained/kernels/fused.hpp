// The few operations of a step that torch has no quick kernel for at these sizes: rows of 64 to 1024 numbers, and the
// softmax over a vocabulary. bf16 in and out, everything else fp32; the same bits every time. No torch, no CUDA
// headers.
#pragma once

#include <cstdint>

namespace lla::trained::kernels {

using Stream = void*;

constexpr int64_t norm_width_unit = 8, norm_width_limit = 1024;
constexpr int64_t vocabulary_unit = 8, vocabulary_limit = 16384;

// sum = x + added (added may be null: then sum is not written), y = scale * sum / sqrt(mean(sum^2) + epsilon), inverse
// (rows): 1 / sqrt(mean + epsilon).
void norm_forward(const void* x, const void* added, void* sum, void* y, float* inverse, int64_t rows, int64_t width,
                  float scale, float epsilon, Stream stream);
// dx from dy, and from dsum where it is not null.
void norm_backward(const void* dy, const void* dsum, const void* y, const float* inverse, void* dx, int64_t rows,
                   int64_t width, float scale, Stream stream);

// logits (rows, vocabulary) fp16 become, in place and as bf16, softmax less one at the label; loss (rows) is -log
// softmax there.
void label_slopes(void* logits, const int64_t* labels, float* loss, int64_t rows, int64_t vocabulary, Stream stream);

// lambda = floor + (1 - floor) sigmoid(logits), fp32 (rows, width), from rows of bf16 that begin every `stride`
// elements.
void ridge_forward(const void* logits, int64_t stride, float* ridge, int64_t rows, int64_t width, float floor,
                   Stream stream);
// From the gradient of each head, (rows, heads, width) fp32, to the logits' (rows, width) bf16.
void ridge_backward(const float* dridge, const float* ridge, void* dlogits, int64_t rows, int64_t heads, int64_t width,
                    float floor, Stream stream);

}  // namespace lla::trained::kernels
