// Heads of a trained model, to be measured instead of synthetic ones.
//
// A folder with NAME_q.npy, NAME_k.npy, NAME_v.npy (length, dim), NAME_ridge.npy (length) and, where there are
// gradients, NAME_g.npy: what unzip makes of an .npz file; or a case file (case_file.hpp) with NAME/q and so on and
// NAME/grad_o.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lla::data {

struct TrainedHead {
  std::string name;
  int64_t length, dim;
  std::vector<double> q, k, v, ridge;
  std::vector<double> grad_o;  // empty where there is none
};

// In the order of their names. Throws std::runtime_error with the path and the reason.
std::vector<TrainedHead> read_heads(const std::filesystem::path&);

// Those of the longest length, with one dimension. Throws where dimensions differ there.
std::vector<TrainedHead> longest_heads(std::vector<TrainedHead>);

// (length, heads, dim), or (length, heads) for a ridge, of the first `length` rows of `count` heads, which repeat where
// there are more than given.
std::vector<double> interleaved(const std::vector<TrainedHead>&, std::vector<double> TrainedHead::*, int64_t length,
                                int64_t count);

}  // namespace lla::data
