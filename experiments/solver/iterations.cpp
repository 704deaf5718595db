#include "solver/iterations.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include <fmt/core.h>

#include "common/parallel.hpp"
#include "data/data.hpp"
#include "data/heads.hpp"
#include "lla/lla.h"
#include "solver/fixed.hpp"

namespace lla::experiments {
namespace {

struct Head {
  std::vector<float> q, ridge;  // ridge: the layer's own, by row; empty for synthetic data
  Keys keys;
};

std::vector<float> to_floats(const std::vector<double>& x) { return {x.begin(), x.end()}; }

std::vector<Head> synthetic(const IterationsRun& run, data::Kind kind, int d) {
  const int64_t n = *std::max_element(run.positions.begin(), run.positions.end());
  std::vector<Head> list;
  for (int h = 0; h < run.heads; ++h) {
    const data::Tensors t = data::make(kind, run.seed + h, {1, n, n, 1, 1, d, d});
    list.push_back({to_floats(t.q), {}, Keys(n, d, to_floats(t.k), to_floats(t.v))});
  }
  return list;
}

// Every head of the folder; all must have one shape.
std::vector<Head> trained(const fs::path& folder) {
  std::vector<Head> list;
  for (const data::TrainedHead& head : data::read_heads(folder)) {
    if (!list.empty() && (list[0].keys.n != head.length || list[0].keys.d != head.dim)) {
      throw Failure(fmt::format("{}: the arrays of {} do not have one shape", folder.string(), head.name));
    }
    list.push_back(
        {to_floats(head.q), to_floats(head.ridge), Keys(head.length, head.dim, to_floats(head.k), to_floats(head.v))});
  }
  return list;
}

// Errors of one row, [ridge][method][step].
using RowErrors = std::vector<std::array<std::array<double, kSteps.size()>, kMethodNames.size()>>;

double quantile(std::vector<double> x, double q) {
  std::sort(x.begin(), x.end());
  return x[static_cast<size_t>(std::ceil(q * double(x.size()))) - 1];
}

// The records of one kind and dimension. ridge = null: the layer's own.
std::vector<Json> measure(const IterationsRun& run, const std::string& kind, const std::vector<Head>& heads) {
  const int64_t d = heads[0].keys.d;
  std::vector<std::optional<double>> ridges(run.ridges.begin(), run.ridges.end());
  if (!heads[0].ridge.empty()) ridges.insert(ridges.begin(), std::nullopt);
  struct Row {
    const Head* head;
    int position;
  };
  std::vector<Row> rows;
  for (const int position : run.positions) {
    for (const Head& head : heads) {
      if (position <= head.keys.n) rows.push_back({&head, position});
    }
  }
  std::vector<RowErrors> errors(rows.size(), RowErrors(ridges.size()));
  parallel_for(static_cast<int64_t>(rows.size()), lla_get_num_threads(), [&](int64_t i, int) {
    const Row& row = rows[rows.size() - 1 - i];  // longest first
    const RowSystem system(row.head->keys, row.position, row.head->q.data() + (row.position - 1) * d,
                           1 / std::sqrt(double(d)));
    for (size_t r = 0; r < ridges.size(); ++r) {
      const double ridge = ridges[r] ? *ridges[r] : row.head->ridge[row.position - 1];
      for (size_t m = 0; m < kMethodNames.size(); ++m) {
        errors[rows.size() - 1 - i][r][m] = system.errors(static_cast<Method>(m), ridge);
      }
    }
  });
  std::vector<Json> records;
  for (size_t r = 0; r < ridges.size(); ++r) {
    for (size_t m = 0; m < kMethodNames.size(); ++m) {
      std::vector<double> worst, median, below;
      Json by_position = Json::object();
      for (size_t s = 0; s < kSteps.size(); ++s) {
        std::vector<double> all;
        for (const RowErrors& row : errors) all.push_back(row[r][m][s]);
        worst.push_back(*std::max_element(all.begin(), all.end()));
        median.push_back(quantile(all, 0.5));
        below.push_back(double(std::count_if(all.begin(), all.end(), [](double e) { return e < 1e-3; })) /
                        double(all.size()));
      }
      for (const int position : run.positions) {
        std::vector<double> there(kSteps.size(), 0);
        for (size_t i = 0; i < rows.size(); ++i) {
          for (size_t s = 0; s < kSteps.size() && rows[i].position == position; ++s)
            there[s] = std::max(there[s], errors[i][r][m][s]);
        }
        by_position[std::to_string(position)] = there;
      }
      records.push_back({{"task", "iterations"},
                         {"kind", kind},
                         {"d", d},
                         {"ridge", ridges[r] ? Json(*ridges[r]) : Json()},
                         {"method", kMethodNames[m]},
                         {"rows", rows.size()},
                         {"worst", worst},
                         {"median", median},
                         {"share_below_1e-3", below},
                         {"worst_by_position", by_position}});
    }
  }
  return records;
}

}  // namespace

bool run(const IterationsRun& request, const Progress& progress) {
  std::vector<Head> layers;
  if (!request.layers.empty()) layers = trained(request.layers);
  const Json settings = {{"seed", request.seed},           {"steps", kSteps},        {"ridges", request.ridges},
                         {"positions", request.positions}, {"heads", request.heads}, {"arithmetic", "fp64"}};
  Results results(request.out, "iterations", settings, request.command);
  const double total = double(std::size(data::kinds) * request.dims.size()) + 1;
  double done = 0;
  const auto add = [&](const std::string& kind, int64_t d, const auto& heads) {
    if (!results.contains({{"kind", kind}, {"d", d}})) {
      for (Json& record : measure(request, kind, heads())) results.add(std::move(record));
      results.write();
    }
    progress.report(++done / total, kind);
    return !progress.stop();
  };
  for (const int d : request.dims) {
    for (const data::Kind kind : data::kinds) {
      if (!add(data::name(kind), d, [&] { return synthetic(request, kind, d); })) return false;
    }
  }
  if (!layers.empty()) return add("layer", layers[0].keys.d, [&] { return layers; });
  return true;
}

}  // namespace lla::experiments
