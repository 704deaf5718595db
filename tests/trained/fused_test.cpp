// The norms, λ and the loss over a vocabulary against plain formulas in fp64, with their gradients: torch's operations
// on the CPU, and on a GPU the kernels that take their place there.
#include <gtest/gtest.h>

#include <ATen/detail/CUDAHooksInterface.h>

#include "models/fused.hpp"
#include "models/label_loss.hpp"

namespace lla::trained {
namespace {

using at::Tensor;
using ::torch::autograd::grad;

struct Place {
  const char* name;
  at::Device device;
  at::ScalarType type;
  double tolerance;  // of an element, relative to itself and to the root mean square of its row
};

class Fused : public ::testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    if (!GetParam().device.is_cuda()) return;
    if (!at::globalContext().hasCUDA() || at::detail::getCUDAHooks().deviceCount() == 0) GTEST_SKIP() << "no GPU";
  }

  // Numbers that the type of the place holds, in fp64.
  static Tensor draw(at::IntArrayRef shape, double size = 1) {
    return (at::randn(shape, at::kDouble) * size).to(GetParam().type).to(at::kDouble);
  }
  static Tensor ours(const Tensor& t) {
    return t.detach().to(GetParam().device, GetParam().type).requires_grad_(t.requires_grad());
  }
  // `terms`: what a difference of the result is made of, where it may be much smaller than they are.
  static void expect_near(const Tensor& got, const Tensor& wanted, const std::string& what, const Tensor& terms = {}) {
    const Tensor value = got.detach().to(at::kCPU, at::kDouble), exact = wanted.detach();
    ASSERT_EQ(value.sizes(), exact.sizes()) << what;
    const Tensor row = (terms.defined() ? terms.detach() : exact).square().mean(-1, true).sqrt();
    const Tensor excess = (value - exact).abs() - GetParam().tolerance * (exact.abs() + row);
    EXPECT_LE(excess.max().item<double>(), 1e-30) << what;  // NaN fails
  }
};

constexpr double kEpsilon = 1e-6;
Tensor inverse(const Tensor& x, double scale) { return scale / (x.square().mean(-1, true) + kEpsilon).sqrt(); }
Tensor plain_norm(const Tensor& x, double scale) { return x * inverse(x, scale); }

TEST_P(Fused, RmsNormAloneAndWithTheSumBeforeIt) {
  at::manual_seed(1);
  for (const int64_t width : {8, 24, 64, 128, 384, 1024, 1032, 20}) {  // the last two have no kernel
    for (const int64_t rows : {1, 7, 300}) {
      for (const double size : {1.0, 1e-3, 100.0}) {
        const std::string what = "width " + std::to_string(width) + ", rows " + std::to_string(rows);
        const Tensor x = draw({rows, width}, size).requires_grad_(), more = draw({rows, width}, size).requires_grad_();
        const Tensor slope = draw({rows, width}), other = draw({rows, width});
        for (const double scale : {1.0, 0.125}) {
          const Tensor exact = plain_norm(x, scale), own = ours(x), got = fused_rms_norm(own, scale, kEpsilon);
          expect_near(got, exact, what);
          expect_near(grad({got}, {own}, {ours(slope)})[0], grad({exact}, {x}, {slope})[0], what + ", gradient",
                      slope * inverse(x, scale));
        }
        // The sum is rounded before it is normed: the exact one begins with what the place holds.
        const Tensor a = ours(x), b = ours(more);
        const SumAndNorm got = fused_sum_and_norm(a, b, kEpsilon);
        const Tensor sum = (x + more).detach().to(GetParam().type).to(at::kDouble).requires_grad_();
        const Tensor exact = plain_norm(sum, 1);
        expect_near(got.sum, x + more, what + ", sum");
        expect_near(got.normed, exact, what + ", normed sum");
        const Tensor wanted = grad({sum * 1, exact}, {sum}, {other, slope})[0];
        const auto both = grad({got.sum, got.normed}, {a, b}, {ours(other), ours(slope)});
        expect_near(both[0], wanted, what + ", gradient of both", slope * inverse(sum, 1) + other);
        EXPECT_TRUE(both[0].equal(both[1])) << what;
      }
    }
  }
}

TEST_P(Fused, RidgeSharedByTheHeads) {
  at::manual_seed(2);
  for (const int64_t width : {8, 64, 128, 12}) {
    for (const double floor : {0.0, 1e-3}) {
      // Columns out of a wider product, as the layer has them.
      const Tensor wide = draw({3, 5, 2 * width}, 4).requires_grad_(), own = ours(wide);
      const auto part = [&](const Tensor& t) { return t.narrow(2, width, width); };
      const Tensor exact = (floor + (1 - floor) * part(wide).sigmoid()).unsqueeze(2).expand({-1, -1, 2, -1});
      const Tensor got = shared_ridge(part(own), 2, floor);
      const std::string what = "width " + std::to_string(width);
      EXPECT_EQ(got.scalar_type(), GetParam().type == at::kDouble ? at::kDouble : at::kFloat);
      const Tensor value = got.detach().to(at::kCPU, at::kDouble);
      EXPECT_LT(((value - exact) / exact).abs().max().item<double>(), 2e-6) << what;
      const Tensor slope = draw({3, 5, 2, width});
      const Tensor back = grad({got}, {own}, {slope.to(got.options())})[0];
      expect_near(back, grad({exact}, {wide}, {slope})[0], what + ", gradient");
    }
  }
}

TEST_P(Fused, LossOverAVocabulary) {
  at::manual_seed(3);
  for (const int64_t vocabulary : {8, 256, 1000, 8192, 16384, 16392}) {
    for (const double size : {0.1, 0.5, 1.0}) {  // from even chances to words that are nearly certain
      const int64_t rows = 37, width = 16;
      const Tensor features = draw({2, rows, width}, size).requires_grad_();
      const Tensor matrix = draw({2, width, vocabulary}).requires_grad_();
      const Tensor labels = at::randint(vocabulary, {2, rows}, at::kLong);
      const Tensor chances = at::log_softmax(at::bmm(features, matrix), -1);
      const Tensor exact = -chances.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean(1);
      const Tensor a = ours(features), b = ours(matrix);
      const Tensor got = label_losses(a, b, labels.to(GetParam().device));
      const std::string what = "vocabulary " + std::to_string(vocabulary) + ", size " + std::to_string(size);
      expect_near(got, exact, what);
      const Tensor slope = draw({2});
      const auto back = grad({got}, {a, b}, {slope.to(got.options())});
      const auto wanted = grad({exact}, {features, matrix}, {slope});
      for (size_t i = 0; i < 2; ++i) {
        const Tensor value = back[i].to(at::kCPU, at::kDouble);
        EXPECT_LT((value - wanted[i]).norm().item<double>(), GetParam().tolerance * wanted[i].norm().item<double>())
            << what << ", gradient " << i;
      }
    }
  }
}

// bf16 has 8 significant bits; a result is rounded once, a gradient passes through one rounded factor more.
INSTANTIATE_TEST_SUITE_P(Places, Fused,
                         ::testing::Values(Place{"cpu_f64", at::kCPU, at::kDouble, 1e-12},
                                           Place{"cpu_f32", at::kCPU, at::kFloat, 1e-5},
                                           Place{"gpu_bf16", at::Device(at::kCUDA, 0), at::kBFloat16, 0.01}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lla::trained
