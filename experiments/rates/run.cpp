#include "rates/run.hpp"

#include <cmath>

#include <fmt/core.h>

#include "common/parallel.hpp"
#include "common/statistics.hpp"
#include "lla/lla.h"
#include "rates/estimators.hpp"

namespace lla::experiments {
namespace {

constexpr std::array<const char*, 3> kEstimators = {"global_linear", "local_constant", "local_linear"};
constexpr int kTestPoints = 512;   // where the integral over the ball is sampled, fresh for every repetition
constexpr int kProfileBins = 40;   // of the distance to the boundary
constexpr int kProfileLeast = 30;  // points a bin needs to be shown

double bandwidth(const RatesRun& run, int estimator, int d, double n) {
  return run.bandwidth * std::pow(n, -1.0 / (d + (estimator == 1 ? 3 : 4)));
}

double ball_volume(int d) { return std::pow(M_PI, d / 2.0) / std::tgamma(d / 2.0 + 1); }

// One repetition: integrated squared error of each estimator, whole, in the boundary layer, and by distance to the
// boundary.
struct Repetition {
  double total[3] = {}, boundary[3] = {};
  double profile[3][kProfileBins] = {};
  double profile_count[kProfileBins] = {};
};

Repetition repeat(const RatesRun& run, int d, int64_t n, int index) {
  const uint64_t item = static_cast<uint64_t>(n) << 16 | static_cast<uint64_t>(index);
  const Sample sample(Stream(run.seed, item, 2 * d), d, n, run.noise);
  const Stream tests(run.seed, item, 2 * d + 1);
  const double h[3] = {0, bandwidth(run, 1, d, double(n)), bandwidth(run, 2, d, double(n))};
  Repetition r;
  for (int t = 0; t < kTestPoints; ++t) {
    const Point x = ball_point(tests, d, t, kTestPoints);
    const double truth = target(d, x);
    const auto [constant, linear] = sample.local(x, h[1], h[2]);
    const double estimate[3] = {sample.global_linear(x), constant, linear};
    double squares = 0;
    for (int j = 0; j < d; ++j) squares += x[j] * x[j];
    const double distance = 1 - std::sqrt(squares);
    const int bin = std::min(kProfileBins - 1, static_cast<int>(distance * kProfileBins));
    r.profile_count[bin] += 1;
    for (int e = 0; e < 3; ++e) {
      const double squared = (estimate[e] - truth) * (estimate[e] - truth);
      const double part = squared * ball_volume(d) / kTestPoints;
      r.total[e] += part;
      if (distance < h[e]) r.boundary[e] += part;
      r.profile[e][bin] += squared;
    }
  }
  return r;
}

// The records of one (d, n): one per estimator.
std::vector<Json> measure(const RatesRun& run, int d, int64_t n) {
  std::vector<Repetition> repetitions(run.repetitions);
  parallel_for(run.repetitions, lla_get_num_threads(),
               [&](int64_t i, int) { repetitions[i] = repeat(run, d, n, int(i)); });
  std::vector<Json> records;
  for (int e = 0; e < 3; ++e) {
    std::vector<double> errors, boundary;
    std::vector<double> profile(kProfileBins, 0.0), count(kProfileBins, 0.0);
    for (const Repetition& r : repetitions) {
      errors.push_back(r.total[e]);
      boundary.push_back(r.boundary[e]);
      for (int b = 0; b < kProfileBins; ++b) profile[b] += r.profile[e][b], count[b] += r.profile_count[b];
    }
    Json by_distance = Json::array();  // null where too few test points fell
    for (int b = 0; b < kProfileBins; ++b)
      by_distance.push_back(count[b] >= kProfileLeast ? Json(profile[b] / count[b]) : Json());
    records.push_back({{"task", "rates"},
                       {"kind", "error"},
                       {"d", d},
                       {"n", n},
                       {"estimator", kEstimators[e]},
                       {"bandwidth", e == 0 ? Json() : Json(bandwidth(run, e, d, double(n)))},
                       {"noise", run.noise},
                       {"repetitions", run.repetitions},
                       {"ise_mean", mean(errors)},
                       {"ise_boundary_mean", mean(boundary)},
                       {"ise", errors},
                       {"squared_error_by_distance", by_distance}});
  }
  return records;
}

// Fitted exponents, one per dimension and estimator, from the error records. The theory is about n to infinity; at
// finite n the boundary layer, a share of about d h of the ball, has errors of its own size, so the error is C n^-rate
// (1 + c h + ...). "slope" allows for that term, "plain_slope" is the straight line through the points.
Json slopes(const Json& records, const RatesRun& run) {
  Json fits = Json::array();
  const int intervals = 2 * static_cast<int>(run.dims.size());  // of the two local estimators
  for (int d : run.dims) {
    for (const char* estimator : kEstimators) {
      std::vector<Measured> points;
      for (const Json& r : records) {
        if (!Results::matches(r, {{"d", d}, {"estimator", estimator}})) continue;
        points.push_back({r["n"].get<double>(), r["ise"], r["bandwidth"].is_null() ? 0 : r["bandwidth"].get<double>()});
      }
      const Slope plain = fit_exponent(points, false, intervals);
      const Slope fit = std::string(estimator) == "global_linear" ? plain : fit_exponent(points, true, intervals);
      fits.push_back({{"d", d},
                      {"estimator", estimator},
                      {"theory", theoretical_rate(estimator, d)},
                      {"slope", fit.value},
                      {"low", fit.low},
                      {"high", fit.high},
                      {"plain_slope", plain.value},
                      {"plain_low", plain.low},
                      {"plain_high", plain.high},
                      {"plain_intercept", plain.intercept}});
    }
  }
  return fits;
}

}  // namespace

double theoretical_rate(const std::string& estimator, int d) {
  if (estimator == "local_constant") return -3.0 / (d + 3);
  if (estimator == "local_linear") return -4.0 / (d + 4);
  return 0;
}

std::vector<int64_t> rate_sizes(int steps_per_decade) {
  std::vector<int64_t> sizes;
  for (int i = 0; i <= 2 * steps_per_decade; ++i)
    sizes.push_back(std::llround(std::pow(10.0, 4 + double(i) / steps_per_decade)));
  return sizes;
}

bool run(const RatesRun& request, const Progress& progress) {
  const Json settings = {{"seed", request.seed},
                         {"noise", request.noise},
                         {"bandwidth", request.bandwidth},
                         {"repetitions", request.repetitions},
                         {"test_points", kTestPoints},
                         {"target", "4 x1 + 2 |x|^2 on the unit ball, x uniform"},
                         {"kernel", "1 - |u|^2 on |u| < 1"}};
  Results results(request.out, "rates", settings, request.command);
  double total = 0, done = 0;
  for (int64_t n : request.sizes) total += double(n) * request.dims.size();
  for (int d : request.dims) {
    for (int64_t n : request.sizes) {
      if (!results.contains({{"d", d}, {"n", n}})) {
        for (Json& record : measure(request, d, n)) results.add(std::move(record));
        results.write();
      }
      done += double(n);
      progress.report(done / total, fmt::format("d {} n {}", d, n));
      if (progress.stop()) return false;
    }
  }
  results.set_summary("slopes", slopes(results.records(), request));
  results.write();
  return true;
}

}  // namespace lla::experiments
