// A problem as tests speak of it: sizes and options, and inputs in double (rounded to what the tested type holds).
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "data/data.hpp"
#include "support/tensor.hpp"

namespace lla::test {

using core::RidgeShape;

struct Spec {
  DType dtype = DType::f32;
  DType out_dtype = DType::none;  // of o and the gradients; none: like dtype
  DType x_dtype = DType::none;    // of a given x; none: like dtype
  int64_t batch = 1;
  int64_t length_q = 64;
  int64_t length_k = 64;
  int64_t heads_q = 1;
  int64_t heads_kv = 1;
  int64_t dim = 16;
  int64_t value_dim = 16;
  std::vector<int32_t> cu_q, cu_k;  // both empty, or packed: batch is 1 and the lengths are totals
  RidgeShape ridge = RidgeShape::scalar;
  Layout layout = Layout::dense;
  Options options;

  bool packed() const { return !cu_q.empty(); }
  DType output() const { return out_dtype == DType::none ? dtype : out_dtype; }
  DType given_dtype() const { return dtype == DType::f64 || x_dtype == DType::none ? dtype : x_dtype; }
  DType ridge_dtype() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  double tolerance() const {  // of the solve, the default where none is named
    return std::isnan(options.tolerance) ? core::default_tolerance(dtype) : options.tolerance;
  }
  int64_t rows() const { return batch * length_q * heads_q; }
  // Sizes of the tensors, without the batch when packed.
  std::vector<int64_t> rows_size(int64_t channels) const;  // q, o, x
  std::vector<int64_t> keys_size(int64_t channels) const;  // k, v
  std::vector<int64_t> ridge_size() const;
  std::vector<int64_t> info_size() const;
  std::string text() const;  // one line, enough to rebuild the case
};

// Sizes of a self-attention problem: equal lengths, equal head counts.
Spec self_attention(int64_t length, int64_t dim, int64_t heads = 1, int64_t batch = 1);

// Row-major, in the layouts of the interface. x is empty unless it is given; then the ridge is empty.
struct Inputs {
  std::vector<double> q, k, v, ridge, x, grad_o;
};

// Data of a kind, a ridge around `ridge` (varied by up to half of it where its shape allows), and a gradient of o; all
// rounded to the types of the spec.
Inputs make_inputs(const Spec& spec, data::Kind kind, double ridge, uint64_t seed);

}  // namespace lla::test
