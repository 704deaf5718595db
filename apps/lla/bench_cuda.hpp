// Parts of `lla bench ... --device cuda`.
#pragma once

#include "bench.hpp"
#include "bench/cuda_bench.hpp"

namespace lla::app {

nlohmann::ordered_json cuda_record(const bench::CudaCase& c, const bench::CudaResult& r);

// `--table`: every shape the project has a target for.
void run_cuda_table(const BenchOptions& o, BenchReport& report, const std::function<void(double)>& progress);

}  // namespace lla::app
