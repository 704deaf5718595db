// The kinds of data that repeat, vanish or differ in size by orders of magnitude: what real sequences hold and random
// numbers do not. Each is made from randn by changing it.
#pragma once

#include "data/data.hpp"

namespace lla::data {

void degrade(Kind kind, const Sizes& sizes, Tensors& tensors);

}  // namespace lla::data
