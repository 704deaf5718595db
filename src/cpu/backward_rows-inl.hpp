// Backward, pass A, one block of rows: t, the solve for y, c, then dq and the ridge's gradient. With cached weights 7 +
// 2T products. It leaves everything pass B needs of the rows packed in PackedQueries.
//
// Of a panel's arrays: x the forward's solution, solution y, value the gradient of o, rhs t.
//
// Every row's gradient is divided by the power of two of its largest element as it is read, and by that of the head's
// largest value, which makes its products with values of size 1. What is linear in the two is multiplied by them as it
// is written: in between their size is of no consequence, and gradients of 1e-30 have all their digits.
#if defined(LLA_CPU_BACKWARD_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_BACKWARD_ROWS_INL_HPP
#undef LLA_CPU_BACKWARD_ROWS_INL_HPP
#else
#define LLA_CPU_BACKWARD_ROWS_INL_HPP
#endif

#include "cpu/lanes-inl.hpp"
#include "cpu/layout.hpp"
#include "cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// What pass A keeps of a panel's lanes beside Panel.
template <class T>
struct GradientLanes {
  LaneCentres<T> tau;                              // gradient of o . mean value
  LaneCentres<T> x, y;                             // x . mean key, y . mean key
  HWY_ALIGN T sum_x[kPanel<T>], sum_b[kPanel<T>];  // weighted sums of E and b: 0 but for rounding
  HWY_ALIGN T sum_xb[kPanel<T>];                   // and of their product
  HWY_ALIGN T c[kPanel<T>];
  HWY_ALIGN T unit[kPanel<T>];  // what gamma - tau amounts to
  int32_t exponent[kPanel<T>];  // the gradient of o is divided by 2^exponent; kNoExponent: it is zero
  int32_t value_exponent;       // ... and by this power

  // Of what is linear in gradient and values.
  PowerOfTwo<T> undo(int64_t lane) const { return PowerOfTwo<T>(both(lane)); }
  int32_t both(int64_t lane) const { return exponent[lane] == kNoExponent ? 0 : exponent[lane] + value_exponent; }
};

// Divides each lane's gradient by its powers of two.
template <class T>
void scale_gradient(const core::Problem& p, const PackedHead<T>& head, Panel<T>& panel, GradientLanes<T>& lanes) {
  const auto scale_lane = [&](int64_t l, int32_t exponent) {
    const PowerOfTwo<T> scale(exponent);
    for (int64_t e = l; e < p.value_dim * kPanel<T>; e += kPanel<T>) panel.value[e] = scale(panel.value[e]);
  };
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    lanes.exponent[l] = largest_exponent(panel.value + l, p.value_dim, kPanel<T>);
    if (lanes.exponent[l] != kNoExponent) scale_lane(l, -lanes.exponent[l]);
  }
  lane_dots(panel.value, panel.value, p.value_dim, lanes.unit);
  lanes.value_exponent = head.value_exponent();
  const T spread = head.tiles() > 0 ? *std::max_element(head.value_spread, head.value_spread + head.tiles()) : T{0};
  // The spread of normal numbers is about five times their deviation.
  const T deviation = PowerOfTwo<T>(-lanes.value_exponent)(spread) / 5;
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    lanes.unit[l] = std::sqrt(lanes.unit[l] / static_cast<T>(p.value_dim)) * deviation;
    scale_lane(l, -lanes.value_exponent);
  }
}

template <class T>
void read_saved(Panel<T>& panel, const core::Problem& p, const PackedHead<T>& head, const T* saved) {
  const core::SavedLayout at(p);
  T zeros[kMaxChannels] = {};
  const auto finite = [](const T* row, int64_t n) {
    return std::all_of(row, row + n, [](T x) { return std::isfinite(x); });
  };
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    const int64_t r = row_place(p, head, panel.first_row + std::min(l, panel.rows - 1)).index;
    const T* mean_k = saved + at.mean_k + r * p.dim;
    const T* mean_v = saved + at.mean_v + r * p.value_dim;
    const T* x = saved + at.x + r * p.dim;
    bool good = l < panel.rows;
    if (good && !(std::isfinite(saved[at.max + r]) && std::isfinite(saved[at.omega + r]) && finite(mean_k, p.dim) &&
                  finite(mean_v, p.value_dim) && finite(x, p.dim))) {
      good = false;
      panel.mark_bad(l);
    }
    const bool shifted = good && head.shifted && !panel.empty(l);
    panel.max[l] = good ? saved[at.max + r] - (shifted ? panel.offset[l] : T{0}) : T{0};
    put_lane(panel.mean_k, l, p.dim, good ? mean_k : zeros);
    for (int64_t c = 0; c < p.dim && shifted; ++c) panel.mean_k[c * kPanel<T> + l] -= head.shift[c];
    put_lane(panel.mean_v, l, p.value_dim, good ? mean_v : zeros);
    put_lane(panel.x, l, p.dim, good ? x : zeros);
  }
}

// rhs = t = sum of p (gamma - tau) (k - mean key); fills the cache of weights.
template <class T>
void find_t(PanelBlock<T>& block, const GradientLanes<T>* lanes) {
  const int64_t dim = block.problem.dim, value_dim = block.problem.value_dim;
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    clear_statistics(panel);
    for (T* sums : {panel.row_sum, panel.spread}) std::fill_n(sums, kPanel<T>, T{0});
    panel.centre = lanes[i].tau;
    clear(panel.rhs, dim);
    block.count_products(panel, 2 * dim + value_dim);
  }
  walk(block, nullptr, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    Panel<T>& panel = block.panels[i];
    const PackedHead<T>& head = block.head;
    T* const weights = panel.weights ? panel.weights + (lo - panel.base()) * kPanel<T> : block.memory.tiles[1];
    T* const u = block.memory.tiles[0];
    logits_tile(panel, head.k.transposed, dim, lo, hi, weights);
    logits_to_weights<true>(panel, weights, lo, hi, head.key_squares);
    centred_tile<true>(panel, head.v.transposed, value_dim, lo, hi, panel.value, weights, block.memory.tiles[3], u);
    natural_product(head.k.natural + lo * dim, dim, dim, u, hi - lo, panel.rhs);
  });
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    finish_statistics(panel, dim);
    centre_and_divide<false>(panel, panel.rhs, panel.mean_k, dim);
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      const T mean = panel.omega[l] > 0 ? panel.row_sum[l] / panel.omega[l] : T{0};
      panel.spread[l] = panel.omega[l] > 0 ? std::max(T{0}, panel.spread[l] / panel.omega[l] - mean * mean) : T{0};
      if (!panel.bad[l]) continue;
      for (int64_t c = 0; c < dim; ++c) panel.rhs[c * kPanel<T> + l] = 0;
    }
  }
}

// b[j] = (G . v_j - tau) - (y . k_j - centre), for the keys [lo, hi).
template <class T>
HWY_INLINE void b_tile(const PanelBlock<T>& block, const Panel<T>& panel, const GradientLanes<T>& g, int64_t lo,
                       int64_t hi, T* b) {
  T* const scratch = block.memory.tiles[3];
  centred_product(block.head.v.transposed, block.problem.value_dim, lo, hi, panel.value, g.tau, scratch,
                  [&](int64_t j, Vec<T> v0, Vec<T> v1) HWY_ATTR {
                    store(v0, b + j * kPanel<T>);
                    store(v1, b + j * kPanel<T> + kLanes<T>);
                  });
  if (block.problem.given_x()) return;
  centred_product(block.head.k.transposed, block.problem.dim, lo, hi, panel.solution, g.y, scratch,
                  [&](int64_t j, Vec<T> f0, Vec<T> f1) HWY_ATTR {
                    T* const to = b + j * kPanel<T>;
                    store(hn::Sub(load(to), f0), to);
                    store(hn::Sub(load(to + kLanes<T>), f1), to + kLanes<T>);
                  });
}

// image = sum of dS k (dS without the scale); c comes in as an estimate, whose error the row sums take off again, and
// goes out as the sum it stands for.
template <class T>
void find_dq(PanelBlock<T>& block, GradientLanes<T>* lanes) {
  const core::Problem& p = block.problem;
  const int64_t dim = p.dim;
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    for (T* sums : {panel.row_sum, lanes[i].sum_x, lanes[i].sum_b, lanes[i].sum_xb}) std::fill_n(sums, kPanel<T>, T{0});
    clear(panel.image, dim);
    block.count_products(panel, p.value_dim + (p.given_x() ? 2 : 3) * dim + (panel.weights ? 0 : dim));
  }
  walk(block, nullptr, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    Panel<T>& panel = block.panels[i];
    const PackedRows<T>& k = block.head.k;
    const T* weights = weights_tile(panel, k.transposed, dim, lo, hi, block.memory.tiles[1]);
    T* const u = block.memory.tiles[0];
    T* const b = block.memory.tiles[2];
    GradientLanes<T>& g = lanes[i];
    b_tile(block, panel, g, lo, hi, b);
    struct Sums {
      Vec<T> u, x, b, xb;
    };
    const auto start = [&](int64_t at) HWY_ATTR {
      return Sums{load(panel.row_sum + at), load(g.sum_x + at), load(g.sum_b + at), load(g.sum_xb + at)};
    };
    Sums sums0 = start(0), sums1 = start(kLanes<T>);
    const auto epilogue = [&](int64_t j, Vec<T> e0, Vec<T> e1) HWY_ATTR {
      const auto finish = [&](Vec<T> e, int64_t lane, Sums& sums) HWY_ATTR {
        const int64_t at = j * kPanel<T> + lane;
        const auto w = load(weights + at), bj = load(b + at);
        const auto uj = hn::Mul(w, hn::MulSub(hn::Add(e, splat(T{1})), bj, load(g.c + lane)));
        const auto we = hn::Mul(w, e);
        sums = {hn::Add(sums.u, uj), hn::Add(sums.x, we), hn::MulAdd(w, bj, sums.b), hn::MulAdd(we, bj, sums.xb)};
        store(uj, u + at);
      };
      finish(e0, 0, sums0);
      finish(e1, kLanes<T>, sums1);
    };
    centred_product(k.transposed, dim, lo, hi, panel.x, g.x, block.memory.tiles[3], epilogue);
    const auto end = [&](const Sums& sums, int64_t at) HWY_ATTR {
      store(sums.u, panel.row_sum + at);
      store(sums.x, g.sum_x + at);
      store(sums.b, g.sum_b + at);
      store(sums.xb, g.sum_xb + at);
    };
    end(sums0, 0);
    end(sums1, kLanes<T>);
    natural_product(k.natural + lo * dim, dim, dim, u, hi - lo, panel.image);
  });
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    centre_and_divide<false>(panel, panel.image, panel.mean_k, dim);
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      if (!(panel.omega[l] > 0)) continue;
      GradientLanes<T>& g = lanes[i];
      g.sum_x[l] /= panel.omega[l];
      g.sum_b[l] /= panel.omega[l];
      g.c[l] = g.sum_xb[l] / panel.omega[l] - g.sum_x[l] * g.sum_b[l];  // sum of p (1 + E) b, both centred as computed
    }
  }
}

// The ridge's gradient of one row: - x y by channel, summed where the ridge is one number.
template <class T>
void write_ridge_gradient(const Panel<T>& panel, const GradientLanes<T>& lanes, const core::BackwardCall& call,
                          const RowPlace& at, int64_t lane, double* ridge_rows) {
  const core::Problem& p = call.problem;
  T row[kMaxChannels];
  double sum = 0;
  for (int64_t c = 0; c < p.dim; ++c) {
    row[c] = panel.bad[lane] ? std::numeric_limits<T>::quiet_NaN()
                             : -panel.x[c * kPanel<T> + lane] * panel.solution[c * kPanel<T> + lane];
    sum += static_cast<double>(row[c]);
  }
  if (p.ridge == core::RidgeShape::dimension) {
    const PowerOfTwo<T> undo = lanes.undo(lane);
    for (int64_t c = 0; c < p.dim; ++c) row[c] = undo(row[c]);
    return write_row(call.dridge, row_offset(call.dridge, at), p.dim, row);
  }
  sum = PowerOfTwo<double>(lanes.both(lane))(sum);
  if (ridge_rows) {
    ridge_rows[at.index] = sum;
    return;
  }
  const T total = static_cast<T>(sum);
  write_row(call.dridge, row_offset(call.dridge, at), 1, &total);
}

// dq, dx and the ridge's gradient of the lanes, and their rows for pass B. A bad row is NaN here and 0, but marked,
// there.
template <class T>
void write_rows(const Panel<T>& panel, const GradientLanes<T>& lanes, const core::BackwardCall& call,
                const PackedHead<T>& head, const PackedQueries<T>& queries, double* ridge_rows) {
  const core::Problem& p = call.problem;
  constexpr T nan = std::numeric_limits<T>::quiet_NaN();
  const T scale = static_cast<T>(p.scale);
  T row[kMaxChannels];
  const auto put = [&](const PackedRows<T>& to, int64_t r, const T* array, int64_t lane, int64_t channels, T factor) {
    for (int64_t c = 0; c < channels; ++c) row[c] = factor * array[c * kPanel<T> + lane];
    to.put(r, channels, row);
  };
  for (int64_t l = 0; l < panel.rows; ++l) {
    const int64_t r = panel.first_row + l;
    const RowPlace at = row_place(p, head, r);
    const bool bad = panel.bad[l], used = !bad && panel.omega[l] > 0;
    const PowerOfTwo<T> undo = lanes.undo(l);
    if (call.dq) {
      for (int64_t c = 0; c < p.dim; ++c) {
        const int64_t e = c * kPanel<T> + l;
        row[c] = bad ? nan : undo(scale * panel.image[e] + panel.solution[e]);
      }
      write_row(call.dq, row_offset(call.dq, at), p.dim, row);
    }
    if (call.dx) {
      for (int64_t c = 0; c < p.dim; ++c) row[c] = bad ? nan : undo(panel.rhs[c * kPanel<T> + l]);
      write_row(call.dx, row_offset(call.dx, at), p.dim, row);
    }
    if (call.dridge) write_ridge_gradient(panel, lanes, call, at, l, ridge_rows);
    // Pass B sums natural rows of q with the scale, transposed rows are logits; y is subtracted there.
    put({queries.q.natural, nullptr}, r, panel.q, l, p.dim, used ? static_cast<T>(0.69314718055994530942) : T{0});
    put({nullptr, queries.q.transposed}, r, panel.q, l, p.dim, used ? T{1} : T{0});
    put(queries.x, r, panel.x, l, p.dim, used ? T{1} : T{0});
    put({queries.y.natural, nullptr}, r, panel.solution, l, p.dim, used ? T{-1} : T{0});
    put({nullptr, queries.y.transposed}, r, panel.solution, l, p.dim, used ? T{1} : T{0});
    // transposed rows of the gradient meet the values, natural ones are summed up to dv.
    put({nullptr, queries.grad.transposed}, r, panel.value, l, p.value_dim, used ? T{1} : T{0});
    const PowerOfTwo<T> of_values(lanes.value_exponent);
    for (int64_t c = 0; c < p.value_dim; ++c) row[c] = used ? of_values(panel.value[c * kPanel<T> + l]) : T{0};
    PackedRows<T>{queries.grad.natural, nullptr}.put(r, p.value_dim, row);
    queries.max[r] = panel.max[l];
    queries.inverse_omega[r] = used ? 1 / panel.omega[l] : T{0};
    const auto put_centre = [&](const CentreRows<T>& to, const LaneCentres<T>& from) {
      to.native[r] = used ? from.native[l] : T{0};
      to.precise[r] = used ? from.precise[l] : T{0};
      to.wide[r] = used && from.precise[l] != 0 ? from.wide[l] : 0.0;
    };
    put_centre(queries.tau, lanes.tau);
    put_centre(queries.centre_x, lanes.x);
    put_centre(queries.centre_y, lanes.y);
    queries.shift_x[r] = used ? lanes.sum_x[l] : T{0};
    queries.shift_b[r] = used ? lanes.sum_b[l] : T{0};
    queries.c[r] = used ? lanes.c[l] : T{0};
    queries.exponent[r] = used ? lanes.exponent[l] : kNoExponent;
    queries.bad[r] = bad;
    if (bad) queries.bad_count->fetch_add(1, std::memory_order_relaxed);
  }
}

// Rows whose gradients are not to be trusted say so: where rounding the saved x moves (k - mean).x by as much as
// matters (a tiny ridge makes x long), and where dq is not finite.
template <class T>
void report_rows(Panel<T>& panel, const core::Problem& p) {
  HWY_ALIGN T squares[kPanel<T>], nothing[kPanel<T>];
  lane_dots(panel.x, panel.x, p.dim, squares);
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    auto sum = hn::Zero(Tag<T>());  // of differences that are 0 or, where something is not finite, NaN
    for (int64_t e = at; e < p.dim * kPanel<T>; e += kPanel<T>) {
      const auto value = hn::Add(load(panel.image + e), load(panel.solution + e));
      sum = hn::Add(sum, hn::Sub(value, value));
    }
    store(sum, nothing + at);
  }
  for (int64_t l = 0; l < panel.rows; ++l) {
    if (panel.bad[l] || panel.empty(l)) continue;
    const double moved = std::sqrt(static_cast<double>(squares[l]) * static_cast<double>(panel.variance[l]) *
                                   static_cast<double>(p.dim)) *
                         static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
    if ((!p.given_x() && moved > 0.1) || nothing[l] != 0) panel.status[l] = LLA_ROW_BREAKDOWN;
  }
}

template <class T>
void backward_rows(const core::BackwardCall& call, const PackedHead<T>& head, const PackedQueries<T>& queries,
                   int64_t first_row, int64_t rows, WorkerMemory<T>& memory, double* ridge_rows) {
  const core::Problem& p = call.problem;
  PanelBlock<T> block(p, head, memory);
  GradientLanes<T> lanes[kMaxPanels];
  const T log2_scale = static_cast<T>(p.scale * 1.4426950408889634074);
  for (int64_t r = first_row; r < first_row + rows; r += kPanel<T>) {
    Panel<T>& panel = block.panels[block.count];
    static_cast<PanelMemory<T>&>(panel) = memory.panels[block.count];
    set_rows(panel, p, head.sequence, r, std::min(kPanel<T>, first_row + rows - r));
    mark_bad_keys(panel, head);
    read_lanes(panel, p, head, call.q, p.dim, huge_bits<T>(), panel.q);
    for (int64_t e = 0; e < p.dim * kPanel<T>; ++e) panel.q[e] *= log2_scale;
    find_offsets(panel, head, p.dim);
    read_lanes(panel, p, head, call.grad_o, p.value_dim, infinity_bits<T>(), panel.value);
    read_saved(panel, p, head, static_cast<const T*>(call.saved));
    if (!p.given_x()) read_ridge(panel, p, head, call.ridge);
    scale_gradient(p, head, panel, lanes[block.count]);
    lanes[block.count].tau.set_by_size(panel.value, panel.mean_v, p.value_dim, lanes[block.count].unit);
    panel.tau = &lanes[block.count].tau;
    ++block.count;
  }
  find_t(block, lanes);
  if (!p.given_x()) solve(block);
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    GradientLanes<T>& g = lanes[i];
    g.x.set_by_size(panel.x, panel.mean_k, p.dim);
    if (p.given_x()) {
      clear(panel.solution, p.dim);
      lane_dots(panel.x, panel.rhs, p.dim, g.c);
    } else {
      HWY_ALIGN T ridge_share[kPanel<T>];
      lane_dots(panel.x, panel.residual, p.dim, g.c);
      for (int64_t e = 0; e < p.dim * kPanel<T>; ++e) panel.direction[e] = panel.ridge[e] * panel.solution[e];
      lane_dots(panel.x, panel.direction, p.dim, ridge_share);
      for (int64_t l = 0; l < kPanel<T>; ++l) {
        g.c[l] = std::isfinite(g.c[l]) ? g.c[l] + ridge_share[l] : T{0};  // an estimate; anything finite will do
      }
    }
    g.y.set_by_size(panel.solution, panel.mean_k, p.dim, g.unit);
  }
  find_dq(block, lanes);
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    for (int64_t l = 0; l < panel.rows; ++l) {
      if (!(panel.omega[l] > 0)) panel.mark_bad(l);
    }
    report_rows(panel, p);
    write_rows(panel, lanes[i], call, head, queries, ridge_rows);
    write_info(panel, p, head, call.info);
  }
  add_work(block.work);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
