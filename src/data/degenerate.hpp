// The kinds of data that repeat, vanish or differ in size by orders of magnitude: what real sequences hold and random
// numbers do not. Each is made from randn by changing it.
#pragma once

#include "data/data.hpp"
#include "lla/lla.hpp"

namespace lla::data {

void degrade(Kind kind, const Sizes& sizes, Tensors& tensors);

// Where a result is all cancellation, such as gradients through equal values, nobody can compute it and only its size
// can be asked for. How far the truth moves when the inputs move by roundings says where that is. Moves every value by
// up to `by` of itself; `stream` names the tensor.
void perturb(std::vector<double>& values, uint64_t stream, double by);
// What the arithmetic of a type rounds by, several times over: fp64, fp32, and fp32 sums of products of 16 bits.
double rounding_of(DType dtype);
inline constexpr double kForgivenMoves = 16;  // times that distance is forgiven

}  // namespace lla::data
