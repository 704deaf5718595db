// The planner: the list of implementations, who takes what and why not, plans as text, and the plan of an H200 on any
// machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "plan/implementation.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

core::Problem problem(core::Device device, DType dtype = DType::bf16) {
  core::Problem p;
  p.device = device;
  p.dtype = p.out_dtype = dtype;
  p.batch = 2;
  p.seqlen_q = p.seqlen_k = 4096;
  p.total_q = p.total_k = 8192;
  p.heads_q = p.heads_kv = 16;
  p.dim = p.value_dim = 128;
  p.scale = 0.088;
  p.mask.right = 0;
  p.max_iterations = 256;
  return p;
}

std::vector<std::string> names() {
  std::vector<std::string> result;
  for (const core::Implementation* i : core::implementations()) result.emplace_back(i->name);
  return result;
}

TEST(Registry, ListsTheFastestFirstAndTheReferenceLast) {
  const std::vector<std::string> order = {"sm90", "cuda-portable", "cpu", "reference"};
  std::vector<std::string> expected;
  for (const std::string& name : order) {
    const std::vector<std::string> present = names();
    if (std::find(present.begin(), present.end(), name) != present.end()) expected.push_back(name);
  }
  EXPECT_EQ(names(), expected);
  ASSERT_GE(expected.size(), 2u);
  EXPECT_EQ(expected.back(), "reference");
  EXPECT_EQ(expected[expected.size() - 2], "cpu");
}

TEST(Registry, IsReachableThroughTheCInterface) {
  const std::vector<std::string> list = names();
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(lla_implementation_name(static_cast<int32_t>(i)), list[i]);
    EXPECT_STRNE(lla_implementation_description(static_cast<int32_t>(i)), "");
  }
  EXPECT_EQ(lla_implementation_name(static_cast<int32_t>(list.size())), nullptr);
  EXPECT_EQ(lla_implementation_name(-1), nullptr);
  EXPECT_EQ(lla_implementation_description(99), nullptr);
  EXPECT_STRNE(lla_machine_description(), "");
}

TEST(Plan, TheCpuIsPreferredToTheReference) {
  core::Plan plan;
  ASSERT_TRUE(core::make_plan(problem(core::Device::cpu), core::this_cpu(), nullptr, plan));
  EXPECT_STREQ(plan.implementation->name, "cpu");
  ASSERT_TRUE(core::make_plan(problem(core::Device::cpu), core::this_cpu(), "reference", plan));
  EXPECT_STREQ(plan.implementation->name, "reference");
}

TEST(Plan, AnUnknownNameIsAnError) {
  core::Plan plan;
  const Status status = core::make_plan(problem(core::Device::cpu), core::this_cpu(), "abacus", plan);
  EXPECT_EQ(status.code(), LLA_INVALID_ARGUMENT);
  EXPECT_NE(status.message().find("abacus"), std::string::npos);
  EXPECT_NE(status.message().find("reference"), std::string::npos);
}

TEST(Plan, ACudaProblemOnAMachineWithoutIsUnsupportedAndSaysWhy) {
  core::Machine machine;
  machine.cuda.absent_reason = "the driver is on holiday";
  core::Plan plan;
  const Status status = core::make_plan(problem(core::Device::cuda), machine, nullptr, plan);
  EXPECT_EQ(status.code(), LLA_UNSUPPORTED);
  EXPECT_NE(status.message().find("the driver is on holiday"), std::string::npos) << status.message();
  // One reason for all that need the device, and one for every other.
  for (const core::Implementation* i : core::implementations()) {
    if (i->device == core::Device::cuda) continue;
    EXPECT_NE(status.message().find(std::string(i->name) + ": "), std::string::npos) << status.message();
  }
}

TEST(Plan, ExplainHasALinePerImplementation) {
  const std::string text = core::explain(problem(core::Device::cpu), core::this_cpu());
  EXPECT_EQ(static_cast<size_t>(std::count(text.begin(), text.end(), '\n')), names().size());
  EXPECT_NE(text.find("reference: yes\n"), std::string::npos) << text;
  EXPECT_NE(text.find("cpu: yes\n"), std::string::npos) << text;
}

// No GPU needed: a machine is a value, and so is a plan.
TEST(Plan, OfAnH200) {
  const core::Machine machine = core::h200();
  EXPECT_TRUE(machine.cuda.present);
  EXPECT_EQ(machine.cuda.arch, 90);
  const std::vector<std::string> list = names();
  const bool has_cuda = std::any_of(core::implementations().begin(), core::implementations().end(),
                                    [](const auto* i) { return i->device == core::Device::cuda; });
  core::Plan plan;
  const Status status = core::make_plan(problem(core::Device::cuda), machine, nullptr, plan);
  if (!has_cuda) {
    EXPECT_EQ(status.code(), LLA_UNSUPPORTED);
    return;
  }
  ASSERT_TRUE(status) << status.message();
  EXPECT_EQ(plan.implementation->device, core::Device::cuda);
  EXPECT_STREQ(plan.implementation->name, list.front().c_str()) << "the fastest takes the problem it was made for";
  EXPECT_FALSE(plan.text(problem(core::Device::cuda), machine).empty());
}

TEST(Plan, TextNamesTheDecisions) {
  for (const char* name : {"cpu", "reference"}) {
    core::Plan plan;
    ASSERT_TRUE(core::make_plan(problem(core::Device::cpu), core::this_cpu(), name, plan));
    const std::string text = plan.text(problem(core::Device::cpu), core::this_cpu());
    for (const char* word : {name, "workspace: ", "solver: ", "weights: ", "block: ", "workers: "}) {
      EXPECT_NE(text.find(word), std::string::npos) << text;
    }
  }
}

TEST(Plan, TheSolverAskedForIsTheSolverPlanned) {
  for (const char* name : {"cpu", "reference"}) {
    for (const Solver solver : {Solver::cg, Solver::direct}) {
      core::Problem p = problem(core::Device::cpu);
      p.solver = solver;
      core::Plan plan;
      ASSERT_TRUE(core::make_plan(p, core::this_cpu(), name, plan));
      EXPECT_EQ(plan.solver, solver) << name;
    }
  }
}

TEST(Plan, WorkspaceOfTheCpuIsLinearInTheLength) {
  const auto bytes = [](int64_t n, core::Operation operation) {
    core::Problem p = problem(core::Device::cpu, DType::f32);
    p.operation = operation;
    p.batch = 1;
    p.heads_q = p.heads_kv = 1;
    p.dim = p.value_dim = 64;
    p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = n;
    core::Plan plan;
    EXPECT_TRUE(core::make_plan(p, core::this_cpu(), "cpu", plan));
    return static_cast<double>(plan.workspace_bytes);
  };
  for (const core::Operation operation : {core::Operation::forward, core::Operation::backward}) {
    EXPECT_LE(bytes(65536, operation) / bytes(32768, operation), 2.1);
  }
  EXPECT_LE(bytes(65536, core::Operation::forward), 256.0 * (1 << 20));  // one head, D 64
}

TEST(Plan, TextIsCutToTheCapacityAndTerminated) {
  ForwardArgs args;
  float data[64] = {};
  args.q = args.k = args.v = dense(data, DType::f32, {1, 2, 1, 4});
  args.o = dense(data + 32, DType::f32, {1, 2, 1, 4});
  args.ridge = scalar(data);
  char text[4096];
  ASSERT_EQ(lla_forward_plan(&args, text, sizeof(text)), LLA_OK) << lla_last_error();
  const std::string whole = text;
  EXPECT_NE(whole.find("implementation: "), std::string::npos);
  char cut[8];
  std::memset(cut, 'x', sizeof(cut));
  ASSERT_EQ(lla_forward_plan(&args, cut, 5), LLA_OK);
  EXPECT_EQ(std::string(cut), whole.substr(0, 4));
  EXPECT_EQ(cut[5], 'x');
}

TEST(Api, VersionAndNames) {
  EXPECT_EQ(std::string(lla_version()), std::to_string(LLA_VERSION_MAJOR) + "." + std::to_string(LLA_VERSION_MINOR) +
                                            "." + std::to_string(LLA_VERSION_PATCH));
  EXPECT_STREQ(lla_status_name(LLA_OK), "OK");
  EXPECT_STREQ(lla_status_name(LLA_WORKSPACE_TOO_SMALL), "WORKSPACE_TOO_SMALL");
  EXPECT_STREQ(lla_status_name(static_cast<lla_status>(99)), "UNKNOWN");
}

TEST(Api, ThreadsCanBeSetAndRestored) {
  const int32_t before = lla_get_num_threads();
  EXPECT_GE(before, 1);
  EXPECT_EQ(lla_set_num_threads(3), LLA_OK);
  EXPECT_EQ(lla_get_num_threads(), 3);
  EXPECT_EQ(lla_set_num_threads(-1), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(lla_get_num_threads(), 3);
  EXPECT_EQ(lla_set_num_threads(0), LLA_OK);
  EXPECT_EQ(lla_get_num_threads(), before);
}

TEST(Api, TheCppLayerRunsAProblem) {
  std::vector<float> q(2 * 3 * 1 * 4, 0.5f), k(2 * 3 * 1 * 4), v(2 * 3 * 1 * 4), o(2 * 3 * 1 * 4, -7.0f);
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(data::normal(1, 1, i));
    v[i] = static_cast<float>(data::normal(1, 2, i));
  }
  const float ridge = 0.5f;
  ForwardArgs args;
  args.q = dense(q.data(), DType::f32, {2, 3, 1, 4});
  args.k = dense(k.data(), DType::f32, {2, 3, 1, 4});
  args.v = dense(v.data(), DType::f32, {2, 3, 1, 4});
  args.o = dense(o.data(), DType::f32, {2, 3, 1, 4});
  args.ridge = scalar(&ridge);
  Workspace workspace(args);
  const Status status = forward(args);
  ASSERT_TRUE(status) << status.message();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(o[i], v[i]);  // the first row sees one key
  args.k.size[3] = 5;
  const Status failed = forward(args);
  EXPECT_FALSE(failed);
  EXPECT_EQ(failed.code(), LLA_INVALID_ARGUMENT);
  EXPECT_NE(failed.message().find("k: "), std::string::npos);
}

}  // namespace
}  // namespace lla::test
