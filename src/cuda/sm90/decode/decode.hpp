// Attention over a key-value cache where every sequence has few rows: what of it this backend takes, and how.
#pragma once

#include <limits>

#include "cuda/sm90/decode/partials.hpp"
#include "plan/implementation.hpp"

namespace lla::cuda::sm90::decode {

// Lengths are counted in 32 bits, with room for a granule.
inline constexpr int64_t kLargestLength = std::numeric_limits<int32_t>::max() - 1024;

// Pure decisions, for any machine (plan.cpp; tested without a GPU).
int kernel_dim(const core::Problem& problem);
int64_t rows_sharing_keys(const core::Problem& problem);  // of a sequence, at most
bool rows_are_alone(const core::Problem& problem);        // one of every key head, and no prompts can be beside them
bool two_passes(const core::Problem& problem);
Form form_of(const core::Problem& problem);
// Of rows that make one pass, at most; rows where each makes its own.
int64_t most_bundles(const core::Problem& problem, Form form);
struct Workspace {
  int64_t x, terms;  // where x and the size of the terms of k.x lie that two passes share
  int64_t size;
};
Workspace workspace(const core::Problem& problem, int multiprocessors);
int64_t pieces_of_rows(const core::Problem& problem);  // at most, under batch_invariant; else 0
// Calls of few key heads, whose caches are often short: how many blocks share a key head, and up to how many keys that is
// the way. 0: it never is.
struct ShortCaches {
  int cluster;
  int32_t keys;
};
ShortCaches short_caches(const core::Problem& problem, int multiprocessors);
std::string refuse(const core::Problem& problem, const core::Machine& machine);
core::Plan plan(const core::Problem& problem, const core::Machine& machine);
core::Notes notes(const core::Problem& problem, const core::Plan& plan);

Status forward(const core::ForwardCall& call, const core::Plan& plan);

}  // namespace lla::cuda::sm90::decode
