// Set-up that the tests of decoding and of prompts over caches share.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "support/cache.hpp"

namespace lla::test {

// Two heads in bf16, outputs in f32; page size 0: contiguous.
inline CacheSpec bf16_cache(int64_t dim, std::vector<CachedSequence> sequences, int64_t page_size) {
  CacheSpec spec;
  spec.dtype = DType::bf16;
  spec.out_dtype = DType::f32;
  spec.sequences = std::move(sequences);
  spec.page_size = page_size;
  spec.heads_q = spec.heads_kv = 2;
  spec.dim = spec.value_dim = dim;
  return spec;
}

// Behind the host's back: element `at` of a tensor of int32 on the device.
inline void write_int(const lla_tensor& t, int64_t at, int32_t value) {
  ASSERT_EQ(cudaMemcpy(static_cast<int32_t*>(t.data) + at, &value, 4, cudaMemcpyHostToDevice), cudaSuccess);
}

inline void expect_invalid_rows(const CacheForward& got, size_t sequence) {
  for (const double o : got.o[sequence]) EXPECT_TRUE(std::isnan(o)) << "sequence " << sequence;
  for (const int status : got.row_status[sequence]) EXPECT_EQ(status, LLA_ROW_INVALID) << "sequence " << sequence;
  for (const int iterations : got.iterations[sequence]) EXPECT_EQ(iterations, -1) << "sequence " << sequence;
}

}  // namespace lla::test
