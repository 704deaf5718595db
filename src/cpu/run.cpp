// Runs a call: waves of kv heads, each packed, then worked off block by block.
#include <algorithm>
#include <new>
#include <type_traits>

#include "cpu/cpu.hpp"
#include "cpu/decode_run.hpp"
#include "cpu/kernels.hpp"
#include "cpu/layout.hpp"
#include "cpu/plan.hpp"
#include "cpu/thread_pool.hpp"

namespace lla::cpu {
namespace {

// Names the heads of a wave, from `next` on, and packs their keys and values. Returns how many heads it has; `next` is
// then the first of the next wave. Sequences of a cache that decode take no part.
template <class T, class Call>
int64_t pack_wave(const Call& call, const core::Plan& plan, const Schedule& s, const Layout<T>& layout, int64_t& next) {
  const core::Problem& p = call.problem;
  int64_t count = 0, longest = 0;
  for (; next < s.heads && count < s.packed_heads; ++next) {
    const core::Sequence sequence = core::sequence(call, next / p.heads_kv);
    if (p.cache && decodes(p, sequence)) continue;
    PackedHead<T>& head = layout.heads[count++];
    head.sequence = sequence;
    head.kv_head = next % p.heads_kv;
    head.seen = {0, sequence.length_k};
    if constexpr (std::is_same_v<Call, core::ForwardCall>) {
      head.cache = call.cache;
      if (call.cache) head.seen = core::visible_keys(p.mask, sequence);
    }
    longest = std::max(longest, head.seen.end);
    new (head.bad_count) std::atomic<int64_t>(0);
  }
  parallel_for(count, plan.workers, [&](int64_t item, int) {
    PackedHead<T>& head = layout.heads[item];
    head.shifted = find_shift(call.k, head.cache, head.sequence, head.seen, head.kv_head, p.dim, head.shift);
  });
  const int64_t tiles = (longest + kTile - 1) / kTile;
  parallel_for(count * tiles, plan.workers, [&](int64_t item, int) {
    const PackedHead<T>& head = layout.heads[item / tiles];
    const int64_t first = item % tiles * kTile;
    if (first < head.seen.end && first + kTile > head.seen.begin) pack_tile(p, call.k, call.v, head, item % tiles);
  });
  return count;
}

template <class T>
void forward(const core::ForwardCall& call, const core::Plan& plan) {
  const core::Problem& p = call.problem;
  const bool decoding = may_decode(p) && call.saved == nullptr;
  if (decoding) decode(call, plan.workers);
  if (decoding && only_decodes(p)) return;
  const Schedule s = make_schedule(p, plan);
  Layout<T> layout;
  layout.take(call.workspace, p, plan, s);
  const int64_t blocks = s.blocks(s.rows);
  for (int64_t next = 0; next < s.heads;) {
    const int64_t count = pack_wave(call, plan, s, layout, next);
    // Last blocks first: under a causal mask they are the longest.
    parallel_for(blocks * count, plan.workers, [&](int64_t item, int worker) {
      const PackedHead<T>& head = layout.heads[item % count];
      const int64_t row = (blocks - 1 - item / count) * s.block_rows;
      const int64_t rows = head.sequence.length_q * p.group() - row;
      if (rows > 0) run_forward_block(call, head, row, std::min(rows, s.block_rows), layout.workers[worker]);
    });
  }
}

// The gradient of a ridge shared between rows: the rows' shares, summed in the order of the rows whoever computed them.
void sum_ridge(const core::BackwardCall& call, const double* shares) {
  const core::Problem& p = call.problem;
  double all = 0;
  for (int64_t h = 0; h < p.heads_q; ++h) {
    double sum = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const core::Sequence s = core::sequence(p, call.cu_seqlens_q, call.cu_seqlens_k, b);
      for (int64_t i = 0; i < s.length_q; ++i) sum += shares[core::row_index(p, s, h, i)];
    }
    if (p.ridge == core::RidgeShape::head) write_row(call.dridge, row_offset(call.dridge, 0, 0, h), 1, &sum);
    all += sum;
  }
  if (p.ridge == core::RidgeShape::scalar) write_row(call.dridge, 0, 1, &all);
}

template <class T>
void backward(const core::BackwardCall& call, const core::Plan& plan) {
  const core::Problem& p = call.problem;
  const Schedule s = make_schedule(p, plan);
  Layout<T> layout;
  layout.take(call.workspace, p, plan, s);
  const int64_t row_blocks = s.blocks(s.rows), key_blocks = s.blocks(p.seqlen_k);
  for (int64_t next = 0; next < s.heads;) {
    const int64_t count = pack_wave(call, plan, s, layout, next);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t rows = layout.heads[i].sequence.length_q * p.group();
      new (layout.queries[i].bad_count) std::atomic<int64_t>(0);
      layout.queries[i].put_zeros(p, rows, round_up(rows, kPackRows));
    }
    parallel_for(row_blocks * count, plan.workers, [&](int64_t item, int worker) {
      const PackedHead<T>& head = layout.heads[item % count];
      const int64_t row = (row_blocks - 1 - item / count) * s.block_rows;
      const int64_t rows = head.sequence.length_q * p.group() - row;
      if (rows <= 0) return;
      run_backward_rows(call, head, layout.queries[item % count], row, std::min(rows, s.block_rows),
                        layout.workers[worker], call.dridge ? layout.ridge_rows : nullptr);
    });
    if (!call.dk && !call.dv) continue;
    // First blocks first: under a causal mask most queries see the first keys.
    parallel_for(key_blocks * count, plan.workers, [&](int64_t item, int worker) {
      const PackedHead<T>& head = layout.heads[item % count];
      const int64_t key = item / count * s.block_rows;
      const int64_t keys = head.sequence.length_k - key;
      if (keys <= 0) return;
      run_backward_keys(call, head, layout.queries[item % count], key, std::min(keys, s.block_rows),
                        layout.workers[worker]);
    });
  }
  if (layout.ridge_rows && call.dridge) sum_ridge(call, layout.ridge_rows);
}

Status run_forward(const core::ForwardCall& call, const core::Plan& plan) {
  if (call.problem.dtype == DType::f64) {
    forward<double>(call, plan);
  } else {
    forward<float>(call, plan);
  }
  return {};
}

Status run_backward(const core::BackwardCall& call, const core::Plan& plan) {
  if (call.problem.dtype == DType::f64) {
    backward<double>(call, plan);
  } else {
    backward<float>(call, plan);
  }
  return {};
}

}  // namespace

const core::Implementation implementation = {"cpu",
                                             "SIMD kernels for f32, f64, bf16 and f16, threaded",
                                             core::Device::cpu,
                                             refuse,
                                             make_plan,
                                             notes,
                                             run_forward,
                                             run_backward};

}  // namespace lla::cpu
