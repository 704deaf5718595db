// One call of the library on host arrays: local linear and local constant (softmax) attention together.
#pragma once

#include <cstdint>
#include <vector>

namespace lla::experiments {

// T: float or double. Arrays are row-major (batch, queries or keys, dim or value_dim).
template <class T>
struct AttendArgs {
  int64_t batch, queries, keys, dim, value_dim;
  const T *q, *k, *v;
  std::vector<double> ridge;  // one number, or one for every dimension
  double scale;
  double tolerance = 1e-4;
  bool causal = false;
  bool direct = false;  // solve directly, whatever the library would choose
};

template <class T>
struct Attended {
  std::vector<T> lla, softmax;
};

template <class T>
Attended<T> attend(const AttendArgs<T>&);

// Keys and queries (rows, d) with one more coordinate, |k|^2 and -1/2: with them the library's weights are the RBF
// kernel's, exp(-scale |q - k|^2 / 2), but for a factor all keys share. An infinite ridge keeps the coordinate out of
// the fit.
template <class T>
void extend_for_rbf(int64_t rows, int64_t d, const T* from, bool keys, T* to);

}  // namespace lla::experiments
