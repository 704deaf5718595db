// The C entry points: validate, plan, run. Nothing escapes as an exception.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "core/text.hpp"
#include "api/last_error.hpp"
#include "lla/lla.h"
#include "plan/backends.hpp"
#include "plan/implementation.hpp"
#include "plan/padding.hpp"
#include "validate/validate.hpp"

namespace lla::core {
namespace {

// Which call type belongs to which arguments, and how it is run.
struct Forward {
  using Args = lla_forward_args;
  using Call = ForwardCall;
  static Status run(const Call& call, const Plan& plan) { return plan.implementation->forward(call, plan); }
  // Forward writes per query only.
  static bool nothing_to_write(const Problem& p) { return p.rows() == 0; }
};

struct Backward {
  using Args = lla_backward_args;
  using Call = BackwardCall;
  static Status run(const Call& call, const Plan& plan) { return plan.implementation->backward(call, plan); }
  // Without queries the gradients of keys, values and a shared ridge are still written: zeros.
  static bool nothing_to_write(const Problem& p) {
    return p.rows() == 0 && p.total_k * p.heads_kv == 0 && p.ridge != RidgeShape::scalar && p.ridge != RidgeShape::head;
  }
};

// With the workspace a call brings along: one that was asked for under another number of threads must do.
Machine machine_for(const Problem& p, size_t workspace_bytes = SIZE_MAX) {
  Machine m = p.device == Device::cuda ? this_machine(p.device_index) : this_cpu();
  m.workspace_bytes = workspace_bytes;
  return m;
}

template <class Pass>
Status prepare(const typename Pass::Args* args, Pointers pointers, typename Pass::Call& call, Plan& plan) {
  if (args == nullptr) return invalid("args: is null");
  LLA_RETURN_IF_ERROR(validate(*args, pointers, call));
  if (call.problem.device == Device::cpu) LLA_RETURN_IF_ERROR(cpu::check_environment());
  const size_t workspace_bytes = pointers == Pointers::required ? args->workspace_bytes : SIZE_MAX;
  return make_plan(call.problem, machine_for(call.problem, workspace_bytes), args->options.implementation, plan);
}

template <class Pass>
Status query_workspace(const typename Pass::Args* args, size_t* bytes) {
  if (bytes == nullptr) return invalid("bytes: is null");
  typename Pass::Call call;
  Plan plan;
  LLA_RETURN_IF_ERROR(prepare<Pass>(args, Pointers::optional, call, plan));
  *bytes = Pass::nothing_to_write(call.problem) ? 0 : plan.workspace_bytes;
  return {};
}

Status copy_text(const std::string& from, char* text, size_t capacity) {
  if (text == nullptr || capacity == 0) return invalid(cat("text: is ", text ? "of capacity 0" : "null"));
  const size_t n = std::min(from.size(), capacity - 1);
  std::memcpy(text, from.data(), n);
  text[n] = '\0';
  return {};
}

template <class Pass>
Status query_plan(const typename Pass::Args* args, char* text, size_t capacity) {
  typename Pass::Call call;
  Plan plan;
  LLA_RETURN_IF_ERROR(prepare<Pass>(args, Pointers::optional, call, plan));
  return copy_text(plan.text(call.problem, machine_for(call.problem)), text, capacity);
}

template <class Pass>
Status query_explanation(const typename Pass::Args* args, char* text, size_t capacity) {
  if (args == nullptr) return invalid("args: is null");
  typename Pass::Call call;
  LLA_RETURN_IF_ERROR(validate(*args, Pointers::optional, call));
  return copy_text(explain(call.problem, machine_for(call.problem)), text, capacity);
}

template <class Pass>
Status run(const typename Pass::Args* args) {
  typename Pass::Call call;
  Plan plan;
  LLA_RETURN_IF_ERROR(prepare<Pass>(args, Pointers::required, call, plan));
  if (Pass::nothing_to_write(call.problem)) return {};
  LLA_RETURN_IF_ERROR(validate_workspace(*args, plan.workspace_bytes));
  LLA_RETURN_IF_ERROR(Pass::run(call, plan));
  return zero_padding(call);
}

}  // namespace
}  // namespace lla::core

using namespace lla::core;

extern "C" {

void lla_options_init(lla_options* options) {
  if (options == nullptr) return;
  *options = lla_options{};
  options->struct_size = sizeof(lla_options);
  options->scale = std::nan("");
  options->tolerance = std::nan("");
  options->window_left = -1;
  options->window_right = -1;
  options->cached_weights_limit = int64_t{1} << 30;
  options->causal = 1;
}

void lla_forward_args_init(lla_forward_args* args) {
  if (args == nullptr) return;
  *args = lla_forward_args{};
  args->struct_size = sizeof(lla_forward_args);
  lla_options_init(&args->options);
}

void lla_backward_args_init(lla_backward_args* args) {
  if (args == nullptr) return;
  *args = lla_backward_args{};
  args->struct_size = sizeof(lla_backward_args);
  lla_options_init(&args->options);
}

lla_status lla_forward_workspace(const lla_forward_args* args, size_t* bytes) {
  return guarded([&] { return query_workspace<Forward>(args, bytes); });
}
lla_status lla_backward_workspace(const lla_backward_args* args, size_t* bytes) {
  return guarded([&] { return query_workspace<Backward>(args, bytes); });
}

lla_status lla_saved_size(const lla_forward_args* args, int64_t* elements) {
  return guarded([&]() -> lla::Status {
    if (args == nullptr) return invalid("args: is null");
    if (elements == nullptr) return invalid("elements: is null");
    lla_forward_args without_saved = *args;  // asked before the vector exists, so its shape is not checked yet
    without_saved.saved = lla_tensor{};
    ForwardCall call;
    LLA_RETURN_IF_ERROR(validate(without_saved, Pointers::optional, call));
    *elements = SavedLayout(call.problem).size;
    return {};
  });
}

lla_status lla_forward_plan(const lla_forward_args* args, char* text, size_t capacity) {
  return guarded([&] { return query_plan<Forward>(args, text, capacity); });
}
lla_status lla_backward_plan(const lla_backward_args* args, char* text, size_t capacity) {
  return guarded([&] { return query_plan<Backward>(args, text, capacity); });
}
lla_status lla_forward_explain(const lla_forward_args* args, char* text, size_t capacity) {
  return guarded([&] { return query_explanation<Forward>(args, text, capacity); });
}
lla_status lla_backward_explain(const lla_backward_args* args, char* text, size_t capacity) {
  return guarded([&] { return query_explanation<Backward>(args, text, capacity); });
}

lla_status lla_forward(const lla_forward_args* args) {
  return guarded([&] { return run<Forward>(args); });
}
lla_status lla_backward(const lla_backward_args* args) {
  return guarded([&] { return run<Backward>(args); });
}

}  // extern "C"
