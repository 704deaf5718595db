#include "cuda/sm90/plan.hpp"

#include <algorithm>
#include <limits>

#include "core/text.hpp"
#include "cuda/sm90/backward/workspace.hpp"
#include "cuda/sm90/decode/decode.hpp"
#include "cuda/sm90/given_x/config.hpp"
#include "cuda/sm90/sm90.hpp"
#include "cuda/sm90/solve/config.hpp"
#include "cuda/tensor/workspace.hpp"

namespace lla::cuda::sm90 {
namespace {

using core::cat;
using core::Problem;

constexpr int64_t kLargestLength = std::numeric_limits<int32_t>::max() - 2 * kBlockRows;
// Where cached weights are faster than recomputing them (docs/benchmarks): reading them is bound by memory, recomputing
// them by the tensor cores, which need half as long at head dimension 64. Measured at 1024, 4096 and 16384 keys. At 128
// they always won, in the backward at 16384 by less than a hundredth; at 64 up to 4096 forward, not at 4096 backward.
constexpr bool caching_pays(int dim, int64_t keys, bool backward) {
  const int64_t most = dim == 128 ? (backward ? 6144 : 32768) : (backward ? 3072 : 6144);
  return keys >= 512 && keys < most;
}

// Keys and values of the heads that are worked on at a time: so much stays in the half of the L2 cache that is near a
// multiprocessor, beside all that goes through it once.
constexpr int64_t kBundleBytes = int64_t{16} << 20;

int resident_blocks(const Problem& p, const core::Machine& m, int rows) {
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(shape_of(p).items(rows), 1), m.cuda.multiprocessors));
}

// A bound for a single sequence, too.
int64_t most_keys_of_a_sequence(const Problem& p) {
  return p.cache ? std::min(p.seqlen_k, most_own_keys(p)) : p.seqlen_k;
}

int64_t cached_bytes_of_block(const Problem& p, int64_t keys) {
  Shape s = shape_of(p);
  s.seqlen_k = static_cast<int32_t>(std::min<int64_t>(s.seqlen_k, keys));
  return cached_weights_bytes(s, padded_dim(p.dim, p.value_dim));
}

int64_t cached_bytes(const Problem& p, const core::Machine& m) {
  // Kept and recomputed weights round differently: what is invariant must not choose by how many blocks there are.
  const int blocks = p.batch_invariant ? m.cuda.multiprocessors : resident_blocks(p, m, kWarpgroupRows);
  return cached_weights_per_block(p) * blocks;
}

// See keys_of_kept_weights: 132 MiB on an H200.
constexpr int64_t kKeptKeys = 4096;

// With x given nothing is solved, and no pass repeats another's weights.
bool cache_weights(const Problem& p, const core::Machine& m) {
  if (p.given_x()) return false;
  if (p.weights != Weights::automatic) return p.weights == Weights::cached;
  const int dim = padded_dim(p.dim, p.value_dim);
  Shape s = shape_of(p);
  s.seqlen_k = static_cast<int32_t>(std::min<int64_t>(s.seqlen_k, most_keys_of_a_sequence(p)));
  const int64_t keys = most_tiles(s, tile_keys(dim)) * tile_keys(dim);  // of a block
  return caching_pays(dim, keys, p.operation == core::Operation::backward) &&
         cached_bytes(p, m) <= p.cached_weights_limit;
}

}  // namespace

Shape shape_of(const Problem& p) {
  const auto narrow = [](int64_t n) { return static_cast<int32_t>(std::min(n, kLargestLength)); };
  Shape s;
  s.batch = narrow(p.batch), s.heads_q = narrow(p.heads_q), s.group = narrow(p.group());
  s.seqlen_q = narrow(p.seqlen_q), s.seqlen_k = narrow(p.seqlen_k);
  s.total_q = narrow(p.total_q), s.total_k = narrow(p.total_k);
  s.packed = p.packed;
  s.spans = p.packed ? kPackedSpans : kNoSpans;
  if (has_own_spans(p)) {
    s.spans = kOwnSpans;
    s.total_k = narrow(own_positions(p));
  }
  s.left = narrow(p.mask.left), s.right = narrow(p.mask.right);
  const int64_t key_head_bytes = std::max<int64_t>(int64_t{s.seqlen_k} * padded_dim(p.dim, p.value_dim) * 4, 1);
  const int64_t key_heads = std::max<int64_t>(kBundleBytes / key_head_bytes, 1);
  s.bundle = static_cast<int32_t>(std::min(key_heads * s.group, int64_t{s.batch} * s.heads_q));
  return s;
}

Shape solve_shape_of(const Problem& p) {
  Shape s = shape_of(p);
  if (s.left < 0 && s.right >= 0) {
    const int64_t rows =
        int64_t{few_keys(padded_dim(p.dim, p.value_dim))} - (int64_t{s.seqlen_k} - s.seqlen_q) - s.right;
    s.early_rows = static_cast<int32_t>(std::clamp<int64_t>(rows, 0, s.seqlen_q));
  }
  return s;
}

SolveLimits solve_limits(const Problem& p) {
  if (p.operation == core::Operation::forward) {
    // The other implementations ask for 6 tol of what the output is made of: rounding takes its share here.
    return {p.tolerance, p.tolerance, 0, 0, 3 * p.tolerance, 0.2 * p.tolerance, 0.25 * p.tolerance};
  }
  // λ's gradient, -x y, follows y's residual most closely: a tenth less of it keeps the promised accuracy for every
  // kind. Where rows see few keys x is large in directions the keys do not reach, and y's error there, which its
  // residual hardly shows, meets it: half the residual, and at least three steps.
  const core::StopRule rule = core::stop_rule(p);
  return {0.9 * p.tolerance, 0.5 * p.tolerance, 3, std::numeric_limits<int32_t>::max(), rule.share, rule.least, 0};
}

bool sees_few_keys(const Problem& p) {
  const Shape s = shape_of(p);
  return most_keys(s, {0, s.seqlen_k}) <= few_keys(padded_dim(p.dim, p.value_dim));
}

int32_t heads_together(const Problem& p) {
  // As many as keep their operands in the L2 cache, beside what goes through it once.
  constexpr int64_t kOperandBytes = int64_t{24} << 20;
  const int64_t row_bytes = int64_t{padded_dim(p.dim, p.value_dim)} * 2 * (p.given_x() ? 4 : 6);
  const int64_t per_head = std::max<int64_t>(1, p.seqlen_q * p.group() * row_bytes);
  const int64_t heads = std::max<int64_t>(p.batch * p.heads_kv, 1);
  const int64_t most = std::clamp<int64_t>(kOperandBytes / per_head, 1, heads);
  // A bundle begins with its longest blocks, and those of a small last one would keep a few multiprocessors busy while
  // the others have nothing left: up to a half fewer, so that the last bundle is as full as can be.
  int64_t best = most;
  const auto in_last = [&](int64_t size) { return (heads - 1) % size + 1; };
  for (int64_t size = most - 1; 2 * size > most && in_last(best) < best; --size) {
    if (in_last(size) * best > in_last(best) * size) best = size;
  }
  return static_cast<int32_t>(best);
}

int64_t cached_weights_per_block(const Problem& p) { return cached_bytes_of_block(p, most_keys_of_a_sequence(p)); }

int64_t keys_of_kept_weights(const Problem& p, const core::Plan& plan) {
  if (plan.cached_weights || p.given_x() || !p.cache || p.weights != Weights::automatic) return 0;
  if (most_keys_of_a_sequence(p) <= kKeptKeys) return 0;
  return cached_bytes_of_block(p, kKeptKeys) * plan.workers <= p.cached_weights_limit ? kKeptKeys : 0;
}

WorkspaceLayout forward_layout(const Problem& p, const core::Plan& plan) {
  const int64_t kept = keys_of_kept_weights(p, plan);
  const int64_t weights = plan.cached_weights ? cached_weights_per_block(p)
                          : kept > 0          ? cached_bytes_of_block(p, kept)
                                              : 0;
  return {p, p.given_x() ? 0 : plan.workers, weights};
}

std::string refuse(const Problem& p, const core::Machine& m) {
  if (m.cuda.arch != 90)
    return cat("needs compute capability 9.0, this device has ", m.cuda.arch / 10, ".", m.cuda.arch % 10);
  if (p.dtype == DType::f32 && p.precision != Precision::tf32)
    return "takes f32 inputs only where options.precision allows TF32";
  if (p.dtype == DType::f64) return "takes bf16, f16 and f32 inputs, not f64";
  if (p.batch_invariant && p.operation == core::Operation::backward)
    return "has no backward pass for which options.batch_invariant holds";
  if (p.dim > 128 || p.value_dim > 128) return "takes head dimensions up to 128";
  if (p.dim % 8 != 0 || p.value_dim % 8 != 0) return "takes head dimensions that are multiples of 8";
  if (has_decode_part(p)) {
    if (const std::string reason = decode::refuse(p, m); !reason.empty() || !has_forward_part(p)) return reason;
  }
  if (p.solver == Solver::direct) return "solves by conjugate gradients only";
  const bool own = has_own_spans(p);
  if (std::max({p.seqlen_q, p.seqlen_k, p.packed ? p.total_q : 0, p.packed && !own ? p.total_k : 0}) > kLargestLength) {
    return "takes sequences shorter than 2^31 - 256";
  }
  if (shape_of(p).items(kWarpgroupRows) > std::numeric_limits<int32_t>::max()) return "has too many blocks of queries";
  const int64_t keys = own ? own_positions(p) : p.packed ? p.total_k : p.batch * p.seqlen_k;
  if (keys * p.heads_kv > kLargestLength) {
    return p.cache ? "takes up to 2^31 - 256 keys over all heads of sequences with many rows; max_total_k bounds them"
                   : "takes up to 2^31 - 256 keys over all heads";
  }
  if (own && p.batch * p.heads_kv > kLargestLength) return "takes up to 2^31 - 256 heads over all sequences";
  if (p.operation == core::Operation::backward && p.rows() > kLargestLength)
    return "takes up to 2^31 - 256 queries over all heads";
  if (cache_weights(p, m) && cached_bytes(p, m) > p.cached_weights_limit) {
    return cat("cached weights would take ", cached_bytes(p, m), " bytes, more than options.cached_weights_limit");
  }
  return {};
}

core::Plan plan(const Problem& p, const core::Machine& m) {
  if (!has_forward_part(p)) return decode::plan(p, m);
  core::Plan plan;
  plan.solver = has_decode_part(p) && !p.given_x() ? Solver::automatic : Solver::cg;
  plan.cached_weights = cache_weights(p, m);
  plan.block_rows = p.given_x() ? kBlockRows : kWarpgroupRows;
  // Decode wants all multiprocessors, whatever the forward has to do.
  plan.workers = has_decode_part(p) ? m.cuda.multiprocessors : resident_blocks(p, m, static_cast<int>(plan.block_rows));
  const int dim = padded_dim(p.dim, p.value_dim);
  const bool backward = p.operation == core::Operation::backward;
  plan.block_keys = p.given_x() && !backward ? given_x_tile_keys(dim) : tile_keys(dim);
  plan.workspace_bytes = static_cast<size_t>(backward ? backward_layout(p, plan.workers, plan.cached_weights).size
                                                      : forward_layout(p, plan).size);
  if (has_decode_part(p)) {
    // One after the other: they may use the same memory.
    const core::Plan decode = decode::plan(p, m);
    plan.workspace_bytes = std::max(plan.workspace_bytes, decode.workspace_bytes);
  }
  return plan;
}

core::Notes notes(const Problem& p, const core::Machine&, const core::Plan& plan) {
  if (!has_forward_part(p)) return decode::notes(p, plan);
  const WorkspaceLayout layout = forward_layout(p, plan);
  core::Notes notes;
  if (has_decode_part(p)) {
    notes = decode::notes(p, plan);
    notes.emplace_back("parts", cat("decode for sequences of up to ", most_rows(p),
                                    " rows per key head, the forward for the others, both launched"));
  } else {
    notes = {{"head dimension", cat(padded_dim(p.dim, p.value_dim), " in the kernel")}};
    if (p.cache) notes.emplace_back("parts", "the forward for all sequences");
  }
  if (p.cache) notes.emplace_back("keys of the forward", cat("up to ", most_own_keys(p)));
  const core::Notes of_forward{{"work items", cat(shape_of(p).items(static_cast<int>(plan.block_rows)))},
                               {"operand copies", cat(layout.scratch - layout.keys, " bytes")}};
  notes.insert(notes.end(), of_forward.begin(), of_forward.end());
  const bool backward = p.operation == core::Operation::backward;
  if (p.given_x()) {
    if (!backward) {
      notes.emplace_back("kernel", sees_few_keys(p)   ? "for few keys"
                                   : has_own_spans(p) ? "for few and for many keys, by a sequence's own"
                                                      : "for many keys");
    }
  } else {
    const SolveLimits limits = solve_limits(p);
    const int64_t few = few_keys(padded_dim(p.dim, p.value_dim));
    notes.emplace_back("rows stop at",
                       cat("residual ", limits.tolerance, "; up to ", few, " keys ", limits.few_keys_tolerance,
                           " and not before ", limits.few_keys_iterations, " iterations"));
    notes.emplace_back("products in two parts",
                       backward ? cat("for rows of up to ", few, " keys")
                                : std::string("where rounding could show: the residual is formed anew"));
  }
  if (backward) notes.emplace_back("heads side by side", cat(heads_together(p)));
  if (plan.cached_weights || layout.weights_stride > 0) {
    const int64_t kept = keys_of_kept_weights(p, plan);
    notes.emplace_back("cached weights",
                       cat(layout.weights_stride * plan.workers, " bytes",
                           kept > 0 ? cat(", of sequences of up to ", kept, " keys") : std::string()));
  }
  return notes;
}

}  // namespace lla::cuda::sm90
