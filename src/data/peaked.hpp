// The kinds of trained attention: rows that look at few keys, keys with means, outlier channels and sinks. What each
// does to the q, k and v of a head that start as N(0, 1).
#pragma once

#include <vector>

#include "data/data.hpp"

namespace lla::data {

// The random numbers a head's kind may need besides q, k and v: N(0, 1) for each channel, the same for keys and queries
// of the head.
using Channels = std::vector<double>;

void shape_peaked_keys(Kind kind, const Channels& random, int64_t dim, std::vector<double>& keys);
void shape_peaked_queries(Kind kind, const Channels& random, const Sizes& sizes, std::vector<double>& queries);
void shape_peaked_values(Kind kind, int64_t value_dim, std::vector<double>& values);

}  // namespace lla::data
