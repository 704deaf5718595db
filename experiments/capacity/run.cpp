#include "capacity/run.hpp"

#include <cmath>

#include <fmt/core.h>

#include "common/attend.hpp"
#include "common/gemm.hpp"
#include "common/random.hpp"

namespace lla::experiments {
namespace {

double squares(const std::vector<double>& x) {
  double sum = 0;
  for (const double e : x) sum += e * e;
  return sum;
}

// Sum of squared differences from v, relative to v.
template <class T>
double relative_error(const std::vector<T>& o, const std::vector<float>& v) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    difference += std::pow(double(o[i]) - v[i], 2);
    norm += double(v[i]) * v[i];
  }
  return difference / norm;
}

std::vector<double> transposed(const std::vector<double>& x, size_t rows, size_t columns) {
  std::vector<double> out(x.size());
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) out[j * rows + i] = x[i * columns + j];
  }
  return out;
}

// h x = b in place for d right-hand sides (rows of length `width`), h positive definite.
void solve(size_t d, std::vector<double>& h, std::vector<double>& b, size_t width) {
  for (size_t p = 0; p < d; ++p) {
    for (size_t r = p + 1; r < d; ++r) {
      const double f = h[r * d + p] / h[p * d + p];
      for (size_t c = p; c < d; ++c) h[r * d + c] -= f * h[p * d + c];
      for (size_t c = 0; c < width; ++c) b[r * width + c] -= f * b[p * width + c];
    }
  }
  for (size_t r = d; r-- > 0;) {
    for (size_t t = r + 1; t < d; ++t) {
      for (size_t c = 0; c < width; ++c) b[r * width + c] -= h[r * d + t] * b[t * width + c];
    }
    for (size_t c = 0; c < width; ++c) b[r * width + c] /= h[r * d + r];
  }
}

void normalise(std::vector<float>& k, int n, int d, double length) {
  for (int i = 0; i < n; ++i) {
    double sum = 0;
    for (int j = 0; j < d; ++j) sum += double(k[i * d + j]) * k[i * d + j];
    for (int j = 0; j < d; ++j) k[i * d + j] = static_cast<float>(k[i * d + j] * length / std::sqrt(sum));
  }
}

}  // namespace

Retrieval retrieve(int n, int d, bool normalised, double ridge, double mesa_ridge, std::vector<float> k,
                   const std::vector<float>& v) {
  const size_t rows = n, dim = d;
  Retrieval r{};
  const std::vector<double> values(v.begin(), v.end());
  const double norm = squares(values);
  // Linear attention, S k_j with S = sum of v k'.
  if (normalised) normalise(k, n, d, 1);
  {
    const std::vector<double> keys(k.begin(), k.end());
    std::vector<double> state(dim * dim), o(rows * dim), bias(rows * dim), rest(rows * dim);
    gemm(dim, dim, rows, 1.0, {keys.data(), 1, dim}, values.data(), dim, 0.0, state.data(), dim);
    gemm(rows, dim, dim, 1.0, {keys.data(), dim, 1}, state.data(), dim, 0.0, o.data(), dim);
    for (size_t i = 0; i < rows; ++i) {
      double length = 0;
      for (size_t j = 0; j < dim; ++j) length += keys[i * dim + j] * keys[i * dim + j];
      for (size_t j = 0; j < dim; ++j) {
        bias[i * dim + j] = (length - 1) * values[i * dim + j];
        rest[i * dim + j] = o[i * dim + j] - length * values[i * dim + j];
      }
    }
    r.linear = relative_error(o, v);
    r.linear_bias = squares(bias) / norm;
    r.linear_interference = squares(rest) / norm;
  }
  if (normalised) normalise(k, n, d, std::sqrt(double(d)));
  // MesaNet, S H^-1 k_j with H = sum of k k' + ridge I.
  {
    const std::vector<double> keys(k.begin(), k.end());
    std::vector<double> state(dim * dim), h(dim * dim), o(rows * dim), x = transposed(keys, rows, dim);
    gemm(dim, dim, rows, 1.0, {keys.data(), 1, dim}, values.data(), dim, 0.0, state.data(), dim);
    gemm(dim, dim, rows, 1.0, {keys.data(), 1, dim}, keys.data(), dim, 0.0, h.data(), dim);
    for (size_t j = 0; j < dim; ++j) h[j * dim + j] += mesa_ridge;
    solve(dim, h, x, rows);
    gemm(rows, dim, dim, 1.0, {x.data(), 1, rows}, state.data(), dim, 0.0, o.data(), dim);
    r.mesanet = relative_error(o, v);
  }
  const auto attended = attend<float>({1, n, n, d, d, k.data(), k.data(), v.data(), {ridge}, 1 / std::sqrt(double(d))});
  r.lla = relative_error(attended.lla, v);
  r.softmax = relative_error(attended.softmax, v);
  return r;
}

bool run(const CapacityRun& request, const Progress& progress) {
  const Json settings = {{"seed", request.seed},
                         {"ridge", request.ridge},
                         {"mesa_ridge", request.mesa_ridge},
                         {"repetitions", request.repetitions},
                         {"scale", "1/sqrt(d)"},
                         {"keys", "N(0, I); normalised: length 1 for linear attention, sqrt(d) for the others"},
                         {"values", "N(0, I), independent of the keys"}};
  Results results(request.out, "capacity", settings, request.command);
  double total = 0, done = 0;
  for (const int n : request.pairs) total += 2.0 * n * double(request.dims.size());
  for (const int d : request.dims) {
    for (const bool normalised : {false, true}) {
      for (const int n : request.pairs) {
        const Json key = {{"d", d}, {"normalised", normalised}, {"pairs", n}};
        if (!results.contains(key)) {
          Retrieval sum{};
          for (int i = 0; i < request.repetitions; ++i) {
            const size_t size = size_t(n) * d;
            std::vector<float> k(size), v(size);
            const uint64_t item = uint64_t(n) << 32 | uint64_t(d) << 16 | uint64_t(i);
            Stream(request.seed, item, 0).normal(k.data(), k.size());
            Stream(request.seed, item, 1).normal(v.data(), v.size());
            const Retrieval one = retrieve(n, d, normalised, request.ridge, request.mesa_ridge, std::move(k), v);
            sum.linear += one.linear, sum.linear_bias += one.linear_bias;
            sum.linear_interference += one.linear_interference;
            sum.softmax += one.softmax, sum.mesanet += one.mesanet, sum.lla += one.lla;
          }
          Json record = {{"task", "capacity"}};
          record.update(key);
          const double count = request.repetitions;
          record.update({{"linear", sum.linear / count},
                         {"linear_bias", sum.linear_bias / count},
                         {"linear_interference", sum.linear_interference / count},
                         {"softmax", sum.softmax / count},
                         {"mesanet", sum.mesanet / count},
                         {"lla", sum.lla / count}});
          results.add(std::move(record));
          results.write();
        }
        done += n;
        progress.report(done / total, fmt::format("d {} pairs {}", d, n));
        if (progress.stop()) return false;
      }
    }
  }
  return true;
}

}  // namespace lla::experiments
