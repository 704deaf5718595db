// Solves A solution = rhs for a block of panels: conjugate gradients, the direct solver, or one after the other.
#if defined(LLA_CPU_SOLVE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_SOLVE_INL_HPP
#undef LLA_CPU_SOLVE_INL_HPP
#else
#define LLA_CPU_SOLVE_INL_HPP
#endif

#include "cpu/cg-inl.hpp"
#include "cpu/cost.hpp"
#include "cpu/direct-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// A ridge so small that a solution, or its square, leaves the range of the type: such a row goes without one and says
// so.
template <class T>
void drop_overflowing(const core::Problem& p, Panel<T>& panel) {
  const T limit = std::sqrt(std::numeric_limits<T>::max()) / 1024;
  for (int64_t l = 0; l < panel.rows; ++l) {
    bool fits = true;
    for (int64_t c = 0; c < p.dim; ++c) fits &= std::abs(panel.solution[c * kPanel<T> + l]) < limit;
    if (fits || panel.bad[l]) continue;
    panel.status[l] = LLA_ROW_BREAKDOWN;
    panel.low_lanes[l] = false;
    for (int64_t at = l; at < p.dim * kPanel<T>; at += kPanel<T>) {
      panel.solution[at] = panel.low[at] = 0;
      panel.residual[at] = panel.preconditioner[at] > 0 ? panel.rhs[at] : T{0};
    }
  }
}

// Multiplies lane by lane by powers of two. What squares a right-hand side then meets numbers around 1 only.
template <class T>
void scale_lanes(const core::Problem& p, T* array, const int32_t* exponent, int32_t sign) {
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (exponent[l] == kNoExponent) continue;
    const PowerOfTwo<T> scale(sign * exponent[l]);
    for (int64_t e = l; e < p.dim * kPanel<T>; e += kPanel<T>) array[e] = scale(array[e]);
  }
}

// On return panel.solution holds the result, and status, iterations and relative_residual say how each lane ended.
// panel.residual holds what is left of the right-hand side: 0 where a row was solved directly.
template <class T>
void solve(PanelBlock<T>& block) {
  const core::Problem& p = block.problem;
  constexpr bool kDouble = sizeof(T) == 8;
  for (int i = 0; i < block.count; ++i) {
    Panel<T>& panel = block.panels[i];
    for (int64_t l = 0; l < kPanel<T>; ++l) panel.rhs_exponent[l] = largest_exponent(panel.rhs + l, p.dim, kPanel<T>);
    scale_lanes(p, panel.rhs, panel.rhs_exponent, -1);
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      panel.row_unit_squares[l] =
          panel.rhs_exponent[l] == kNoExponent ? 1.0 : std::ldexp(1.0, -2 * panel.rhs_exponent[l]);
    }
    start_cg(block, panel, block.cg[i]);
  }
  if (p.solver != Solver::direct) {
    const bool automatic = p.solver == Solver::automatic;
    bool running[kMaxPanels];
    int limit[kMaxPanels];
    for (int i = 0; i < block.count; ++i) {
      const int64_t keys = block.panels[i].end - block.panels[i].begin;
      running[i] = !automatic || !direct_first(p.dim, keys, p.tolerance, kDouble);
      limit[i] =
          automatic ? std::min(p.max_iterations, direct_cost_in_iterations(p.dim, keys, kDouble)) : p.max_iterations;
    }
    run_cg(block, running, limit, automatic);
  }
  for (int i = 0; i < block.count; ++i) {
    if (p.solver != Solver::cg) solve_directly(block, block.panels[i], block.cg[i]);
    drop_overflowing(p, block.panels[i]);
    for (T* array : {block.panels[i].rhs, block.panels[i].solution, block.panels[i].residual}) {
      scale_lanes(p, array, block.panels[i].rhs_exponent, 1);
    }
    if (block.panels[i].low_part()) scale_lanes(p, block.panels[i].low, block.panels[i].rhs_exponent, 1);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
