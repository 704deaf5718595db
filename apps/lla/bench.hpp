// What `lla bench` measures and how a device plugs in: one BenchDevice, listed in bench.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/case.hpp"
#include "core/problem.hpp"

namespace lla::app {

enum class BenchWhat { forward, backward, cg, decode };
const char* name(BenchWhat what);

struct BenchOptions {
  BenchWhat what = BenchWhat::forward;
  DType dtype = DType::none;  // none: the device's default
  int64_t batch = 1;
  int64_t heads = 1;
  std::vector<int64_t> lengths;  // empty: the default
  std::vector<int64_t> dims;     // empty: the default
  data::Kind kind = data::Kind::randn;
  std::shared_ptr<const std::vector<data::TrainedHead>> trained;  // instead of a kind, where given
  double ridge = 0.1;
  bool causal = true;
  double tolerance = 1e-3;
  Solver solver = Solver::automatic;
  Weights weights = Weights::automatic;
  bool given_x = false;            // Parallax instead of a solve
  std::string implementation;      // empty: the library's choice
  int threads = 0;                 // 0: the library's choice
  double seconds = 0;              // per case; 0: the default
  int64_t group = 1, queries = 1;  // decode: query heads per key head, new tokens of a sequence
  int64_t page_size = 0;           // decode; 0: a contiguous cache
  bool head_major = false;         // decode: of a head all keys, instead of a key's heads, side by side
  bool batch_invariant = false;
  bool table = false;  // every shape of docs/benchmarks instead of lengths and dims
};

// The case of these options; default_dtype where they name none.
bench::Case case_of(const BenchOptions& o, DType default_dtype, int64_t dim, int64_t length);

// What is measured, with defaults where no length and no head dimension is named.
std::vector<int64_t> lengths_of(const BenchOptions& o);
std::vector<int64_t> dims_of(const BenchOptions& o);

// A table for people, the same as records for machines, and sentences that belong under the table.
struct BenchReport {
  struct Column {
    std::string title;
    std::string unit;
  };
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes;
  std::vector<std::string> failures;  // cases without a result, each with its reason: the command fails in the end
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
};

struct BenchDevice {
  const char* name;
  // Empty when the device can measure this, otherwise the reason it cannot.
  std::string (*refuse)(const BenchOptions&);
  // Throws std::runtime_error with the reason when a measurement fails. progress gets a number growing to 1.
  void (*run)(const BenchOptions&, BenchReport&, const std::function<void(double)>& progress);
};

// `lla bench decode`, whatever the device.
void run_decode(const BenchOptions&, core::Device, BenchReport&, const std::function<void(double)>& progress);

extern const BenchDevice cpu_bench;
#if LLA_HAVE_CUDA
extern const BenchDevice cuda_bench;
#endif

}  // namespace lla::app
