// Parameters of R runs that train as one stacked model: one (R, P) fp32 buffer, the same table of names and places for
// all runs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "torch.hpp"

namespace lla::trained {

enum class Init {
  zeros,
  ones,
  normal,           // standard deviation a
  uniform,          // [a, b)
  log_uniform,      // log of uniform [a, b): Mamba-2's and Gated DeltaNet's A
  inverse_softplus  // of log-uniform [a, b): the bias of their step size
};

struct InitRule {
  Init kind = Init::normal;
  double a = 0, b = 0;
};

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;  // of one run
  InitRule init;
  bool decay = true;   // weight decay: matrices yes; gains, biases, positions' rates no
  bool full = false;   // fp32 in the model whatever the compute dtype
  int64_t offset = 0;  // into a run's P
  int64_t size = 0;
};

// Every parameter starts at a multiple of 64 elements, what lies between is zero and stays zero. Those cast to the
// compute dtype come first, those in full precision last.
class ParameterTable {
 public:
  void add(std::string name, std::vector<int64_t> shape, InitRule init, bool decay = true, bool full = false);
  void finish();  // gives places; nothing is added afterwards

  const std::vector<Parameter>& all() const { return all_; }
  size_t index(std::string_view name) const;  // throws std::out_of_range with the name
  int64_t total() const { return total_; }    // P: elements of a run, padding too
  int64_t cast() const { return cast_; }      // the first of them that are cast
  int64_t count() const;                      // parameters, without padding

  // (P) fp32 on the CPU, the same for the same seed everywhere.
  at::Tensor init(uint64_t seed) const;
  // (P) fp32 of 0 and 1: where weight decay applies.
  at::Tensor decay_mask() const;

 private:
  std::vector<Parameter> all_;
  std::unordered_map<std::string, size_t> places_;
  int64_t total_ = 0, cast_ = 0;
};

// The leaves of one step. Made anew from the master weights each step (inside the captured graph).
class StackedParameters {
 public:
  // master (R, P) fp32 (fp64 in tests). learn: the views are leaves that gradients can be taken of.
  StackedParameters(const ParameterTable& table, const at::Tensor& master, at::ScalarType compute, bool learn);

  int64_t runs() const { return runs_; }
  at::ScalarType compute() const { return compute_; }
  // (R, shape...).
  const at::Tensor& operator[](std::string_view name) const { return views_[table_->index(name)]; }

  // d loss / d master into `out` (R, P), like master, padding zero. One call for each forward pass.
  void gradients(const at::Tensor& loss, at::Tensor& out) const;

 private:
  const ParameterTable* table_;
  int64_t runs_;
  at::ScalarType compute_;
  std::vector<at::Tensor> views_;
};

}  // namespace lla::trained
