// Conjugate gradients on A u = (1/omega) (W (uK - centre)) K + ridge u, a panel of rows at a time, every lane its own
// iteration.
//
// Preconditioned by the diagonal ridge + (variance of the keys): without effect where a row's ridge is one number, a
// help where it differs by channel, and it makes an infinite ridge (preconditioner 0) drop out of every vector by
// itself.
#if defined(LLA_CPU_CG_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_CG_INL_HPP
#undef LLA_CPU_CG_INL_HPP
#else
#define LLA_CPU_CG_INL_HPP
#endif

#include "cpu/cost.hpp"
#include "cpu/panel-inl.hpp"
#include "cpu/stop-inl.hpp"
#include "cpu/work.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// How far a lane's solve has come.
enum Lane : int {
  kDone = 0,
  kRunning = 1,
  kUnfinished = 2,  // to be solved directly, where that is allowed
  kDoubtful = 3     // stopped, but to be checked
};

template <class T>
struct CgLanes {
  HWY_ALIGN T active[kPanel<T>];  // 1 while the lane iterates, else 0
  HWY_ALIGN T rz[kPanel<T>], rr[kPanel<T>], rr_start[kPanel<T>];
  HWY_ALIGN T dmd[kPanel<T>];        // direction . direction / preconditioner
  HWY_ALIGN T curvature[kPanel<T>];  // largest direction . image / dmd seen
  HWY_ALIGN T smallest_ridge[kPanel<T>];
  HWY_ALIGN T limit[kPanel<T>];       // square of the residual to stop at, known better as the solution is
  HWY_ALIGN T key_length[kPanel<T>];  // root of the mean |k|^2
  HWY_ALIGN T query_squares[kPanel<T>];
  HWY_ALIGN T rr_checked[kPanel<T>];  // of the last check that missed, 0 before the first
  double noise[kPanel<T>];            // how far a stopped lane's b - A x may be from what it reports
  Lane lane[kPanel<T>];
  HWY_ALIGN T precise[kPanel<T>];  // 1 where products with the direction are taken in double, else 0
  bool checking;                   // this pass forms b - A x of the doubtful lanes
};

// A block of rows that share their walks over the keys.
template <class T>
struct PanelBlock {
  const core::Problem& problem;
  const core::StopRule stop;
  const PackedHead<T>& head;
  WorkerMemory<T>& memory;
  int count = 0;  // panels
  Panel<T> panels[kMaxPanels];
  CgLanes<T> cg[kMaxPanels];
  Work work;

  PanelBlock(const core::Problem& p, const PackedHead<T>& h, WorkerMemory<T>& m)
      : problem(p), stop(core::stop_rule(p)), head(h), memory(m) {}

  int64_t first_tile() const {
    int64_t first = panels[0].begin;
    for (int i = 1; i < count; ++i) first = std::min(first, panels[i].begin);
    return first / kTile;
  }
  int64_t last_tile() const {
    int64_t last = 0;
    for (int i = 0; i < count; ++i) last = std::max(last, panels[i].end);
    return (last + kTile - 1) / kTile;
  }
  void count_products(const Panel<T>& panel, int64_t channels) {
    work.product_flops += 2 * panel.pairs * static_cast<uint64_t>(channels);
  }
};

// visit(panel index, lo, hi) for each tile of keys and each panel that is running and sees some of them.
template <class T, class Visit>
HWY_INLINE void walk(PanelBlock<T>& block, const bool* running, const Visit& visit) {
  const int64_t last = block.last_tile();
  for (int64_t tile = block.first_tile(); tile < last; ++tile) {
    for (int i = 0; i < block.count; ++i) {
      const int64_t lo = block.panels[i].lo(tile), hi = block.panels[i].hi(tile);
      if ((!running || running[i]) && lo < hi) visit(i, lo, hi);
    }
  }
}

// u[j] = w[j] (k_j . vector - centre) for the keys [lo, hi); panel.row_sum += its sums. With kSquares panel.spread +=
// the sums of w[j] (k_j . vector - centre)^2.
template <bool kSquares = false, class T>
HWY_INLINE void centred_tile(Panel<T>& panel, const T* keys_transposed, int64_t dim, int64_t lo, int64_t hi,
                             const T* vector, const T* weights, T* scratch, T* u) {
  auto sum0 = hn::Zero(Tag<T>()), sum1 = sum0, squares0 = sum0, squares1 = sum0;
  const auto epilogue = [&](int64_t j, Vec<T> e0, Vec<T> e1) HWY_ATTR {
    const int64_t at = j * kPanel<T>;
    const auto u0 = hn::Mul(load(weights + at), e0);
    const auto u1 = hn::Mul(load(weights + at + kLanes<T>), e1);
    sum0 = hn::Add(sum0, u0);
    sum1 = hn::Add(sum1, u1);
    if (kSquares) {
      squares0 = hn::MulAdd(u0, e0, squares0);
      squares1 = hn::MulAdd(u1, e1, squares1);
    }
    store(u0, u + at);
    store(u1, u + at + kLanes<T>);
  };
  centred_product(keys_transposed, dim, lo, hi, vector, panel.centre, scratch, epilogue);
  store(hn::Add(load(panel.row_sum), sum0), panel.row_sum);
  store(hn::Add(load(panel.row_sum + kLanes<T>), sum1), panel.row_sum + kLanes<T>);
  if (kSquares) {
    store(hn::Add(load(panel.spread), squares0), panel.spread);
    store(hn::Add(load(panel.spread + kLanes<T>), squares1), panel.spread + kLanes<T>);
  }
}

// image = A direction, for the running panels, but for the ridge's part.
template <class T>
void apply_covariance(PanelBlock<T>& block, const bool* running) {
  const int64_t dim = block.problem.dim;
  for (int i = 0; i < block.count; ++i) {
    if (!running[i]) continue;
    Panel<T>& panel = block.panels[i];
    panel.centre.set_precise(panel.direction, panel.mean_k, dim, block.cg[i].precise);
    clear(panel.image, dim);
    std::fill_n(panel.row_sum, kPanel<T>, T{0});
    block.count_products(panel, (panel.weights ? 2 : 3) * dim);
  }
  walk(block, running, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    Panel<T>& panel = block.panels[i];
    const PackedRows<T>& k = block.head.k;
    const T* weights = weights_tile(panel, k.transposed, dim, lo, hi, block.memory.tiles[1]);
    T* const u = block.memory.tiles[0];
    centred_tile(panel, k.transposed, dim, lo, hi, panel.direction, weights, block.memory.tiles[3], u);
    natural_product(k.natural + lo * dim, dim, dim, u, hi - lo, panel.image);
  });
  for (int i = 0; i < block.count; ++i) {
    if (running[i]) centre_and_divide<false>(block.panels[i], block.panels[i].image, block.panels[i].mean_k, dim);
  }
}

// solution = 0, direction = preconditioned right-hand side. Lanes with nothing to solve are done.
// An infinite ridge becomes 0 with a preconditioner of 0, which keeps that channel of every vector at 0.
template <class T>
void start_cg(PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s) {
  const int64_t dim = block.problem.dim;
  const auto zero = hn::Zero(Tag<T>()), one = splat(T{1}), infinity = splat(std::numeric_limits<T>::infinity());
  const auto normal = splat(std::numeric_limits<T>::min());  // the reciprocal of less may be infinite, and times 0 NaN
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    const auto variance = load(panel.variance + at);
    auto smallest = infinity, rz = zero, rr = zero, mean_squares = zero;
    for (int64_t e = at; e < dim * kPanel<T>; e += kPanel<T>) {
      const auto ridge = load(panel.ridge + e);
      const auto infinite = hn::Eq(ridge, infinity);
      const auto scale = hn::Add(ridge, variance);
      const auto inverse =
          hn::IfThenZeroElse(infinite, hn::Div(one, hn::IfThenElse(hn::Gt(scale, zero), hn::Max(scale, normal), one)));
      const auto r = hn::IfThenZeroElse(infinite, load(panel.rhs + e));
      const auto z = hn::Mul(inverse, r);
      const auto mean = load(panel.mean_k + e);
      smallest = hn::Min(smallest, ridge);
      rz = hn::MulAdd(r, z, rz);
      rr = hn::MulAdd(r, r, rr);
      mean_squares = hn::MulAdd(mean, mean, mean_squares);
      store(hn::IfThenZeroElse(infinite, ridge), panel.ridge + e);
      store(inverse, panel.preconditioner + e);
      store(r, panel.residual + e);
      store(z, panel.direction + e);
      store(zero, panel.solution + e);
    }
    store(smallest, s.smallest_ridge + at);
    store(rz, s.rz + at);
    store(rz, s.dmd + at);
    store(rr, s.rr + at);
    store(rr, s.rr_start + at);
    store(mean_squares, s.curvature + at);
  }
  s.checking = false;
  lane_dots(panel.q, panel.q, dim, s.query_squares);
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    s.precise[l] = precise_iterations(s.curvature[l], panel.variance[l], dim, block.problem.tolerance) ? T{1} : T{0};
    s.key_length[l] = std::sqrt(panel.variance[l] * static_cast<T>(dim) + s.curvature[l]);
    s.limit[l] =
        static_cast<T>(block.stop.start(static_cast<double>(s.rr_start[l]), panel.lane_end[l] - panel.lane_begin[l]));
    s.rr_checked[l] = 0;
    s.noise[l] = 0;
    // Rounding of the mean key alone gives u . A u up to (eps |u| |mean|)^2: less than that is no curvature.
    const T scale = s.smallest_ridge[l] + panel.variance[l];
    s.curvature[l] =
        scale > 0 && std::isfinite(scale) ? std::numeric_limits<T>::epsilon() * s.curvature[l] / scale : T{0};
    s.lane[l] = l < panel.rows && !panel.bad[l] && s.rr_start[l] > 0 ? kRunning : kDone;
    s.active[l] = s.lane[l] == kRunning ? T{1} : T{0};
  }
}

// Running lanes whose residual has reached their limit stop, if it is still their limit for the solution they have now.
template <class T>
void stop_lanes(const PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s) {
  const SolutionSizes<T> sizes(panel, block.problem.dim);
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (s.lane[l] != kRunning || s.rr[l] > s.limit[l]) continue;
    const T limit = std::sqrt(stop_limit(block.stop, sizes, panel, s.rr_start[l], s.smallest_ridge[l], l));
    const double steepest =
        static_cast<double>(s.curvature[l]) * static_cast<double>(s.smallest_ridge[l] + panel.variance[l]);
    const Noise<T> noise(sizes, l, std::sqrt(static_cast<double>(s.rr_start[l])), static_cast<double>(s.key_length[l]),
                         steepest, std::sqrt(static_cast<double>(s.query_squares[l])));
    const bool doubtful = s.precise[l] != 0 || s.rr_checked[l] > 0 || 2 * noise.drift > static_cast<double>(limit);
    s.noise[l] = noise.rounding + (doubtful ? 0.0 : noise.drift);
    if (s.noise[l] > most_noise<T>(block.stop.residual) * std::sqrt(static_cast<double>(s.rr_start[l]))) {
      panel.status[l] = LLA_ROW_BREAKDOWN;
      s.lane[l] = kUnfinished;
      continue;
    }
    // What it will report, noise included, is to be within the limit, unless the arithmetic cannot give that.
    const T within = limit - static_cast<T>(s.noise[l]);
    s.limit[l] = 2 * within > limit ? within * within : limit * limit;
    if (s.rr[l] <= s.limit[l]) s.lane[l] = doubtful ? kDoubtful : kDone;
  }
}

// Before a pass that forms b - A x of the doubtful lanes: they stand in for the direction.
template <class T>
void start_check(const PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s) {
  s.checking = true;
  HWY_ALIGN T wanted[kPanel<T>];
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    wanted[l] = s.lane[l] == kDoubtful ? T{1} : T{0};
    s.precise[l] = sizeof(T) == 4 ? wanted[l] : T{0};
  }
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    const auto factor = load(wanted + at);
    for (int64_t e = at; e < block.problem.dim * kPanel<T>; e += kPanel<T>) {
      store(hn::Mul(factor, load(panel.solution + e)), panel.direction + e);
    }
  }
}

// After that pass, image = covariance * solution: lanes that hold are done, the others start again from what is left,
// as long as a start leaves less than half of what the last one did. Returns whether any lane goes on.
template <class T>
bool finish_check(const PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s, int limit) {
  s.checking = false;
  bool any = false;
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (s.lane[l] != kDoubtful) continue;
    double rr = 0, rz = 0;
    for (int64_t e = l; e < block.problem.dim * kPanel<T>; e += kPanel<T>) {
      const T inverse = panel.preconditioner[e];
      const T r = inverse > 0 ? (panel.rhs[e] - panel.ridge[e] * panel.solution[e]) - panel.image[e] : T{0};
      panel.residual[e] = r;
      panel.direction[e] = inverse * r;
      rr += static_cast<double>(r) * static_cast<double>(r);
      rz += static_cast<double>(r) * static_cast<double>(inverse * r);
    }
    s.rr[l] = static_cast<T>(rr);
    s.rz[l] = s.dmd[l] = static_cast<T>(rz);
    if (s.rr[l] <= std::max(s.limit[l], static_cast<T>(s.noise[l] * s.noise[l]))) {
      s.lane[l] = kDone;
    } else if (!std::isfinite(s.rr[l]) || (s.rr_checked[l] > 0 && 4 * s.rr[l] > s.rr_checked[l])) {
      panel.status[l] = LLA_ROW_BREAKDOWN;  // rounding is all that is left
      s.lane[l] = kUnfinished;
    } else if (panel.iterations[l] >= limit) {
      panel.status[l] = LLA_ROW_MAX_ITERATIONS;
      s.lane[l] = kUnfinished;
    } else {
      s.lane[l] = kRunning;
      s.rr_checked[l] = s.rr[l];
    }
    s.active[l] = s.lane[l] == kRunning ? T{1} : T{0};
    any |= s.lane[l] == kRunning;
  }
  return any;
}

// One iteration's vector work, with image = covariance * direction given. Returns whether any lane goes on.
template <class T>
bool step_cg(PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s, int limit) {
  constexpr T kVanishing = 8 * std::numeric_limits<T>::epsilon();
  const int64_t end = block.problem.dim * kPanel<T>;
  HWY_ALIGN T rr_new[kPanel<T>], usable[kPanel<T>], momentum_of[kPanel<T>];
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    const auto zero = hn::Zero(Tag<T>());
    auto dad = zero;
    for (int64_t e = at; e < end; e += kPanel<T>) {
      const auto direction = load(panel.direction + e);
      // Where the preconditioner is 0 the channel is left out; there direction is 0, so only the image has to be
      // cleared.
      const auto image = hn::IfThenZeroElse(hn::Eq(load(panel.preconditioner + e), zero),
                                            hn::MulAdd(load(panel.ridge + e), direction, load(panel.image + e)));
      store(image, panel.image + e);
      dad = hn::MulAdd(direction, image, dad);
    }
    const auto active = hn::Gt(load(s.active + at), zero);
    const auto dmd = load(s.dmd + at), rz = load(s.rz + at);
    const auto largest = load(s.curvature + at);
    const auto ok = hn::And(active, hn::Gt(dad, hn::Mul(splat(kVanishing), hn::Mul(dmd, largest))));
    store(hn::IfThenElse(ok, hn::Max(largest, hn::Div(dad, dmd)), largest), s.curvature + at);
    const auto stride = hn::IfThenElseZero(ok, hn::Div(rz, dad));
    auto rz_new = zero, rr = zero;
    for (int64_t e = at; e < end; e += kPanel<T>) {
      const auto r = hn::NegMulAdd(stride, load(panel.image + e), load(panel.residual + e));
      store(r, panel.residual + e);
      rz_new = hn::MulAdd(r, hn::Mul(r, load(panel.preconditioner + e)), rz_new);
      rr = hn::MulAdd(r, r, rr);
    }
    // A residual that is no longer finite: the step is not taken.
    const auto good = hn::And(ok, hn::Lt(rr, splat(std::numeric_limits<T>::max())));
    const auto step = hn::IfThenElseZero(good, stride);
    const auto momentum = hn::IfThenElseZero(good, hn::Div(rz_new, rz));
    for (int64_t e = at; e < end; e += kPanel<T>) {
      store(hn::MulAdd(step, load(panel.direction + e), load(panel.solution + e)), panel.solution + e);
    }
    store(hn::MulAdd(hn::Mul(momentum, momentum), dmd, rz_new), s.dmd + at);
    store(rz_new, s.rz + at);
    store(rr, rr_new + at);
    store(momentum, momentum_of + at);
    store(hn::IfThenElseZero(good, splat(T{1})), usable + at);
  }
  bool any = false, reached = false;
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (s.lane[l] != kRunning) continue;
    ++panel.iterations[l];
    if (usable[l] == 0) {
      panel.status[l] = LLA_ROW_BREAKDOWN;
      s.lane[l] = kUnfinished;
    } else {
      s.rr[l] = rr_new[l];
      reached |= rr_new[l] <= s.limit[l];
    }
  }
  if (reached) stop_lanes(block, panel, s);
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (s.lane[l] == kRunning && panel.iterations[l] >= limit) {
      panel.status[l] = LLA_ROW_MAX_ITERATIONS;
      s.lane[l] = kUnfinished;
    }
    s.active[l] = s.lane[l] == kRunning ? T{1} : T{0};
    any |= s.lane[l] == kRunning;
  }
  if (!any) return false;
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    const auto active = hn::Gt(load(s.active + at), hn::Zero(Tag<T>()));
    const auto momentum = load(momentum_of + at);
    for (int64_t e = at; e < end; e += kPanel<T>) {
      const auto z = hn::Mul(load(panel.residual + e), load(panel.preconditioner + e));
      store(hn::IfThenElseZero(active, hn::MulAdd(momentum, load(panel.direction + e), z)), panel.direction + e);
    }
  }
  return true;
}

// Under auto: lanes that conjugate gradients should not be trusted with, known once the first curvature is.
template <class T>
bool hand_over_ill_conditioned(PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s) {
  bool any = false;
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (s.lane[l] == kDone && panel.iterations[l] == 0) continue;  // had nothing to solve
    const T curvature = s.curvature[l] * (s.smallest_ridge[l] + panel.variance[l]);
    const T effective_keys = panel.omega[l] * panel.omega[l] / panel.omega_squares[l];
    if (too_ill_conditioned(s.smallest_ridge[l], curvature, effective_keys, block.problem.dim)) s.lane[l] = kUnfinished;
    s.active[l] = s.lane[l] == kRunning ? T{1} : T{0};
    any |= s.lane[l] == kRunning;
  }
  return any;
}

// What a panel's lanes report once none goes on.
template <class T>
void finish_cg(Panel<T>& panel, CgLanes<T>& s) {
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (!(s.rr_start[l] > 0)) {
      panel.relative_residual[l] = 0;
      continue;
    }
    const double residual = std::sqrt(static_cast<double>(s.rr[l])) + s.noise[l];
    panel.relative_residual[l] = static_cast<T>(residual / std::sqrt(static_cast<double>(s.rr_start[l])));
  }
}

// Iterates the running panels until their lanes have met the tolerance, broken down or reached the panel's limit.
template <class T>
void run_cg(PanelBlock<T>& block, bool* running, const int* limit, bool automatic) {
  const auto has = [](const CgLanes<T>& s, Lane kind) {
    return std::find(s.lane, s.lane + kPanel<T>, kind) != s.lane + kPanel<T>;
  };
  bool any = false;
  for (int i = 0; i < block.count; ++i) {
    if (!running[i]) continue;
    block.work.cg_pairs += block.panels[i].pairs;
    running[i] = has(block.cg[i], kRunning);
    if (!running[i]) finish_cg(block.panels[i], block.cg[i]);
    any |= running[i];
  }
  for (int iteration = 1; any; ++iteration) {
    apply_covariance(block, running);
    any = false;
    for (int i = 0; i < block.count; ++i) {
      if (!running[i]) continue;
      Panel<T>& panel = block.panels[i];
      CgLanes<T>& s = block.cg[i];
      block.work.iteration_pairs += panel.pairs;
      bool go_on = s.checking ? finish_check(block, panel, s, limit[i]) : step_cg(block, panel, s, limit[i]);
      if (automatic && iteration == 1) go_on = hand_over_ill_conditioned(block, panel, s);
      if (!go_on && has(s, kDoubtful)) {
        start_check(block, panel, s);
        go_on = true;
      }
      running[i] = go_on;
      if (!go_on) finish_cg(panel, s);
      any |= go_on;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
