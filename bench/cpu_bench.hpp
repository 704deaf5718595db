// Speed of the CPU backend, measured the way the project states it: floating point operations of the products actually
// executed, per second, over what single-precision GEMM of a BLAS reaches in the same run on the same threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/data.hpp"
#include "lla/lla.hpp"

namespace lla::bench {

enum class What { forward, backward, cg };

struct CpuCase {
  What what = What::forward;
  DType dtype = DType::f32;
  int64_t batch = 1, heads = 1, length = 1024, dim = 64;
  data::Kind kind = data::Kind::randn;
  double ridge = 0.1;
  bool causal = true;
  double tolerance = 1e-3;
  Solver solver = Solver::automatic;
  int threads = 0;       // 0: the library's choice
  double seconds = 1.0;  // to spend on repeats, at least kMinRepeats of them
};

struct CpuResult {
  double seconds = 0;  // best of the repeats
  int repeats = 0;
  double gflops = 0;            // of the products over (query, visible key) pairs, those of the direct solver included
  double blas_gflops = 0;       // best sgemm 2048^3 of the same run; 0 without a BLAS
  double ratio = 0;             // gflops / blas_gflops
  double iterations = 0;        // of conjugate gradients, weighted by the pairs they cost
  double direct_rows = 0;       // share of the rows solved directly
  bool cached_weights = false;  // 2 products an iteration instead of 3
  size_t workspace_bytes = 0;
  int threads = 0;
  double naive_seconds =
      0;  // forward: a naive per-row implementation on one thread, extrapolated from sampled rows; else 0
};

// what == cg: seconds and gflops of one iteration (a long run minus a short one, over the difference of their
// iterations). progress, if given, is called between repeats with a number growing to 1.
Status measure_cpu(const CpuCase& c, CpuResult& result, const std::function<void(double)>& progress = {});

struct Growth {
  std::vector<int64_t> lengths;
  std::vector<double> seconds;
  std::vector<size_t> workspace_bytes;
  double time_exponent = 0, memory_exponent = 0;  // least squares in logarithms
};

// How time and workspace of the case grow with the length; the case's own length is not used.
Status measure_growth(const CpuCase& c, const std::vector<int64_t>& lengths, Growth& growth,
                      const std::function<void(double)>& progress = {});

}  // namespace lla::bench
