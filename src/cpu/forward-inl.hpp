// Forward of one block of rows: statistics, solve, output. With cached weights 5 + 2T products, T the panel's
// iterations.
#if defined(LLA_CPU_FORWARD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_FORWARD_INL_HPP
#undef LLA_CPU_FORWARD_INL_HPP
#else
#define LLA_CPU_FORWARD_INL_HPP
#endif

#include "cpu/lanes-inl.hpp"
#include "cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// panel.max: the largest visible logit, rounded up to an integer. With a cache, the logits are left in it.
template <class T>
void find_max(PanelBlock<T>& block) {
  const int64_t dim = block.problem.dim;
  for (int i = 0; i < block.count; ++i) {
    std::fill_n(block.panels[i].max, kPanel<T>, -std::numeric_limits<T>::infinity());
    std::fill_n(block.panels[i].top, kPanel<T>, int64_t{-1});
    block.count_products(block.panels[i], dim);
  }
  walk(block, nullptr, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    Panel<T>& panel = block.panels[i];
    T* const logits = panel.weights ? panel.weights + (lo - panel.base()) * kPanel<T> : block.memory.tiles[1];
    logits_tile(panel, block.head.k.transposed, dim, lo, hi, logits);
    update_max(panel, logits, lo, hi);
  });
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    std::copy_n(panel.max, kPanel<T>, panel.top_weight);
    for (T& max : panel.max) max = std::isfinite(max) ? std::ceil(max) : T{0};
    for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
      store(exp2_lanes(hn::Sub(load(panel.top_weight + at), load(panel.max + at))), panel.top_weight + at);
    }
  }
}

// omega, mean key and mean value; with a cache, its logits become weights.
//
// The means are taken relative to the key with the largest weight, k* + (1/omega) sum of w (k - k*): where it has
// nearly all the weight, the mean is k* as exactly as the type allows (with w k / w it would be off by roundings that
// everything centred magnifies), and a single key's mean is that key.
template <class T>
void find_means(PanelBlock<T>& block) {
  const int64_t dim = block.problem.dim, value_dim = block.problem.value_dim;
  const PackedHead<T>& head = block.head;
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    clear_statistics(panel);
    clear(panel.mean_k, dim);
    clear(panel.mean_v, value_dim);
    block.count_products(panel, (panel.weights ? 1 : 2) * dim + value_dim);
  }
  walk(block, nullptr, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    Panel<T>& panel = block.panels[i];
    T* weights = panel.weights ? panel.weights + (lo - panel.base()) * kPanel<T> : block.memory.tiles[1];
    if (!panel.weights) logits_tile(panel, head.k.transposed, dim, lo, hi, weights);
    for_top_keys(panel, lo, hi, [&](int64_t, int64_t e) { weights[e] = std::numeric_limits<T>::lowest() / 2; });
    logits_to_weights<true>(panel, weights, lo, hi, head.key_squares);
    natural_product(head.k.natural + lo * dim, dim, dim, weights, hi - lo, panel.mean_k);
    natural_product(head.v.natural + lo * value_dim, value_dim, value_dim, weights, hi - lo, panel.mean_v);
    for_top_keys(panel, lo, hi, [&](int64_t l, int64_t e) { weights[e] = panel.top_weight[l]; });
  });
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    T *const top_k = panel.direction, *const top_v = panel.value;  // not in use yet
    clear(top_k, dim);
    clear(top_v, value_dim);
    std::copy_n(panel.omega, kPanel<T>, panel.row_sum);
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      if (panel.top[l] < 0) continue;
      const T w = panel.top_weight[l];
      panel.omega[l] += w;
      panel.omega_squares[l] += w * w;
      panel.variance[l] += w * head.key_squares[panel.top[l]];
      put_lane(top_k, l, dim, head.k.natural + panel.top[l] * dim);
      put_lane(top_v, l, value_dim, head.v.natural + panel.top[l] * value_dim);
    }
    centre_and_divide<true>(panel, panel.mean_k, top_k, dim);
    centre_and_divide<true>(panel, panel.mean_v, top_v, value_dim);
    finish_statistics(panel, dim);
  }
}

// panel.value = mean value + (1/omega) sum of w ((k - mean key) . solution) v.
template <class T>
void find_output(PanelBlock<T>& block) {
  const int64_t dim = block.problem.dim, value_dim = block.problem.value_dim;
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    panel.centre.set_by_size(panel.solution, panel.mean_k, dim, nullptr, panel.low_part(), panel.low_lanes);
    std::fill_n(panel.row_sum, kPanel<T>, T{0});
    clear(panel.value, value_dim);
    block.count_products(panel, (panel.weights ? 1 : 2) * dim + value_dim);
  }
  walk(block, nullptr, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    Panel<T>& panel = block.panels[i];
    const T* weights = weights_tile(panel, block.head.k.transposed, dim, lo, hi, block.memory.tiles[1]);
    T* const u = block.memory.tiles[0];
    centred_tile(panel, block.head.k.transposed, dim, lo, hi, panel.solution, weights, block.memory.tiles[3], u);
    natural_product(block.head.v.natural + lo * value_dim, value_dim, value_dim, u, hi - lo, panel.value);
  });
  for (int i = 0; i < block.count; ++i) {
    centre_and_divide<true>(block.panels[i], block.panels[i].value, block.panels[i].mean_v, value_dim);
  }
}

template <class T>
void write_saved(const Panel<T>& panel, const core::Problem& p, const PackedHead<T>& head, T* saved) {
  const core::SavedLayout at(p);
  for (int64_t l = 0; l < panel.rows; ++l) {
    const int64_t r = row_place(p, head, panel.first_row + l).index;
    saved[at.max + r] = panel.empty(l) ? T{0} : panel.max[l] + panel.offset[l];
    saved[at.omega + r] = panel.offset_rest[l] == 0 ? panel.omega[l] : panel.omega[l] * std::exp2(panel.offset_rest[l]);
    get_lane(panel.mean_k, l, p.dim, saved + at.mean_k + r * p.dim);
    for (int64_t c = 0; c < p.dim && head.shifted && !panel.empty(l); ++c)
      saved[at.mean_k + r * p.dim + c] += head.shift[c];
    get_lane(panel.mean_v, l, p.value_dim, saved + at.mean_v + r * p.value_dim);
    get_lane(panel.solution, l, p.dim, saved + at.x + r * p.dim);
    if (panel.bad[l]) {
      constexpr T nan = std::numeric_limits<T>::quiet_NaN();
      saved[at.omega + r] = nan;
      std::fill_n(saved + at.mean_k + r * p.dim, p.dim, nan);
      std::fill_n(saved + at.mean_v + r * p.value_dim, p.value_dim, nan);
      std::fill_n(saved + at.x + r * p.dim, p.dim, nan);
    }
  }
}

// A row whose output its type cannot hold (values near the end of the range) says so.
template <class T>
void write_output(Panel<T>& panel, const core::ForwardCall& call, const PackedHead<T>& head) {
  const core::Problem& p = call.problem;
  T row[kMaxChannels];
  for (int64_t l = 0; l < panel.rows; ++l) {
    const int64_t offset = row_offset(call.o, row_place(p, head, panel.first_row + l));
    if (panel.bad[l]) {
      std::fill_n(row, p.value_dim, std::numeric_limits<T>::quiet_NaN());
    } else {
      get_lane(panel.value, l, p.value_dim, row);
      const T largest = static_cast<T>(core::largest_finite(call.o.dtype));
      if (!std::all_of(row, row + p.value_dim, [&](T x) { return std::abs(x) <= largest; })) {
        panel.status[l] = LLA_ROW_BREAKDOWN;
      }
    }
    write_row(call.o, offset, p.value_dim, row);
  }
}

// Rows [first_row, first_row + rows) of the head.
template <class T>
void forward_block(const core::ForwardCall& call, const PackedHead<T>& head, int64_t first_row, int64_t rows,
                   WorkerMemory<T>& memory) {
  const core::Problem& p = call.problem;
  PanelBlock<T> block(p, head, memory);
  const T log2_scale = static_cast<T>(p.scale * 1.4426950408889634074);
  for (int64_t r = first_row; r < first_row + rows; r += kPanel<T>) {
    Panel<T>& panel = block.panels[block.count];
    static_cast<PanelMemory<T>&>(panel) = memory.panels[block.count++];
    set_rows(panel, p, head.sequence, r, std::min(kPanel<T>, first_row + rows - r));
    mark_bad_keys(panel, head);
    read_lanes(panel, p, head, call.q, p.dim, huge_bits<T>(), panel.rhs);
    if (p.given_x()) {
      read_lanes(panel, p, head, call.x, p.dim, infinity_bits<T>(), panel.solution);
    } else {
      read_ridge(panel, p, head, call.ridge);
    }
    for (int64_t e = 0; e < p.dim * kPanel<T>; ++e) panel.q[e] = panel.rhs[e] * log2_scale;
    find_offsets(panel, head, p.dim);
    for (int64_t c = 0; c < p.dim && head.shifted; ++c) {
      for (int64_t l = 0; l < kPanel<T>; ++l) panel.rhs[c * kPanel<T> + l] -= head.shift[c];
    }
  }
  find_max(block);
  find_means(block);
  if (!p.given_x()) {
    for (int i = 0; i < block.count; ++i) {
      Panel<T>& panel = block.panels[i];
      for (int64_t e = 0; e < p.dim * kPanel<T>; ++e) panel.rhs[e] -= panel.mean_k[e];
      for (int64_t l = 0; l < kPanel<T>; ++l) {
        if (panel.empty(l)) {  // nothing to attend to: x = 0
          for (int64_t c = 0; c < p.dim; ++c) panel.rhs[c * kPanel<T> + l] = 0;
        }
      }
    }
    solve(block);
  }
  find_output(block);
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    for (int64_t l = 0; l < panel.rows; ++l) {
      if (!(panel.omega[l] > 0)) panel.mark_bad(l);  // a visible key but no weight: logits beyond the contract
    }
    write_output(panel, call, head);
    write_info(panel, p, head, call.info);
    if (call.saved) write_saved(panel, p, head, static_cast<T*>(call.saved));
  }
  add_work(block.work);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
