// Powers of two of the backward's operands. Sums over queries share an accumulator, so all rows of a head must agree on
// a common scale; what a row needs beyond it (alpha, beta) is split between the two factors of each product.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::tensor {

inline constexpr int kNoExponent = -kExponentBias;  // of zero

// The least e with x < 2^e, for x >= 0.
constexpr int exponent_above(float x) {
  return x > 0 ? static_cast<int>(std::bit_cast<uint32_t>(x) >> 23) - 126 : kNoExponent;
}

// 2^e, kept within the normal floats.
constexpr float power_of_two(int e) {
  return std::bit_cast<float>(static_cast<uint32_t>((e < -126 ? -126 : e > 127 ? 127 : e) + 127) << 23);
}

// x 2^e for exponents up to 252 in magnitude: rounded only where the result is subnormal, infinite where it is too
// large.
struct PowerOfTwo {
  float first, second;
  constexpr explicit PowerOfTwo(int e) : first(power_of_two(e / 2)), second(power_of_two(e - e / 2)) {}
  constexpr float operator*(float x) const { return x * first * second; }
};

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
// Sum of exponents, of which either may be "of zero".
constexpr int plus(int a, int b) { return a <= kNoExponent / 2 || b <= kNoExponent / 2 ? kNoExponent : a + b; }

// Exponents of one row: of its largest elements, and of the bounds of a = 1 + E and b = gamma - tau - F.
struct RowExponents {
  int q, g, x, y;
  int alpha, beta;
  int both;  // of the bound of P (a b - c)
};

// The exponent of the bound of sqrt(Σ p a²) from x·(q - mean key) of a solved row: Σ p a² = 1 + Σ p E² is no more than
// 1 + that. Twice the root, because solves are not exact.
constexpr int energy_exponent(float energy) { return energy > 0 ? (exponent_above(1 + energy) + 1) / 2 + 1 : 1; }
inline constexpr int kNoEnergy = kExponentBias / 4;  // where x is any vector

// |E| <= 2 |x| |k|, |gamma - tau| <= 2 |G| |v|, |F| <= 2 |y| |k|; norms bounded by exponents.
//
// b enters only in P b and dS, whose sums over keys are zero. So where one key has nearly all the weight, all but
// 2^rest, not even that key's element exceeds 2^rest times the bound of b (of a b), and beta may be that much smaller.
// Without it the elements of a peaked row, which all are small, would be left with few of fp16's bits.
//
// Where x is long, the bound of a is far above what a is wherever there is weight: P |a b| is at most sqrt(Σ p a²)
// times the bound of b as well, 2^energy of it, and for all but the heaviest key 2^(energy + rest/2) of it.
constexpr RowExponents row_exponents(int q, int g, int x, int y, int g_norm, int x_norm, int y_norm, int key_norm,
                                     int value_norm, int rest, int energy) {
  const int alpha = larger(0, plus(x_norm, key_norm) + 1) + 1;
  const int beta = plus(larger(plus(g_norm, value_norm), plus(y_norm, key_norm)), 2 + rest);
  return {q, g, x, y, alpha, beta, plus(beta, smaller(alpha, energy + (1 - rest) / 2))};
}

// Of a head's values: |v| <= largest sqrt(dim), half the exponent of the dimension, rounded up.
constexpr int value_norm_exponent(float largest, int value_dim) {
  return plus(exponent_above(largest), (static_cast<int>(std::bit_width(static_cast<uint32_t>(value_dim))) + 1) / 2);
}

// The exponent of the weight that is not the largest one's. Rounding in b, at most 2^-22 of its bound, must stay small
// beside the scaled elements: so not below -16.
constexpr int rest_exponent(float rest) { return larger(-16, smaller(0, exponent_above(rest))); }

// A bound of that weight (1: nothing known) for rows whose weights nobody has walked through. The mean of the logits,
// scale q·(mean key), is no more than the largest, so the row's largest weight is at least 2^(mean - max) / omega, with
// max and omega as saved. Added is what fp16 weights and fp32 sums may be off by.
constexpr float rest_bound(float power_of_mean, float omega) {
  if (!(omega > 0 && omega < 2)) return 1;  // no weight above a half
  const float rest = 1 - power_of_mean / omega + 0x1p-10f;
  return rest < 1 ? rest : 1;
}

// A row may fall this far below its head's largest before its factors stop following: beyond that it could not show in
// the sum anyway, and its other uses (the scores, E) must not run out of bits.
inline constexpr int kSpread = 12;

// What a row adds to the maxima of HeadBounds, in its order; 0 where it adds nothing.
inline constexpr int kHeadBounds = 11;
constexpr uint32_t biased(int e) { return e > kNoExponent ? static_cast<uint32_t>(e + kExponentBias) : 0; }
constexpr void row_bounds(uint32_t (&to)[kHeadBounds], const RowExponents& e) {
  to[0] = biased(e.q), to[1] = biased(e.g), to[2] = biased(e.x), to[3] = biased(e.y);
  to[4] = biased(e.alpha), to[5] = biased(e.beta);
  to[6] = biased(plus(e.g, e.alpha)), to[7] = biased(plus(e.y, e.alpha)), to[8] = biased(plus(e.x, e.beta));
  to[9] = biased(plus(e.q, e.both)), to[10] = biased(e.both);
}

struct HeadExponents {
  int alpha, beta, both;  // largest of the head
  int rows;               // h: X = x 2^(beta + h), Y = -y 2^(alpha + h)
  int g;                  // G 2^(alpha + g), so that G V and Y K share an accumulator
  int q;                  // Q = q 2^(both + q)
  int scale;              // of the logits' scale

  constexpr HeadExponents(const HeadBounds& b, float logit_scale, int key_scale, int value_scale) {
    const auto of = [](uint32_t biased) { return static_cast<int>(biased) - kExponentBias; };
    alpha = of(b.alpha) > kNoExponent ? of(b.alpha) : 1;
    scale = logit_scale == 0 ? 0 : exponent_above(logit_scale < 0 ? -logit_scale : logit_scale);
    const int g_most = larger(of(b.g_alpha), plus(of(b.g), alpha - kSpread));
    if (of(b.beta) <= kNoExponent) {  // b is zero (all values are): G alone decides, and beta is as x and q can take it
      rows = g_most > kNoExponent / 2 ? 15 - g_most + value_scale - key_scale : 0;
      beta =
          smaller(15 - larger(of(b.x), -kExponentBias / 4), 14 - larger(of(b.q), -kExponentBias / 4) - alpha - scale);
      beta -= rows;
      both = alpha + beta;
      g = rows + key_scale - value_scale;
      q = rows + 1 + scale;
      return;
    }
    beta = of(b.beta);
    both = of(b.both);
    const int y_most = larger(of(b.y_alpha), plus(of(b.y), alpha - kSpread));
    const int x_most = larger(of(b.x_beta), plus(of(b.x), beta - kSpread));
    const int q_most = larger(of(b.q_both), plus(of(b.q), both - kSpread));
    int h = 15 - larger(y_most, x_most);
    h = smaller(h, 15 - q_most - 1 - scale);
    h = smaller(h, 15 - g_most + value_scale - key_scale);
    rows = h > kExponentBias / 2 ? 0 : h;  // nothing but zeros
    g = rows + key_scale - value_scale;
    q = rows + 1 + scale;
  }

  constexpr int row_alpha(const RowExponents& r) const { return larger(r.alpha, alpha - kSpread); }
  constexpr int row_beta(const RowExponents& r) const { return larger(r.beta, beta - kSpread); }
  constexpr int row_both(const RowExponents& r) const { return larger(r.both, both - kSpread); }  // for dS
};

}  // namespace lla::cuda::tensor
