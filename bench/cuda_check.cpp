#include "bench/cuda_check.hpp"

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>

#include "reference/reference.hpp"

namespace lla::bench {
namespace {

constexpr int64_t kCheckedLength = 2048;
constexpr int64_t kCheckedBackwardLength = 1024;
constexpr int64_t kSampledRows = 8;

// Relative rms rounding of an output type.
double output_rounding(DType dtype) { return dtype == DType::bf16 ? 1.2e-3 : dtype == DType::f16 ? 1.5e-4 : 0; }

struct Place {
  int64_t batch, head, position;
};
Place sampled(const CudaCase& c, int64_t n) {
  const int64_t head = n * (c.batch * c.heads) / kSampledRows;
  return {head / c.heads, head % c.heads, (2 * n + 1) * c.length / (2 * kSampledRows)};
}

// Rows [begin, end) of a head.
std::vector<double> rows_of(const CudaCase& c, const std::vector<double>& t, const Place& at, int64_t begin,
                            int64_t end) {
  std::vector<double> out;
  for (int64_t i = begin; i < end; ++i) {
    const auto from = t.begin() + ((at.batch * c.length + i) * c.heads + at.head) * c.dim;
    out.insert(out.end(), from, from + c.dim);
  }
  return out;
}

Outputs run(const CudaCase& c, const CudaInputs& inputs, DType out) {
  CudaCall call(c, inputs, out);
  call.poison_outputs();
  call.forward();
  if (c.what != What::backward) return {{"o", call.o()}};
  call.backward();
  return {{"dq", call.dq()}, {"dk", call.dk()}, {"dv", call.dv()}, {c.given_x ? "dx" : "dridge", call.dridge_or_dx()}};
}

}  // namespace

double accuracy_gate(const CudaCase& c) {
  // A looser tolerance may err more, a tighter one is not held to more than the rounding of 16-bit operands allows.
  const double looser = std::max(1.0, c.tolerance / 1e-3);
  if (c.what != What::backward) return looser * (c.given_x || c.ridge >= 0.1 ? 2e-3 : 4e-3);
  if (c.given_x) return 6e-3;
  const bool tight = c.tolerance <= 1e-4;
  return looser * (c.ridge >= 1     ? (tight ? 2e-3 : 6e-3)
                   : c.ridge >= 0.1 ? (tight ? 5e-3 : 2e-2)
                   : tight          ? 2e-2
                                    : 1.2e-1);
}

double row_gate(const CudaCase& c) {
  CudaCase forward = c;
  forward.what = What::forward;
  return 10 * accuracy_gate(forward) + output_rounding(c.dtype);
}

bool same_problem(const CudaCase& a, const CudaCase& b) {
  return same_inputs(a, b) && a.ridge == b.ridge && a.causal == b.causal && a.given_x == b.given_x;
}

CudaCase one_head(const CudaCase& c) {
  CudaCase head = c;
  head.batch = head.heads = 1;
  head.length = std::min(c.length, c.what == What::backward ? kCheckedBackwardLength : kCheckedLength);
  return head;
}

Outputs exact_head(const CudaCase& head, const CudaInputs& inputs) {
  CudaCase exact = head;
  exact.dtype = DType::f64;
  exact.implementation = "cuda-portable";
  exact.solver = Solver::direct;
  exact.weights = Weights::automatic;
  return run(exact, inputs, DType::f64);
}

Outputs computed_head(const CudaCase& head, const CudaInputs& inputs) {
  return run(head, inputs, head.dtype == DType::f64 ? DType::f64 : DType::f32);
}

std::vector<std::vector<double>> exact_rows(const CudaCase& c, const CudaInputs& inputs) {
  std::vector<std::future<std::vector<double>>> solving;
  for (int64_t n = 0; n < kSampledRows; ++n) {
    solving.push_back(std::async(std::launch::async, [&c, &inputs, n] {
      const Place at = sampled(c, n);
      const int64_t i = at.position, keys = c.causal ? i + 1 : c.length;
      reference::Head one;
      one.length_q = 1;
      one.length_k = keys;
      one.dim = one.value_dim = c.dim;
      one.q = rows_of(c, inputs.q, at, i, i + 1);
      one.k = rows_of(c, inputs.k, at, 0, keys);
      one.v = rows_of(c, inputs.v, at, 0, keys);
      if (c.given_x) {
        one.x = rows_of(c, inputs.x, at, i, i + 1);
      } else {
        const double ridge = inputs.ridge[static_cast<size_t>((at.batch * c.length + i) * c.heads + at.head)];
        one.ridge.assign(static_cast<size_t>(c.dim), static_cast<double>(static_cast<float>(ridge)));
      }
      one.scale = 1 / std::sqrt(static_cast<double>(c.dim));
      return reference::forward(one, {}).o;
    }));
  }
  std::vector<std::vector<double>> rows;
  for (auto& row : solving) rows.push_back(row.get());
  return rows;
}

std::vector<std::vector<double>> sampled_rows(const CudaCase& c, const std::vector<double>& o) {
  std::vector<std::vector<double>> rows;
  for (int64_t n = 0; n < kSampledRows; ++n) {
    const Place at = sampled(c, n);
    rows.push_back(rows_of(c, o, at, at.position, at.position + 1));
  }
  return rows;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

}  // namespace lla::bench
