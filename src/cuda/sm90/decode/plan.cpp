#include <algorithm>

#include "core/text.hpp"
#include "cuda/sm90/decode/decode.hpp"
#include "cuda/sm90/decode/partials.hpp"
#include "cuda/sm90/decode/schedule.hpp"
#include "cuda/tensor/cache_parts.hpp"

namespace lla::cuda::sm90::decode {
namespace {

using core::cat;
using core::Problem;

Layout layout_of(const Problem& p, int multiprocessors) {
  return {most_bundles(p), kernel_dim(p), p.given_x(), multiprocessors, rows_sharing_keys(p) > bundle(p)};
}

}  // namespace

int kernel_dim(const Problem& p) { return std::max(p.dim, p.value_dim) <= 64 ? 64 : 128; }

// A bound: beside prompts, theirs. How many blocks work is decided by the rows there are (blocks_for).
int64_t rows_sharing_keys(const Problem& p) { return p.seqlen_q * p.group(); }

// With x given rows of a key head share a pass; solved, every row has a matrix of its own.
int bundle(const Problem& p) { return p.given_x() ? kGivenXBundle : 1; }

// Sequences of which the host knows the queries of all together fill their last bundle or do not.
int64_t most_bundles(const Problem& p) {
  const int64_t rows = most_decoded_rows(p), key_heads = p.heads_q / p.group();
  if (bundle(p) == 1) return rows;
  const int64_t of_a_head = rows / key_heads;
  if (!p.packed) return key_heads * p.batch * ((of_a_head / std::max<int64_t>(p.batch, 1) + bundle(p) - 1) / bundle(p));
  return key_heads * std::min(of_a_head, of_a_head / bundle(p) + p.batch);
}

std::string refuse(const Problem& p, const core::Machine& m) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "takes caches of bf16 and f16";
  if (p.solver == Solver::cg) return "solves rows over a cache directly";
  if (p.weights == Weights::cached) return "keeps no weights of rows over a cache";
  if (p.batch_invariant) return "splits the keys of a cache by what else is in the batch";
  if (p.seqlen_k > kLargestLength || p.total_q > kLargestLength || p.batch > kLargestLength)
    return "takes sequences shorter than 2^31 - 1024";
  if (most_decoded_rows(p) > kLargestLength) return "takes up to 2^31 - 1024 rows over all heads";
  if (m.cuda.multiprocessors > 256) return "takes up to 256 multiprocessors";
  return {};
}

core::Plan plan(const Problem& p, const core::Machine& m) {
  core::Plan plan;
  plan.solver = Solver::direct;
  plan.block_rows = 1;
  plan.block_keys = kGranule;
  plan.workers = m.cuda.multiprocessors;
  plan.workspace_bytes = static_cast<size_t>(layout_of(p, plan.workers).size);
  return plan;
}

core::Notes notes(const Problem& p, const core::Plan& plan) {
  return {{"head dimension", cat(kernel_dim(p), " in the kernel")},
          {"decode", cat("every row from one pass over its keys, split over ", plan.workers, " blocks by the lengths")},
          {"rows at once", cat(layout_of(p, plan.workers).rows_at_once)}};
}

}  // namespace lla::cuda::sm90::decode
