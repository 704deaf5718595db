// The C entry points: validate, plan, run. Nothing escapes as an exception.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "api/last_error.hpp"
#include "core/text.hpp"
#include "lla/lla.h"
#include "plan/backends.hpp"
#include "plan/cache_append.hpp"
#include "plan/implementation.hpp"
#include "plan/padding.hpp"
#include "validate/structs.hpp"
#include "validate/validate.hpp"

namespace lla::core {
namespace {

// Which call type belongs to which arguments, and how it is run.
struct Forward {
  static constexpr const char* kInit = "lla_forward_args_init";
  using Args = lla_forward_args;
  using Call = ForwardCall;
  // NOLINTNEXTLINE(clang-analyzer-core.NullDereference): a plan that was made has its implementation
  static Status run(const Call& call, const Plan& plan) { return plan.implementation->forward(call, plan); }
  static Status outputs(const Args& args, Call& call) { return validate_outputs(args, call); }
  // Forward writes per query only.
  static bool nothing_to_write(const Problem& p) { return p.rows() == 0; }
};

struct Backward {
  static constexpr const char* kInit = "lla_backward_args_init";
  using Args = lla_backward_args;
  using Call = BackwardCall;
  // NOLINTNEXTLINE(clang-analyzer-core.NullDereference): a plan that was made has its implementation
  static Status run(const Call& call, const Plan& plan) { return plan.implementation->backward(call, plan); }
  static Status outputs(const Args&, Call&) { return {}; }  // only the workspace comes on demand
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

lla_forward_sizes sizes_of(const Problem& p, const Plan& plan, const lla_forward_args&) {
  lla_forward_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  sizes.workspace_bytes = plan.workspace_bytes;
  if (p.cache) return sizes;
  const SavedLayout at(p);
  sizes.saved_elements = at.size;
  sizes.saved_max = at.max;
  sizes.saved_omega = at.omega;
  sizes.saved_mean_k = at.mean_k;
  sizes.saved_mean_v = at.mean_v;
  sizes.saved_x = at.x;
  return sizes;
}

lla_backward_sizes sizes_of(const Problem&, const Plan& plan, const lla_backward_args&) {
  return {sizeof(lla_backward_sizes), plan.workspace_bytes};
}

// A call whose arguments are complete, checked and planned.
template <class Pass>
struct Prepared {
  Complete<typename Pass::Args> given;
  typename Pass::Call call;
  Plan plan;

  Status check(const typename Pass::Args* args, Pointers pointers) {
    LLA_RETURN_IF_ERROR(given.read(args, Pass::kInit));
    return validate(given.args, pointers, call);
  }
  Status prepare(const typename Pass::Args* args, Pointers pointers) {
    LLA_RETURN_IF_ERROR(check(args, pointers));
    return choose_plan(pointers == Pointers::required ? given.args.workspace_bytes : SIZE_MAX);
  }
  Status choose_plan(size_t workspace_bytes) {
    const Problem& p = call.problem;
    if (p.device == Device::cpu) LLA_RETURN_IF_ERROR(cpu::check_environment());
    LLA_RETURN_IF_ERROR(make_plan(p, machine_for(p, workspace_bytes), given.options.implementation, plan));
    if (Pass::nothing_to_write(p)) plan.workspace_bytes = 0;
    return {};
  }
  // For a call: with the memory the caller brought, or what its allocate gives.
  Status prepare_call(const typename Pass::Args* args) {
    LLA_RETURN_IF_ERROR(given.read(args, Pass::kInit));
    auto& a = given.args;
    LLA_RETURN_IF_ERROR(validate(a, a.allocate ? Pointers::outputs_later : Pointers::required, call));
    LLA_RETURN_IF_ERROR(choose_plan(a.allocate ? SIZE_MAX : a.workspace_bytes));
    if (a.allocate != nullptr) {
      const auto sizes = sizes_of(call.problem, plan, a);
      if (const lla_status status = a.allocate(a.allocate_context, &sizes, &a); status != LLA_OK)
        return {status, cat("allocate: the caller's function answered ", lla_status_name(status))};
      LLA_RETURN_IF_ERROR(Pass::outputs(a, call));
      call.workspace = a.workspace;
      call.workspace_bytes = a.workspace_bytes;
    }
    if (Pass::nothing_to_write(call.problem)) return {};
    return validate_workspace(a, plan.workspace_bytes);
  }
};

// The answer, cut to the caller's size of it.
template <class Sizes>
Status write_sizes(Sizes sizes, Sizes* to) {
  const size_t size = to->struct_size;
  if (size < sizeof size || size > sizeof sizes || size % alignof(Sizes) != 0) {
    return invalid(cat("sizes: struct_size is ", size, ", this library's is ", sizeof sizes));
  }
  sizes.struct_size = size;
  std::memcpy(to, &sizes, size);
  return {};
}

Status query(const lla_forward_args* args, lla_forward_sizes* to) {
  if (to == nullptr) return invalid("sizes: is null");
  Prepared<Forward> p;
  LLA_RETURN_IF_ERROR(p.given.read(args, Forward::kInit));
  p.given.args.saved = lla_tensor{};  // asked before the vector exists
  LLA_RETURN_IF_ERROR(validate(p.given.args, Pointers::optional, p.call));
  LLA_RETURN_IF_ERROR(p.choose_plan(SIZE_MAX));
  return write_sizes(sizes_of(p.call.problem, p.plan, p.given.args), to);
}

Status query(const lla_backward_args* args, lla_backward_sizes* to) {
  if (to == nullptr) return invalid("sizes: is null");
  Prepared<Backward> p;
  LLA_RETURN_IF_ERROR(p.prepare(args, Pointers::optional));
  return write_sizes(sizes_of(p.call.problem, p.plan, p.given.args), to);
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
  Prepared<Pass> p;
  LLA_RETURN_IF_ERROR(p.prepare(args, Pointers::optional));
  return copy_text(p.plan.text(p.call.problem, machine_for(p.call.problem)), text, capacity);
}

template <class Pass>
Status query_explanation(const typename Pass::Args* args, char* text, size_t capacity) {
  Prepared<Pass> p;
  LLA_RETURN_IF_ERROR(p.check(args, Pointers::optional));
  return copy_text(explain(p.call.problem, machine_for(p.call.problem)), text, capacity);
}

template <class Pass>
Status run(const typename Pass::Args* args) {
  Prepared<Pass> p;
  LLA_RETURN_IF_ERROR(p.prepare_call(args));
  if (Pass::nothing_to_write(p.call.problem)) return {};
  LLA_RETURN_IF_ERROR(Pass::run(p.call, p.plan));
  return zero_padding(p.call);
}

}  // namespace
}  // namespace lla::core

using namespace lla::core;

extern "C" {

void lla_options_init_size(lla_options* options, size_t struct_size) {
  write_sized(default_options(), options, struct_size);
}
void lla_forward_args_init_size(lla_forward_args* args, size_t struct_size) {
  write_sized(default_args<lla_forward_args>(), args, struct_size);
}
void lla_backward_args_init_size(lla_backward_args* args, size_t struct_size) {
  write_sized(default_args<lla_backward_args>(), args, struct_size);
}
void lla_cache_append_args_init_size(lla_cache_append_args* args, size_t struct_size) {
  write_sized(default_args<lla_cache_append_args>(), args, struct_size);
}

lla_status lla_forward_query(const lla_forward_args* args, lla_forward_sizes* sizes) {
  return guarded([&] { return query(args, sizes); });
}
lla_status lla_backward_query(const lla_backward_args* args, lla_backward_sizes* sizes) {
  return guarded([&] { return query(args, sizes); });
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

lla_status lla_cache_append(const lla_cache_append_args* args) {
  return guarded([&]() -> lla::Status {
    if (args == nullptr) return invalid("args: is null");
    auto full = default_args<lla_cache_append_args>();
    LLA_RETURN_IF_ERROR(read_sized("args", "lla_cache_append_args_init", *args, full));
    CacheAppendCall call;
    LLA_RETURN_IF_ERROR(validate(full, call));
    return append(call);
  });
}

}  // extern "C"
