#include "check_cases.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>

#include "core/text.hpp"

namespace lla::app {
namespace {

using core::RidgeShape;

constexpr DType kDtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr double kLambdas[] = {1, 0.01};
constexpr RidgeShape kRidges[] = {RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension,
                                  RidgeShape::none};

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

bool CheckCase::degenerate() const {
  return std::find(std::begin(data::degenerate_kinds), std::end(data::degenerate_kinds), kind) !=
         std::end(data::degenerate_kinds);
}

bool CheckCase::trained() const {
  return std::find(std::begin(data::peaked_kinds), std::end(data::peaked_kinds), kind) != std::end(data::peaked_kinds);
}

double CheckCase::tolerance() const {
  if (saved_tolerance > 0) return saved_tolerance;
  switch (dtype) {
    case DType::f64: return 1e-13;
    case DType::f32: return 1e-6;
    default: return degenerate() ? 1e-6 : 1e-4;
  }
}

std::string CheckCase::text() const {
  const data::Sizes& s = shape->sizes;
  const std::string ridge_text = ridge == RidgeShape::none ? name(ridge) : fmt::format("{} ~ {}", name(ridge), lambda);
  const std::string gradient_text = gradient_power == 0 ? "" : fmt::format(", gradients 2^{}", gradient_power);
  return fmt::format("{}, {}, {}, {}{}, {} (B {}, Lq {}, Lk {}, H {}/{}, D {}, Dv {})", core::name(dtype),
                     data::name(kind), mask->name, ridge_text, gradient_text, shape->name, s.batch, s.length_q,
                     s.length_k, s.heads_q, s.heads_kv, s.dim, s.value_dim);
}

namespace {

// Each type with each kind; quick: one ridge and gradient in turn, otherwise each ridge with every gradient in turn.
void add_degenerate_cases(bool quick, std::vector<CheckCase>& cases) {
  constexpr double lambdas[] = {1, 1e-3, 0.1, 1e4};
  constexpr int powers[] = {0, -100, -47, 13};
  constexpr int narrow_powers[] = {0, -8, -4, 10};  // f16 holds no more
  size_t turn = 0;
  for (DType dtype : kDtypes) {
    for (data::Kind kind : data::degenerate_kinds) {
      for (size_t i = 0; i < (quick ? 1 : std::size(lambdas)); ++i, ++turn) {
        CheckCase c{dtype,
                    kind,
                    lambdas[turn % 4],
                    kRidges[(turn + turn / 5) % 5],
                    &kMasks[turn % 3],
                    &kShapes[(turn / 2) % 5]};
        // Against keys a hundred times as long 1e-3 is 1e-7 of their variance, and nothing is left to compare.
        if (kind == data::Kind::long_keys || kind == data::Kind::one_large_key) c.lambda = std::max(c.lambda, 1.0);
        const auto& some = dtype == DType::f16 ? narrow_powers : powers;
        c.gradient_power = some[(turn + turn / 4) % 4];
        cases.push_back(c);
      }
    }
  }
}

// Each type with each kind of trained attention; quick: one ridge in turn.
void add_peaked_cases(bool quick, std::vector<CheckCase>& cases) {
  constexpr double lambdas[] = {1, 0.1, 0.01};
  size_t turn = 0;
  for (DType dtype : kDtypes) {
    for (data::Kind kind : data::peaked_kinds) {
      for (size_t i = 0; i < (quick ? 1 : std::size(lambdas)); ++i, ++turn) {
        cases.push_back({dtype, kind, lambdas[turn % 3], kRidges[(turn + turn / 5) % 5], &kMasks[turn % 3],
                         &kShapes[(turn / 2) % 5]});
      }
    }
  }
}

}  // namespace

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
  add_degenerate_cases(quick, cases);
  add_peaked_cases(quick, cases);
  for (size_t i = 0; i < cases.size(); ++i) cases[i].seed = i + 1;
  return cases;
}

// fp64 and fp32: the accuracy the project promises. 16 bits run at a tighter tolerance than the default here, because
// windows with fewer keys than dimensions are harder than anything promised; output at the default tolerance is held by
// tests/core/accuracy_test.
CheckGates check_gates(const CheckCase& c) {
  if (c.degenerate()) {  // the loosest of the below: nobody has studied these
    return c.dtype == DType::f64   ? CheckGates{1e-9, 1e-9}
           : c.dtype == DType::f32 ? CheckGates{1e-3, 5e-2}
                                   : CheckGates{2e-2, 8e-2};
  }
  if (c.trained()) {
    return c.dtype == DType::f64   ? CheckGates{1e-9, 1e-9}
           : c.dtype == DType::f32 ? CheckGates{1e-3, 1e-2}
                                   : CheckGates{4e-3, 3e-2};
  }
  const bool small_ridge = c.lambda < 0.1 && c.ridge != RidgeShape::none;
  switch (c.dtype) {
    case DType::f64: return {1e-10, 1e-10};
    case DType::f32: return small_ridge ? CheckGates{1e-3, 1e-2} : CheckGates{2e-5, 1e-4};
    default: return small_ridge ? CheckGates{4e-3, 4e-2} : CheckGates{4e-3, 4e-3};
  }
}

}  // namespace lla::app
