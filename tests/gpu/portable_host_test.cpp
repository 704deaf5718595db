// The host side of the portable CUDA implementation: what it refuses, how it plans, how it divides the workspace. No
// GPU needed.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/common/device.hpp"
#include "cuda/portable/config.hpp"
#include "cuda/portable/decode.hpp"
#include "cuda/portable/layout.hpp"
#include "cuda/portable/portable.hpp"

namespace lla::cuda::portable {
namespace {

core::Problem problem(int64_t dim, DType dtype, core::Operation operation,
                      core::RidgeShape ridge = core::RidgeShape::scalar) {
  core::Problem p;
  p.operation = operation;
  p.device = core::Device::cuda;
  p.dtype = dtype;
  p.batch = 2;
  p.seqlen_q = p.seqlen_k = 333;
  p.total_q = p.total_k = 666;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.dim = dim;
  p.value_dim = dim + 3;
  p.ridge = ridge;
  return p;
}

TEST(PortableHost, TheProbeGivesAReasonOrADevice) {
  const core::CudaDevice device = probe(0);
  if (device.present) {
    EXPECT_GE(device.arch, kOldestArch);
    EXPECT_GT(device.multiprocessors, 0);
  } else {
    EXPECT_FALSE(device.absent_reason.empty());
  }
  const core::CudaDevice none = probe(1000);
  EXPECT_FALSE(none.present);
  EXPECT_FALSE(none.absent_reason.empty());
}

TEST(PortableHost, RefusesWithAReason) {
  core::Machine machine = core::h200();
  core::Problem p = problem(64, DType::f32, core::Operation::forward);
  EXPECT_EQ(implementation.refuse(p, machine), "");
  p.dim = 257;
  EXPECT_NE(implementation.refuse(p, machine).find("257"), std::string::npos);
  p.dim = 64;
  p.weights = Weights::cached;
  EXPECT_NE(implementation.refuse(p, machine), "");
  p.weights = Weights::recompute;
  EXPECT_EQ(implementation.refuse(p, machine), "");
  machine.cuda.arch = 75;
  EXPECT_NE(implementation.refuse(p, machine).find("7.5"), std::string::npos);
  machine.cuda.arch = 86;
  machine.cuda.shared_memory_per_block = kSharedMemoryLimit;
  EXPECT_EQ(implementation.refuse(p, machine), "");
  p.batch = int64_t{1} << 40;
  EXPECT_NE(implementation.refuse(p, machine), "");
}

// Sections in bounds, aligned, without overlap, and large enough for what the kernels index.
TEST(PortableHost, WorkspaceSections) {
  for (const core::Operation operation : {core::Operation::forward, core::Operation::backward}) {
    for (const auto ridge : {core::RidgeShape::none, core::RidgeShape::scalar, core::RidgeShape::dimension}) {
      for (const DType dtype : {DType::bf16, DType::f64}) {
        const core::Problem p = problem(250, dtype, operation, ridge);
        const Layout l(p, 7);
        const int64_t element = dtype == DType::f64 ? 8 : 4, rows = p.rows();
        const bool backward = operation == core::Operation::backward, solves = !p.given_x();
        struct Section {
          int64_t at, bytes;
        };
        std::vector<Section> sections;
        const auto expect = [&](int64_t at, int64_t bytes, bool wanted) {
          EXPECT_EQ(at >= 0, wanted);
          if (at >= 0) sections.push_back({at, bytes});
        };
        expect(l.max, rows * element, true);
        expect(l.omega, rows * element, true);
        expect(l.mean_k, rows * p.dim * element, true);
        expect(l.mean_v, rows * p.value_dim * element, true);
        expect(l.x, rows * p.dim * element, !backward);
        expect(l.residual, rows * p.dim * element, solves);
        expect(l.kind, rows * 4, true);
        expect(l.y, rows * p.dim * element, backward && solves);
        expect(l.mean_e, rows * element, backward);
        expect(l.tau, rows * element, backward);
        expect(l.tau_low, rows * element, backward);
        expect(l.mean_b, rows * element, backward);
        expect(l.c, rows * element, backward);
        expect(l.exponent, rows * 4, backward);
        expect(l.dridge, rows * element, backward && ridge == core::RidgeShape::scalar);
        expect(l.matrices, 7 * DirectConfig::matrix_elements(p.dim) * 8,
               true);  // D = 250 does not fit in shared memory
        std::sort(sections.begin(), sections.end(), [](auto a, auto b) { return a.at < b.at; });
        int64_t end = 0;
        for (const Section& s : sections) {
          EXPECT_EQ(s.at % 256, 0);
          EXPECT_GE(s.at, end);
          end = s.at + s.bytes;
        }
        EXPECT_LE(end, l.bytes);
      }
    }
  }
}

TEST(PortableHost, MemoryIsLinearInLengthTimesDimension) {
  core::Problem p = problem(128, DType::bf16, core::Operation::backward);
  const int64_t small = Layout(p, 0).bytes;
  p.seqlen_q = p.seqlen_k = 3330;
  p.total_q = p.total_k = 6660;
  EXPECT_LE(Layout(p, 0).bytes, 10 * small);
}

TEST(PortableHost, WhichRowsGoToTheDirectSolver) {
  core::Problem p = problem(64, DType::f32, core::Operation::forward);
  const core::CudaDevice device = core::h200().cuda;
  EXPECT_EQ(direct_keys(p), 64);
  EXPECT_TRUE(rescues(p));
  EXPECT_GT(direct_blocks(p, device), 0);
  p.solver = Solver::cg;
  EXPECT_LT(direct_keys(p), 0);
  EXPECT_FALSE(rescues(p));
  EXPECT_EQ(direct_blocks(p, device), 0);
  p.solver = Solver::direct;
  EXPECT_GT(direct_keys(p), p.seqlen_k);
  EXPECT_FALSE(rescues(p));
  p.solver = Solver::automatic;
  p.ridge = core::RidgeShape::none;
  EXPECT_EQ(direct_blocks(p, device), 0);
  p.ridge = core::RidgeShape::scalar;
  p.dim = 256;
  EXPECT_FALSE(rescues(p)) << "too large to be factored on chip";
  EXPECT_FALSE(DirectConfig::matrix_in_shared(256));
  EXPECT_TRUE(DirectConfig::matrix_in_shared(128));
}

TEST(PortableHost, ThePlanSaysWhatItDecided) {
  const core::Problem p = problem(64, DType::bf16, core::Operation::forward);
  core::Plan plan = implementation.plan(p, core::h200());
  plan.implementation = &implementation;
  EXPECT_EQ(plan.block_rows, 32);
  EXPECT_GT(plan.workspace_bytes, 0u);
  const std::string text = plan.text(p, core::h200());
  EXPECT_NE(text.find("arithmetic: f32"), std::string::npos);
  EXPECT_NE(text.find("rows with at most 64 keys directly"), std::string::npos);
}

TEST(PortableHost, TilesFitInSharedMemory) {
  const auto check = [](auto config) {
    using C = decltype(config);
    EXPECT_LE(static_cast<int64_t>(C::shared_bytes(4, 1)), kSharedMemoryLimit);  // dq, the largest
    EXPECT_EQ(C::kThreads % 32, 0);
    EXPECT_EQ(C::kColumns * kLanes * C::kVec * static_cast<int>(sizeof(double)) % 8, 0);
  };
  check(Config<float, 64>{});
  check(Config<float, 128>{});
  check(Config<float, 256>{});
  check(Config<double, 64>{});
  check(Config<double, 128>{});
  check(Config<double, 256>{});
  for (int64_t dim = 1; dim <= kLargestDim; ++dim) {
    EXPECT_LE(static_cast<int64_t>(DirectConfig::shared_bytes(dim)), kSharedMemoryLimit) << dim;
  }
}

// Sequences with few rows over a cache: who takes them, how their keys are cut, and what that needs.
TEST(PortableHost, DecodesSequencesWithFewRows) {
  core::Problem p = problem(64, DType::f32, core::Operation::forward);
  EXPECT_FALSE(has_decoded_rows(p));
  EXPECT_EQ(DecodeLayout(p).bytes, 0);
  p.cache = true;
  p.seqlen_k = 65536;
  EXPECT_FALSE(has_decoded_rows(p)) << "333 queries each, of two heads";
  p.packed = true;
  EXPECT_TRUE(has_decoded_rows(p) && has_block_rows(p));
  EXPECT_TRUE(decodes(p, 16));
  EXPECT_FALSE(decodes(p, 17));
  EXPECT_EQ(DecodeLayout(p).rows, 2 * 4 * 16);
  p.seqlen_q = 16;
  EXPECT_FALSE(has_block_rows(p));
  EXPECT_TRUE(decodes(p, 400)) << "which is invalid, and has nobody else to say so";
  p.solver = Solver::cg;
  EXPECT_FALSE(has_decoded_rows(p));
  EXPECT_TRUE(has_block_rows(p));
  p.solver = Solver::automatic;
  EXPECT_NE(core::Plan(implementation.plan(p, core::h200())).workspace_bytes, 0u);
}

TEST(PortableHost, SpansCoverTheKeys) {
  for (int64_t keys = 0; keys < 300000; keys += keys < 3000 ? 1 : 997) {
    const int64_t spans = KeySpans::count(keys), each = KeySpans::keys_of_each(keys);
    EXPECT_LE(spans, KeySpans::kMost);
    EXPECT_GE(spans * each, keys);
    EXPECT_EQ(each % DirectConfig::kKeys, 0);
  }
  for (const int64_t dim : {1, 64, 128, 256}) {
    for (const core::RidgeShape ridge : {core::RidgeShape::scalar, core::RidgeShape::none}) {
      core::Problem p = problem(dim, DType::bf16, core::Operation::forward, ridge);
      p.value_dim = std::min<int64_t>(p.value_dim, kLargestDim);
      p.cache = true;
      p.batch = 512, p.seqlen_q = 1, p.seqlen_k = 1 << 20;
      const DecodeLayout layout(p);
      EXPECT_EQ(layout.rows, 512 * 4);
      EXPECT_LE(layout.bytes, int64_t{64} << 20) << dim;
      EXPECT_GE(layout.rows_at_once, 1);
      // What the kernels keep of a row in shared memory, beside a matrix.
      EXPECT_LE((20 * (DirectConfig::padded(dim) + 4) + DirectConfig::kKeys) * 8,
                static_cast<int64_t>(DirectConfig::vector_bytes(dim)));
    }
  }
}

}  // namespace
}  // namespace lla::cuda::portable
