// Retrieval error, one-dimensional fits and fixed numbers of iterations, each against something known.
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include "capacity/run.hpp"
#include "common/random.hpp"
#include "data/data.hpp"
#include "data/npy.hpp"
#include "interpolation/run.hpp"
#include "scratch.hpp"
#include "solver/fixed.hpp"

namespace lla::experiments {
namespace {

std::vector<float> normal(uint64_t purpose, size_t count) {
  std::vector<float> x(count);
  Stream(7, 0, purpose).normal(x.data(), count);
  return x;
}

// ---- retrieval -----------------------------------------------------------------------------------------------------

// The paper's formula, term by term: S k_j - v_j = (|k_j|^2 - 1) v_j + sum over the others of v (k.k_j).
TEST(Capacity, LinearAttentionIsBiasAndInterference) {
  const int n = 7, d = 6;
  const std::vector<float> k = normal(0, n * d), v = normal(1, n * d);
  double whole = 0, bias = 0, rest = 0, norm = 0;
  for (int j = 0; j < n; ++j) {
    for (int c = 0; c < d; ++c) {
      double own = 0, others = 0;
      for (int i = 0; i < n; ++i) {
        double dot = 0;
        for (int e = 0; e < d; ++e) dot += double(k[i * d + e]) * k[j * d + e];
        (i == j ? own : others) += (i == j ? dot - 1 : dot) * v[i * d + c];
      }
      whole += (own + others) * (own + others), bias += own * own, rest += others * others;
      norm += double(v[j * d + c]) * v[j * d + c];
    }
  }
  const Retrieval r = retrieve(n, d, false, 0.1, 1, k, v);
  EXPECT_NEAR(r.linear, whole / norm, 1e-9 * whole / norm);
  EXPECT_NEAR(r.linear_bias, bias / norm, 1e-9 * bias / norm);
  EXPECT_NEAR(r.linear_interference, rest / norm, 1e-9 * rest / norm);
  EXPECT_LT(retrieve(n, d, true, 0.1, 1, k, v).linear_bias, 1e-12);  // keys of length 1
}

// A ridge regression through fewer pairs than dimensions interpolates as its ridge vanishes; one pair is kept by all.
TEST(Capacity, WhatMustBeExactIs) {
  const std::vector<float> k = normal(2, 5 * 16), v = normal(3, 5 * 16);
  EXPECT_LT(retrieve(5, 16, false, 0.1, 1e-9, k, v).mesanet, 1e-12);
  const std::vector<float> one_k = normal(4, 16), one_v = normal(5, 16);
  const Retrieval one = retrieve(1, 16, true, 0.1, 1e-9, one_k, one_v);
  for (const double error : {one.linear, one.softmax, one.mesanet, one.lla}) EXPECT_LT(error, 1e-10);
  // Values that are one for all keys: both kinds of attention return it.
  std::vector<float> same(5 * 16, 2.0f);
  const Retrieval constant = retrieve(5, 16, false, 0.1, 1, k, same);
  EXPECT_LT(constant.softmax, 1e-10);
  EXPECT_LT(constant.lla, 1e-10);
}

// ---- fits in one dimension -----------------------------------------------------------------------------------------

std::vector<double> grid(int n) {
  std::vector<double> x(n);
  for (int i = 0; i < n; ++i) x[i] = -1 + 2.0 * i / (n - 1);
  return x;
}

TEST(Interpolation, EndsAreTheLeastSquaresLineAndTheLocalMean) {
  const std::vector<double> x = grid(37), at = grid(11);
  std::vector<double> y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(front_target(x[i]) + 0.1 * std::sin(50.0 * double(i)));
  const double n = static_cast<double>(x.size());
  const double mx = std::accumulate(x.begin(), x.end(), 0.0) / n, my = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xx = 0, xy = 0;
  for (size_t i = 0; i < x.size(); ++i) xx += (x[i] - mx) * (x[i] - mx), xy += (x[i] - mx) * (y[i] - my);
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<double> line = fit(x, y, at, infinity, 1e-9).local_linear;
  const Fitted soft = fit(x, y, at, 0.2, infinity);
  for (size_t i = 0; i < at.size(); ++i) {
    EXPECT_NEAR(line[i], my + xy / xx * (at[i] - mx), 1e-6);
    double weight = 0, sum = 0;
    for (size_t j = 0; j < x.size(); ++j) {
      const double w = std::exp(-std::pow(x[j] - at[i], 2) / (2 * 0.2 * 0.2));
      weight += w, sum += w * y[j];
    }
    EXPECT_NEAR(soft.local_constant[i], sum / weight, 1e-9);
    EXPECT_NEAR(soft.local_linear[i], sum / weight, 1e-9);
  }
}

// ---- fixed numbers of iterations -----------------------------------------------------------------------------------

TEST(FixedIterations, ReachTheSolutionInAsManyStepsAsDimensions) {
  const int64_t n = 60, d = 16;
  const data::Tensors t = data::make(data::Kind::randn, 3, {1, n, n, 1, 1, d, d});
  const Keys keys(n, d, {t.k.begin(), t.k.end()}, {t.v.begin(), t.v.end()});
  const std::vector<float> q(t.q.end() - d, t.q.end());
  const RowSystem system(keys, n, q.data(), 0.25);
  for (const Method method : {Method::cg, Method::diagonal, Method::chebyshev}) {
    const auto errors = system.errors(method, 0.1);
    EXPECT_LT(errors[kSteps.size() - 1], 1e-7) << kMethodNames[int(method)];
    if (method != Method::chebyshev) {
      EXPECT_LT(errors[5], 1e-9) << kMethodNames[int(method)];  // T = 32 > d
    }
    EXPECT_GT(errors[0], 1e-3);
  }
  // After T steps, the same as the row solver that stops there (its tolerance never reached).
  const RowOptions two{.form = Form::centered,
                       .arithmetic = Arithmetic::f64,
                       .scale = 0.25,
                       .ridge = 0.1,
                       .tolerance = 0,
                       .max_iterations = 2};
  RowOptions many = two;
  many.tolerance = 1e-14, many.max_iterations = 200;
  const std::vector<double> o = solve_row(keys, n, q.data(), two).o, exact = solve_row(keys, n, q.data(), many).o;
  double difference = 0, norm = 0;
  for (int64_t c = 0; c < d; ++c) difference += std::pow(o[c] - exact[c], 2), norm += exact[c] * exact[c];
  EXPECT_NEAR(system.errors(Method::cg, 0.1)[1], std::sqrt(difference / norm), 1e-8);
}

void write_npy(const fs::path& path, const std::string& type, const std::string& shape, const std::string& data) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file << std::string("\x93NUMPY\x01\x00", 8) << char(header.size() & 255) << char(header.size() >> 8) << header
       << data;
}

TEST(Npy, ReadsWhatItSaysAndRefusesTheRest) {
  const Scratch scratch;
  fs::create_directories(scratch.path);
  const fs::path file = scratch.path / "x.npy";
  const float numbers[6] = {1, -2, 3.5, 0, 5, 6};
  const std::string bytes(reinterpret_cast<const char*>(numbers), sizeof numbers);
  write_npy(file, "<f4", "(2, 3)", bytes);
  const data::Array a = data::read_npy(file);
  EXPECT_EQ(a.rows, 2);
  EXPECT_EQ(a.columns, 3);
  EXPECT_EQ(a.data, std::vector<float>(numbers, numbers + 6));
  write_npy(file, "<f2", "(2,)", std::string("\x00\x3c\x00\xc0", 4));
  EXPECT_EQ(data::read_npy(file).data, (std::vector<float>{1, -2}));
  const auto refused = [&](const std::string& why) {
    try {
      data::read_npy(file);
    } catch (const std::runtime_error& failure) {
      EXPECT_NE(std::string(failure.what()).find(why), std::string::npos) << failure.what();
      return;
    }
    ADD_FAILURE() << "accepted: " << why;
  };
  write_npy(file, "<f4", "(2, 3)", bytes.substr(1));
  refused("does not hold as many numbers");
  write_npy(file, "<i4", "(6,)", bytes);
  refused("does not hold f16, f32 or f64");
  write_npy(file, "<f4", "(1, 2, 3)", bytes);
  refused("one or two dimensions");
  std::ofstream(file) << "something else";
  refused("is not a .npy file");
}

}  // namespace
}  // namespace lla::experiments
