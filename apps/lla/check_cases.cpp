#include "check_cases.hpp"

#include <fmt/core.h>

#include "core/text.hpp"

namespace lla::app {
namespace {

using core::RidgeShape;

constexpr DType kDtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr double kLambdas[] = {1, 0.01};
constexpr RidgeShape kRidges[] = {RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension, RidgeShape::none};

const CheckMask kMasks[] = {
    {"causal", true, -1, -1},
    {"full", false, -1, -1},
    {"window(24,5)", false, 24, 5},
};

//                       name       B   Lq   Lk  Hq Hkv   D  Dv   cumulative lengths
const CheckShape kShapes[] = {
    {"plain", {1, 129, 129, 2, 2, 64, 64}, {}},
    {"gqa", {2, 64, 64, 4, 2, 16, 24}, {}},
    {"cross", {1, 40, 150, 2, 1, 32, 32}, {}},
    {"odd", {1, 83, 83, 1, 1, 37, 13}, {}},
    {"packed", {1, 160, 160, 2, 2, 32, 32}, {0, 63, 63, 64, 160}},
};
const CheckShape kLargerShapes[] = {
    {"long", {1, 600, 600, 1, 1, 64, 64}, {}},
    {"wide", {1, 260, 260, 1, 1, 128, 128}, {}},
};

const char* name(RidgeShape ridge) {
  switch (ridge) {
    case RidgeShape::none: return "x given";
    case RidgeShape::scalar: return "one ridge";
    case RidgeShape::head: return "ridge per head";
    case RidgeShape::token: return "ridge per token";
    case RidgeShape::dimension: return "ridge per dimension";
  }
  return "";
}

}  // namespace

double CheckCase::tolerance() const {
  switch (dtype) {
    case DType::f64: return 1e-13;
    case DType::f32: return 1e-6;
    default: return 1e-4;
  }
}

std::string CheckCase::text() const {
  const data::Sizes& s = shape->sizes;
  const std::string ridge_text = ridge == RidgeShape::none ? name(ridge) : fmt::format("{} ~ {}", name(ridge), lambda);
  return fmt::format("{}, {}, {}, {}, {} (B {}, Lq {}, Lk {}, H {}/{}, D {}, Dv {})", core::name(dtype), data::name(kind), mask->name,
                     ridge_text, shape->name, s.batch, s.length_q, s.length_k, s.heads_q, s.heads_kv, s.dim, s.value_dim);
}

std::vector<CheckCase> check_cases(bool quick) {
  std::vector<const CheckShape*> shapes;
  for (const CheckShape& s : kShapes) shapes.push_back(&s);
  if (!quick) {
    for (const CheckShape& s : kLargerShapes) shapes.push_back(&s);
  }
  std::vector<CheckCase> cases;
  size_t turn = 0;  // which shape is next; when quick also which mask and ridge
  for (DType dtype : kDtypes) {
    for (double lambda : kLambdas) {
      for (data::Kind kind : data::kinds) {
        if (quick) {
          // 5 ridges, 5 shapes, 3 masks: the division keeps a ridge from meeting the same shape every time.
          const RidgeShape ridge = kRidges[turn % 5];
          cases.push_back({dtype, kind, lambda, ridge, &kMasks[turn % 3], shapes[(turn + turn / 5) % shapes.size()]});
          ++turn;
          continue;
        }
        for (const CheckMask& mask : kMasks) {
          for (RidgeShape ridge : kRidges) {
            if (ridge == RidgeShape::none && lambda != kLambdas[0]) continue;  // no ridge, nothing to vary
            cases.push_back({dtype, kind, lambda, ridge, &mask, shapes[turn++ % shapes.size()]});
          }
        }
      }
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) cases[i].seed = i + 1;
  return cases;
}

// fp64 and fp32: the accuracy the project promises. 16 bits run at a tighter tolerance than the default here, because windows with
// fewer keys than dimensions are harder than anything promised; output at the default tolerance is held by tests/core/accuracy_test.
CheckGates check_gates(const CheckCase& c) {
  const bool small_ridge = c.lambda < 0.1 && c.ridge != RidgeShape::none;
  switch (c.dtype) {
    case DType::f64: return {1e-10, 1e-10};
    case DType::f32: return small_ridge ? CheckGates{1e-3, 1e-2} : CheckGates{2e-5, 1e-4};
    default: return small_ridge ? CheckGates{4e-3, 4e-2} : CheckGates{4e-3, 4e-3};
  }
}

}  // namespace lla::app
