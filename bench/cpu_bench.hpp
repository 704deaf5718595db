// Speed of the CPU backend, measured the way the project states it: floating point operations of the products actually
// executed, per second, over what single-precision GEMM of a BLAS reaches in the same run on the same threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/case.hpp"

namespace lla::bench {

struct CpuCase : Case {
  int threads = 0;  // 0: the library's choice
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
  double naive_seconds = 0;  // forward: a naive loop over rows on one thread, extrapolated from some rows; else 0
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
