// What every kernel gets: the problem, the tensors, and the row arrays they hand each other. Passed by value.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace lla::cuda::portable {

// What a row turned out to be. Only regular rows are solved, and only their x and y are used.
enum RowKind : int32_t {
  kRegular = 0,
  kUnfinished = 1,  // regular, but conjugate gradients did not reach the tolerance
  kEmpty = 2,       // sees no key
  kSingle = 3,      // sees one key: o = v, whatever x is
  kBad = 4,         // a value that is not finite, or an illegal ridge
  kElsewhere = 5    // its output is written elsewhere: the sequence is decoded, or out of bounds and NaN already
};

// Row arrays are indexed by core::row_index; vectors of a row are contiguous. Maxima and mean keys are those of the
// shifted keys.
template <class T>
struct RowArrays {
  T* max = nullptr;
  T* omega = nullptr;
  T* mean_k = nullptr;
  T* mean_v = nullptr;
  T* x = nullptr;
  T* residual = nullptr;  // right-hand side, then residual, of the solve
  int32_t* kind = nullptr;
  // Backward only.
  T* y = nullptr;
  T* mean_e = nullptr;  // x.mean_k
  T* tau = nullptr;     // G.mean_v, and what the mean of G.v is off from it: see rhs.cu
  T* tau_low = nullptr;
  T* mean_b = nullptr;  // tau_low - y.mean_k
  T* c = nullptr;
  double* dridge = nullptr;  // the row's sum of -x y: in double, a float may be too small for it where their sum is not
  // Gradients of o are divided by 2^exponent as they are read, which makes G.v of size 1; what is linear in them is
  // multiplied by it as it is written. kNoExponent where a row has no gradient.
  int32_t* exponent = nullptr;
};

template <class T>
struct Arguments {
  core::Problem problem;
  core::Operand q, k, v, ridge, x, o, grad_o;
  core::Operand dq, dk, dv, dridge, dx;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  core::KeyCache cache;  // forward only
  core::RowOutputs info;
  T* shift = nullptr;  // what is taken off the keys of a head where they are read; (sequence, key head, channel)
  RowArrays<T> rows;
  // The solve: from `residual` to `solution` (x forward, y backward).
  T* solution = nullptr;
  int64_t direct_keys = -1;    // rows that see at most this many keys are left to the direct solver
  bool rescue = false;         // and so are the rows conjugate gradients leaves unfinished
  double* matrices = nullptr;  // one per block of the direct solver, null where they fit in shared memory
  int direct_blocks = 0;

  bool backward() const { return problem.operation == core::Operation::backward; }
};

// One launch each, in the order of docs/cuda-portable.md; defined in the .cu file of the same name.
template <class T>
Status launch_shift(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_stats(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_cg(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_direct(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_output(const Arguments<T>&, cudaStream_t);
// Makes the maxima, omegas and mean keys of the saved vector those of the keys as they were given.
template <class T>
Status launch_unshift(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_rhs(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_dq(const Arguments<T>&, cudaStream_t);
template <class T>
Status launch_dkdv(const Arguments<T>&, cudaStream_t);
// Of the sequences with few rows over a cache; whatever the arithmetic of the others, in double.
Status launch_decode(const Arguments<double>&, void* workspace, cudaStream_t);
template <class T>
Status launch_dridge(const Arguments<T>&, cudaStream_t);

}  // namespace lla::cuda::portable
