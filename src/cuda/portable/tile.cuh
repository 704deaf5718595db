// Tiles of rows in shared memory, how they are filled, and the two products over them.
#pragma once

#include <cmath>

#include "core/problem.hpp"
#include "cuda/common/convert.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/portable/config.hpp"

namespace lla::cuda::portable {

// Position of a thread: `lane` along a row, `group` = which owned row (of the first kRowTeams).
__device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
__device__ __forceinline__ int team() { return threadIdx.x / kLanes; }

template <class T>
struct alignas(16) Vec {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

// Rows of kDim elements. The 16-byte pieces of a row are stored in an order that depends on the row, so that eight
// threads reading the same column of eight rows hit different banks.
template <class T, int kDim>
struct Tile {
  T* data;

  __device__ __forceinline__ Vec<T>& vec(int row, int column) const {
    return *reinterpret_cast<Vec<T>*>(data + row * kDim + ((column ^ (row & 7)) * Vec<T>::kSize));
  }
};

// Where the rows of a tile come from.
struct Source {
  const void* data;
  DType dtype;
  int64_t offset;  // of row 0, in elements
  int64_t row_stride;
  int64_t column_stride;
  int columns;
  bool vectors;  // 16-byte pieces of the arithmetic type can be read whole
  // Keys and values of a paged cache: row r is slot r % page_size of page pages[r / page_size]. Null: rows are evenly
  // spaced.
  const int32_t* pages = nullptr;
  int64_t page_size = 0;
  int64_t page_stride = 0;
  const void* shift = nullptr;  // keys: what is taken off every row, in the arithmetic type; null: nothing

  __device__ __forceinline__ int64_t row(int64_t r) const {
    if (pages == nullptr) return offset + r * row_stride;
    return offset + pages[r / page_size] * page_stride + r % page_size * row_stride;
  }
};

template <class T>
__device__ __forceinline__ bool reads_vectors(const core::Operand& t, int64_t columns) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t bytes = t.dtype == DType::f64 ? 8 : t.dtype == DType::f32 ? 4 : 2;
  return t.stride[3] == 1 && columns % kSize == 0 && t.stride[0] % kSize == 0 && t.stride[1] % kSize == 0 &&
         t.stride[2] % kSize == 0 && reinterpret_cast<uintptr_t>(t.data) % (kSize * bytes) == 0;
}

// Rows from position `position` of one batch entry and head of a tensor.
template <class T>
__device__ Source tensor_rows(const core::Operand& t, int64_t batch, int64_t position, int64_t head, int64_t columns) {
  return {t.data,
          t.dtype,
          batch * t.stride[0] + position * t.stride[1] + head * t.stride[2],
          t.stride[1],
          t.stride[3],
          static_cast<int>(columns),
          reads_vectors<T>(t, columns)};
}

// Rows from index `row` of a row array.
template <class T>
__device__ Source array_rows(const T* array, int64_t row, int64_t columns) {
  const bool vectors = columns % Vec<T>::kSize == 0 && reinterpret_cast<uintptr_t>(array) % sizeof(Vec<T>) == 0;
  return {array,  sizeof(T) == 8 ? DType::f64 : DType::f32, row * columns, columns, 1, static_cast<int>(columns),
          vectors};
}

template <class T>
__device__ __forceinline__ Vec<T> read_whole(const void* data, DType dtype, int64_t at) {
  if constexpr (sizeof(T) == 8) {
    return *reinterpret_cast<const Vec<T>*>(static_cast<const double*>(data) + at);
  } else {
    if (dtype == DType::f32) return *reinterpret_cast<const Vec<T>*>(static_cast<const float*>(data) + at);
    struct alignas(8) Raw {
      uint16_t bits[4];
    };
    const Raw raw = *reinterpret_cast<const Raw*>(static_cast<const uint16_t*>(data) + at);
    Vec<T> result;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      result.at[e] = dtype == DType::bf16 ? __uint_as_float(static_cast<uint32_t>(raw.bits[e]) << 16)
                                          : __half2float(__ushort_as_half(raw.bits[e]));
    }
    return result;
  }
}

template <class T>
__device__ __forceinline__ Vec<T> read_vec(const Source& source, int64_t at, int column) {
  constexpr int kSize = Vec<T>::kSize;
  if (source.vectors) return read_whole<T>(source.data, source.dtype, at + column * kSize);
  Vec<T> result;
#pragma unroll
  for (int e = 0; e < kSize; ++e) {
    const int c = column * kSize + e;
    result.at[e] = c < source.columns ? load_as<T>(source.data, source.dtype, at + c * source.column_stride) : T(0);
  }
  return result;
}

// Sets what is not finite to zero and says whether there was any: a weight of zero must make a key vanish even if it
// holds NaN.
template <class T>
__device__ __forceinline__ bool clean(Vec<T>& v) {
  bool found = false;
#pragma unroll
  for (int e = 0; e < Vec<T>::kSize; ++e) {
    if (!isfinite(v.at[e])) {
      v.at[e] = T(0);
      found = true;
    }
  }
  return found;
}

// v -= piece `column` of the shift.
template <class T>
__device__ __forceinline__ void take_off(Vec<T>& v, const T* shift, int column, int columns) {
#pragma unroll
  for (int e = 0; e < Vec<T>::kSize; ++e) {
    const int c = column * Vec<T>::kSize + e;
    if (c < columns) v.at[e] -= shift[c];
  }
}

// Number of 16-byte pieces that hold `columns` elements.
template <class T>
__device__ __forceinline__ int pieces(int64_t columns) {
  return static_cast<int>((columns + Vec<T>::kSize - 1) / Vec<T>::kSize);
}

// Fills kRows rows of a tile with rows first, first + 1, ... of the source; those for which `wanted(row)` is false, and
// all from `count` on, are zero. bad[row] is set where a value that is not finite was replaced by zero (pass null not
// to ask). All threads of the block take part; the caller puts barriers around it.
template <int kRows, class C, class T, int kDim, class Wanted>
__device__ void load_tile(Tile<T, kDim> tile, const Source& source, int64_t first, int64_t count, int32_t* bad,
                          Wanted wanted) {
  const int columns = pieces<T>(source.columns);
  for (int row = team(); row < kRows; row += C::kRowTeams) {
    const bool present = row < count && wanted(row);
    const int64_t at = present ? source.row(first + row) : 0;
    for (int c = lane(); c < columns; c += kLanes) {
      Vec<T> v{};
      if (present) v = read_vec<T>(source, at, c);
      if (clean(v) && bad != nullptr) bad[row] = 1;
      if (present && source.shift != nullptr) take_off(v, static_cast<const T*>(source.shift), c, source.columns);
      tile.vec(row, c) = v;
    }
  }
}

struct Always {
  __device__ bool operator()(int) const { return true; }
};

// s[n][r][c] = own[n] row (team + kRowTeams r) . other row (lane + kLanes c), over `columns` pieces. The order of the
// sum does not depend on who owns which side, so that weights come out the same in every pass.
template <class C, int kN, class T, int kDim>
__device__ __forceinline__ void product(const Tile<T, kDim> (&own)[kN], Tile<T, kDim> other, int columns,
                                        T (&s)[kN][C::kRows][C::kRows]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kRows; ++c) s[n][r][c] = 0;
    }
  }
#pragma unroll 4
  for (int column = 0; column < columns; ++column) {
    Vec<T> b[C::kRows];
#pragma unroll
    for (int c = 0; c < C::kRows; ++c) b[c] = other.vec(lane() + kLanes * c, column);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
        const Vec<T> a = own[n].vec(team() + C::kRowTeams * r, column);
#pragma unroll
        for (int c = 0; c < C::kRows; ++c) {
#pragma unroll
          for (int e = 0; e < C::kVec; ++e) s[n][r][c] = fma(a.at[e], b[c].at[e], s[n][r][c]);
        }
      }
    }
  }
}

// The part of the owned rows' vectors a thread holds: pieces lane + kLanes c of each row.
template <class C, class T>
struct Accumulator {
  Vec<T> at[C::kRows][C::kColumns];

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kColumns; ++c) at[r][c] = Vec<T>{};
    }
  }
  __device__ __forceinline__ void scale(int r, T factor) {
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < C::kVec; ++e) at[r][c].at[e] *= factor;
    }
  }
};

// Weights of the owned rows for one tile of the other side; a half-warp reads only what it wrote.
template <class C, class T>
struct Weights {
  T* data;

  __device__ __forceinline__ void put(const T (&w)[C::kRows][C::kRows]) const {
    __syncwarp();  // the last use is over
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kRows; ++c)
        data[(team() + C::kRowTeams * r) * C::kWeightStride + lane() + kLanes * c] = w[r][c];
    }
    __syncwarp();
  }
};

// acc += weights . other, over `columns` pieces.
template <class C, class T, int kDim>
__device__ __forceinline__ void accumulate(Accumulator<C, T>& acc, Weights<C, T> weights, Tile<T, kDim> other,
                                           int columns) {
#pragma unroll 2
  for (int b = 0; b < C::kOther; b += C::kVec) {
    Vec<T> w[C::kRows];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      w[r] = *reinterpret_cast<const Vec<T>*>(weights.data + (team() + C::kRowTeams * r) * C::kWeightStride + b);
    }
#pragma unroll
    for (int i = 0; i < C::kVec; ++i) {
#pragma unroll
      for (int c = 0; c < C::kColumns; ++c) {
        if (lane() + kLanes * c >= columns) continue;
        const Vec<T> v = other.vec(b + i, lane() + kLanes * c);
#pragma unroll
        for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
          for (int e = 0; e < C::kVec; ++e) acc.at[r][c].at[e] = fma(w[r].at[i], v.at[e], acc.at[r][c].at[e]);
        }
      }
    }
  }
}

// f(c, e, column) for every element of a row of `columns` elements that this thread holds.
template <class C, class F>
__device__ __forceinline__ void for_columns(int64_t columns, F&& f) {
#pragma unroll
  for (int c = 0; c < C::kColumns; ++c) {
#pragma unroll
    for (int e = 0; e < C::kVec; ++e) {
      const int column = (lane() + kLanes * c) * C::kVec + e;
      if (column < columns) f(c, e, column);
    }
  }
}

}  // namespace lla::cuda::portable
