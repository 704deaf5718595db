// Behind the public interface: gathers each head into doubles, runs it, scatters the results.
#include "reference/implementation.hpp"

#include <algorithm>
#include <cmath>
#include <new>

#include "core/convert.hpp"
#include "core/text.hpp"
#include "reference/reference.hpp"

namespace lla::reference {
namespace {

using core::BackwardCall;
using core::ForwardCall;
using core::Operand;
using core::Plan;
using core::Problem;
using core::Sequence;

int64_t offset(const Operand& t, const Sequence& s, int64_t start, int64_t position, int64_t head, int64_t channel) {
  return s.batch * t.stride[0] + (start + position) * t.stride[1] + head * t.stride[2] + channel * t.stride[3];
}

// (length, width) of one head of one sequence.
Vector gather(const Operand& t, const Sequence& s, int64_t start, int64_t length, int64_t head, int64_t width) {
  Vector result;
  result.reserve(static_cast<size_t>(length * width));
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t c = 0; c < width; ++c) result.push_back(core::load(t.data, t.dtype, offset(t, s, start, i, head, c)));
  }
  return result;
}

void scatter(const Operand& t, const Sequence& s, int64_t start, int64_t length, int64_t head, int64_t width,
             Span values) {
  if (!t) return;
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t c = 0; c < width; ++c) {
      core::store(t.data, t.dtype, offset(t, s, start, i, head, c), values[static_cast<size_t>(i * width + c)]);
    }
  }
}

// The keys or values of a head that its rows see; the others stay zero, unread.
Vector gather_cached(const Operand& t, const core::KeyCache& cache, const Sequence& s, const core::KeyRange& seen,
                     int64_t head, int64_t width) {
  Vector result(static_cast<size_t>(s.length_k * width), 0.0);
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const int64_t at = cache.page(s.batch, j) * t.stride[0] + cache.slot(j) * t.stride[1] + head * t.stride[2];
    for (int64_t c = 0; c < width; ++c)
      result[static_cast<size_t>(j * width + c)] = core::load(t.data, t.dtype, at + c * t.stride[3]);
  }
  return result;
}

void gather_keys(const ForwardCall& call, const Sequence& s, int64_t kv_head, Head& result) {
  const Problem& p = call.problem;
  if (p.cache) {
    const core::KeyRange seen = core::visible_keys(p.mask, s);
    result.first_key = s.first_key;
    result.k = gather_cached(call.k, call.cache, s, seen, kv_head, p.dim);
    result.v = gather_cached(call.v, call.cache, s, seen, kv_head, p.value_dim);
  } else {
    result.k = gather(call.k, s, s.start_k, s.length_k, kv_head, p.dim);
    result.v = gather(call.v, s, s.start_k, s.length_k, kv_head, p.value_dim);
  }
}

void gather_keys(const BackwardCall& call, const Sequence& s, int64_t kv_head, Head& result) {
  result.k = gather(call.k, s, s.start_k, s.length_k, kv_head, call.problem.dim);
  result.v = gather(call.v, s, s.start_k, s.length_k, kv_head, call.problem.value_dim);
}

template <class Call>
Head gather_head(const Call& call, const Sequence& s, int64_t head) {
  const Problem& p = call.problem;
  Head result;
  result.length_q = s.length_q;
  result.length_k = s.length_k;
  result.dim = p.dim;
  result.value_dim = p.value_dim;
  result.q = gather(call.q, s, s.start_q, s.length_q, head, p.dim);
  gather_keys(call, s, head / p.group(), result);
  if (p.given_x()) {
    result.x = gather(call.x, s, s.start_q, s.length_q, head, p.dim);
  } else {
    result.ridge = gather(call.ridge, s, s.start_q, s.length_q, head, p.dim);
  }
  result.scale = p.scale;
  result.mask = p.mask;
  return result;
}

SolveOptions solve_options(const Problem& p, const Plan& plan) {
  return {plan.solver == Solver::cg, core::forward_stop_rule(p.tolerance, p.dim),
          core::backward_stop_rule(p.tolerance, p.dtype, p.dim), p.max_iterations};
}

void write_info(const core::RowOutputs& info, int64_t row, const Solution& solution) {
  if (info.iterations) info.iterations[row] = solution.iterations;
  if (info.residual) info.residual[row] = static_cast<float>(solution.residual);
  if (info.status) info.status[row] = solution.status;
}

void write_saved(const ForwardCall& call, int64_t row, int64_t i, const ForwardResult& result) {
  if (!call.saved) return;
  const Problem& p = call.problem;
  const core::SavedLayout layout(p);
  const DType dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto put = [&](int64_t section, int64_t width, const Vector& values) {
    for (int64_t c = 0; c < width; ++c) {
      core::store(call.saved, dtype, section + row * width + c, values[static_cast<size_t>(i * width + c)]);
    }
  };
  put(layout.max, 1, result.max);
  put(layout.omega, 1, result.omega);
  put(layout.mean_k, p.dim, result.mean_k);
  put(layout.mean_v, p.value_dim, result.mean_v);
  put(layout.x, p.dim, result.x);
}

// A row whose output its type cannot hold says so.
void report_overflow(const ForwardCall& call, ForwardResult& result) {
  const double largest = core::largest_finite(call.o.dtype);
  const auto width = static_cast<size_t>(call.problem.value_dim);
  for (size_t i = 0; i < result.solution.size(); ++i) {
    const Span o = Span(result.o).subspan(i * width, width);
    const bool fits = std::all_of(o.begin(), o.end(), [&](double x) { return std::abs(x) <= largest; });
    if (!fits && result.solution[i].status == LLA_ROW_OK) result.solution[i].status = LLA_ROW_BREAKDOWN;
  }
}

void run_forward(const ForwardCall& call, const Plan& plan) {
  const Problem& p = call.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = core::sequence(call, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      ForwardResult result = forward(gather_head(call, s, h), solve_options(p, plan));
      report_overflow(call, result);
      scatter(call.o, s, s.start_q, s.length_q, h, p.value_dim, result.o);
      for (int64_t i = 0; i < s.length_q; ++i) {
        const int64_t row = core::row_index(p, s, h, i);
        write_info(call.info, row, result.solution[static_cast<size_t>(i)]);
        write_saved(call, row, i, result);
      }
    }
  }
}

// Sums of the ridge's gradient over what the ridge is broadcast over. Elements that share an offset share a sum.
class RidgeGradient {
 public:
  explicit RidgeGradient(const BackwardCall& call) : call_(call) {
    const Problem& p = call.problem;
    switch (p.ridge) {
      case core::RidgeShape::none: break;
      case core::RidgeShape::scalar: sums_.resize(1); break;
      case core::RidgeShape::head: sums_.resize(static_cast<size_t>(p.heads_q)); break;
      case core::RidgeShape::token: sums_.resize(static_cast<size_t>(p.rows())); break;
      case core::RidgeShape::dimension: sums_.resize(static_cast<size_t>(p.rows() * p.dim)); break;
    }
  }

  void add(const Sequence& s, int64_t head, Span dridge) {
    const Problem& p = call_.problem;
    for (int64_t i = 0; i < s.length_q; ++i) {
      for (int64_t d = 0; d < p.dim; ++d) sums_[index(s, head, i, d)] += dridge[static_cast<size_t>(i * p.dim + d)];
    }
  }

  void write() const {
    const Problem& p = call_.problem;
    if (!call_.dridge) return;
    // The scalar and the per-head ridge have one element however many rows there are, also when there is none.
    if (p.ridge == core::RidgeShape::scalar) return core::store(call_.dridge.data, call_.dridge.dtype, 0, sums_[0]);
    if (p.ridge == core::RidgeShape::head) {
      for (int64_t h = 0; h < p.heads_q; ++h) {
        core::store(call_.dridge.data, call_.dridge.dtype, h * call_.dridge.stride[2], sums_[static_cast<size_t>(h)]);
      }
      return;
    }
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = core::sequence(call_, b);
      const int64_t width = p.ridge == core::RidgeShape::dimension ? p.dim : 1;
      for (int64_t h = 0; h < p.heads_q; ++h) {
        for (int64_t i = 0; i < s.length_q; ++i) {
          for (int64_t d = 0; d < width; ++d) {
            core::store(call_.dridge.data, call_.dridge.dtype, offset(call_.dridge, s, s.start_q, i, h, d),
                        sums_[index(s, h, i, d)]);
          }
        }
      }
    }
  }

 private:
  size_t index(const Sequence& s, int64_t head, int64_t i, int64_t d) const {
    const Problem& p = call_.problem;
    switch (p.ridge) {
      case core::RidgeShape::head: return static_cast<size_t>(head);
      case core::RidgeShape::token: return static_cast<size_t>(core::row_index(p, s, head, i));
      case core::RidgeShape::dimension: return static_cast<size_t>(core::row_index(p, s, head, i) * p.dim + d);
      default: return 0;
    }
  }

  const BackwardCall& call_;
  Vector sums_;
};

void add_to(Vector& sum, const Vector& values) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
}

void run_backward(const BackwardCall& call, const Plan& plan) {
  const Problem& p = call.problem;
  RidgeGradient ridge_gradient(call);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = core::sequence(call, b);
    for (int64_t h_kv = 0; h_kv < p.heads_kv; ++h_kv) {
      Vector dk(static_cast<size_t>(s.length_k * p.dim), 0.0);  // summed over the query heads of the group
      Vector dv(static_cast<size_t>(s.length_k * p.value_dim), 0.0);
      for (int64_t h = h_kv * p.group(); h < (h_kv + 1) * p.group(); ++h) {
        const Vector g = gather(call.grad_o, s, s.start_q, s.length_q, h, p.value_dim);
        const BackwardResult result = backward(gather_head(call, s, h), g, solve_options(p, plan));
        add_to(dk, result.dk);
        add_to(dv, result.dv);
        scatter(call.dq, s, s.start_q, s.length_q, h, p.dim, result.dq);
        if (p.given_x()) {
          scatter(call.dx, s, s.start_q, s.length_q, h, p.dim, result.dx);
        } else {
          ridge_gradient.add(s, h, result.dridge);
        }
        for (int64_t i = 0; i < s.length_q; ++i) {
          write_info(call.info, core::row_index(p, s, h, i), result.solution[static_cast<size_t>(i)]);
        }
      }
      scatter(call.dk, s, s.start_k, s.length_k, h_kv, p.dim, dk);
      scatter(call.dv, s, s.start_k, s.length_k, h_kv, p.value_dim, dv);
    }
  }
  ridge_gradient.write();
}

// A row's matrix has D^2 entries, which must be countable.
constexpr int64_t kLargestDim = int64_t{1} << 16;

std::string refuse(const Problem& p, const core::Machine&) {
  if (p.dim <= kLargestDim && p.value_dim <= kLargestDim) return {};
  return core::cat("takes head dimensions up to ", kLargestDim, ", not D = ", p.dim, " with Dv = ", p.value_dim);
}

Plan make_plan(const Problem& p, const core::Machine&) {
  Plan plan;
  plan.implementation = &implementation;
  plan.solver = p.solver == Solver::cg ? Solver::cg : Solver::direct;
  plan.block_rows = 1;
  plan.workers = 1;
  return plan;
}

core::Notes notes(const Problem&, const core::Machine&, const Plan&) {
  return {{"arithmetic", "fp64, a row at a time; the backward pass works the forward pass out again"}};
}

template <class Call>
Status guarded(void (*run)(const Call&, const Plan&), const Call& call, const Plan& plan) {
  try {
    run(call, plan);
    return {};
  } catch (const std::bad_alloc&) {
    return {LLA_OUT_OF_MEMORY, "reference: out of host memory"};
  }
}

}  // namespace

const core::Implementation implementation = {
    .name = "reference",
    .description = "fp64 on the host, slow and obviously right: the oracle of the tests",
    .device = core::Device::cpu,
    .refuse = refuse,
    .plan = make_plan,
    .notes = notes,
    .forward = [](const ForwardCall& call, const Plan& plan) { return guarded(run_forward, call, plan); },
    .backward = [](const BackwardCall& call, const Plan& plan) { return guarded(run_backward, call, plan); },
};

}  // namespace lla::reference
