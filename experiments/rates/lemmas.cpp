#include "rates/lemmas.hpp"

#include <cmath>
#include <limits>

#include <fmt/core.h>

#include "common/attend.hpp"
#include "common/statistics.hpp"
#include "rates/estimators.hpp"

namespace lla::experiments {
namespace {

constexpr int kInside = 256, kBoundary = 64;  // test points in the ball and on its boundary
constexpr int kNoises = 16;                   // independent draws of the noise in one call, a value channel each
constexpr double kRidge = 1e-9;               // far below the variance of the keys a row sees, h^2
constexpr std::array<const char*, 2> kEstimators = {"local_constant", "local_linear"};
constexpr std::array<const char*, 3> kQuantities = {"bias", "boundary_bias", "variance"};

double bandwidth(int i) { return 0.04 * std::pow(2.0, i / 2.0); }
double ball_volume(int d) { return std::pow(M_PI, d / 2.0) / std::tgamma(d / 2.0 + 1); }

// Steep across the boundary and curved along one axis only: with curvature in all directions the leading terms of the
// local linear bias at the boundary nearly cancel in two dimensions, and what is left is of higher order.
double curve(const Point& x) { return 4 * x[0] + 3 * x[0] * x[0]; }

// The exponents of the lemmas: squared bias in h, variance in 1/(n h^d).
double theory(const std::string& quantity, const std::string& estimator) {
  if (quantity == "variance") return 1;
  if (estimator == "local_linear") return 4;
  return quantity == "bias" ? 3 : 2;
}

// [quantity][estimator], of one sample.
using Measurement = std::array<std::array<double, 2>, 3>;

Measurement measure(const LemmasRun& run, int d, int64_t n, double h, int repetition) {
  const uint64_t item = static_cast<uint64_t>(n) << 16 | static_cast<uint64_t>(repetition);
  const Stream sample(run.seed, item, 2 * d), tests(run.seed, item, 2 * d + 1), noise(run.seed, item, 100 + d);
  constexpr int64_t kChannels = 1 + kNoises, kQueries = kInside + kBoundary;
  std::vector<double> x(n * d), at(kQueries * d), v(n * kChannels), truth(kQueries);
  std::vector<float> e(n * kNoises);
  noise.normal(e.data(), e.size());
  for (int64_t i = 0; i < n; ++i) {
    const Point p = ball_point(sample, d, i);
    std::copy_n(p.begin(), d, x.begin() + i * d);
    v[i * kChannels] = curve(p);  // without noise: what is off is bias
    for (int c = 0; c < kNoises; ++c) v[i * kChannels + 1 + c] = e[i * kNoises + c];
  }
  for (int64_t i = 0; i < kQueries; ++i) {
    Point p = ball_point(tests, d, i, i < kInside ? kInside : 0);
    if (i >= kInside) {
      double squares = 0;
      for (int j = 0; j < d; ++j) squares += p[j] * p[j];
      for (int j = 0; j < d; ++j) p[j] /= std::sqrt(squares);
    }
    std::copy_n(p.begin(), d, at.begin() + i * d);
    truth[i] = curve(p);
  }
  std::vector<double> keys(n * (d + 1)), queries(kQueries * (d + 1));
  extend_for_rbf(n, d, x.data(), true, keys.data());
  extend_for_rbf(kQueries, d, at.data(), false, queries.data());
  std::vector<double> ridge(d + 1, kRidge);
  ridge[d] = std::numeric_limits<double>::infinity();
  const Attended<double> out = attend<double>({.batch = 1,
                                               .queries = kQueries,
                                               .keys = n,
                                               .dim = d + 1,
                                               .value_dim = kChannels,
                                               .q = queries.data(),
                                               .k = keys.data(),
                                               .v = v.data(),
                                               .ridge = ridge,
                                               .scale = 1 / (h * h),
                                               .direct = true});
  Measurement m{};
  for (int estimator = 0; estimator < 2; ++estimator) {
    const std::vector<double>& o = estimator == 0 ? out.softmax : out.lla;
    for (int64_t i = 0; i < kQueries; ++i) {
      const double bias = std::pow(o[i * kChannels] - truth[i], 2);
      if (i >= kInside) {
        m[1][estimator] += bias / kBoundary;
        continue;
      }
      m[0][estimator] += bias * ball_volume(d) / kInside;
      for (int c = 1; c < kChannels; ++c) {
        m[2][estimator] += std::pow(o[i * kChannels + c], 2) * ball_volume(d) / kInside / kNoises;
      }
    }
  }
  return m;
}

Json slopes(const Json& records, const LemmasRun& run) {
  Json fits = Json::array();
  const int intervals = static_cast<int>(run.dims.size() * kQuantities.size() * kEstimators.size());
  for (const int d : run.dims) {
    for (const char* quantity : kQuantities) {
      const bool variance = std::string(quantity) == "variance";
      for (const char* estimator : kEstimators) {
        std::vector<Measured> points;
        for (const Json& r : records) {
          if (!Results::matches(r, {{"d", d}, {"quantity", quantity}, {"estimator", estimator}})) continue;
          const double h = r["bandwidth"];
          points.push_back({variance ? 1 / (r["n"].get<double>() * std::pow(h, d)) : h, r["values"], h});
        }
        const Slope plain = fit_exponent(points, false, intervals), fit = fit_exponent(points, true, intervals);
        fits.push_back({{"d", d},
                        {"quantity", quantity},
                        {"estimator", estimator},
                        {"theory", theory(quantity, estimator)},
                        {"slope", fit.value},
                        {"low", fit.low},
                        {"high", fit.high},
                        {"plain_slope", plain.value}});
      }
    }
  }
  return fits;
}

}  // namespace

bool run(const LemmasRun& request, const Progress& progress) {
  const Json settings = {{"seed", request.seed},
                         {"repetitions", request.repetitions},
                         {"test_points", {kInside, kBoundary}},
                         {"noise_draws", kNoises},
                         {"ridge", kRidge},
                         {"target", "4 x1 + 3 x1^2 on the unit ball, x uniform"},
                         {"kernel", "exp(-|u|^2 / (2 h^2))"}};
  Results results(request.out, "lemmas", settings, request.command);
  double total = 0, done = 0;
  for (const int64_t n : request.sizes) total += double(n) * double(request.dims.size()) * request.bandwidths;
  for (const int d : request.dims) {
    for (const int64_t n : request.sizes) {
      for (int i = 0; i < request.bandwidths; ++i) {
        const double h = bandwidth(i);
        if (!results.contains({{"d", d}, {"n", n}, {"bandwidth", h}})) {
          std::vector<Measurement> repeated;
          repeated.reserve(static_cast<size_t>(request.repetitions));
          for (int r = 0; r < request.repetitions; ++r) repeated.push_back(measure(request, d, n, h, r));
          for (size_t quantity = 0; quantity < kQuantities.size(); ++quantity) {
            // Short samples add a variance of their own to the bias (that of the design): only the longest count.
            if (quantity != 2 && n != request.sizes.back()) continue;
            for (size_t e = 0; e < kEstimators.size(); ++e) {
              std::vector<double> values;
              values.reserve(repeated.size());
              for (const Measurement& m : repeated) values.push_back(m[quantity][e]);
              results.add({{"task", "lemmas"},
                           {"d", d},
                           {"n", n},
                           {"bandwidth", h},
                           {"quantity", kQuantities[quantity]},
                           {"estimator", kEstimators[e]},
                           {"value", mean(values)},
                           {"values", values}});
            }
          }
          results.write();
        }
        done += double(n);
        progress.report(done / total, fmt::format("d {} h {:.3f}", d, h));
        if (progress.stop()) return false;
      }
    }
  }
  results.set_summary("slopes", slopes(results.records(), request));
  results.write();
  return true;
}

}  // namespace lla::experiments
