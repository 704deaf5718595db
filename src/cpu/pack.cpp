#include "cpu/pack.hpp"

#include <algorithm>
#include <cmath>

#include "core/key_shift.hpp"

namespace lla::cpu {
namespace {

template <class T>
T squares(const T* row, int64_t channels) {
  T sum = 0;
  for (int64_t c = 0; c < channels; ++c) sum += row[c] * row[c];
  return sum;
}

template <class T>
bool smaller(T a, T b) {
  return std::abs(a) < std::abs(b);
}

template <class T>
T largest_distance(const T* a, const T* b, int64_t channels) {
  T largest = 0;
  for (int64_t c = 0; c < channels; ++c) largest = std::max(largest, std::abs(a[c] - b[c]));
  return largest;
}

}  // namespace

template <class T>
bool find_shift(const core::Operand& k, const core::KeyCache& cache, const core::Sequence& s, core::KeyRange seen,
                int64_t kv_head, int64_t dim, T* shift) {
  core::ShiftSums sums[kMaxChannels];
  T key[kMaxChannels];
  const int64_t keys = seen.end - seen.begin, sample = std::min(core::kShiftSample, keys);
  for (int64_t i = 0; i < sample; ++i) {
    const int64_t j = core::shift_sample(seen.begin, keys, i, sample);
    if (read_row(k, key_offset(cache, k, s, kv_head, j), dim, key) >= huge_bits<T>()) continue;
    for (int64_t c = 0; c < dim; ++c) sums[c].add(static_cast<double>(key[c]));
  }
  bool shifted = false;
  for (int64_t c = 0; c < dim; ++c) {
    shift[c] = sums[c].shift<T>();
    shifted |= shift[c] != 0;
  }
  return shifted;
}

template <class T>
void pack_tile(const core::Problem& p, const core::Operand& k, const core::Operand& v, const PackedHead<T>& head,
               int64_t tile) {
  const core::Sequence& s = head.sequence;
  const int64_t first = tile * kTile;
  const int64_t begin = std::clamp(head.seen.begin, first, first + kTile);
  const int64_t last = std::clamp(head.seen.end, begin, first + kTile);
  T key[kMaxChannels], value[kMaxChannels] = {}, first_value[kMaxChannels];
  T size = 0, spread = 0;
  if (begin == last || read_row(v, key_offset(head.cache, v, s, head.kv_head, head.seen.begin), p.value_dim,
                                first_value) >= infinity_bits<T>()) {
    std::fill_n(first_value, p.value_dim, T{0});
  }
  int64_t bad_here = 0;
  for (int64_t j = first; j < begin; ++j) {
    head.bad[j] = 0;
    head.key_squares[j] = 0;
    head.k.put_zero(j, p.dim);
    head.v.put_zero(j, p.value_dim);
  }
  for (int64_t j = begin; j < last; ++j) {
    const bool bad =
        read_row(k, key_offset(head.cache, k, s, head.kv_head, j), p.dim, key) >= huge_bits<T>() ||
        read_row(v, key_offset(head.cache, v, s, head.kv_head, j), p.value_dim, value) >= infinity_bits<T>();
    head.bad[j] = bad;
    for (int64_t c = 0; c < p.dim && head.shifted; ++c) key[c] -= head.shift[c];
    head.key_squares[j] = bad ? T{0} : squares(key, p.dim);
    if (bad) {
      ++bad_here;
      head.k.put_zero(j, p.dim);
      head.v.put_zero(j, p.value_dim);
    } else {
      head.k.put(j, p.dim, key);
      head.v.put(j, p.value_dim, value);
      size = std::max(size, std::abs(*std::max_element(value, value + p.value_dim, smaller<T>)));
      spread = std::max(spread, largest_distance(value, first_value, p.value_dim));
    }
  }
  if (head.value_size) {
    head.value_size[tile] = size;
    head.value_spread[tile] = spread;
  }
  for (int64_t j = last; j < round_up(last, kPackRows); ++j) {
    head.k.put_zero(j, p.dim);
    head.v.put_zero(j, p.value_dim);
  }
  if (bad_here > 0) head.bad_count->fetch_add(bad_here, std::memory_order_relaxed);
}

template bool find_shift<float>(const core::Operand&, const core::KeyCache&, const core::Sequence&, core::KeyRange,
                                int64_t, int64_t, float*);
template bool find_shift<double>(const core::Operand&, const core::KeyCache&, const core::Sequence&, core::KeyRange,
                                 int64_t, int64_t, double*);
template void pack_tile<float>(const core::Problem&, const core::Operand&, const core::Operand&,
                               const PackedHead<float>&, int64_t);
template void pack_tile<double>(const core::Problem&, const core::Operand&, const core::Operand&,
                                const PackedHead<double>&, int64_t);

}  // namespace lla::cpu
