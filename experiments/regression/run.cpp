#include "regression/run.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include <fmt/core.h>

#include "common/parallel.hpp"
#include "lla/lla.h"
#include "regression/attention.hpp"
#include "regression/checkpoint.hpp"
#include "regression/curves.hpp"
#include "regression/data.hpp"
#include "regression/models.hpp"

namespace lla::experiments {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// One batch of sequences through every model. Errors are added in the order of the sequences, so sums do not depend on
// how the work was spread over threads or runs.
class Batch {
 public:
  Batch(DeviceMemory& memory, const RegressionSetting& setting, const std::string& implementation)
      : setting_(setting), threads_(lla_get_num_threads()), attention_(memory, setting, implementation) {
    const size_t size = static_cast<size_t>(kBatch) * setting.length * setting.d;
    for (auto* v : {&k_, &v_, &lla_, &softmax_}) v->resize(size);
    for (auto& form : errors_) {
      for (auto& model : form) model.resize(kBatch * setting.length);
    }
    for (int t = 0; t < threads_; ++t) data_.emplace_back(setting);
  }

  // Returns the seconds spent inside the models.
  double run(int64_t first, int64_t count, Sums& sums) {
    const int length = setting_.length, d = setting_.d;
    const int64_t stride = int64_t{length} * d;
    parallel_for(count, threads_, [&](int64_t b, int worker) {
      data_[worker].generate(first + b, k_.data() + b * stride, v_.data() + b * stride);
    });
    double kernel_seconds = 0;
    for (int strict = 0; strict < 2; ++strict) {
      const auto start = Clock::now();
      attention_.run(count, k_.data(), v_.data(), strict == 1, lla_.data(), softmax_.data());
      kernel_seconds += since(start);
      parallel_for(count, threads_, [&](int64_t b, int) {
        squared_errors(length, d, lla_.data() + b * stride, v_.data() + b * stride, at(strict, Model::lla, b));
        squared_errors(length, d, softmax_.data() + b * stride, v_.data() + b * stride, at(strict, Model::softmax, b));
      });
    }
    const auto start = Clock::now();
    parallel_for(count, threads_, [&](int64_t b, int) {
      const float* k = k_.data() + b * stride;
      const float* v = v_.data() + b * stride;
      linear_errors(length, d, k, v, both(Model::linear, b));
      mesanet_errors(length, d, setting_.mesa_ridge, k, v, both(Model::mesanet, b));
      random_errors(length, d, stream(setting_, first + b, Draw::predictor), k, v, both(Model::random, b));
    });
    kernel_seconds += since(start);
    add(count, sums);
    return kernel_seconds;
  }

 private:
  double* at(int strict, Model model, int64_t b) { return errors_[strict][int(model)].data() + b * setting_.length; }
  Errors both(Model model, int64_t b) { return {at(0, model, b), at(1, model, b)}; }

  void add(int64_t count, Sums& sums) {
    for (int strict = 0; strict < 2; ++strict) {
      for (int model = 0; model < kModels; ++model) {
        std::vector<double>& sum = sums.error[strict][model];
        for (int64_t b = 0; b < count; ++b) {
          const double* e = at(strict, static_cast<Model>(model), b);
          for (int i = 0; i < setting_.length; ++i) sum[i] += e[i];
        }
      }
    }
    sums.sequences += count;
  }

  RegressionSetting setting_;
  int threads_;
  Attention attention_;
  std::vector<PiecewiseLinear> data_;
  std::vector<float> k_, v_, lla_, softmax_;
  std::vector<double> errors_[2][kModels];
};

// What all settings of a directory share.
Json shared_settings(const RegressionRun& run) {
  const RegressionSetting& s = run.settings.front();
  return {{"length", s.length},
          {"seed", s.seed},
          {"device", run.device == Device::cuda ? "cuda" : "cpu"},
          {"implementation", run.implementation.empty() ? "auto" : run.implementation},
          {"tolerance", kRegressionTolerance},
          {"arithmetic", "fp32 attention and linear attention, fp64 MesaNet, errors summed in fp64"}};
}

// A rough cost of a sequence, for the progress bar: pairs of positions times dimension, and the exponentials.
double cost(const RegressionSetting& s) { return static_cast<double>(s.sequences) * (s.d + 24); }

// A setting is done when its LLA and MesaNet records are there (their ridges tell sweeps apart).
bool done(const Results& results, const RegressionSetting& s) {
  Json lla = identity(s), mesanet = identity(s);
  lla["model"] = "lla", lla["ridge"] = s.ridge;
  mesanet["model"] = "mesanet", mesanet["ridge"] = s.mesa_ridge;
  return results.contains(lla) && results.contains(mesanet);
}

// Models a sweep over another model's ridge does not change are recorded once.
void add_new(Results& results, const std::vector<Json>& records) {
  for (const Json& record : records) {
    Json key = record;
    key.erase("mse");
    key.erase("mse_mean");
    if (!results.contains(key)) results.add(record);
  }
}

}  // namespace

RunSummary run(const RegressionRun& request, const Progress& progress) {
  for (const auto& s : request.settings) {
    if (const std::string wrong = problem_with(s); !wrong.empty()) throw Failure(wrong);
  }
  const std::unique_ptr<DeviceMemory> memory = open_device(request.device);
  Results results(request.out, "regression", shared_settings(request), request.command, request.device);
  require_writable(request.out / "partial");

  RunSummary summary;
  const auto start = Clock::now();
  double total = 0, before = 0;
  for (const auto& s : request.settings) total += cost(s);
  for (const auto& setting : request.settings) {
    const std::string label = fmt::format("d {} segment {}", setting.d, setting.segment);
    const auto setting_start = Clock::now();
    if (!done(results, setting)) {
      const fs::path path = checkpoint_path(request.out, setting);
      Sums sums = read_checkpoint(path, setting);
      Batch batch(*memory, setting, request.implementation);
      auto written = Clock::now();
      while (sums.sequences < setting.sequences) {
        progress.report((before + cost(setting) * sums.sequences / setting.sequences) / total, label);
        summary.kernel_seconds += batch.run(sums.sequences, std::min(kBatch, setting.sequences - sums.sequences), sums);
        const bool stop = progress.stop();
        if (stop || since(written) >= request.checkpoint_seconds) {
          write_checkpoint(path, setting, sums);
          written = Clock::now();
        }
        if (stop) {
          summary.seconds = since(start);
          return summary;
        }
      }
      add_new(results, to_records(setting, sums));
      results.write();
      write_curves(request.out, results.records());
      fs::remove(path);
    }
    summary.setting_seconds.emplace_back(setting, since(setting_start));
    before += cost(setting);
    progress.report(before / total, label);
  }
  std::error_code ignored;
  fs::remove(request.out / "partial", ignored);  // stays when another run left something in it
  summary.finished = true;
  summary.seconds = since(start);
  return summary;
}

}  // namespace lla::experiments
