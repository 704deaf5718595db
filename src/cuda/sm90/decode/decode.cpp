#include "cuda/sm90/decode/decode.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/text.hpp"
#include "cuda/common/runtime.hpp"
#include "cuda/sm90/decode/launch.hpp"
#include "cuda/sm90/decode/schedule.hpp"

namespace lla::cuda::sm90::decode {
namespace {

using core::cat;
using core::Problem;

// Rows (queries times query heads) of a key head: each is solved on its own, from its own pass over the keys.
constexpr int64_t kMostRows = 32;
// Lengths are counted in 32 bits, with room for a granule.
constexpr int64_t kLargestLength = std::numeric_limits<int32_t>::max() - 1024;

int kernel_dim(const Problem& p) { return std::max(p.dim, p.value_dim) <= 64 ? 64 : 128; }

// At most so many rows are decoded.
int64_t most_rows(const Problem& p) { return p.rows(); }

Layout layout_of(const Problem& p, int blocks) {
  return decode::layout_of(most_rows(p), kernel_dim(p), p.given_x(), blocks);
}

Params params_of(const core::ForwardCall& call) {
  const Problem& p = call.problem;
  Params out{};
  out.cache.k = call.k, out.cache.v = call.v;
  out.cache.lengths = call.cache.lengths, out.cache.first_key = call.cache.first_key;
  out.cache.table = call.cache.table, out.cache.table_stride = call.cache.table_stride;
  out.cache.max_length = static_cast<int32_t>(call.cache.max_length);
  out.cache.page_size = static_cast<int32_t>(std::min(call.cache.page_size, kLargestLength));
  out.cache.pages = static_cast<int32_t>(call.cache.pages);
  out.q = call.q, out.o = call.o, out.ridge = call.ridge, out.x = call.x;
  out.cu_q = p.packed ? call.cu_seqlens_q : nullptr;
  out.info = call.info;
  out.batch = static_cast<int32_t>(p.batch), out.heads_q = static_cast<int32_t>(p.heads_q);
  out.group = static_cast<int32_t>(p.group());
  out.seqlen_q = static_cast<int32_t>(p.seqlen_q), out.total_q = static_cast<int32_t>(p.total_q);
  out.dim = static_cast<int32_t>(p.dim), out.value_dim = static_cast<int32_t>(p.value_dim);
  out.left = static_cast<int32_t>(std::min(p.mask.left, kLargestLength));
  out.right = static_cast<int32_t>(std::min(p.mask.right, kLargestLength));
  // A zero scale means equal weights; the smallest one keeps masked logits (-inf times it) at -inf.
  const float half = std::max(static_cast<float>(0.5 * std::abs(p.scale) * std::numbers::log2e), 1e-37f);
  out.half_scale = p.scale < 0 ? -half : half;
  out.most_rows = static_cast<int32_t>(kMostRows);
  return out;
}

}  // namespace

std::string refuse(const Problem& p, const core::Machine& m) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "takes caches of bf16 and f16";
  if (p.solver == Solver::cg) return "solves rows over a cache directly";
  if (p.weights == Weights::cached) return "keeps no weights of rows over a cache";
  if (p.batch_invariant) return "splits the keys of a cache by what else is in the batch";
  if (p.seqlen_q * p.group() > kMostRows) {
    return cat("takes a cache where a key head has at most ", kMostRows, " rows of a sequence, not ",
               p.seqlen_q * p.group());
  }
  if (p.seqlen_k > kLargestLength || p.total_q > kLargestLength || p.batch > kLargestLength)
    return "takes sequences shorter than 2^31 - 1024";
  if (p.rows() > kLargestLength) return "takes up to 2^31 - 1024 rows over all heads";
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

Status forward(const core::ForwardCall& call, const core::Plan& plan) {
  const Problem& p = call.problem;
  Launch launch{params_of(call), most_rows(p), kernel_dim(p), p.dtype == DType::bf16, plan.workers, call.workspace,
                static_cast<cudaStream_t>(call.stream)};
  LLA_RETURN_IF_ERROR(describe_cache(launch.p));
  return decode::launch(launch, p.given_x());
}

}  // namespace lla::cuda::sm90::decode
