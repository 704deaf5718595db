// The pre-pass over caches (and over packed sequences that must not depend on each other): it follows lengths, tables
// and strides on the device while it copies, and copies what is alive. Beside the copies it leaves the spans the
// forward kernels read.
#pragma once

#include "cuda/tensor/cache/places.hpp"
#include "cuda/tensor/prepass.hpp"

namespace lla::cuda::tensor {

struct CachePrepassParams {
  PrepassParams
      to;  // strides are those of the cache; its chunks are counted over all sequences, its heads per sequence
  SequenceSource source;
  SequencePlace* places;
  int32_t* live_chunks;
  int32_t* spans;
  int32_t left, right;  // window
  int32_t few_keys;     // sequences whose rows see at most so many keys are in the second list
  int32_t most_chunks;  // that may be alive
  core::Operand o;      // of rows whose sequence turns out invalid
  core::RowOutputs info;
};

// Begin and end of sequences' rows or keys in a list.
constexpr int32_t* list_of_spans(int32_t* spans, int64_t batch, int list, bool keys) {
  return spans + (2 * list + (keys ? 1 : 0)) * 2 * batch;
}

Status run_cache_prepass(const CachePrepassParams& params, cudaStream_t stream);

// After the forward: rows of sequences that break a bound or name a page that is not there become NaN,
// LLA_ROW_INVALID.
Status overwrite_invalid_rows(const CachePrepassParams& params, cudaStream_t stream);

}  // namespace lla::cuda::tensor
