#include "solver/run.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

#include <fmt/core.h>

#include "common/parallel.hpp"
#include "core/convert.hpp"
#include "data/data.hpp"
#include "lla/lla.hpp"
#include "reference/reference.hpp"
#include "solver/row.hpp"

namespace lla::experiments {
namespace {

// One head's data: the inputs are exact in bf16, so that only the arithmetic differs.
struct HeadData {
  std::vector<float> q;
  Keys keys;
};

std::vector<HeadData> heads(const SolverRun& run, data::Kind kind) {
  const int64_t n = *std::max_element(run.positions.begin(), run.positions.end()), d = run.dim;
  std::vector<HeadData> list;
  for (int h = 0; h < run.rows; ++h) {
    const data::Tensors t = data::make(kind, run.seed + h, {1, n, n, 1, 1, d, d});
    const auto rounded = [](const std::vector<double>& x) {
      std::vector<float> out(x.size());
      std::transform(x.begin(), x.end(), out.begin(),
                     [](double e) { return core::to_float(core::to_bf16(static_cast<float>(e))); });
      return out;
    };
    list.push_back({rounded(t.q), Keys(n, d, rounded(t.k), rounded(t.v))});
  }
  return list;
}

// fp64, direct.
std::vector<double> exact(const HeadData& head, int64_t visible, const float* q, double scale, double ridge) {
  const int64_t d = head.keys.d;
  reference::Head h;
  h.length_q = 1, h.length_k = visible;
  h.dim = h.value_dim = d;
  h.scale = scale;
  h.q.assign(q, q + d);
  h.k.assign(head.keys.k.begin(), head.keys.k.begin() + visible * d);
  h.v.assign(head.keys.v.begin(), head.keys.v.begin() + visible * d);
  h.ridge.assign(d, ridge);
  return reference::forward(h, reference::SolveOptions{}).o;
}

struct Case {
  int position;
  double ridge;
  Form form;
  Arithmetic arithmetic;
  double tolerance;
};

// Mean iterations and errors over the heads.
Json measure(const SolverRun& run, data::Kind kind, const std::vector<HeadData>& list, const Case& c,
             const std::vector<std::vector<double>>& truth) {
  double iterations = 0, difference = 0, norm = 0, worst = 0;
  int unconverged = 0;
  const double scale = 1 / std::sqrt(double(run.dim));
  for (size_t h = 0; h < list.size(); ++h) {
    const float* q = list[h].q.data() + (c.position - 1) * run.dim;
    const RowResult r = solve_row(list[h].keys, c.position, q,
                                  {.form = c.form,
                                   .arithmetic = c.arithmetic,
                                   .scale = scale,
                                   .ridge = c.ridge,
                                   .tolerance = c.tolerance,
                                   .max_iterations = 2 * run.dim});
    double row_difference = 0, row_norm = 0;
    for (int i = 0; i < run.dim; ++i) {
      row_difference += (r.o[i] - truth[h][i]) * (r.o[i] - truth[h][i]);
      row_norm += truth[h][i] * truth[h][i];
    }
    iterations += r.iterations;
    unconverged += !r.converged;
    difference += row_difference, norm += row_norm;
    worst = std::max(worst, std::sqrt(row_difference / row_norm));
  }
  return {{"task", "solver"},
          {"kind", data::name(kind)},
          {"d", run.dim},
          {"position", c.position},
          {"ridge", c.ridge},
          {"form", kFormNames[int(c.form)]},
          {"arithmetic", kArithmeticNames[int(c.arithmetic)]},
          {"tolerance", c.tolerance},
          {"rows", run.rows},
          {"iterations", iterations / double(list.size())},
          {"error", std::sqrt(difference / norm)},
          {"worst_row_error", worst},
          {"unconverged", unconverged}};
}

}  // namespace

bool run(const SolverRun& request, const Progress& progress) {
  const Json settings = {{"seed", request.seed},
                         {"d", request.dim},
                         {"tolerances", request.tolerances},
                         {"rows", request.rows},
                         {"max_iterations", 2 * request.dim},
                         {"inputs", "rounded to bf16"}};
  Results results(request.out, "solver", settings, request.command);
  const int threads = lla_get_num_threads();
  double done = 0;
  const double total = double(std::size(data::kinds)) * request.ridges.size();
  for (const data::Kind kind : data::kinds) {
    std::vector<HeadData> list;
    for (const double ridge : request.ridges) {
      if (!results.contains({{"kind", data::name(kind)}, {"ridge", ridge}})) {
        if (list.empty()) list = heads(request, kind);
        std::vector<std::vector<Json>> records(request.positions.size());
        parallel_for(request.positions.size(), threads, [&](int64_t i, int) {
          const int position = request.positions[request.positions.size() - 1 - i];  // longest first
          std::vector<std::vector<double>> truth;
          for (const HeadData& h : list) {
            truth.push_back(exact(h, position, h.q.data() + (position - 1) * request.dim,
                                  1 / std::sqrt(double(request.dim)), ridge));
          }
          for (const Form form : {Form::centered, Form::z}) {
            for (const Arithmetic a : {Arithmetic::f64, Arithmetic::f32, Arithmetic::f16, Arithmetic::bf16}) {
              for (const double tolerance : request.tolerances) {
                records[i].push_back(measure(request, kind, list, {position, ridge, form, a, tolerance}, truth));
              }
            }
          }
        });
        for (auto it = records.rbegin(); it != records.rend(); ++it) {
          for (Json& record : *it) results.add(std::move(record));
        }
        results.write();
      }
      progress.report(++done / total, fmt::format("{} ridge {}", data::name(kind), ridge));
      if (progress.stop()) return false;
    }
  }
  return true;
}

}  // namespace lla::experiments
