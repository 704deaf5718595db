#include "regression/run.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <deque>
#include <limits>
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
  Batch(Device device, const RegressionSetting& setting, const std::vector<Series>& series,
        const std::string& implementation)
      : setting_(setting),
        series_(series),
        threads_(lla_get_num_threads()),
        memory_(open_device(device)),
        attention_(*memory_, setting, implementation),
        arrays_(*memory_, DeviceBuffer::Where::host),
        errors_(series.size()) {
    const int64_t capacity = batch_size(device, setting.d);
    const int64_t size = capacity * setting.length * setting.d;
    k_ = q_ = arrays_.require_as<float>(size * (setting.query_noise ? 4 : 2));
    v_ = target_ = k_ + size;
    if (setting.query_noise) q_ = k_ + 2 * size, target_ = k_ + 3 * size;
    for (size_t s = 0; s < series.size(); ++s) {
      if (series[s].model == Model::lla) ridges_.push_back(series[s].ridge);
      for (auto& form : errors_[s]) form.resize(attends(series[s]) ? 0 : capacity * setting.length);
    }
    attends_ = std::any_of(series.begin(), series.end(), attends);
    // Softmax attention alone is LLA with an infinite ridge.
    if (ridges_.empty()) ridges_.push_back(std::numeric_limits<double>::infinity());
    for (int t = 0; t < threads_; ++t) data_.emplace_back(setting);
  }

  ~Batch() {
    try {
      memory_->synchronize();  // a run that was stopped leaves work behind that still reads the arrays
    } catch (const Failure&) {
    }
  }

  // Makes the data, begins the attention and, beside it where that runs on a GPU, computes the other models.
  void start(int64_t first, int64_t count, RunSummary& seconds) {
    first_ = first, count_ = count;
    auto begin = Clock::now();
    parallel_for(count, threads_, [&](int64_t b, int worker) { data_[worker].generate(first + b, sequence(b)); });
    seconds.data_seconds += since(begin);
    begin = Clock::now();
    if (attends_) attention_.start({count, k_, v_, q_, target_}, ridges_, threads_);
    std::vector<size_t> others;
    for (size_t s = 0; s < series_.size(); ++s) {
      if (!attends(series_[s])) others.push_back(s);
    }
    parallel_for(count, threads_, [&](int64_t b, int) {
      for (const size_t s : others) compute(s, b);
    });
    seconds.model_seconds += since(begin);
  }

  void finish(Sums& sums, RunSummary& seconds) {
    const auto begin = Clock::now();
    if (attends_) attention_.finish();
    seconds.waited_seconds += since(begin);
    seconds.model_seconds += since(begin);
    for (int strict = 0; strict < 2; ++strict) {
      for (size_t s = 0, lla = 0; s < series_.size(); ++s) {
        const size_t place = series_[s].model == Model::lla ? lla++ : ridges_.size();
        std::vector<double>& sum = sums.error[strict][s];
        for (int64_t b = 0; b < count_; ++b) {
          const double* e = attends(series_[s]) ? attention_.errors(strict == 1, place, b)
                                                : errors_[s][strict].data() + b * setting_.length;
          for (int i = 0; i < setting_.length; ++i) sum[i] += e[i];
        }
      }
    }
    sums.sequences += count_;
  }

 private:
  static bool attends(const Series& s) { return s.model == Model::lla || s.model == Model::softmax; }

  Sequence sequence(int64_t b) const {
    const int64_t at = b * setting_.length * setting_.d;
    return {k_ + at, v_ + at, q_ + at, target_ + at};
  }

  void compute(size_t s, int64_t b) {
    const int length = setting_.length, d = setting_.d;
    const Errors out{errors_[s][0].data() + b * length, errors_[s][1].data() + b * length};
    if (series_[s].model == Model::linear) linear_errors(length, d, sequence(b), out);
    if (series_[s].model == Model::mesanet) mesanet_errors(length, d, series_[s].ridge, sequence(b), out);
    if (series_[s].model == Model::random) {
      random_errors(length, d, stream(setting_, first_ + b, Draw::predictor), sequence(b), out);
    }
  }

  RegressionSetting setting_;
  std::vector<Series> series_;
  std::vector<double> ridges_;
  bool attends_ = false;
  int threads_;
  std::unique_ptr<DeviceMemory> memory_;
  Attention attention_;
  DeviceBuffer arrays_;
  float *k_ = nullptr, *v_ = nullptr, *q_ = nullptr, *target_ = nullptr;
  std::vector<PiecewiseLinear> data_;
  std::vector<std::array<std::vector<double>, 2>> errors_;  // [series][strict], (sequence, position)
  int64_t first_ = 0, count_ = 0;
};

// Two batches on a GPU: while it works on one, the host makes the next and its other models.
class Pipeline {
 public:
  Pipeline(const RegressionRun& request, const RegressionSetting& setting, const std::vector<Series>& series,
           int64_t done)
      : setting_(setting), batch_(batch_size(request.device, setting.d)), next_(done) {
    const int slots = request.device == Device::cuda ? 2 : 1;
    for (int i = 0; i < slots; ++i)
      idle_.push_back(std::make_unique<Batch>(request.device, setting, series, request.implementation));
  }

  // Adds one more batch to the sums.
  void step(Sums& sums, RunSummary& seconds) {
    while (!idle_.empty() && next_ < setting_.sequences) {
      const int64_t count = std::min(batch_, setting_.sequences - next_);
      idle_.front()->start(next_, count, seconds);
      next_ += count;
      running_.push_back(std::move(idle_.front()));
      idle_.pop_front();
    }
    running_.front()->finish(sums, seconds);
    idle_.push_back(std::move(running_.front()));
    running_.pop_front();
  }

 private:
  RegressionSetting setting_;
  int64_t batch_, next_;
  std::deque<std::unique_ptr<Batch>> idle_, running_;
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

// What is not yet among the results: everything, or what a sweep adds.
std::vector<Series> missing(const Results& results, const RegressionSetting& setting) {
  std::vector<Series> list = series(setting);
  std::erase_if(list, [&](const Series& s) { return results.contains(identity(setting, s)); });
  return list;
}

}  // namespace

int64_t batch_size(Device device, int d) { return device == Device::cpu ? 16 : std::clamp(16384 / d, 128, 512); }

RunSummary run(const RegressionRun& request, const Progress& progress) {
  for (const auto& s : request.settings) {
    if (const std::string wrong = problem_with(s); !wrong.empty()) throw Failure(wrong);
  }
  open_device(request.device);  // or a refusal before anything is written
  Results results(request.out, request.task, shared_settings(request), request.command, request.device);
  require_writable_folder(request.out / "partial");

  RunSummary summary;
  const auto start = Clock::now();
  double total = 0, before = 0;
  for (const auto& s : request.settings) total += cost(s);
  for (const auto& setting : request.settings) {
    const std::string label = fmt::format("d {} segment {}", setting.d, setting.segment);
    const auto setting_start = Clock::now();
    if (const std::vector<Series> list = missing(results, setting); !list.empty()) {
      const fs::path path = checkpoint_path(request.out, setting, list);
      Sums sums = read_checkpoint(path, setting, list.size());
      Pipeline pipeline(request, setting, list, sums.sequences);
      auto written = Clock::now();
      while (sums.sequences < setting.sequences) {
        progress.report((before + cost(setting) * sums.sequences / setting.sequences) / total, label);
        pipeline.step(sums, summary);
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
      for (Json& record : to_records(setting, list, sums)) results.add(std::move(record));
      results.write();
      write_curves(request.out, results.records());
      fs::remove(path);
    }
    summary.setting_seconds.emplace_back(setting, since(setting_start));
    before += cost(setting);
    progress.report(before / total, label);
  }
  if (request.task != "regression") {  // a study is read as a whole
    results.set_summary("finished", true);
    results.write();
  }
  std::error_code ignored;
  fs::remove(request.out / "partial", ignored);  // stays when another run left something in it
  summary.finished = true;
  summary.seconds = since(start);
  return summary;
}

}  // namespace lla::experiments
