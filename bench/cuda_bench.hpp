// Speed of the CUDA implementations. A case is first checked against fp64 and not timed when the check fails; then it
// is timed with events, the L2 cache flushed before every run, and the median is reported beside the iterations that
// were executed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bench/cpu_bench.hpp"
#include "data/data.hpp"
#include "lla/lla.hpp"

namespace lla::bench {

struct CudaCase {
  What what = What::forward;
  std::string implementation;  // empty: the library's choice
  int device = 0;
  DType dtype = DType::bf16;  // of the inputs and of the outputs
  int64_t batch = 4, heads = 8, length = 4096, dim = 128;
  data::Kind kind = data::Kind::randn;
  double ridge = 0.1;
  bool given_x = false;  // Parallax
  bool causal = true;
  double tolerance = 1e-3;
  Solver solver = Solver::automatic;
  Weights weights = Weights::automatic;
  double seconds = 1.0;  // to spend on repeats, at least kMinCudaRepeats of them
};

inline constexpr int kMinCudaRepeats = 10;

struct CudaResult {
  std::string device, implementation, plan;
  double seconds = 0;  // median; of one iteration for What::cg
  double fastest = 0, slowest = 0;
  int repeats = 0;
  double error = 0, gate = 0;  // of the check: the worst relative norm among the outputs, and what is allowed
  std::string worst_output;    // which one that was
  double iterations = 0;       // mean over the rows, weighted by the keys they see
  int most_iterations = 0;
  double direct_rows = 0;  // share of the rows solved directly
  double tflops = 0;       // products over visible pairs that the method needs (see products()), per second
  bool cached_weights = false;
  size_t workspace_bytes = 0;
};

// Fails, and leaves no speed in the result, when there is no device, the problem is refused, or the check fails.
Status measure_cuda(const CudaCase& c, CudaResult& result, const std::function<void(double)>& progress = {});

// Products of 2 D FLOP per visible pair that a pass with this many iterations needs.
double products(const CudaCase& c, double iterations, bool cached_weights);

// The accuracy the project promises for a case: relative norm of o (forward) or of the worst gradient (backward).
double accuracy_gate(const CudaCase& c);

}  // namespace lla::bench
