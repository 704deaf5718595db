// Calls over key-value caches as tests speak of them: sequences of their own lengths, written into a cache whose every
// other element is NaN, and the same sequences one by one through the reference.
#pragma once

#include <string>
#include <vector>

#include "support/run.hpp"

namespace lla::test {

struct CachedSequence {
  int64_t rows = 1;  // queries
  int64_t keys = 1;  // with those of the queries
  int64_t first_key = 0;
};

enum class PageOrder { forward, reversed, shuffled, shared /* sequences with equal keys use the same pages */ };

struct CacheSpec {
  DType dtype = DType::f32;
  DType out_dtype = DType::none;  // none: like dtype
  std::vector<CachedSequence> sequences = {{}};
  bool packed = false;    // queries by cu_seqlens_q; otherwise all sequences have equally many
  int64_t page_size = 0;  // 0: contiguous
  PageOrder order = PageOrder::forward;
  int64_t capacity = 0;     // keys a sequence may have; 0: a little more than the longest has
  int64_t max_total_k = 0;  // as in lla.h
  int64_t heads_q = 2, heads_kv = 1;
  int64_t dim = 16, value_dim = 16;
  RidgeShape ridge = RidgeShape::token;
  Layout layout = Layout::dense;
  Options options;

  DType output() const { return out_dtype == DType::none ? dtype : out_dtype; }
  Spec sequence(size_t b) const;  // alone: its rows over the keys it may see
  std::string text() const;
};

// Of each sequence, in the layout of Spec. Sequences of equal keys under PageOrder::shared have the same keys and
// values.
std::vector<Inputs> make_cache_inputs(const CacheSpec& spec, data::Kind kind, double ridge, uint64_t seed);
// Keys four times as long from the `from`-th on: the largest logit rises there, whatever was summed up before.
void lengthen_keys(const CacheSpec& spec, std::vector<Inputs>& inputs, int64_t from);

struct CacheForward {
  lla_status status = LLA_OK;
  std::string message;
  std::vector<std::vector<double>> o;        // of each sequence, (rows, Hq, Dv)
  std::vector<std::vector<int>> row_status;  // (Hq, rows)
  std::vector<std::vector<int>> iterations;
};

// What tests change between the checked arguments and the call.
using CacheEdit = void (*)(lla_forward_args&);

// How the call is issued: once, or captured and replayed.
using CacheIssue = lla_status (*)(const lla_forward_args*);

CacheForward run_cache(const CacheSpec& spec, const std::vector<Inputs>& inputs, const std::string& implementation,
                       CacheEdit edit = nullptr, CacheIssue issue = lla_forward);
// Each sequence alone, in fp64.
CacheForward cache_oracle(const CacheSpec& spec, const std::vector<Inputs>& inputs);

// Whether the implementation runs such calls.
bool takes_cache(const std::string& implementation, const CacheSpec& spec);

}  // namespace lla::test
