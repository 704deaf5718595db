// What one would write first: a row at a time, scalar loops, conjugate gradients on the row's own weights. One thread.
#pragma once

#include <cstdint>
#include <vector>

namespace lla::bench {

// Seconds for rows [first, first + count) of one causal head of length n, in float.
double naive_forward_seconds(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                             int64_t n, int64_t dim, float ridge, float tolerance, int64_t first, int64_t count);

}  // namespace lla::bench
