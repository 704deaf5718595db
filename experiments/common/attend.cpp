#include "common/attend.hpp"

#include <algorithm>
#include <type_traits>

#include "common/results.hpp"
#include "lla/lla.hpp"

namespace lla::experiments {

template <class T>
Attended<T> attend(const AttendArgs<T>& a) {
  constexpr DType type = std::is_same_v<T, double> ? DType::f64 : DType::f32;
  Attended<T> out;
  out.lla.resize(a.batch * a.queries * a.value_dim);
  ForwardArgs args;
  args.q = dense(a.q, type, {a.batch, a.queries, 1, a.dim});
  args.k = dense(a.k, type, {a.batch, a.keys, 1, a.dim});
  args.v = dense(a.v, type, {a.batch, a.keys, 1, a.value_dim});
  args.o = dense(out.lla.data(), type, {a.batch, a.queries, 1, a.value_dim});
  const std::vector<T> ridge(a.ridge.begin(), a.ridge.end());
  args.ridge = ridge.size() == 1 ? scalar(ridge.data(), type)
                                 : strided(ridge.data(), type, {a.batch, a.queries, 1, a.dim}, {0, 0, 0, 1});
  args.options.scale = a.scale;
  args.options.tolerance = a.tolerance;
  args.options.causal = a.causal;
  if (a.direct) args.options.solver = LLA_SOLVER_DIRECT;
  ForwardSizes sizes;
  if (const Status s = query(args, sizes); !s) throw Failure(s.message());
  std::vector<T> saved(sizes.saved_elements);
  args.saved = dense(saved.data(), type, {sizes.saved_elements});
  Workspace workspace(args);
  if (const Status s = forward(args); !s) throw Failure(s.message());
  const auto mean_v = saved.begin() + sizes.saved_mean_v;
  out.softmax.assign(mean_v, mean_v + a.batch * a.queries * a.value_dim);
  return out;
}

template <class T>
void extend_for_rbf(int64_t rows, int64_t d, const T* from, bool keys, T* to) {
  for (int64_t i = 0; i < rows; ++i, from += d, to += d + 1) {
    double squares = 0;
    for (int64_t j = 0; j < d; ++j) squares += double(from[j]) * from[j];
    std::copy_n(from, d, to);
    to[d] = static_cast<T>(keys ? squares : -0.5);
  }
}

template Attended<float> attend(const AttendArgs<float>&);
template Attended<double> attend(const AttendArgs<double>&);
template void extend_for_rbf(int64_t, int64_t, const float*, bool, float*);
template void extend_for_rbf(int64_t, int64_t, const double*, bool, double*);

}  // namespace lla::experiments
