// Attention over a key-value cache where every sequence has few rows: what of it this backend takes, and how.
#pragma once

#include <limits>

#include "plan/implementation.hpp"

namespace lla::cuda::sm90::decode {

// Lengths are counted in 32 bits, with room for a granule.
inline constexpr int64_t kLargestLength = std::numeric_limits<int32_t>::max() - 1024;

// Pure decisions, for any machine (plan.cpp; tested without a GPU).
int kernel_dim(const core::Problem& problem);
int64_t rows_sharing_keys(const core::Problem& problem);  // of a sequence, at most
int bundle(const core::Problem& problem);                 // rows of a key head that make one pass
int64_t most_bundles(const core::Problem& problem);
std::string refuse(const core::Problem& problem, const core::Machine& machine);
core::Plan plan(const core::Problem& problem, const core::Machine& machine);
core::Notes notes(const core::Problem& problem, const core::Plan& plan);

Status forward(const core::ForwardCall& call, const core::Plan& plan);

}  // namespace lla::cuda::sm90::decode
