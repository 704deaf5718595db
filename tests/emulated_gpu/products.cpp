// What tensor cores do. Products of 16-bit numbers are exact; sums of a step are made in fp32 and cut off when they are
// added to what there is, as Hopper's are.
#include <cmath>
#include <cstring>
#include <vector>

#include "device.hpp"
#include "include/cuda_bf16.h"
#include "include/cuda_fp16.h"

namespace emulated {
namespace {

float widen_f16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
float widen_bf16(uint16_t bits) { return __bfloat162float({bits}); }

struct F16 {
  static constexpr int kPerWord = 2;
  static float widen(uint32_t word, int i) { return widen_f16(static_cast<uint16_t>(word >> 16 * i)); }
};
struct Bf16 {
  static constexpr int kPerWord = 2;
  static float widen(uint32_t word, int i) { return widen_bf16(static_cast<uint16_t>(word >> 16 * i)); }
};
struct Tf32 {
  static constexpr int kPerWord = 1;
  static float widen(uint32_t word, int) { return __uint_as_float(word & 0xffffe000u); }
};

// To the float below or equal in magnitude.
inline float cut_off(double x) {
  const float rounded = static_cast<float>(x);
  const uint32_t bits = __float_as_uint(rounded);
  const bool over = std::fabs(static_cast<double>(rounded)) > std::fabs(x) && (bits & 0x7f800000u) != 0x7f800000u;
  return __uint_as_float(bits - over);
}

// 16 rows times 8 columns, from the words of 32 threads.
template <class Number>
void multiply(WarpProduct& p, const char* what) {
  together(what, &p, [](void* const* slots) {
    constexpr int kPerWord = Number::kPerWord, kDepth = 8 * kPerWord;
    float a[16][kDepth], b[kDepth][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      if (slots[lane] == nullptr) fail("a product of a warp without all threads");
      const WarpProduct& own = *static_cast<const WarpProduct*>(slots[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < kPerWord; ++i) {
        for (int w = 0; w < 4; ++w) a[g + w % 2 * 8][kPerWord * (t + w / 2 * 4) + i] = Number::widen(own.a[w], i);
        for (int w = 0; w < 2; ++w) b[kPerWord * (t + 4 * w) + i][g] = Number::widen(own.b[w], i);
      }
    }
    float c[16][8] = {};
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      float* const own = static_cast<const WarpProduct*>(slots[lane])->c;
      for (int e = 0; e < 4; ++e) {
        own[e] = cut_off(static_cast<double>(own[e]) + c[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2]);
      }
    }
  });
}

// Where an operand's element lies: `row` of the 64 or of the columns, k of the 16. Tiles are swizzled by 128 bytes.
struct Descriptor {
  uint32_t start, leading, stride;
  bool across;
  explicit Descriptor(uint64_t word, bool is_across)
      : start((word & 0x3fff) << 4),
        leading((word >> 16 & 0x3fff) << 4),
        stride((word >> 32 & 0x3fff) << 4),
        across(is_across) {
    if (word >> 62 != 1) fail("an operand that is not swizzled by 128 bytes");
  }
  uint32_t at(int row, int k) const {
    const uint32_t place = across ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                  : start + row / 8 * stride + row % 8 * 128 + k * 2;
    return (place ^ (place >> 7 & 7) << 4) & 0x3ffff;
  }
  // Eight numbers that lie side by side: of rows from `row` on where it is across, else of k.
  void get_eight(float (&to)[8], int row, int k, bool is_bf16) const {
    uint16_t bits[8];
    std::memcpy(bits, shared_pointer(at(row, k)), sizeof bits);
    for (int i = 0; i < 8; ++i) to[i] = is_bf16 ? widen_bf16(bits[i]) : widen_f16(bits[i]);
  }
  // All of `rows`, as [row][k] or [k][row].
  template <class Put>
  void get_all(int first_row, int rows, bool is_bf16, const Put& put) const {
    float eight[8];
    for (int row = 0; row < rows; row += across ? 8 : 1) {
      for (int k = 0; k < 16; k += across ? 1 : 8) {
        get_eight(eight, first_row + row, k, is_bf16);
        for (int i = 0; i < 8; ++i) put(across ? row + i : row, across ? k : k + i, eight[i]);
      }
    }
  }
};

}  // namespace

void multiply_f16(WarpProduct& p) { multiply<F16>(p, "a product of f16"); }
void multiply_bf16(WarpProduct& p) { multiply<Bf16>(p, "a product of bf16"); }
void multiply_tf32(WarpProduct& p) { multiply<Tf32>(p, "a product of TF32"); }

// Of one warp: sixteen rows.
void do_products(const std::vector<GroupProduct>& lanes) {
  constexpr int kMostColumns = 2 * GroupProduct::kMost;
  const GroupProduct& p = lanes[0];
  const int columns = p.columns, first_row = static_cast<int>(now->index.x) / kWarp % 4 * 16;
  float a[16][16], b[16][kMostColumns];
  const Descriptor right(p.b_descriptor, p.b_across);
  right.get_all(0, columns, p.bf16, [&](int column, int k, float x) { b[k][column] = x; });
  if (p.a_in_registers) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int w = 0; w < 4; ++w) {
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = lanes[lane].a[w];
          a[lane / 4 + w % 2 * 8][2 * (lane % 4 + w / 2 * 4) + i] = p.bf16 ? Bf16::widen(word, i) : F16::widen(word, i);
        }
      }
    }
  } else {
    Descriptor(p.a_descriptor, p.a_across).get_all(first_row, 16, p.bf16, [&](int row, int k, float x) {
      a[row][k] = x;
    });
  }
  for (int row = 0; row < 16; ++row) {
    float sum[kMostColumns] = {};
    for (int k = 0; k < 16; ++k) {
      const float own = p.negative ? -a[row][k] : a[row][k];
      for (int column = 0; column < columns; ++column) sum[column] += own * b[k][column];
    }
    for (int column = 0; column < columns; ++column) {
      float& c = *lanes[row % 8 * 4 + column % 8 / 2].c[column / 8 * 4 + row / 8 * 2 + column % 2];
      c = p.add ? cut_off(static_cast<double>(c) + sum[column]) : sum[column];
    }
  }
}

namespace {
struct Matrices {
  uint32_t address;
  uint32_t* words;
  uint16_t* row(int i) const { return static_cast<uint16_t*>(shared_pointer(address)) + i; }
};
const Matrices& of(void* const* slots, int lane) {
  if (slots[lane] == nullptr) fail("matrices of a warp without all threads");
  return *static_cast<const Matrices*>(slots[lane]);
}
}  // namespace

template <bool kTransposed>
static void load_all(void* const* slots) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int m = 0; m < 4; ++m) {
      const int g = lane / 4, t = lane % 4;
      uint32_t word = 0;
      for (int i = 0; i < 2; ++i) {
        const int row = kTransposed ? 2 * t + i : g, column = kTransposed ? g : 2 * t + i;
        word |= static_cast<uint32_t>(*of(slots, 8 * m + row).row(column)) << 16 * i;
      }
      of(slots, lane).words[m] = word;
    }
  }
}

void load_matrices(uint32_t* to, uint32_t address, bool transposed) {
  if (address % 16 != 0) fail("a row of a matrix is not aligned");
  Matrices own{address, to};
  together(transposed ? "ldmatrix.trans" : "ldmatrix", &own, transposed ? load_all<true> : load_all<false>);
}

void store_matrices(uint32_t address, const uint32_t* from) {
  if (address % 16 != 0) fail("a row of a matrix is not aligned");
  Matrices own{address, const_cast<uint32_t*>(from)};
  together("stmatrix", &own, [](void* const* slots) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int m = 0; m < 4; ++m) {
        for (int i = 0; i < 2; ++i) {
          *of(slots, 8 * m + lane / 4).row(lane % 4 * 2 + i) =
              static_cast<uint16_t>(of(slots, lane).words[m] >> 16 * i);
        }
      }
    }
  });
}

}  // namespace emulated
