// Speed of the CUDA implementations. A case is first checked against fp64 and not timed when the check fails; then it
// is timed with events, the L2 cache flushed before every run, and the median is reported beside the iterations that
// were executed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "bench/case.hpp"

namespace lla::bench {

struct CudaCase : Case {
  CudaCase() = default;
  explicit CudaCase(const Case& c) : Case(c) {}

  std::string implementation;  // empty: the library's choice
  int device = 0;
  bool given_x = false;  // Parallax
  Weights weights = Weights::automatic;
  bool with_iteration = false;  // forward: time one iteration of conjugate gradients, too
};

inline constexpr int kMinCudaRepeats = 10;

struct CudaResult {
  std::string device, implementation, plan;
  double seconds = 0;  // median; of one iteration for What::cg
  double fastest = 0, slowest = 0;
  int repeats = 0;
  double error = 0, gate = 0;   // of the check: the worst relative norm among the outputs, and what is allowed
  std::string worst_output;     // which one that was
  double iterations = 0;        // mean over the rows, weighted by the keys they see
  double block_iterations = 0;  // the same of the most iterations in each block of 128 rows: what a kernel executes
  int most_iterations = 0;
  double direct_rows = 0;        // share of the rows solved directly
  double tflops = 0;             // products over visible pairs that the method needs (see products()), per second
  double iteration_seconds = 0;  // with_iteration and What::cg
  double iteration_tflops = 0;
  bool cached_weights = false;
  size_t workspace_bytes = 0;
};

// Measures one case after the other; those of one problem (that differ in weights or implementation) share its inputs
// and its fp64 results.
class CudaBench {
 public:
  CudaBench();
  ~CudaBench();

  // Fails, and leaves no speed in the result, when there is no device, the problem is refused, or the check fails.
  Status measure(const CudaCase& c, CudaResult& result, const std::function<void(double)>& progress = {});

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

// Products of 2 D FLOP per visible pair that a pass with this many iterations needs.
double products(const CudaCase& c, double iterations, bool cached_weights);

// FLOP of one product.
double product_flop(const CudaCase& c);

// The least an iteration can take on an H200, in seconds: its products at the rate of a large plain one, or reading the
// cached weights at the rate of a plain copy.
double h200_iteration_floor(const CudaCase& c, bool cached_weights);

}  // namespace lla::bench
