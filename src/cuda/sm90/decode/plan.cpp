#include <algorithm>

#include "core/text.hpp"
#include "cuda/sm90/decode/decode.hpp"
#include "cuda/sm90/decode/partials.hpp"
#include "cuda/sm90/decode/schedule.hpp"
#include "cuda/sm90/decode/short.hpp"
#include "cuda/tensor/cache_parts.hpp"

namespace lla::cuda::sm90::decode {
namespace {

using core::cat;
using core::Problem;

constexpr int64_t kManyKeyHeads = 128;  // of all sequences: about as many as there are multiprocessors

Layout layout_of(const Problem& p, Form form, int multiprocessors) {
  const int dim = kernel_dim(p);
  return {
      most_bundles(p, form), dim, form, multiprocessors, rows_sharing_keys(p) > bundle_of(form, dim), pieces_of_rows(p),
      rows_are_alone(p)};
}

}  // namespace

int kernel_dim(const Problem& p) { return std::max(p.dim, p.value_dim) <= 64 ? 64 : 128; }

// A bound: beside prompts, theirs. How many blocks work is decided by the rows there are (blocks_for).
int64_t rows_sharing_keys(const Problem& p) { return p.seqlen_q * p.group(); }

bool rows_are_alone(const Problem& p) { return !p.packed && rows_sharing_keys(p) == 1; }

// With x given, rows of a key head make one pass together. Where every sequence has one row another kernel is a little
// quicker (2 to 7 %, with short keys and D = 64 18 %: docs/benchmarks/h200-decode.md). Ragged queries always go in
// bundles: their bound is that of the prompts beside them, which must not change a bit of the decoders.
//
// Solved rows that share keys may take two passes: one for the sums that x is solved from, several rows at once, one with
// x given. They are quicker (docs/benchmarks/h200-decode.md) at head dimension 128 from two rows of a key head on, where
// there are more rows than multiprocessors: few rows wait for one kernel after the other, and with a pass for each there
// are two instead of four. At 64, where one pass costs less and a bundle has four rows, from three on and where there are
// many key heads. Which it is follows from the group, and from queries and key heads of calls whose sequences have equally
// many; never from what else is in a ragged batch, where it would change the bits of decoders, nor under batch_invariant
// from the batch. f16 has no range for the first pass.
bool two_passes(const Problem& p) {
  if (p.given_x() || p.dtype != DType::bf16) return false;
  const int64_t rows = p.group() * (p.packed ? 1 : p.seqlen_q);
  const bool any_batch = p.packed || p.batch_invariant;
  if (kernel_dim(p) == 128) return rows > 1 && (any_batch || p.batch * p.heads_kv * rows > kBlocksInARound);
  return rows > 2 && !any_batch && p.batch * p.heads_kv >= kManyKeyHeads;
}

Form form_of(const Problem& p) {
  if (p.given_x()) return p.packed || p.seqlen_q * p.group() > 1 ? Form::bundles : Form::given_x;
  return two_passes(p) ? Form::moments : Form::solved;
}

// Rows, or bundles of them. Of sequences of which the host knows only all queries together every one may have a bundle
// that is not full.
int64_t most_bundles(const Problem& p, Form form) {
  const int64_t rows = most_decoded_rows(p), bundle = bundle_of(form, kernel_dim(p));
  if (bundle == 1) return rows;
  const int64_t key_heads = p.heads_q / p.group(), of_a_head = rows / key_heads;
  if (!p.packed) return key_heads * p.batch * ((p.seqlen_q * p.group() + bundle - 1) / bundle);
  return key_heads * std::min(of_a_head, of_a_head / bundle + p.batch);
}

// Of two passes each has the workspace for itself, but for x and the size of its terms.
Workspace workspace(const Problem& p, int multiprocessors) {
  const Form form = form_of(p);
  const int64_t first = layout_of(p, form, multiprocessors).size;
  if (form != Form::moments) return {0, 0, first};
  const int64_t x = (std::max(first, layout_of(p, Form::bundles, multiprocessors).size) + 255) / 256 * 256;
  const int64_t column = most_decoded_rows(p) * int64_t{sizeof(float)}, terms = x + kernel_dim(p) * column;
  return {x, terms, terms + column};
}

int64_t pieces_of_rows(const Problem& p) {
  return p.batch_invariant ? most_pieces(static_cast<int32_t>((p.seqlen_k + kGranule - 1) / kGranule)) : 0;
}

// f16 has no range for the sums that the blocks share. Ragged calls and batch_invariant ask for bits that do not depend on
// what else is in the batch, this way follows from all lengths.
ShortCaches short_caches(const Problem& p, int multiprocessors) {
  const int64_t rows = p.group();
  if (p.given_x() || p.dtype != DType::bf16 || p.packed || p.batch_invariant || p.seqlen_q != 1) return {0, 0};
  const int cluster = cluster_of(p.batch * p.heads_kv, multiprocessors);
  if (cluster == 0 || rows > kMostShortRows) return {0, 0};
  return {cluster, cluster * short_keys_of_block(static_cast<int>(rows), kernel_dim(p), p.page_size > 0)};
}

std::string refuse(const Problem& p, const core::Machine& m) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "takes caches of bf16 and f16";
  if (p.solver == Solver::cg) return "solves rows over a cache directly";
  if (p.weights == Weights::cached) return "keeps no weights of rows over a cache";
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
  plan.workspace_bytes = static_cast<size_t>(workspace(p, plan.workers).size);
  return plan;
}

core::Notes notes(const Problem& p, const core::Plan& plan) {
  const Form form = form_of(p);
  const int bundle = bundle_of(form, kernel_dim(p));
  std::string rows = bundle > 1 ? cat("up to ", bundle, " rows of a key head from one pass over its keys")
                                : std::string("every row from one pass over its keys");
  if (form == Form::moments) rows += cat(", their x solved for, and ", kBundleRows, " from a second with it");
  core::Notes all{
      {"head dimension", cat(kernel_dim(p), " in the kernel")},
      {"decode",
       cat(rows, ", ", p.batch_invariant ? "cut by its own length alone, over " : "split by the lengths over ",
           plan.workers, " blocks")},
      {"rows at once", cat(int64_t{layout_of(p, form, plan.workers).rows_at_once} * bundle)}};
  if (const ShortCaches caches = short_caches(p, plan.workers); caches.cluster > 0) {
    all.push_back({"short caches", cat("where all have up to ", caches.keys, " keys, one kernel, ", caches.cluster,
                                       " blocks a key head")});
  }
  return all;
}

}  // namespace lla::cuda::sm90::decode
