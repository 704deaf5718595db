#include "bench/cuda_call.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <future>
#include <stdexcept>

#include "core/convert.hpp"
#include "core/text.hpp"

namespace lla::bench {

void require_cuda(int error, const char* doing) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(core::cat("CUDA: ", doing, ": ", cudaGetErrorString(static_cast<cudaError_t>(error))));
}

namespace {

void require(const Status& status) {
  if (!status) throw std::runtime_error(status.message());
}

// Heads with data of their own; further ones repeat them. Making normals on the host would take longer than measuring.
constexpr int64_t kDistinctHeads = 4;

std::vector<double> repeat_heads(const std::vector<double>& made, int64_t distinct, const CudaCase& c, int64_t width) {
  std::vector<double> out(static_cast<size_t>(c.batch * c.length * c.heads * width));
  size_t to = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < c.length; ++i) {
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t from = (i * distinct + (b * c.heads + h) % distinct) * width;
        std::copy_n(made.begin() + from, width, out.begin() + static_cast<int64_t>(to));
        to += static_cast<size_t>(width);
      }
    }
  }
  return out;
}

}  // namespace

DeviceArray::DeviceArray(size_t bytes) : memory_(std::in_place, core::Device::cuda, bytes) {}

DeviceArray::DeviceArray(DType dtype, const std::vector<double>& values)
    : DeviceArray(values.size() * static_cast<size_t>(core::size_of(dtype))) {
  std::vector<std::byte> host(bytes());
  for (size_t i = 0; i < values.size(); ++i) core::store(host.data(), dtype, static_cast<int64_t>(i), values[i]);
  memory_->upload(host.data());
}

std::vector<std::byte> DeviceArray::copy() const {
  std::vector<std::byte> host(bytes());
  if (memory_) memory_->download(host.data());
  return host;
}

std::vector<double> DeviceArray::values(DType dtype, int64_t elements) const {
  const std::vector<std::byte> host = copy();
  std::vector<double> out(static_cast<size_t>(elements));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = dtype == DType::i32 ? reinterpret_cast<const int32_t*>(host.data())[i]
                                 : core::load(host.data(), dtype, static_cast<int64_t>(i));
  }
  return out;
}

void DeviceArray::poison() {
  if (memory_) memory_->fill(0xFF);
}

CudaInputs make_cuda_inputs(const CudaCase& c) {
  const int64_t most = c.trained ? static_cast<int64_t>(c.trained->size()) : kDistinctHeads;
  const int64_t distinct = std::min(most, c.batch * c.heads);
  const data::Sizes sizes{1, c.length, c.length, distinct, distinct, c.dim, c.dim};
  const auto normals = [&](double scale, uint64_t stream) {
    std::vector<double> t(static_cast<size_t>(distinct * c.length * c.dim));
    for (size_t i = 0; i < t.size(); ++i) t[i] = scale * data::normal(1, stream, i);
    return t;
  };
  const auto finish = [&](std::vector<double> t) {
    for (double& value : t) {
      std::byte cell[8];
      core::store(cell, c.dtype, 0, value);
      value = core::load(cell, c.dtype, 0);
    }
    return repeat_heads(t, distinct, c, c.dim);
  };
  const auto trained = [&](std::vector<double> data::TrainedHead::*part) {
    return data::interleaved(*c.trained, part, c.length, distinct);
  };
  // A graphics processor waits meanwhile: on as many threads as there are tensors.
  const auto start = [](auto work) { return std::async(std::launch::async, std::move(work)); };
  auto x = start([&] { return finish(normals(0.3, 101)); });
  const bool own_gradient = c.trained && !c.trained->front().grad_o.empty();
  auto grad_o = start([&] {
    if (c.what != What::backward) return std::vector<double>();
    return finish(own_gradient ? trained(&data::TrainedHead::grad_o) : normals(1, 102));
  });
  using Head = data::TrainedHead;
  data::Tensors made =
      c.trained ? data::Tensors{trained(&Head::q), trained(&Head::k), trained(&Head::v)} : data::make(c.kind, 1, sizes);
  auto q = start([&] { return finish(std::move(made.q)); });
  auto k = start([&] { return finish(std::move(made.k)); });
  auto v = start([&] { return finish(std::move(made.v)); });
  const std::vector<double> ridge =
      c.trained ? trained(&Head::ridge) : std::vector<double>(static_cast<size_t>(distinct * c.length), c.ridge);
  return {q.get(), k.get(), v.get(), x.get(), grad_o.get(), repeat_heads(ridge, distinct, c, 1)};
}

bool same_inputs(const CudaCase& a, const CudaCase& b) {
  return (a.what == What::backward) == (b.what == What::backward) && a.dtype == b.dtype && a.batch == b.batch &&
         a.heads == b.heads && a.length == b.length && a.dim == b.dim && a.kind == b.kind && a.trained == b.trained;
}

CudaCall::CudaCall(const CudaCase& c, const CudaInputs& in, DType out)
    : case_(c),
      out_(out),
      ridge_dtype_(c.dtype == DType::f64 ? DType::f64 : DType::f32),
      rows_(c.batch * c.heads * c.length),
      elements_(rows_ * c.dim),
      q_(c.dtype, in.q),
      k_(c.dtype, in.k),
      v_(c.dtype, in.v),
      ridge_(ridge_dtype_, in.ridge),
      o_(static_cast<size_t>(elements_ * core::size_of(out))),
      iterations_(static_cast<size_t>(rows_) * 4) {
  const auto rows = [&](const DeviceArray& t, DType dtype) {
    return dense(t.data(), dtype, {c.batch, c.length, c.heads, c.dim}, c.device);
  };
  const auto attach = [&](auto& args) {
    args.options.causal = c.causal;
    args.options.tolerance = c.tolerance;
    args.options.solver = static_cast<int32_t>(c.solver);
    args.options.weights = static_cast<int32_t>(c.weights);
    if (!case_.implementation.empty()) args.options.implementation = case_.implementation.c_str();
    args.q = rows(q_, c.dtype);
    args.k = rows(k_, c.dtype);
    args.v = rows(v_, c.dtype);
    args.iterations = dense(iterations_.data(), DType::i32, {c.batch, c.heads, c.length}, c.device);
    if (c.given_x) {
      if (x_.data() == nullptr) x_ = DeviceArray(c.dtype, in.x);
      args.x = rows(x_, c.dtype);
    } else {
      args.ridge = dense(ridge_.data(), ridge_dtype_, {c.batch, c.length, c.heads}, c.device);
    }
  };
  attach(forward_);
  forward_.o = rows(o_, out);
  if (c.what == What::backward) {
    ForwardSizes sizes;
    require(query(forward_, sizes));
    const int64_t size = sizes.saved_elements;
    saved_ = DeviceArray(static_cast<size_t>(size * core::size_of(ridge_dtype_)));
    forward_.saved = dense(saved_.data(), ridge_dtype_, {size}, c.device);
    attach(backward_);
    grad_o_ = DeviceArray(c.dtype, in.grad_o);
    const size_t bytes = static_cast<size_t>(elements_ * core::size_of(out));
    dq_ = DeviceArray(bytes);
    dk_ = DeviceArray(bytes);
    dv_ = DeviceArray(bytes);
    backward_.saved = forward_.saved;
    backward_.grad_o = rows(grad_o_, c.dtype);
    backward_.dq = rows(dq_, out);
    backward_.dk = rows(dk_, out);
    backward_.dv = rows(dv_, out);
    if (c.given_x) {
      dridge_ = DeviceArray(bytes);
      backward_.dx = rows(dridge_, out);
    } else {
      dridge_ = DeviceArray(static_cast<size_t>(rows_ * core::size_of(ridge_dtype_)));
      backward_.dridge = dense(dridge_.data(), ridge_dtype_, {c.batch, c.length, c.heads}, c.device);
    }
  }
  give_workspaces();
}

void CudaCall::give_workspaces() {
  const auto give = [](auto& args, DeviceArray& memory) {
    size_t bytes = 0;
    require(workspace_bytes(args, bytes));
    if (bytes > memory.bytes()) memory = DeviceArray(bytes);
    args.workspace = memory.data();
    args.workspace_bytes = bytes;
  };
  give(forward_, workspace_);
  if (case_.what == What::backward) give(backward_, backward_workspace_);
}

void CudaCall::set_solver(Solver solver, double tolerance, int max_iterations) {
  for (lla_options* o : {static_cast<lla_options*>(&forward_.options), static_cast<lla_options*>(&backward_.options)}) {
    o->solver = static_cast<int32_t>(solver);
    o->tolerance = tolerance;
    o->max_iterations = max_iterations;
  }
  give_workspaces();
}

void CudaCall::forward() { require(lla::forward(forward_)); }
void CudaCall::backward() { require(lla::backward(backward_)); }

std::vector<double> CudaCall::dridge_or_dx() const {
  return case_.given_x ? dridge_.values(out_, elements_) : dridge_.values(ridge_dtype_, rows_);
}

void CudaCall::poison_outputs() {
  for (DeviceArray* t : {&o_, &dq_, &dk_, &dv_, &dridge_}) {
    if (t->data() != nullptr) t->poison();
  }
}

std::vector<std::byte> CudaCall::output_bits(bool gradients) const {
  if (!gradients) return o_.copy();
  std::vector<std::byte> bits;
  for (const DeviceArray* t : {&dq_, &dk_, &dv_, &dridge_}) {
    if (t->data() == nullptr) continue;
    const std::vector<std::byte> part = t->copy();
    bits.insert(bits.end(), part.begin(), part.end());
  }
  return bits;
}

}  // namespace lla::bench
