// Results measured against what can be known of them: the truth, and how far it moves when the inputs move by roundings
// (data::perturb).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "data/degenerate.hpp"
#include "support/floats.hpp"
#include "support/run.hpp"

namespace lla::test {

using Values = std::vector<double>;

inline double norm(const Values& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

inline double distance(const Values& a, const Values& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares);
}

inline Inputs perturbed(Inputs inputs, double by) {
  uint64_t stream = 0;
  for (Values* values : {&inputs.q, &inputs.k, &inputs.v, &inputs.grad_o, &inputs.x}) {
    data::perturb(*values, ++stream, by);
  }
  return inputs;
}

// What a type's arithmetic does to inputs, at least. TF32 keeps eleven significant bits, so that an input moves by up to
// 2^-11 of itself: kForgivenMoves makes that of this.
inline double rounding_of(const Spec& spec) {
  return spec.options.precision == LLA_PRECISION_TF32 ? 0x1p-15 : data::rounding_of(spec.dtype);
}

// The truth, and how far it moves when the inputs move by roundings: where that is as large as the result itself, such
// as gradients through equal values, nobody can compute it, and only its size can be asked for.
struct Truth {
  Forward forward;
  Backward backward;
  Forward moved;
  Backward moved_backward;

  Truth(const Spec& spec, const Inputs& inputs)
      : forward(oracle_forward(spec, inputs)),
        backward(oracle_backward(spec, inputs)),
        moved(oracle_forward(spec, perturbed(inputs, rounding_of(spec)))),
        moved_backward(oracle_backward(spec, perturbed(inputs, rounding_of(spec)))) {}
};

struct Checked {
  const char* name;
  const Values &got, &want, &moved;
  DType dtype;
};

// Every element that fp64 finds finite and the type can hold is finite.
inline void expect_finite(const Checked& c) {
  const double largest = range_of(c.dtype).largest / 2;  // what is nearer may round either way
  size_t lost = 0;
  for (size_t i = 0; i < c.want.size(); ++i) lost += std::abs(c.want[i]) < largest && !std::isfinite(c.got[i]);
  EXPECT_EQ(lost, 0u) << c.name << ": elements of " << c.want.size() << " that are not finite but should be";
}

// `floor`: an error that is forgiven whatever the result.
inline void expect_close(const Checked& c, double gate, double floor = 0) {
  const FloatRange range = range_of(c.dtype);
  const double subnormal = range.smallest * std::sqrt(static_cast<double>(c.want.size()));
  // But for what the type cannot hold, and what is beneath the normal numbers of the arithmetic: a weight of 1e-40 is none
  // to fp32.
  const double tiny = range_of(c.dtype == DType::f64 ? DType::f64 : DType::f32).smallest_normal;
  Values got = c.got;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool vanishing = std::abs(c.want[i]) < tiny && std::abs(got[i]) < tiny;
    if (vanishing || std::abs(c.want[i]) >= range.largest / 2) got[i] = c.want[i];
  }
  EXPECT_LE(distance(got, c.want),
            gate * norm(c.want) + data::kForgivenMoves * distance(c.moved, c.want) + subnormal + floor)
      << c.name << ": |want| = " << norm(c.want) << ", moved by roundings: " << distance(c.moved, c.want);
}

}  // namespace lla::test
