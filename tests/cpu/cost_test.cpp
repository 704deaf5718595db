// The cost model and the plans that follow from it.
#include "cpu/cost.hpp"

#include <gtest/gtest.h>

#include "cpu/plan.hpp"
#include "plan/machine.hpp"

namespace lla::cpu {
namespace {

core::Problem causal(int64_t length, int64_t dim) {
  core::Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = length;
  p.dim = p.value_dim = dim;
  p.mask.right = 0;
  return p;
}

core::Machine machine(int threads) {
  core::Machine m;
  m.threads = threads;
  return m;
}

TEST(Cost, ADirectSolveCostsMoreTheLargerTheHeadAndTheFewerTheKeys) {
  EXPECT_LT(direct_cost_in_iterations(16, 4096, false), direct_cost_in_iterations(64, 4096, false));
  EXPECT_LT(direct_cost_in_iterations(64, 4096, false), direct_cost_in_iterations(128, 4096, false));
  EXPECT_LT(direct_cost_in_iterations(64, 4096, false), direct_cost_in_iterations(64, 16, false));
  EXPECT_LT(direct_cost_in_iterations(64, 4096, true), direct_cost_in_iterations(64, 4096, false));
}

TEST(Cost, SmallHeadsAreSolvedDirectlyLargeOnesAreNot) {
  EXPECT_TRUE(direct_first(8, 4096, 1e-3, false));
  EXPECT_FALSE(direct_first(64, 4096, 1e-3, false));
  EXPECT_FALSE(direct_first(128, 4096, 1e-6, false));
}

TEST(Cost, ATinyRidgeOnFewKeysIsIllConditioned) {
  EXPECT_TRUE(too_ill_conditioned(1e-6f, 1.0f, 20.0f, 64));
  EXPECT_TRUE(too_ill_conditioned(0.0f, 1.0f, 20.0f, 64));
  EXPECT_FALSE(too_ill_conditioned(1e-6f, 1.0f, 1000.0f, 64));
  EXPECT_FALSE(too_ill_conditioned(0.1f, 1.0f, 20.0f, 64));
}

TEST(CpuPlan, LongSequencesStayBelow256MiB) {
  const core::Plan plan = make_plan(causal(65536, 64), machine(2));
  EXPECT_TRUE(plan.cached_weights);
  EXPECT_LT(plan.workspace_bytes, size_t{256} << 20);
}

TEST(CpuPlan, WorkspaceGrowsLinearly) {
  for (const core::Operation operation : {core::Operation::forward, core::Operation::backward}) {
    core::Problem small = causal(8192, 64), large = causal(32768, 64);
    small.operation = large.operation = operation;
    EXPECT_LT(make_plan(large, machine(2)).workspace_bytes, 4.1 * make_plan(small, machine(2)).workspace_bytes);
  }
}

TEST(CpuPlan, CachedWeightsKeepToTheirLimit) {
  core::Problem p = causal(16384, 64);
  p.cached_weights_limit = 8 << 20;
  const core::Plan small = make_plan(p, machine(4));
  p.cached_weights_limit = 1 << 10;
  const core::Plan none = make_plan(p, machine(4));
  EXPECT_FALSE(none.cached_weights);
  EXPECT_LE(small.workspace_bytes, none.workspace_bytes + (8 << 20));
  p.weights = Weights::cached;
  EXPECT_NE(refuse(p, machine(4)).find("cached_weights_limit"), std::string::npos);
}

TEST(CpuPlan, TooManyChannelsAreRefusedWithTheNumber) {
  EXPECT_NE(refuse(causal(16, 257), machine(1)).find("257"), std::string::npos);
  EXPECT_EQ(refuse(causal(16, 256), machine(1)), "");
}

TEST(CpuPlan, AShortCallUsesOneThread) {
  EXPECT_EQ(make_plan(causal(16, 16), machine(8)).workers, 1);
  EXPECT_EQ(make_plan(causal(4096, 64), machine(8)).workers, 8);
}

}  // namespace
}  // namespace lla::cpu
