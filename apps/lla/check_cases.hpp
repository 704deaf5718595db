// What `lla check` tries, and how close to the reference each result must come.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "data/data.hpp"

namespace lla::app {

struct CheckShape {
  const char* name;
  data::Sizes sizes;               // packed: batch 1, the lengths are totals
  std::vector<int32_t> sequences;  // cumulative lengths when packed, else empty
};

struct CheckMask {
  const char* name;
  bool causal;
  int64_t left, right;
};

struct CheckCase {
  DType dtype;
  data::Kind kind;
  double lambda;           // around which the ridge varies
  core::RidgeShape ridge;  // none: x is given instead
  const CheckMask* mask;
  const CheckShape* shape;
  uint64_t seed = 0;       // of its data: its place in the list, so that a case alone is the same case
  int gradient_power = 0;  // gradients times 2^this; degenerate kinds only, where some rows' are zero too

  // Of a saved call (check_replay.cpp): its options; nothing set, the defaults.
  double scale = std::numeric_limits<double>::quiet_NaN();
  double saved_tolerance = 0;
  int32_t max_iterations = 0;
  Solver solver = Solver::automatic;

  bool degenerate() const;                                        // its kind
  bool trained() const;                                           // its kind: what trained attention looks like
  bool conditioned() const { return degenerate() || trained(); }  // what roundings move the truth by is forgiven
  double tolerance() const;                                       // of the solver
  std::string text() const;                                       // one line that names everything above
};

// quick: each dtype, kind and size of ridge once, the rest taken in turn. Otherwise every combination but of shapes.
std::vector<CheckCase> check_cases(bool quick);

struct CheckGates {
  double output;
  double gradients;
};
CheckGates check_gates(const CheckCase& c);

}  // namespace lla::app
