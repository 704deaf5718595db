// Packed copies of the rows a kernel broadcasts from: keys and values (forward, pass A), and in pass B of the backward
// what belongs to the queries. Two layouts of the same matrix feed the one product of gemm-inl.hpp:
//   natural     row r, channel c at [r * channels + c]: products that sum over rows;
//   transposed  packs of kPackRows rows, channel by channel, [(r / kPackRows * channels + c) * kPackRows + r %
//               kPackRows]: products that sum over channels. The last pack is filled up with zero rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/keys.hpp"

namespace lla::cpu {

constexpr int64_t kPackRows = 12;  // a multiple of the rows of every register block
constexpr int64_t kTile = 96;      // rows walked over at a time; the tiles of a sequence start at multiples of it

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class T>
struct PackedRows {
  T* natural = nullptr;
  T* transposed = nullptr;

  // Writes row r to both layouts (those that are there).
  void put(int64_t r, int64_t channels, const T* row) const {
    if (natural) {
      T* to = natural + r * channels;
      for (int64_t c = 0; c < channels; ++c) to[c] = row[c];
    }
    if (transposed) {
      T* to = transposed + r / kPackRows * kPackRows * channels + r % kPackRows;
      for (int64_t c = 0; c < channels; ++c) to[c * kPackRows] = row[c];
    }
  }
  void put_zero(int64_t r, int64_t channels) const {
    const T zeros[kMaxChannels] = {};
    put(r, channels, zeros);
  }
};

// Whether one of the flags [begin, end) is set; count says how many there are at all.
inline bool any_flag(const uint8_t* flags, const std::atomic<int64_t>* count, int64_t begin, int64_t end) {
  if (count->load(std::memory_order_relaxed) == 0) return false;
  for (int64_t j = begin; j < end; ++j) {
    if (flags[j]) return true;
  }
  return false;
}

// One kv head of one sequence. A key or value that is not finite is zero in the copies and marked in bad: a row that
// sees it becomes NaN by that mark, and a row that does not see it never meets it.
template <class T>
struct PackedHead {
  core::Sequence sequence;
  core::KeyCache cache;  // where keys and values lie; empty where they are in no cache
  core::KeyRange seen;   // keys some row sees: no other is read
  int64_t kv_head;
  PackedRows<T> k, v;
  uint8_t* bad;  // one flag a key
  std::atomic<int64_t>* bad_count;
  T* key_squares;  // |k|^2
  // The copies of the keys are k - shift. LLA does not change with it, but products with keys that have a large common
  // mean lose digits to that mean. Zero in channels without one; `shifted` says whether there is any.
  T* shift;
  bool shifted;
  // Backward only, by tile: the largest |v|, and the largest |v - first v|, in any channel.
  T *value_size, *value_spread;

  int64_t tiles() const { return (sequence.length_k + kTile - 1) / kTile; }
  int32_t value_exponent() const {  // of the largest value; 0 where all are zero
    const int32_t exponent = largest_exponent(value_size, tiles());
    return exponent == kNoExponent ? 0 : exponent;
  }
  bool any_bad(int64_t begin, int64_t end) const { return any_flag(bad, bad_count, begin, end); }
};

// Sets `shift` from a sample of the keys some row of the head sees; returns whether it is anything but 0.
template <class T>
bool find_shift(const core::Operand& k, const core::KeyCache& cache, const core::Sequence& s, core::KeyRange seen,
                int64_t kv_head, int64_t dim, T* shift);

// Packs the keys and values of one tile of the head, filling up the last pack.
template <class T>
void pack_tile(const core::Problem& p, const core::Operand& k, const core::Operand& v, const PackedHead<T>& head,
               int64_t tile);

extern template bool find_shift<float>(const core::Operand&, const core::KeyCache&, const core::Sequence&,
                                       core::KeyRange, int64_t, int64_t, float*);
extern template bool find_shift<double>(const core::Operand&, const core::KeyCache&, const core::Sequence&,
                                        core::KeyRange, int64_t, int64_t, double*);
extern template void pack_tile<float>(const core::Problem&, const core::Operand&, const core::Operand&,
                                      const PackedHead<float>&, int64_t);
extern template void pack_tile<double>(const core::Problem&, const core::Operand&, const core::Operand&,
                                       const PackedHead<double>&, int64_t);

}  // namespace lla::cpu
