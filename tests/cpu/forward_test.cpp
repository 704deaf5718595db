// The CPU forward against the reference: every data kind, both solvers and auto.
#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

class CpuForward : public testing::TestWithParam<data::Kind> {};

TEST_P(CpuForward, AgreesWithTheReference) {
  for (const double ridge : {1.0, 0.01}) {
    for (const int64_t dim : {16, 37, 64}) {
      for (const lla_solver solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
        Spec spec = self_attention(reduced() ? 70 : 300, dim);
        spec.options.solver = solver;
        spec.options.tolerance = 1e-6;
        spec.options.max_iterations = 1000;
        const Inputs inputs = make_inputs(spec, GetParam(), ridge, 1);
        const Forward got = run_forward(spec, inputs, "cpu");
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        const Error error = compare(spec, Side::queries, spec.value_dim, got.o, oracle_forward(spec, inputs).o);
        EXPECT_LE(error.norm, ridge == 1.0 ? 2e-5 : 1e-3) << spec.text() << " ridge " << ridge << ": " << error.text();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CpuForward, testing::ValuesIn(data::kinds),
                         [](const auto& info) { return std::string(data::name(info.param)); });

}  // namespace
}  // namespace lla::test
