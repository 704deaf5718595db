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

// On return panel.solution holds the result, and status, iterations and relative_residual say how each lane ended.
// panel.residual holds what is left of the right-hand side: 0 where a row was solved directly.
template <class T>
void solve(Block<T>& block) {
  const core::Problem& p = block.problem;
  constexpr bool kDouble = sizeof(T) == 8;
  for (int i = 0; i < block.count; ++i) start_cg(block, block.panels[i], block.cg[i]);
  if (p.solver != Solver::direct) {
    const bool automatic = p.solver == Solver::automatic;
    bool running[kMaxPanels];
    int limit[kMaxPanels];
    for (int i = 0; i < block.count; ++i) {
      const int64_t keys = block.panels[i].end - block.panels[i].begin;
      running[i] = !automatic || !direct_first(p.dim, keys, p.tolerance, kDouble);
      limit[i] = automatic ? std::min(p.max_iterations, direct_cost_in_iterations(p.dim, keys, kDouble)) : p.max_iterations;
    }
    run_cg(block, running, limit, automatic);
  }
  if (p.solver == Solver::cg) return;
  for (int i = 0; i < block.count; ++i) solve_directly(block, block.panels[i], block.cg[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
