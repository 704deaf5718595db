#include "support/cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "core/text.hpp"

namespace lla::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> as_doubles(const std::vector<int32_t>& v) { return {v.begin(), v.end()}; }

// Where every key of every sequence lies, and what the cache is made of.
struct Placement {
  int64_t capacity = 0, pages = 0, page_size = 0, table_width = 0;
  std::vector<int32_t> table;  // (sequences, table_width); -1 where no row looks

  explicit Placement(const CacheSpec& s) {
    int64_t longest = 0;
    for (const CachedSequence& q : s.sequences) longest = std::max(longest, q.keys);
    capacity = s.capacity > 0 ? s.capacity : longest + 5;
    const auto batch = static_cast<int64_t>(s.sequences.size());
    if (s.page_size == 0) {
      pages = batch;
      page_size = capacity;
      return;
    }
    page_size = s.page_size;
    table_width = (capacity + page_size - 1) / page_size;
    const bool shared = s.order == PageOrder::shared;
    pages = (shared ? 1 : batch) * table_width + 3;
    std::vector<int32_t> order(static_cast<size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    if (s.order == PageOrder::reversed) std::reverse(order.begin(), order.end());
    if (s.order == PageOrder::shuffled || shared) std::shuffle(order.begin(), order.end(), std::mt19937(7));
    table.assign(static_cast<size_t>(batch * table_width), -1);
    for (int64_t b = 0; b < batch; ++b) {
      const CachedSequence& q = s.sequences[static_cast<size_t>(b)];
      const int64_t used = q.rows > 0 ? (q.keys + page_size - 1) / page_size : 0;
      for (int64_t n = std::min(q.first_key, q.keys) / page_size; n < used; ++n)
        table[static_cast<size_t>(b * table_width + n)] =
            order[static_cast<size_t>((shared ? 0 : b * table_width) + n)];
    }
  }

  // Row-major offset of (page, slot) of key j, in slots.
  int64_t slot(const CacheSpec& s, int64_t b, int64_t j) const {
    if (s.page_size == 0) return b * page_size + j;
    return int64_t{table[static_cast<size_t>(b * table_width + j / page_size)]} * page_size + j % page_size;
  }
};

// (pages, page_size, Hkv, width) with the keys each sequence sees, NaN elsewhere.
std::vector<double> cache_values(const CacheSpec& s, const Placement& at, const std::vector<Inputs>& inputs,
                                 std::vector<double> Inputs::*of, int64_t width) {
  std::vector<double> values(static_cast<size_t>(at.pages * at.page_size * s.heads_kv * width), kNaN);
  for (size_t b = 0; b < s.sequences.size(); ++b) {
    const CachedSequence& q = s.sequences[b];
    if (q.rows == 0) continue;
    const auto row = static_cast<size_t>(s.heads_kv * width);
    for (int64_t j = q.first_key; j < q.keys; ++j) {
      const auto from = (inputs[b].*of).begin() + (j - q.first_key) * static_cast<int64_t>(row);
      std::copy(from, from + static_cast<int64_t>(row),
                values.begin() + at.slot(s, static_cast<int64_t>(b), j) * static_cast<int64_t>(row));
    }
  }
  return values;
}

std::vector<double> joined(const std::vector<Inputs>& inputs, std::vector<double> Inputs::*of) {
  std::vector<double> all;
  for (const Inputs& in : inputs) all.insert(all.end(), (in.*of).begin(), (in.*of).end());
  return all;
}

struct CacheTensors {
  TestTensor q, k, v, ridge, x, cu_q, lengths, table, first_key;

  CacheTensors(const CacheSpec& s, const std::vector<Inputs>& inputs, Memory& m) {
    const Placement at(s);
    const auto batch = static_cast<int64_t>(s.sequences.size());
    std::vector<int32_t> cu = {0}, length, first;
    for (const CachedSequence& sequence : s.sequences) {
      cu.push_back(cu.back() + static_cast<int32_t>(sequence.rows));
      length.push_back(static_cast<int32_t>(sequence.keys));
      first.push_back(static_cast<int32_t>(sequence.first_key));
    }
    const auto rows = [&](int64_t channels) -> std::vector<int64_t> {
      if (s.packed) return {cu.back(), s.heads_q, channels};
      return {batch, s.sequences[0].rows, s.heads_q, channels};
    };
    const DType wide = s.dtype == DType::f64 ? DType::f64 : DType::f32;
    q = TestTensor(m, "q", s.dtype, rows(s.dim), s.layout, joined(inputs, &Inputs::q));
    const std::vector<int64_t> slots = {at.pages, at.page_size, s.heads_kv, s.dim};
    k = TestTensor(m, "k", s.dtype, slots, s.layout, cache_values(s, at, inputs, &Inputs::k, s.dim));
    const std::vector<int64_t> value_slots = {at.pages, at.page_size, s.heads_kv, s.value_dim};
    v = TestTensor(m, "v", s.dtype, value_slots, s.layout, cache_values(s, at, inputs, &Inputs::v, s.value_dim));
    if (s.ridge == RidgeShape::none) {
      x = TestTensor(m, "x", s.dtype, rows(s.dim), s.layout, joined(inputs, &Inputs::x));
    } else {
      std::vector<int64_t> size = rows(1);
      size.pop_back();
      if (s.ridge == RidgeShape::head) size = {s.heads_q};
      if (s.ridge == RidgeShape::scalar) size = {};
      if (s.ridge == RidgeShape::dimension) size = rows(s.dim);
      const bool by_row = s.ridge == RidgeShape::token || s.ridge == RidgeShape::dimension;
      ridge =
          TestTensor(m, "ridge", wide, size, Layout::dense, by_row ? joined(inputs, &Inputs::ridge) : inputs[0].ridge);
    }
    if (s.packed) cu_q = TestTensor(m, "cu_seqlens_q", DType::i32, {batch + 1}, Layout::dense, as_doubles(cu));
    lengths = TestTensor(m, "seqlens_k", DType::i32, {batch}, Layout::dense, as_doubles(length));
    if (s.page_size > 0) {
      table = TestTensor(m, "page_table", DType::i32, {batch, at.table_width}, Layout::dense, as_doubles(at.table));
    }
    if (std::any_of(first.begin(), first.end(), [](int32_t n) { return n != 0; }))
      first_key = TestTensor(m, "first_key", DType::i32, {batch}, Layout::dense, as_doubles(first));
  }

  void attach(ForwardArgs& args, const CacheSpec& s) const {
    args.options = s.options;
    args.q = q.view(), args.k = k.view(), args.v = v.view(), args.ridge = ridge.view(), args.x = x.view();
    args.cu_seqlens_q = cu_q.view();
    args.seqlens_k = lengths.view(), args.page_table = table.view(), args.first_key = first_key.view();
    args.max_total_k = s.max_total_k;
    for (const CachedSequence& sequence : s.sequences) {
      if (s.packed) args.max_seqlen_q = std::max(args.max_seqlen_q, sequence.rows);
      args.max_seqlen_k = std::max(args.max_seqlen_k, sequence.keys);
    }
  }

  void expect_intact() const {
    for (const TestTensor* t : {&q, &k, &v, &ridge, &x, &cu_q, &lengths, &table, &first_key}) t->expect_intact();
  }
};

// (total or batch, heads) order of the outputs, cut into sequences.
template <class T>
std::vector<std::vector<T>> rows_of(const CacheSpec& s, const std::vector<double>& info) {
  std::vector<std::vector<T>> out;
  int64_t total = 0, start = 0;
  for (const CachedSequence& q : s.sequences) total += q.rows;
  for (size_t b = 0; b < s.sequences.size(); ++b) {
    const int64_t rows = s.sequences[b].rows;
    std::vector<T> mine;
    for (int64_t h = 0; h < s.heads_q; ++h) {
      const int64_t at = s.packed ? h * total + start : (static_cast<int64_t>(b) * s.heads_q + h) * rows;
      for (int64_t i = 0; i < rows; ++i) mine.push_back(static_cast<T>(info[static_cast<size_t>(at + i)]));
    }
    out.push_back(std::move(mine));
    start += rows;
  }
  return out;
}

}  // namespace

Spec CacheSpec::sequence(size_t b) const {
  Spec s;
  s.dtype = dtype;
  s.out_dtype = out_dtype;
  s.length_q = sequences[b].rows;
  s.length_k = std::max<int64_t>(sequences[b].keys - sequences[b].first_key, 0);
  s.heads_q = heads_q;
  s.heads_kv = heads_kv;
  s.dim = dim;
  s.value_dim = value_dim;
  s.ridge = ridge;
  s.options = options;
  return s;
}

std::string CacheSpec::text() const {
  std::string out = core::cat(core::name(dtype), " heads ", heads_q, "/", heads_kv, " D ", dim, "/", value_dim,
                              " pages of ", page_size, packed ? " packed" : "", " layout ", name(layout), " sequences");
  for (const CachedSequence& q : sequences) out += core::cat(" ", q.rows, "x", q.keys, "-", q.first_key);
  return out;
}

std::vector<Inputs> make_cache_inputs(const CacheSpec& spec, data::Kind kind, double ridge, uint64_t seed) {
  std::vector<Inputs> inputs;
  for (size_t b = 0; b < spec.sequences.size(); ++b) {
    inputs.push_back(make_inputs(spec.sequence(b), kind, ridge, seed + b));
    if (spec.order == PageOrder::shared) {
      // The longest sequence's pages hold everybody's beginnings.
      for (size_t other = 0; other < b; ++other) {
        for (auto of : {&Inputs::k, &Inputs::v}) {
          auto &mine = inputs[b].*of, &its = inputs[other].*of;
          std::copy_n(its.begin(), std::min(mine.size(), its.size()), mine.begin());
        }
      }
    }
    const bool by_row = spec.ridge == RidgeShape::token || spec.ridge == RidgeShape::dimension;
    if (!by_row) inputs[b].ridge = inputs[0].ridge;
  }
  return inputs;
}

void lengthen_keys(const CacheSpec& spec, std::vector<Inputs>& inputs, int64_t from) {
  for (Inputs& in : inputs) {
    const auto first = std::min(static_cast<size_t>(from * spec.heads_kv * spec.dim), in.k.size());
    for (size_t e = first; e < in.k.size(); ++e) in.k[e] *= 4;
  }
}

CacheForward run_cache(const CacheSpec& spec, const std::vector<Inputs>& inputs, const std::string& implementation,
                       CacheEdit edit, CacheIssue issue) {
  SCOPED_TRACE(implementation + " cache: " + spec.text());
  Memory& m = memory_of(implementation);
  const CacheTensors tensors(spec, inputs, m);
  ForwardArgs args;
  tensors.attach(args, spec);
  args.options.implementation = implementation.c_str();
  std::vector<int64_t> size(args.q.size, args.q.size + args.q.ndim);
  size.back() = spec.value_dim;
  std::vector<int64_t> info_size = {spec.heads_q, size[0]};
  if (!spec.packed) info_size = {size[0], spec.heads_q, size[1]};
  const TestTensor o(m, "o", spec.output(), size, spec.layout), status(m, "row_status", DType::i32, info_size),
      iterations(m, "iterations", DType::i32, info_size), residual(m, "residual", DType::f32, info_size);
  args.o = o.view(), args.row_status = status.view(), args.iterations = iterations.view();
  args.residual = residual.view();
  if (edit) edit(args);
  CacheForward result;
  ForwardSizes sizes;
  if ((result.status = lla_forward_query(&args, &sizes)) == LLA_OK) {
    const GuardedBuffer workspace(m, sizes.workspace_bytes);
    args.workspace = workspace.data();
    args.workspace_bytes = sizes.workspace_bytes;
    result.status = issue(&args);
    m.synchronize();
    EXPECT_TRUE(workspace.guards_intact()) << "written outside the workspace";
  }
  if (result.status != LLA_OK) {
    result.message = lla_last_error();
    for (const TestTensor* t : {&o, &status, &iterations, &residual}) t->expect_untouched();
    return result;
  }
  if (edit == nullptr) tensors.expect_intact();
  for (const TestTensor* t : {&o, &status, &iterations, &residual}) t->expect_intact();
  const std::vector<double> all = o.values();
  auto next = all.begin();
  for (const CachedSequence& q : spec.sequences) {
    const auto end = next + q.rows * spec.heads_q * spec.value_dim;
    result.o.emplace_back(next, end);
    next = end;
  }
  result.row_status = rows_of<int>(spec, status.values());
  result.iterations = rows_of<int>(spec, iterations.values());
  return result;
}

CacheForward cache_oracle(const CacheSpec& spec, const std::vector<Inputs>& inputs) {
  CacheForward result;
  for (size_t b = 0; b < spec.sequences.size(); ++b) {
    const Forward alone = oracle_forward(spec.sequence(b), inputs[b]);
    EXPECT_EQ(alone.status, LLA_OK) << alone.message;
    result.o.push_back(alone.o);
    result.row_status.push_back(alone.info.status);
    result.iterations.push_back(alone.info.iterations);
  }
  return result;
}

bool takes_cache(const std::string& implementation, const CacheSpec& spec) {
  const int device = memory_of(implementation).cuda_device();
  const auto batch = static_cast<int64_t>(spec.sequences.size());
  int64_t queries = 1, total = 0;  // of the sequence that has most, and of all
  for (const CachedSequence& s : spec.sequences) queries = std::max(queries, s.rows), total += s.rows;
  const auto rows = [&](int64_t channels) -> std::vector<int64_t> {
    if (spec.packed) return {total, spec.heads_q, channels};
    return {batch, queries, spec.heads_q, channels};
  };
  ForwardArgs args;
  args.options = spec.options;
  args.options.implementation = implementation.c_str();
  args.q = described(spec.dtype, rows(spec.dim), spec.layout, device);
  args.k = described(spec.dtype, {batch, 64, spec.heads_kv, spec.dim}, spec.layout, device);
  args.v = described(spec.dtype, {batch, 64, spec.heads_kv, spec.value_dim}, spec.layout, device);
  args.o = described(spec.output(), rows(spec.value_dim), spec.layout, device);
  if (spec.ridge == RidgeShape::none) {
    args.x = args.q;
  } else {
    args.ridge = described(spec.dtype == DType::f64 ? DType::f64 : DType::f32, {}, Layout::dense, device);
  }
  args.seqlens_k = described(DType::i32, {batch}, Layout::dense, device);
  if (spec.packed) {
    args.cu_seqlens_q = described(DType::i32, {batch + 1}, Layout::dense, device);
    args.max_seqlen_q = queries;
  }
  ForwardSizes sizes;
  const Status status = query(args, sizes);
  EXPECT_TRUE(status || status.code() == LLA_UNSUPPORTED) << status.message();
  return static_cast<bool>(status);
}

}  // namespace lla::test
