#include "interpolation/run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/attend.hpp"
#include "common/random.hpp"

namespace lla::experiments {
namespace {

constexpr int kGrid = 201;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Step {
  double bandwidth, ridge;
};

// First the weights become local, then the slope is taken away.
std::vector<Step> walk(double end) {
  return {{kInfinity, 1e-9}, {1.0, 1e-9}, {0.5, 1e-9}, {end, 1e-9},
          {end, 0.01},       {end, 0.03}, {end, 0.1},  {end, kInfinity}};
}

Json or_infinite(double x) { return std::isinf(x) ? Json("infinite") : Json(x); }

double rms_error(const std::vector<double>& at, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < at.size(); ++i) sum += std::pow(y[i] - front_target(at[i]), 2);
  return std::sqrt(sum / static_cast<double>(at.size()));
}

}  // namespace

double front_target(double x) { return 2 * x * x + 0.8 * std::sin(3 * x); }

Fitted fit(const std::vector<double>& x, const std::vector<double>& y, const std::vector<double>& at, double bandwidth,
           double ridge) {
  std::vector<double> keys(2 * x.size()), queries(2 * at.size());
  extend_for_rbf(static_cast<int64_t>(x.size()), 1, x.data(), true, keys.data());
  extend_for_rbf(static_cast<int64_t>(at.size()), 1, at.data(), false, queries.data());
  AttendArgs<double> args{.batch = 1,
                          .queries = static_cast<int64_t>(at.size()),
                          .keys = static_cast<int64_t>(x.size()),
                          .dim = 2,
                          .value_dim = 1,
                          .q = queries.data(),
                          .k = keys.data(),
                          .v = y.data(),
                          .ridge = {ridge, kInfinity},
                          .scale = std::isinf(bandwidth) ? 0 : 1 / (bandwidth * bandwidth),
                          .tolerance = 1e-12};
  const Attended<double> out = attend(args);
  return {out.lla, out.softmax};
}

bool run(const InterpolationRun& request, const Progress& progress) {
  const Json settings = {{"seed", request.seed},
                         {"observations", request.observations},
                         {"noise", request.noise},
                         {"bandwidth", request.bandwidth},
                         {"target", "2x^2 + 0.8 sin(3x) on [-1, 1]"},
                         {"weights", "exp(-(x - x')^2 / (2 bandwidth^2))"}};
  Results results(request.out, "interpolation", settings, request.command);
  if (!results.records().empty()) return true;
  const Stream stream(request.seed, 0, 0);
  std::vector<double> x(request.observations), y(x.size()), at(kGrid), truth(kGrid);
  std::vector<float> noise(x.size());
  stream.normal(noise.data(), noise.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = 2 * stream.uniform(i) - 1;
  std::sort(x.begin(), x.end());
  for (size_t i = 0; i < x.size(); ++i) y[i] = front_target(x[i]) + request.noise * noise[i];
  for (int i = 0; i < kGrid; ++i) {
    at[i] = -1 + 2.0 * i / (kGrid - 1);
    truth[i] = front_target(at[i]);
  }
  const auto record = [&](const char* kind, const char* name, double bandwidth, double ridge, const auto& xs,
                          const auto& ys, const Json& error) {
    results.add({{"task", "interpolation"},
                 {"kind", kind},
                 {"name", name},
                 {"bandwidth", or_infinite(bandwidth)},
                 {"ridge", or_infinite(ridge)},
                 {"rms_error", error},
                 {"x", xs},
                 {"y", ys}});
  };
  record("data", "observations", 0, 0, x, y, Json());
  record("data", "truth", 0, 0, at, truth, 0);
  const std::vector<double> global = fit(x, y, at, kInfinity, 1e-9).local_linear;
  const Fitted local = fit(x, y, at, request.bandwidth, 1e-9);
  record("front", "global_linear", kInfinity, 1e-9, at, global, rms_error(at, global));
  record("front", "local_constant", request.bandwidth, kInfinity, at, local.local_constant,
         rms_error(at, local.local_constant));
  record("front", "local_linear", request.bandwidth, 1e-9, at, local.local_linear, rms_error(at, local.local_linear));
  for (const Step& s : walk(request.bandwidth)) {
    const std::vector<double> curve = fit(x, y, at, s.bandwidth, s.ridge).local_linear;
    record("walk", "lla", s.bandwidth, s.ridge, at, curve, rms_error(at, curve));
  }
  results.write();
  progress.report(1, "curves");
  return true;
}

}  // namespace lla::experiments
