// Normal draws by counter: the same (seed, stream, index) gives the same number whatever was drawn before it, by
// whichever thread, so an interrupted run continues with exactly the data it would have seen.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lla::experiments {

// Threefry-2x32 with 20 rounds (Salmon et al., 2011): the generator under everything here.
struct Block {
  uint32_t x0, x1;
};
Block threefry(Block counter, Block key);

// One independent sequence of numbers. `purpose` separates what is drawn (keys, noise, ...) for the same item.
class Stream {
 public:
  Stream(uint64_t seed, uint64_t item, uint64_t purpose);

  // out[i] = number start + i of the stream, standard normal; start must be even.
  void normal(float* out, size_t count, uint64_t start = 0) const;
  // Uniform on [0, 1), scalar and in double.
  double uniform(uint64_t index) const;

 private:
  Block key_;
};

}  // namespace lla::experiments
