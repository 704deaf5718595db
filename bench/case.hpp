// What is measured, whatever the device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/data.hpp"
#include "data/heads.hpp"
#include "lla/lla.hpp"

namespace lla::bench {

enum class What { forward, backward, cg };

struct Case {
  What what = What::forward;
  DType dtype = DType::f32;  // of the inputs and of the outputs
  int64_t batch = 1, heads = 1, length = 1024, dim = 64;
  data::Kind kind = data::Kind::randn;
  std::shared_ptr<const std::vector<data::TrainedHead>> trained;  // instead of a kind, where given
  double ridge = 0.1;                                             // of every row; of trained heads the smallest
  bool causal = true;
  double tolerance = 1e-3;
  Solver solver = Solver::automatic;
  double seconds = 1.0;  // to spend on repeats
};

}  // namespace lla::bench
