// The operators lla::forward and lla::backward (ridge or a given x), lla::cache_append, and lla::plan and friends that
// say what they would do. Each fills the structs of lla.h from torch tensors and options and calls the C interface;
// nothing else happens here. Autograd, fake (meta) and autocast rules are registered from Python (python/lla/_ops.py).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "lla/lla.hpp"
#include "tensors.hpp"

namespace lla::torch_ops {
namespace {

using MaybeTensor = std::optional<Tensor>;

// What every operator takes after its tensors, in schema order.
const std::string kOptionsSchema =
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, bool causal, "
    "SymInt window_left, SymInt window_right, float? tol, int max_iterations, str solver, str? implementation, bool "
    "tf32, bool batch_invariant";
// What makes k and v a cache; the forward operators take it after the options.
const std::string kCacheSchema = "Tensor? seqlens_k, Tensor? page_table, Tensor? first_key, SymInt max_total_k";
// Both with the defaults of lla.h: a call that leaves them out is the cheapest.
const std::string kDefaultsSchema =
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, float? "
    "scale=None, bool causal=True, SymInt window_left=-1, SymInt window_right=-1, float? tol=None, int "
    "max_iterations=0, str solver='auto', str? implementation=None, bool tf32=False, bool batch_invariant=False, "
    "Tensor? seqlens_k=None, Tensor? page_table=None, Tensor? first_key=None, SymInt max_total_k=0";

struct Options {
  const MaybeTensor& cu_seqlens_q;
  const MaybeTensor& cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  std::optional<double> tol;
  int64_t max_iterations;
  const std::string& solver;
  const std::optional<std::string>& implementation;
  bool tf32;  // allowed for f32 tensors
  bool batch_invariant;
};

struct Cache {
  const MaybeTensor& seqlens_k;
  const MaybeTensor& page_table;
  const MaybeTensor& first_key;
  int64_t max_total_k;
};

// The texts are read again by python/lla/_errors.py, which chooses the exception type by them.
[[noreturn]] void fail(lla_status status) {
  const char* kind = status == LLA_INVALID_ARGUMENT ? "invalid argument"
                     : status == LLA_UNSUPPORTED    ? "unsupported"
                     : status == LLA_OUT_OF_MEMORY  ? "out of memory"
                     : status == LLA_CUDA_ERROR     ? "CUDA error"
                                                    : "internal error";
  throw std::runtime_error(std::string("lla: ") + kind + ": " + lla_last_error());
}

void check(lla_status status) {
  if (status != LLA_OK) fail(status);
}

[[noreturn]] void invalid(const std::string& message) { throw std::runtime_error("lla: invalid argument: " + message); }

lla_solver parse_solver(const std::string& name) {
  if (name == "auto") return LLA_SOLVER_AUTO;
  if (name == "cg") return LLA_SOLVER_CG;
  if (name == "direct") return LLA_SOLVER_DIRECT;
  invalid("solver must be \"auto\", \"cg\" or \"direct\", not \"" + name + "\"");
}

// The numbers among the options. What `options` refers to must outlive the arguments.
template <class Args>
void fill_options(Args& args, const Options& options) {
  args.max_seqlen_q = options.max_seqlen_q;
  args.max_seqlen_k = options.max_seqlen_k;
  if (options.scale && std::isnan(*options.scale)) invalid("scale is NaN");  // which lla.h takes for "not given"
  if (options.tol && std::isnan(*options.tol)) invalid("tol is NaN");
  if (options.max_iterations < 0 || options.max_iterations > INT32_MAX) {
    invalid("max_iterations must be between 0 (the default) and 2^31 - 1");
  }
  lla::Options& o = args.options;
  if (options.scale) o.scale = *options.scale;
  o.causal = options.causal;
  o.window_left = options.window_left;
  o.window_right = options.window_right;
  if (options.tol) o.tolerance = *options.tol;
  o.max_iterations = static_cast<int32_t>(options.max_iterations);
  o.solver = parse_solver(options.solver);
  o.implementation = options.implementation ? options.implementation->c_str() : nullptr;
  o.precision = options.tf32 ? LLA_PRECISION_TF32 : LLA_PRECISION_FULL;
  o.batch_invariant = options.batch_invariant;
}

// Either kind of arguments, filled from what both have in common.
template <class Args>
void fill(Args& args, const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ridge, const MaybeTensor& x,
          const Options& options) {
  args.q = view(q, "q");
  args.k = view(k, "k");
  args.v = view(v, "v");
  args.ridge = view(ridge, "ridge");
  args.x = view(x, "x");
  args.cu_seqlens_q = view(options.cu_seqlens_q, "cu_seqlens_q");
  args.cu_seqlens_k = view(options.cu_seqlens_k, "cu_seqlens_k");
  fill_options(args, options);
}

void fill(ForwardArgs& args, const Cache& cache) {
  args.seqlens_k = view(cache.seqlens_k, "seqlens_k");
  args.page_table = view(cache.page_table, "page_table");
  args.first_key = view(cache.first_key, "first_key");
  args.max_total_k = cache.max_total_k;
}

// The dense output a call makes, without data: what validate is asked about before anything is allocated. Of tensors
// whose shapes are wrong it means nothing, and validate says so.
lla_tensor describe_output(const lla_tensor& q, const lla_tensor& v) {
  lla_tensor o = q;
  o.data = nullptr;
  if (o.ndim > 0 && v.ndim > 0) o.size[o.ndim - 1] = v.size[v.ndim - 1];
  uint64_t stride = 1;
  for (int i = o.ndim - 1; i >= 0; --i) {
    o.stride[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(o.size[i] > 0 ? o.size[i] : 1);
  }
  return o;
}

// Runs on the tensors' device, as torch's own operators do.
std::optional<torch::stable::accelerator::DeviceGuard> enter_device(const Tensor& q) {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (q.is_cuda()) {
    guard.emplace(q.get_device_index());
  } else {
    adopt_torch_threads();
  }
  return guard;
}

ScalarType saved_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// What is known of each row, in one tensor: iterations, residual (the bits of a float), status. Points the arguments at
// it. q has been checked.
template <class Args>
Tensor make_row_info(Args& args, const Tensor& q) {
  const bool packed = args.q.ndim == 3;
  const int64_t batch = packed ? 1 : q.size(0), length = q.size(packed ? 0 : 1), heads = q.size(packed ? 1 : 2);
  Tensor row_info = empty({3, batch * heads * length}, ScalarType::Int, q);
  const auto section = [&](int64_t index, lla_dtype dtype) {
    lla_tensor t = args.q;  // for the device; the size is (B, Hq, Lq), packed (Hq, total_q)
    t.data = static_cast<int32_t*>(row_info.data_ptr()) + index * batch * heads * length;
    t.dtype = dtype;
    t.ndim = packed ? 2 : 3;
    const int64_t size[3] = {batch, heads, length}, stride[3] = {heads * length, length, 1};
    std::copy(size + packed, size + 3, t.size);
    std::copy(stride + packed, stride + 3, t.stride);
    return t;
  };
  args.iterations = section(0, LLA_I32);
  args.residual = section(1, LLA_F32);
  args.row_status = section(2, LLA_I32);
  return row_info;
}

// What a call makes once the library has checked and planned it: everything is validated and planned once. Exceptions
// must not pass through C: the first is kept and thrown again behind the call.
struct CallMemory {
  const Tensor& q;
  std::optional<Workspace> workspace;
  std::exception_ptr error;

  template <class Args, class Make>
  lla_status make(size_t workspace_bytes, Args* args, const Make& outputs) {
    try {
      outputs();
      workspace.emplace(workspace_bytes, q);
      args->workspace = workspace->data();
      args->workspace_bytes = workspace_bytes;
      return LLA_OK;
    } catch (...) {
      error = std::current_exception();
      return LLA_OUT_OF_MEMORY;
    }
  }
};

struct ForwardMemory : CallMemory {
  MaybeTensor* saved;
  MaybeTensor* row_info;
  const CacheAppendArgs* append;  // what goes into the cache once the library has taken the call, or null
  MaybeTensor o;

  static lla_status allocate(void* context, const lla_forward_sizes* sizes, lla_forward_args* args) {
    auto& made = *static_cast<ForwardMemory*>(context);
    return made.make(sizes->workspace_bytes, args, [&] {
      made.o = empty(args->o.size, args->o.ndim, made.q.scalar_type(), made.q);
      args->o.data = made.o->data_ptr();
      if (made.saved != nullptr) {
        *made.saved = empty({sizes->saved_elements}, saved_type(made.q), made.q);
        args->saved = view(**made.saved, "saved");
      }
      if (made.row_info != nullptr) *made.row_info = make_row_info(*args, made.q);
      if (made.append != nullptr) check(lla_cache_append(made.append));
    });
  }
};

struct BackwardMemory : CallMemory {
  static lla_status allocate(void* context, const lla_backward_sizes* sizes, lla_backward_args* args) {
    return static_cast<BackwardMemory*>(context)->make(sizes->workspace_bytes, args, [] {});
  }
};

template <class Args, class Memory>
void run(Args& args, Memory& memory, lla_status (*call)(const typename Args::Base*)) {
  args.allocate = Memory::allocate;
  args.allocate_context = &memory;
  args.stream = current_stream(memory.q);
  const lla_status status = call(&args);
  if (memory.error) std::rethrow_exception(memory.error);
  check(status);
}

// The output; also what the backward pass needs and what is known of each row, where a place for them is given. New
// keys and values are written once the call is known to be good.
Tensor run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ridge, const MaybeTensor& x,
                   const Options& options, const Cache& cache, MaybeTensor* saved, MaybeTensor* row_info,
                   const CacheAppendArgs* append = nullptr) {
  const auto guard = enter_device(q);
  ForwardArgs args;
  fill(args, q, k, v, ridge, x, options);
  fill(args, cache);
  args.o = describe_output(args.q, args.v);
  ForwardMemory memory{{q, {}, {}}, saved, row_info, append, {}};
  run(args, memory, lla_forward);
  return *memory.o;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x,
                                           MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, int64_t max_seqlen_q,
                                           int64_t max_seqlen_k, std::optional<double> scale, bool causal,
                                           int64_t window_left, int64_t window_right, std::optional<double> tol,
                                           int64_t max_iterations, std::string solver,
                                           std::optional<std::string> implementation, bool tf32, bool batch_invariant,
                                           MaybeTensor seqlens_k, MaybeTensor page_table, MaybeTensor first_key,
                                           int64_t max_total_k, bool save, bool info) {
  MaybeTensor saved, row_info;
  Tensor o =
      run_forward(q, k, v, ridge, x,
                  {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right,
                   tol, max_iterations, solver, implementation, tf32, batch_invariant},
                  {seqlens_k, page_table, first_key, max_total_k}, save ? &saved : nullptr, info ? &row_info : nullptr);
  return {o, save ? *saved : empty({0}, saved_type(q), q), info ? *row_info : empty({0}, ScalarType::Int, q)};
}

// The output alone, in one tensor: the short way for small problems.
Tensor inference(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, MaybeTensor cu_seqlens_q,
                 MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
                 bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol,
                 int64_t max_iterations, std::string solver, std::optional<std::string> implementation, bool tf32,
                 bool batch_invariant, MaybeTensor seqlens_k, MaybeTensor page_table, MaybeTensor first_key,
                 int64_t max_total_k) {
  return run_forward(q, k, v, ridge, x,
                     {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right,
                      tol, max_iterations, solver, implementation, tf32, batch_invariant},
                     {seqlens_k, page_table, first_key, max_total_k}, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_o, Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, Tensor saved,
    MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol,
    int64_t max_iterations, std::string solver, std::optional<std::string> implementation, bool tf32,
    bool batch_invariant, bool need_dq, bool need_dk, bool need_dv, bool need_dridge, bool info) {
  const auto guard = enter_device(q);
  if (!ridge && !x) invalid("ridge: is absent, and so is x; give exactly one");
  BackwardArgs args;
  fill(args, q, k, v, ridge, x,
       {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, tol,
        max_iterations, solver, implementation, tf32, batch_invariant});
  args.grad_o = view(grad_o, "grad_o");
  args.saved = view(saved, "saved");

  const auto gradient = [&](bool needed, const Tensor& of, lla_tensor& slot) {
    if (!needed) return empty({0}, of.scalar_type(), of);
    Tensor made = empty_like(of);
    slot = view(made, "gradient");
    return made;
  };
  Tensor dq = gradient(need_dq, q, args.dq), dk = gradient(need_dk, k, args.dk), dv = gradient(need_dv, v, args.dv);
  Tensor dridge = gradient(need_dridge, ridge ? *ridge : *x, ridge ? args.dridge : args.dx);
  if (info && q.dim() != (cu_seqlens_q ? 3 : 4))
    invalid("q: must have " + std::string(cu_seqlens_q ? "3" : "4") + " dimensions");
  Tensor row_info = info ? make_row_info(args, q) : empty({0}, ScalarType::Int, q);
  BackwardMemory memory{{q, {}, {}}};
  run(args, memory, lla_backward);
  return {dq, dk, dv, dridge, row_info};
}

CacheAppendArgs append_args(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                            const MaybeTensor& seqlens, const MaybeTensor& slots, const MaybeTensor& page_table,
                            const MaybeTensor& cu_seqlens) {
  CacheAppendArgs args;
  args.k = view(k, "k");
  args.v = view(v, "v");
  args.k_cache = view(k_cache, "k_cache");
  args.v_cache = view(v_cache, "v_cache");
  args.seqlens = view(seqlens, "seqlens");
  args.slots = view(slots, "slots");
  args.page_table = view(page_table, "page_table");
  args.cu_seqlens = view(cu_seqlens, "cu_seqlens");
  args.stream = current_stream(k);
  return args;
}

void cache_append(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, MaybeTensor seqlens, MaybeTensor slots,
                  MaybeTensor page_table, MaybeTensor cu_seqlens) {
  const auto guard = enter_device(k);
  const CacheAppendArgs args = append_args(k, v, k_cache, v_cache, seqlens, slots, page_table, cu_seqlens);
  check(lla_cache_append(&args));
}

// Room for the lengths with the new tokens. On a GPU the append writes them. On the CPU they are there from the
// beginning, because the attention's checks read them before anything is appended.
Tensor make_new_lengths(const CacheAppendArgs& append, const Tensor& seqlens) {
  const auto is_vector = [](const lla_tensor& t) {
    return t.dtype == LLA_I32 && t.ndim == 1 && (t.stride[0] == 1 || t.size[0] <= 1);
  };
  const bool packed = append.cu_seqlens.dtype != LLA_DTYPE_NONE;
  const int64_t batch = append.seqlens.size[0];
  if (!is_vector(append.seqlens)) invalid("seqlens: must be a dense int32 (B) tensor");
  if (packed && (!is_vector(append.cu_seqlens) || append.cu_seqlens.size[0] != batch + 1 ||
                 append.cu_seqlens.device_type != append.seqlens.device_type)) {
    invalid("cu_seqlens_q: must be a dense int32 tensor with one entry more than seqlens, on the same device");
  }
  Tensor made = empty({batch}, ScalarType::Int, seqlens);
  if (append.seqlens.device_type == LLA_CUDA) return made;
  const auto* before = static_cast<const int32_t*>(append.seqlens.data);
  const auto* cu = static_cast<const int32_t*>(append.cu_seqlens.data);
  auto* to = static_cast<int32_t*>(made.data_ptr());
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = before[b] + (packed ? int64_t{cu[b + 1]} - cu[b] : append.k.size[1]);
    to[b] = static_cast<int32_t>(std::clamp<int64_t>(length, -1, INT32_MAX));
  }
  return made;
}

// A step of generation in one call: checks, writes the new keys and values, attends. Nothing is written where the
// attention is refused.
Tensor append_inference(Tensor new_k, Tensor new_v, Tensor seqlens, Tensor q, Tensor k, Tensor v, MaybeTensor ridge,
                        MaybeTensor x, MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, int64_t max_seqlen_q,
                        int64_t max_seqlen_k, std::optional<double> scale, bool causal, int64_t window_left,
                        int64_t window_right, std::optional<double> tol, int64_t max_iterations, std::string solver,
                        std::optional<std::string> implementation, bool tf32, bool batch_invariant,
                        MaybeTensor seqlens_k, MaybeTensor page_table, MaybeTensor first_key, int64_t max_total_k) {
  if (seqlens_k) invalid("seqlens_k: is given to a call that appends, whose lengths follow from seqlens");
  CacheAppendArgs append = append_args(new_k, new_v, k, v, seqlens, {}, page_table, cu_seqlens_q);
  seqlens_k = make_new_lengths(append, seqlens);
  if (q.is_cuda()) append.new_seqlens = view(seqlens_k, "new_seqlens");
  return run_forward(q, k, v, ridge, x,
                     {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right,
                      tol, max_iterations, solver, implementation, tf32, batch_invariant},
                     {seqlens_k, page_table, first_key, max_total_k}, nullptr, nullptr, &append);
}

// Text as a tensor (uint8, zero-padded to a fixed size), so that a traced graph can hold the call.
constexpr int64_t kTextBytes = 4096;

Tensor plan(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, MaybeTensor cu_seqlens_q,
            MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
            bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol, int64_t max_iterations,
            std::string solver, std::optional<std::string> implementation, bool tf32, bool batch_invariant,
            MaybeTensor seqlens_k, MaybeTensor page_table, MaybeTensor first_key, int64_t max_total_k, bool explain) {
  const auto guard = enter_device(q);
  ForwardArgs args;
  fill(args, q, k, v, ridge, x,
       {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, tol,
        max_iterations, solver, implementation, tf32, batch_invariant});
  fill(args, {seqlens_k, page_table, first_key, max_total_k});
  args.o = describe_output(args.q, args.v);
  Tensor text = empty_cpu(kTextBytes);
  char* to = static_cast<char*>(text.data_ptr());
  std::fill(to, to + kTextBytes, '\0');
  check(explain ? lla_forward_explain(&args, to, kTextBytes) : lla_forward_plan(&args, to, kTextBytes));
  return text;
}

// Whether a call would be taken, without making it: what a cache's keys are written after.
void check_call(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, MaybeTensor cu_seqlens_q,
                MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
                bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol,
                int64_t max_iterations, std::string solver, std::optional<std::string> implementation, bool tf32,
                bool batch_invariant, MaybeTensor seqlens_k, MaybeTensor page_table, MaybeTensor first_key,
                int64_t max_total_k) {
  const auto guard = enter_device(q);
  ForwardArgs args;
  fill(args, q, k, v, ridge, x,
       {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, tol,
        max_iterations, solver, implementation, tf32, batch_invariant});
  fill(args, {seqlens_k, page_table, first_key, max_total_k});
  args.o = describe_output(args.q, args.v);
  ForwardSizes sizes;
  check(lla_forward_query(&args, &sizes));
}

// The same of tensors that have shapes but no memory, as a trace has them. Each is described by its lla_dtype (0:
// absent), whether it is on CUDA, its dimensions, sizes and strides, one after the other in the order of the schema.
int64_t check_shapes(std::vector<int64_t> described, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
                     std::optional<double> tol, int64_t max_iterations, std::string solver,
                     std::optional<std::string> implementation, bool tf32, bool batch_invariant, int64_t max_total_k) {
  ForwardArgs args;
  const MaybeTensor none;
  fill_options(args, {none, none, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, tol,
                      max_iterations, solver, implementation, tf32, batch_invariant});
  args.max_total_k = max_total_k;
  size_t at = 0;
  const auto next = [&] { return at < described.size() ? described[at++] : 0; };
  for (lla_tensor* t : {&args.q, &args.k, &args.v, &args.ridge, &args.x, &args.cu_seqlens_q, &args.cu_seqlens_k,
                        &args.seqlens_k, &args.page_table, &args.first_key}) {
    t->dtype = static_cast<int32_t>(next());
    if (t->dtype == LLA_DTYPE_NONE) continue;
    t->device_type = next() != 0 ? LLA_CUDA : LLA_CPU;
    t->ndim = static_cast<int32_t>(next());
    if (t->ndim > LLA_MAX_DIMS)
      invalid("a tensor has " + std::to_string(t->ndim) + " dimensions, at most 4 have a meaning");
    for (int i = 0; i < t->ndim; ++i) t->size[i] = next();
    for (int i = 0; i < t->ndim; ++i) t->stride[i] = next();
  }
  args.o = describe_output(args.q, args.v);
  char text[1];  // which implementation takes it is this machine's matter, not the trace's
  check(lla_forward_explain(&args, text, sizeof text));
  return 0;
}

// What a row takes of the saved vector: the fake kernels multiply it by symbolic numbers of rows.
int64_t saved_row_elements(int64_t dim, int64_t value_dim) {
  ForwardArgs args;
  args.q = args.k = dense(nullptr, DType::f32, {1, 1, 1, dim});
  args.v = args.o = dense(nullptr, DType::f32, {1, 1, 1, value_dim});
  args.ridge = scalar(nullptr);
  ForwardSizes sizes;
  check(lla_forward_query(&args, &sizes));
  return sizes.saved_elements;
}

std::string implementations() {
  std::string lines;
  for (int32_t i = 0; lla_implementation_name(i) != nullptr; ++i) {
    lines += std::string(lla_implementation_name(i)) + ": " + lla_implementation_description(i) + "\n";
  }
  return lines;
}

std::string machine() { return lla_machine_description(); }

std::string version() { return lla_version(); }

// The same for every device: the library behind lla.h chooses by where the tensors are.
void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("forward", TORCH_BOX(&forward));
  library.impl("inference", TORCH_BOX(&inference));
  library.impl("backward", TORCH_BOX(&backward));
  library.impl("plan", TORCH_BOX(&plan));
  library.impl("check_call", TORCH_BOX(&check_call));
  library.impl("cache_append", TORCH_BOX(&cache_append));
  library.impl("append_inference", TORCH_BOX(&append_inference));
}

}  // namespace
}  // namespace lla::torch_ops

STABLE_TORCH_LIBRARY(lla, m) {
  using lla::torch_ops::kCacheSchema;
  using lla::torch_ops::kDefaultsSchema;
  using lla::torch_ops::kOptionsSchema;
  const std::string inputs = "Tensor q, Tensor k, Tensor v, Tensor? ridge, Tensor? x, ";
  const std::string forward = inputs + kOptionsSchema + ", " + kCacheSchema;
  m.def(("forward(" + forward + ", bool save, bool info) -> (Tensor o, Tensor saved, Tensor row_info)").c_str());
  m.def(("inference(" + inputs + kDefaultsSchema + ") -> Tensor").c_str());
  m.def(
      ("backward(Tensor grad_o, " + inputs + "Tensor saved, " + kOptionsSchema +
       ", bool need_dq, bool need_dk, bool need_dv, bool need_dridge, bool info) -> (Tensor dq, Tensor dk, Tensor dv, "
       "Tensor dridge, Tensor row_info)")
          .c_str());
  m.def(("plan(" + forward + ", bool explain) -> Tensor").c_str());
  m.def(("check_call(" + forward + ") -> ()").c_str());
  m.def(
      "check_shapes(int[] described, int max_seqlen_q, int max_seqlen_k, float? scale, bool causal, int window_left, "
      "int window_right, float? tol, int max_iterations, str solver, str? implementation, bool tf32, bool "
      "batch_invariant, int max_total_k) -> int");
  m.def(
      "cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? seqlens, Tensor? slots, "
      "Tensor? page_table, Tensor? cu_seqlens) -> ()");
  m.def(("append_inference(Tensor new_k, Tensor new_v, Tensor seqlens, Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor? "
         "ridge, Tensor? x, " +
         kDefaultsSchema + ") -> Tensor")
            .c_str());
  m.def("saved_row_elements(int dim, int value_dim) -> int");
  m.def("implementations() -> str");
  m.def("machine() -> str");
  m.def("version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lla, CPU, m) { lla::torch_ops::register_kernels(m); }

STABLE_TORCH_LIBRARY_IMPL(lla, CUDA, m) { lla::torch_ops::register_kernels(m); }

STABLE_TORCH_LIBRARY_IMPL(lla, CompositeExplicitAutograd, m) {
  m.impl("check_shapes", TORCH_BOX(&lla::torch_ops::check_shapes));
  m.impl("saved_row_elements", TORCH_BOX(&lla::torch_ops::saved_row_elements));
  m.impl("implementations", TORCH_BOX(&lla::torch_ops::implementations));
  m.impl("machine", TORCH_BOX(&lla::torch_ops::machine));
  m.impl("version", TORCH_BOX(&lla::torch_ops::version));
}
