// A state on disk: named tensors and a JSON object, exact to the bit, replaced as a whole. A file that was cut or
// changed is refused.
#pragma once

#include <map>
#include <string>

#include "common/results.hpp"
#include "torch.hpp"

namespace lla::trained {

struct Checkpoint {
  experiments::Json state;
  std::map<std::string, at::Tensor> tensors;  // on the CPU when read
};

void write_checkpoint(const experiments::fs::path& path, const Checkpoint& checkpoint);
Checkpoint read_checkpoint(const experiments::fs::path& path);

}  // namespace lla::trained
