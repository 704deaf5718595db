// Conjugate gradients on a matrix in the registers of a block: what solves most rows, in a fraction of the time of an
// elimination. Plain functions of a thread, as the elimination's; a test runs them on the CPU.
//
// Of real and of random attention the matrix has a condition of tens: ten to twenty steps are enough for what sums of
// rounded keys allow. A row that needs more, or whose matrix may be singular, is eliminated.
#pragma once

#include <cstddef>

#include "cuda/sm90/decode/eliminate.hpp"

namespace lla::cuda::sm90::decode {

// The whole matrix, as it is put together. It lies over what the elimination makes.
template <int kDim>
struct Square {
  static constexpr unsigned kRowFloats = kDim + 8;  // every other row begins half of the banks further on
  alignas(16) float rows[kDim * kRowFloats];

  constexpr float& at(unsigned row, unsigned column) { return rows[row * kRowFloats + column]; }
  constexpr const float& at(unsigned row, unsigned column) const { return rows[row * kRowFloats + column]; }
};
static_assert(sizeof(Square<64>) <= offsetof(Matrix<64>, rhs) && sizeof(Square<128>) <= offsetof(Matrix<128>, rhs));

// A thread's part of it: of two rows every so many fours of columns. Of their products one row's becomes its own.
template <int kDim>
struct MatrixPart {
  static constexpr unsigned kLanes = 2 * kSolveThreads / kDim;  // threads that share two rows
  static constexpr unsigned kFours = kDim / 4 / kLanes;
  static_assert(kDim % (4 * kLanes) == 0);
  Four at[2][kFours];

  static constexpr unsigned first_row(unsigned thread) { return thread / kLanes * 2; }
  static constexpr unsigned own_row(unsigned thread) { return first_row(thread) + thread % 2; }
  // Whether it is the first of those who have the row for their own.
  static constexpr bool speaks(unsigned thread) { return thread % kLanes < 2; }
  static constexpr unsigned column(unsigned thread, unsigned four) { return 4 * (four * kLanes + thread % kLanes); }

  constexpr MatrixPart(const Square<kDim>& from, unsigned thread) : at{} {
#pragma unroll
    for (unsigned r = 0; r < 2; ++r) {
#pragma unroll
      for (unsigned i = 0; i < kFours; ++i) {
        at[r][i] = load_floats<Four>(&from.at(first_row(thread) + r, column(thread, i)));
      }
    }
  }

  constexpr Two multiply(const float* u, unsigned thread) const {
    Two even{}, odd{};
#pragma unroll
    for (unsigned i = 0; i < kFours; ++i) {
      const Four four = load_floats<Four>(u + column(thread, i));
#pragma unroll
      for (unsigned r = 0; r < 2; ++r) {
        even.at[r] += at[r][i].at[0] * four.at[0], odd.at[r] += at[r][i].at[1] * four.at[1];
        even.at[r] += at[r][i].at[2] * four.at[2], odd.at[r] += at[r][i].at[3] * four.at[3];
      }
    }
    return {even.at[0] + odd.at[0], even.at[1] + odd.at[1]};
  }

  // For the elimination, which has the lower triangle and whole panels on its diagonal.
  constexpr void put(Matrix<kDim>& to, unsigned thread) const {
#pragma unroll
    for (unsigned r = 0; r < 2; ++r) {
      const unsigned row = first_row(thread) + r;
#pragma unroll
      for (unsigned i = 0; i < kFours; ++i) {
        if (column(thread, i) / kPanel <= row / kPanel) store_floats(&to.at(row, column(thread, i)), at[r][i]);
      }
    }
  }
};

// An elimination takes as long as some fifty steps, and a call waits for its slowest row: of 32 rows of a language
// model's head that takes 18 steps (29 in the worst head) with these limits, 27 (57) with half of them.
inline constexpr int kMostSteps = 40;
inline constexpr int kHalfWay = 20;  // who is not half way then is not going to make it
// Of the root of bᵀM⁻¹b, M the diagonal, a residual may leave so much. Of outputs that is 1e-4 to 2e-4 at most (queries
// six times longer, QK-norm), 5e-5 in the heads of a language model.
inline constexpr float kStepsGoal = 0x1p-15f;

// One element of x = A⁻¹ rhs, by the thread whose own row it is. Returns whether it was found, to all threads the same.
// Chronopoulos and Gear's form: both sums of a step are added up at once. `Block`: `publish` gives all threads everyone's
// element, `own` makes of a thread's two products the whole one of its own row, `sum` adds up over all rows.
template <int kDim, class Block, class Inverse>
constexpr bool conjugate_gradients(const MatrixPart<kDim>& a, float rhs, float diagonal, unsigned thread, Block& block,
                                   const Inverse& inverse_of, float& x) {
  const float over = inverse_of(diagonal);
  float residual = rhs, u = rhs * over, p = 0, a_p = 0, step = 0, last = 0, goal = 0, half_way = 0;
  x = 0;
#pragma unroll 1
  for (int i = 0;; ++i) {
    const float a_u = block.own(a.multiply(block.publish(u, thread), thread), thread);
    const Two sums = block.sum({residual * u, a_u * u}, thread);
    const float left = sums.at[0];
    if (!(left <= 0x1p+120f)) return false;
    if (i == 0) goal = left * (kStepsGoal * kStepsGoal), half_way = left * kStepsGoal;
    if (left <= goal) return true;
    if (i == kHalfWay && left > half_way) return false;
    const float again = i == 0 ? 0.0f : left * inverse_of(last);
    const float curvature = i == 0 ? sums.at[1] : sums.at[1] - again * left * inverse_of(step);
    if (!(curvature > 0) || i == kMostSteps) return false;
    step = left * inverse_of(curvature), last = left;
    p = u + again * p, a_p = a_u + again * a_p;
    x += step * p, residual -= step * a_p;
    u = residual * over;
  }
}

}  // namespace lla::cuda::sm90::decode
