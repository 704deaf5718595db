// The Hopper planner, asked about an H200 from any machine.
#include <gtest/gtest.h>

#include "cuda/sm90/decode/decode.hpp"
#include "cuda/sm90/given_x/config.hpp"
#include "cuda/sm90/plan.hpp"
#include "cuda/sm90/sm90.hpp"
#include "cuda/sm90/solve/config.hpp"
#include "cuda/tensor/workspace.hpp"
#include "plan/machine.hpp"

namespace lla::cuda::sm90 {
namespace {

core::Problem problem(int64_t batch, int64_t heads, int64_t length, int64_t dim) {
  core::Problem p;
  p.device = core::Device::cuda;
  p.dtype = p.out_dtype = DType::bf16;
  p.batch = batch, p.heads_q = p.heads_kv = heads, p.seqlen_q = p.seqlen_k = length;
  p.total_q = p.total_k = batch * length;
  p.dim = p.value_dim = dim;
  p.mask = {-1, 0};
  return p;
}

const core::Machine kH200 = core::h200();

TEST(Sm90Plan, Takes) {
  for (int64_t dim : {8, 32, 64, 80, 96, 112, 128}) EXPECT_EQ(refuse(problem(2, 4, 1000, dim), kH200), "") << dim;
}

TEST(Sm90Plan, DecidesWhenRowsStop) {
  core::Problem p = problem(2, 4, 1000, 128);
  p.tolerance = 1e-3;
  const SolveLimits forward = solve_limits(p);
  EXPECT_EQ(forward.tolerance, 1e-3);
  EXPECT_EQ(forward.few_keys_tolerance, 1e-3);
  EXPECT_EQ(forward.two_part_passes, 0);
  EXPECT_EQ(forward.share, 3e-3);
  EXPECT_EQ(forward.sum_error, 0.25e-3);
  p.operation = core::Operation::backward;
  const SolveLimits backward = solve_limits(p);
  EXPECT_FLOAT_EQ(static_cast<float>(backward.tolerance * backward.tolerance), 0.81e-6f);
  EXPECT_FLOAT_EQ(static_cast<float>(backward.few_keys_tolerance * backward.few_keys_tolerance), 0.25e-6f);
  EXPECT_EQ(backward.few_keys_iterations, 3);
}

TEST(Sm90Plan, DecidesHowManyHeadsAreSideBySide) {
  core::Problem p = problem(2, 4, 4096, 128);  // 6 MiB of operands a head
  p.operation = core::Operation::backward;
  EXPECT_EQ(heads_together(p), 4);
  p.ridge = core::RidgeShape::none;  // 4 MiB
  EXPECT_EQ(heads_together(p), 4) << "six would fit, but leave two for the last";
  p.batch = 1, p.heads_q = p.heads_kv = 17;
  EXPECT_EQ(heads_together(p), 6) << "6, 6 and 5";
  EXPECT_EQ(heads_together(problem(2, 4, 64, 64)), 8) << "not more than there are";
  EXPECT_EQ(heads_together(problem(1, 1, 1 << 20, 128)), 1);
}

TEST(Sm90Plan, ChoosesTheKernelForFewKeys) {
  core::Problem p = problem(2, 4, 256, 128);
  p.ridge = core::RidgeShape::none;
  EXPECT_TRUE(sees_few_keys(p));
  p = problem(2, 4, 257, 128);
  EXPECT_FALSE(sees_few_keys(p));
  p.mask = {100, 0};
  EXPECT_TRUE(sees_few_keys(p)) << "of a window";
}

TEST(Sm90Plan, PrintsWhatItDecided) {
  core::Problem p = problem(2, 4, 1000, 128);
  const auto printed = [&](const core::Problem& of) {
    std::string text;
    for (const auto& [key, value] : notes(of, kH200, plan(of, kH200))) text += key + ": " + value + "\n";
    return text;
  };
  EXPECT_NE(printed(p).find("rows stop at: residual 0.001"), std::string::npos) << printed(p);
  EXPECT_NE(printed(p).find("products in two parts"), std::string::npos);
  p.operation = core::Operation::backward;
  EXPECT_NE(printed(p).find("heads side by side: 8"), std::string::npos) << printed(p);
  p = problem(2, 4, 100, 64);
  p.ridge = core::RidgeShape::none;
  EXPECT_NE(printed(p).find("kernel: for few keys"), std::string::npos) << printed(p);
}

TEST(Sm90Plan, RefusesWithAReason) {
  core::Problem p = problem(2, 4, 1000, 128);
  p.dtype = DType::f32;
  EXPECT_NE(refuse(p, kH200).find("TF32"), std::string::npos);
  p.precision = Precision::tf32;
  EXPECT_EQ(refuse(p, kH200), "");
  p.dtype = DType::f64;
  EXPECT_NE(refuse(p, kH200).find("f64"), std::string::npos);
  EXPECT_NE(refuse(problem(2, 4, 1000, 256), kH200).find("128"), std::string::npos);
  EXPECT_NE(refuse(problem(2, 4, 1000, 20), kH200).find("multiples of 8"), std::string::npos);
  p = problem(2, 4, 1000, 128);
  p.solver = Solver::direct;
  EXPECT_NE(refuse(p, kH200).find("conjugate gradients"), std::string::npos);
  core::Machine older = kH200;
  older.cuda.arch = 80;
  EXPECT_NE(refuse(problem(2, 4, 1000, 128), older).find("8.0"), std::string::npos);
}

core::Problem over_cache(int64_t batch, int64_t heads, int64_t rows, int64_t capacity, int64_t dim) {
  core::Problem p = problem(batch, heads, rows, dim);
  p.cache = true;
  p.seqlen_k = capacity, p.total_k = batch * capacity;
  return p;
}

TEST(Sm90Plan, DecodesOverCaches) {
  for (const int64_t dim : {8, 64, 96, 128}) {
    for (const int64_t rows : {1, 4, 32}) EXPECT_EQ(refuse(over_cache(32, 8, rows, 16384, dim), kH200), "") << dim;
  }
  const core::Problem p = over_cache(32, 8, 1, 16384, 128);
  const core::Plan planned = plan(p, kH200);
  EXPECT_EQ(planned.solver, Solver::direct);
  EXPECT_EQ(planned.workers, 132);
  // Whatever the capacity.
  EXPECT_EQ(planned.workspace_bytes, plan(over_cache(32, 8, 1, 1 << 20, 128), kH200).workspace_bytes);
  EXPECT_LE(plan(over_cache(4096, 8, 1, 1024, 128), kH200).workspace_bytes, size_t{65} << 20);
}

std::string noted(const core::Problem& p, const char* key);

// With x given rows that share keys go in bundles. So do ragged queries: prompts beside decoders only show in the bound of
// the queries, and do not change what the decoders get.
TEST(Sm90Plan, BundlesOfRowsWithTheirX) {
  core::Problem p = over_cache(32, 8, 1, 16384, 128);
  EXPECT_EQ(decode::form_of(p), decode::Form::solved);
  p.ridge = core::RidgeShape::none;
  EXPECT_EQ(decode::form_of(p), decode::Form::given_x);
  EXPECT_EQ(decode::most_bundles(p, decode::form_of(p)), 32 * 8);
  p.packed = true;
  for (const int64_t queries : {1, 4, 512}) {
    p.seqlen_q = queries;
    EXPECT_EQ(decode::form_of(p), decode::Form::bundles) << queries;
  }
  p = over_cache(32, 8, 4, 16384, 128);
  p.ridge = core::RidgeShape::none;
  EXPECT_EQ(decode::form_of(p), decode::Form::bundles);
  EXPECT_EQ(decode::most_bundles(p, decode::form_of(p)), 32 * 8) << "four rows are one bundle";
  EXPECT_NE(noted(p, "decode").find("up to 8 rows"), std::string::npos);
  p.heads_kv = 2;  // sixteen rows of each
  EXPECT_EQ(decode::most_bundles(p, decode::form_of(p)), 32 * 2 * 2);
  p.packed = true;
  EXPECT_EQ(decode::most_bundles(p, decode::form_of(p)), 2 * (32 * 16 / 8 + 32))
      << "each sequence may have one that is not full";
}

// Few key heads with one query each: which calls have the kernel for short caches, and up to how many keys.
TEST(Sm90Plan, ShortCachesOfFewKeyHeads) {
  const auto caches = [](const core::Problem& p, int multiprocessors = 132) {
    return decode::short_caches(p, multiprocessors);
  };
  core::Problem p = over_cache(1, 8, 1, 16384, 128);
  EXPECT_EQ(caches(p).cluster, 8);
  EXPECT_EQ(caches(p).keys, 8 * 384);
  EXPECT_EQ(caches(over_cache(1, 8, 1, 1 << 20, 128)).keys, 8 * 384) << "whatever the bound of the lengths";
  EXPECT_NE(noted(p, "short caches").find("up to 3072 keys"), std::string::npos) << noted(p, "short caches");
  EXPECT_EQ(caches(over_cache(2, 8, 1, 1024, 64)).cluster, 4);
  EXPECT_EQ(caches(over_cache(4, 8, 1, 1024, 64)).cluster, 0) << "too many key heads to run at once";
  EXPECT_EQ(caches(p, 66).cluster, 4) << "on half of the machine";
  EXPECT_EQ(caches(p, 6).cluster, 0);
  EXPECT_EQ(caches(over_cache(1, 8, 2, 1024, 64)).cluster, 0) << "several queries";
  p.heads_q = 32;  // a group of four
  EXPECT_EQ(caches(p).keys, 8 * 128);
  EXPECT_EQ(caches(p, 66).cluster, 4) << "each row is solved by a block of its own";
  p.heads_q = 40;
  EXPECT_EQ(caches(p).cluster, 0) << "quicker with a pass for every row";
  p.heads_q = 8;
  p.page_size = 16;
  EXPECT_EQ(caches(p).keys, 8 * 128) << "what fits into shared memory";
  p.dim = p.value_dim = 64;
  EXPECT_EQ(caches(p).keys, 8 * 384);
  p = over_cache(1, 8, 1, 1024, 128);
  p.packed = true;
  EXPECT_EQ(caches(p).cluster, 0) << "what else is in a ragged batch must not matter";
  p.packed = false, p.batch_invariant = true;
  EXPECT_EQ(caches(p).cluster, 0);
  p.batch_invariant = false, p.dtype = DType::f16;
  EXPECT_EQ(caches(p).cluster, 0);
  p.dtype = DType::bf16, p.ridge = core::RidgeShape::none;
  EXPECT_EQ(caches(p).cluster, 0) << "x given: there is nothing to solve";
}

// Solved rows that share keys take two passes, by the call's shape alone.
TEST(Sm90Plan, TwoPassesForSolvedRowsThatShareKeys) {
  core::Problem p = over_cache(32, 8, 1, 4096, 128);
  EXPECT_LE(plan(p, kH200).workspace_bytes, size_t{65} << 20);
  EXPECT_FALSE(decode::two_passes(p));
  p = over_cache(32, 8, 4, 4096, 128);
  EXPECT_EQ(decode::form_of(p), decode::Form::moments);
  EXPECT_NE(noted(p, "decode").find("up to 2 rows of a key head"), std::string::npos) << noted(p, "decode");
  EXPECT_NE(noted(p, "decode").find("8 from a second"), std::string::npos) << noted(p, "decode");
  EXPECT_EQ(decode::most_bundles(p, decode::Form::moments), 32 * 8 * 2) << "two rows a bundle";
  EXPECT_EQ(decode::most_bundles(p, decode::Form::bundles), 32 * 8) << "eight in the second pass";
  // x of every row lies behind the sums of either pass, wherever they end, and the size of its terms behind that.
  const decode::Workspace at = decode::workspace(p, 132);
  EXPECT_EQ(at.terms - at.x, 32 * 8 * 4 * 128 * 4);
  EXPECT_EQ(at.size - at.terms, 32 * 8 * 4 * 4);
  EXPECT_EQ(at.x % 256, 0);
  EXPECT_LE(at.x, int64_t{65} << 20);
  EXPECT_EQ(static_cast<size_t>(at.size), plan(p, kH200).workspace_bytes);
  core::Problem few = over_cache(1, 8, 2, 4096, 128);
  EXPECT_FALSE(decode::two_passes(few)) << "sixteen rows";
  EXPECT_FALSE(decode::two_passes(over_cache(4, 8, 4, 4096, 128))) << "fewer rows than multiprocessors";
  EXPECT_TRUE(decode::two_passes(over_cache(5, 8, 4, 4096, 128))) << "more";
  few.batch_invariant = true;
  EXPECT_TRUE(decode::two_passes(few)) << "whatever the batch";
  p.packed = true;  // how many queries each sequence has is the device's to know
  EXPECT_FALSE(decode::two_passes(p));
  p.heads_kv = 2;
  for (const int64_t queries : {1, 4, 512}) {
    p.seqlen_q = queries;
    EXPECT_TRUE(decode::two_passes(p)) << queries;
  }
  p.dtype = DType::f16;
  EXPECT_FALSE(decode::two_passes(p)) << "the range of f16";
}

TEST(Sm90Plan, TwoPassesAtHeadDimension64) {
  for (const int64_t rows : {1, 2, 3, 4, 8}) {
    core::Problem p = over_cache(32, 8, rows, 4096, 64);
    EXPECT_EQ(decode::two_passes(p), rows > 2) << rows;
    p.batch_invariant = true;
    EXPECT_FALSE(decode::two_passes(p)) << "the batch must not matter";
    EXPECT_FALSE(decode::two_passes(over_cache(1, 8, rows, 4096, 64))) << "few key heads";
  }
  core::Problem p = over_cache(32, 2, 1, 4096, 64);
  p.heads_q = 8, p.packed = true;
  EXPECT_FALSE(decode::two_passes(p)) << "prompts beside decoders must not matter";
}

std::string noted(const core::Problem& p, const char* key) {
  for (const auto& [name, text] : notes(p, kH200, plan(p, kH200))) {
    if (name == key) return text;
  }
  return {};
}

// Sequences with few rows decode, those with many take the forward; where the host knows of one kind alone there is
// one part.
TEST(Sm90Plan, PartsOfACacheCall) {
  core::Problem p = over_cache(32, 8, 33, 16384, 128);
  EXPECT_EQ(refuse(p, kH200), "");
  EXPECT_EQ(plan(p, kH200).solver, Solver::cg);
  EXPECT_NE(noted(p, "parts").find("all"), std::string::npos);
  EXPECT_EQ(most_own_keys(p), 32 * 16384);
  p.total_k = 100000;
  EXPECT_EQ(most_own_keys(p), 100000);
  EXPECT_LE(own_positions(p), 100000 + 34 * kPrepassRows);
  p.batch_invariant = true;
  EXPECT_EQ(refuse(p, kH200), "") << "the forward over a cache is so anyway";

  p = over_cache(32, 8, 512, 16384, 128);
  p.packed = true;
  p.total_q = 31 + 512;
  EXPECT_EQ(refuse(p, kH200), "");
  const core::Plan planned = plan(p, kH200);
  EXPECT_EQ(planned.solver, Solver::automatic);
  EXPECT_EQ(planned.workers, 132);
  EXPECT_NE(noted(p, "parts").find("both"), std::string::npos);
  const int64_t fewest = kSolvedCrossing.fewest;
  EXPECT_EQ(most_rows(p), fewest) << "many heads fill the GPU in the forward";
  EXPECT_EQ(most_forward_sequences(p), (31 + 512) / (fewest + 1)) << "no more can have so many rows";
  EXPECT_EQ(most_own_keys(p), (31 + 512) / (fewest + 1) * 16384);
  EXPECT_EQ(most_decoded_rows(p), std::min<int64_t>(31 + 512, 32 * fewest) * 8);
  EXPECT_EQ(decode::rows_sharing_keys(p), 512) << "a bound";
  p.solver = Solver::cg;
  EXPECT_NE(refuse(p, kH200).find("directly"), std::string::npos);
  p.solver = Solver::direct;
  EXPECT_NE(refuse(p, kH200).find("conjugate gradients"), std::string::npos);

  p = over_cache(1, 8, kSolvedCrossing.most / 4 + 1, 1000, 128);
  p.heads_kv = 2;  // each query has four rows
  EXPECT_FALSE(has_decode_part(p));
  p.seqlen_q = kSolvedCrossing.most / 4;
  EXPECT_FALSE(has_forward_part(p));
  p.packed = true;
  EXPECT_FALSE(has_forward_part(p)) << "no sequence may have more";
}

// The fewer key heads a call has room for, the more rows decode; nothing else about the batch counts.
TEST(Sm90Plan, WhereDecodeAndForwardCross) {
  int64_t before = kSolvedCrossing.most;
  for (const int64_t batch : {1, 2, 4, 8, 32, 256}) {
    core::Problem p = over_cache(batch, 8, 64, 16384, 128);
    EXPECT_LE(most_rows(p), before);
    EXPECT_GE(most_rows(p), kSolvedCrossing.fewest);
    before = most_rows(p);
    p.seqlen_k = 1000, p.total_k = batch * 1000, p.seqlen_q = 2, p.total_q = 2 * batch;
    EXPECT_EQ(most_rows(p), before) << "lengths do not count";
    p.batch_invariant = true;
    EXPECT_EQ(most_rows(p), kInvariantRows) << "nor does the batch";
    p.batch_invariant = false;
    p.solver = Solver::direct;
    EXPECT_EQ(most_rows(p), kSolvedCrossing.most) << "only decode solves directly";
    for (const Solver solver : {Solver::cg, Solver::automatic}) {
      p.solver = solver;
      p.dtype = solver == Solver::cg ? DType::bf16 : DType::f32;
      EXPECT_EQ(most_rows(p), kSolvedCrossing.fewest) << "decode takes neither";
    }
  }
  EXPECT_EQ(before, kSolvedCrossing.fewest);
  // The heads of a group share nothing in the forward: there more of their rows decode.
  core::Problem grouped = over_cache(32, 8, 4, 4096, 128);
  grouped.heads_q = 64;
  EXPECT_GE(most_rows(grouped), 32);
  EXPECT_FALSE(has_forward_part(grouped)) << "four queries of eight heads";
  core::Problem given = over_cache(1, 8, 33, 65536, 128);
  given.ridge = core::RidgeShape::none;
  EXPECT_EQ(most_rows(given), kGivenXCrossing.most);
  given.batch = 4;
  EXPECT_LT(most_rows(given), kGivenXCrossing.most);
  EXPECT_GT(most_rows(given), kGivenXCrossing.fewest);
  given.batch = 32;
  EXPECT_EQ(most_rows(given), kGivenXCrossing.fewest);
}

TEST(Sm90Plan, BatchInvariantWhereItHolds) {
  core::Problem p = problem(3, 4, 300, 64);
  p.batch_invariant = true;
  EXPECT_EQ(refuse(p, kH200), "");
  EXPECT_FALSE(has_own_spans(p)) << "dense sequences have statistics of their own";
  p.packed = true;
  EXPECT_TRUE(has_own_spans(p));
  EXPECT_EQ(refuse(p, kH200), "");
  p.operation = core::Operation::backward;
  EXPECT_NE(refuse(p, kH200).find("batch_invariant"), std::string::npos);

  p = over_cache(32, 8, 1, 16384, 128);
  EXPECT_EQ(decode::pieces_of_rows(p), 0);
  p.batch_invariant = true;
  EXPECT_EQ(refuse(p, kH200), "");
  EXPECT_EQ(decode::pieces_of_rows(p), 4);
  EXPECT_NE(noted(p, "decode").find("its own length"), std::string::npos);
  EXPECT_LE(plan(p, kH200).workspace_bytes, size_t{129} << 20);
}

TEST(Sm90Plan, RefusesOverCaches) {
  core::Problem p = over_cache(1, 8, 1, 1000, 128);
  p.solver = Solver::cg;
  EXPECT_NE(refuse(p, kH200).find("directly"), std::string::npos);
  p = over_cache(1, 8, 1, 1000, 128);
  p.dtype = DType::f32;
  p.precision = Precision::tf32;
  EXPECT_NE(refuse(p, kH200).find("bf16"), std::string::npos);
}

TEST(Sm90Plan, CachesWeightsWithinTheLimit) {
  core::Problem p = problem(4, 8, 2048, 128);
  core::Plan planned = plan(p, kH200);
  EXPECT_TRUE(planned.cached_weights);
  EXPECT_EQ(planned.block_rows, 64);
  EXPECT_EQ(planned.workers, 132);
  // 132 resident blocks of two times 64 queries, n keys rounded up to tiles, 2 bytes each: linear in n.
  EXPECT_EQ(cached_weights_per_block(p), 26 * 80 * 128 * 2);
  p.cached_weights_limit = 50 << 20;
  EXPECT_FALSE(plan(p, kH200).cached_weights);
  p.weights = Weights::cached;
  EXPECT_NE(refuse(p, kH200).find("cached_weights_limit"), std::string::npos);
  p.weights = Weights::recompute;
  EXPECT_EQ(refuse(p, kH200), "");
  EXPECT_FALSE(plan(p, kH200).cached_weights);
}

TEST(Sm90Plan, AGivenXTakesOnePassAndCachesNothing) {
  for (const int64_t dim : {64, 128}) {
    core::Problem p = problem(4, 8, 4096, dim);
    p.ridge = core::RidgeShape::none;
    p.weights = Weights::cached;  // nothing is read twice, so there is nothing to refuse either
    p.cached_weights_limit = 0;
    EXPECT_EQ(refuse(p, kH200), "");
    const core::Plan planned = plan(p, kH200);
    EXPECT_FALSE(planned.cached_weights);
    EXPECT_EQ(planned.block_keys, given_x_tile_keys(static_cast<int>(dim)));
    const int64_t copies = 2 * p.total_k * p.heads_kv * dim * 2, marks = 2 * p.total_k * p.heads_kv;
    const int64_t maxima = p.batch * p.heads_kv * prepass_chunks(p.seqlen_k) * 8;
    EXPECT_LE(static_cast<int64_t>(planned.workspace_bytes), copies + marks + maxima + 8 * kWorkspaceAlignment);
    p.operation = core::Operation::backward;
    EXPECT_EQ(plan(p, kH200).block_keys, tile_keys(static_cast<int>(dim)));
  }
}

TEST(Sm90Plan, WindowShrinksTheCache) {
  core::Problem p = problem(1, 8, 100000, 64);
  EXPECT_FALSE(plan(p, kH200).cached_weights);  // 3.4 GB
  p.mask = {1023, 0};
  EXPECT_TRUE(plan(p, kH200).cached_weights);
  EXPECT_LE(cached_weights_per_block(p), (1024 + 128 + 2 * 128) * 128 * 2);
}

TEST(Sm90Plan, CachesWeightsWhereItPays) {
  for (const auto& [length, dim, pays] : {std::tuple{256, 128, false},
                                          {1024, 128, true},
                                          {16384, 128, true},
                                          {65536, 128, false},
                                          {256, 64, false},
                                          {4096, 64, true},
                                          {16384, 64, false}}) {
    const core::Plan planned = plan(problem(1, 8, length, dim), kH200);
    EXPECT_EQ(planned.cached_weights, pays) << length << " " << dim;
  }
  core::Problem p = problem(1, 8, 4096, 128);
  p.operation = core::Operation::backward;
  EXPECT_TRUE(plan(p, kH200).cached_weights);
  p = problem(1, 8, 4096, 64);
  p.operation = core::Operation::backward;
  EXPECT_FALSE(plan(p, kH200).cached_weights);
}

TEST(Sm90Plan, BundlesOfHeadsFitTheCache) {
  EXPECT_EQ(shape_of(problem(4, 8, 4096, 128)).bundle, 8);
  EXPECT_EQ(shape_of(problem(4, 8, 100, 64)).bundle, 32);      // all there are
  EXPECT_EQ(shape_of(problem(4, 8, 1 << 20, 128)).bundle, 1);  // one at a time
}

// Queries that see at most twice the head dimension take most iterations: their blocks come first where there is a
// solve.
TEST(Sm90Plan, BlocksWithFewKeysComeFirst) {
  core::Problem p = problem(4, 8, 4096, 128);
  EXPECT_EQ(shape_of(p).early_rows, 0);
  EXPECT_EQ(solve_shape_of(p).early_rows, 256);
  p.seqlen_k = 4200;
  EXPECT_EQ(solve_shape_of(p).early_rows, 152);
  p.seqlen_k = 8192;
  EXPECT_EQ(solve_shape_of(p).early_rows, 0);
  p = problem(4, 8, 100, 40);
  EXPECT_EQ(solve_shape_of(p).early_rows, 100);
  p.mask = {-1, -1};  // all see as many
  EXPECT_EQ(solve_shape_of(p).early_rows, 0);
}

// 64 MiB, fp16 copies of the operands, what is kept in fp32 per row, and the cached weights, themselves within their
// limit: linear in the length, nothing per pair but the cache.
TEST(Sm90Plan, WorkspaceStaysWithinItsBound) {
  struct Size {
    int64_t batch, heads, length;
  };
  for (const Size& size : {Size{4, 8, 4096}, Size{1, 8, 16384}, Size{8, 8, 1024}, Size{1, 2, 131072}, Size{64, 1, 1}}) {
    for (const int64_t dim : {24, 64, 128}) {
      for (const auto operation : {core::Operation::forward, core::Operation::backward}) {
        for (const auto ridge : {core::RidgeShape::token, core::RidgeShape::none}) {
          core::Problem p = problem(size.batch, size.heads, size.length, dim);
          p.operation = operation;
          p.ridge = ridge;
          const core::Plan planned = plan(p, kH200);
          const int64_t rows = p.rows(), padded = padded_dim(dim, dim);
          const int64_t weights = planned.cached_weights ? cached_weights_per_block(p) * planned.workers : 0;
          EXPECT_LE(weights, p.cached_weights_limit);
          int64_t bound = (int64_t{64} << 20) + 2 * rows * padded * 2 + weights;
          // Q, G, and x and y in two parts each; y itself and twelve constants.
          if (operation == core::Operation::backward) bound += 6 * rows * padded * 2 + rows * (padded + 12) * 4;
          EXPECT_LE(static_cast<int64_t>(planned.workspace_bytes), bound)
              << size.batch << " x " << size.heads << " x " << size.length << ", D " << dim
              << (operation == core::Operation::backward ? ", backward" : ", forward");
        }
      }
    }
  }
}

TEST(Sm90Plan, FewBlocksNeedLittle) {
  const core::Plan planned = plan(problem(1, 1, 100, 64), kH200);
  EXPECT_EQ(planned.workers, 2);  // items of 64 queries
  EXPECT_LT(planned.workspace_bytes, size_t{2} << 20);
}

TEST(Sm90Workspace, SectionsAreAlignedAndInOrder) {
  core::Problem p = problem(3, 5, 777, 80);
  p.packed = true;
  p.total_q = p.total_k = 2001;
  const WorkspaceLayout at(p, 7, 1024 * 5);
  const int64_t order[] = {at.header, at.head_statistics, at.key_marks, at.value_marks, at.keys,
                           at.values, at.scratch,         at.weights,   at.size};
  for (int i = 0; i + 1 < 9; ++i) {
    EXPECT_LE(order[i], order[i + 1]);
    EXPECT_EQ(order[i] % kWorkspaceAlignment, 0);
  }
  EXPECT_GE(at.values - at.keys, 2001 * 5 * 128 * 2);
  EXPECT_GE(at.size - at.weights, 7 * 1024 * 5);
}

}  // namespace
}  // namespace lla::cuda::sm90
