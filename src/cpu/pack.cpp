#include "cpu/pack.hpp"

#include <algorithm>

namespace lla::cpu {
namespace {

// Mean over channels of the variance over the keys [begin, end), without the bad ones; 1 where there is none.
template <class T>
T variance_of(const PackedHead<T>& head, int64_t begin, int64_t end, int64_t channels) {
  const double keys = static_cast<double>(std::count(head.bad + begin, head.bad + end, 0));
  if (keys == 0) return T{1};
  double total = 0;
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0, squares = 0;
    for (int64_t j = begin; j < end; ++j) sum += head.k.natural[j * channels + c];  // a bad key is zero there
    const double mean = sum / keys;
    for (int64_t j = begin; j < end; ++j) {
      const double x = head.bad[j] ? 0.0 : head.k.natural[j * channels + c] - mean;
      squares += x * x;
    }
    total += squares / keys;
  }
  return static_cast<T>(total / static_cast<double>(channels));
}

}  // namespace

template <class T>
void pack_tile(const core::Problem& p, const core::Operand& k, const core::Operand& v, const PackedHead<T>& head,
               int64_t tile) {
  const core::Sequence& s = head.sequence;
  const int64_t first = tile * kTile;
  const int64_t last = std::min(first + kTile, s.length_k);
  T key[kMaxChannels], value[kMaxChannels];
  int64_t bad_here = 0;
  for (int64_t j = first; j < last; ++j) {
    const int64_t position = s.start_k + j;
    const bool bad =
        read_row(k, row_offset(k, s.batch, position, head.head_kv), p.dim, key) >= huge_bits<T>() ||
        read_row(v, row_offset(v, s.batch, position, head.head_kv), p.value_dim, value) >= infinity_bits<T>();
    head.bad[j] = bad;
    if (bad) {
      ++bad_here;
      head.k.put_zero(j, p.dim);
      head.v.put_zero(j, p.value_dim);
    } else {
      head.k.put(j, p.dim, key);
      head.v.put(j, p.value_dim, value);
    }
  }
  for (int64_t j = last; j < round_up(last, kGroup); ++j) {
    head.k.put_zero(j, p.dim);
    head.v.put_zero(j, p.value_dim);
  }
  if (bad_here > 0) head.bad_count->fetch_add(bad_here, std::memory_order_relaxed);
  // From the first tile that some query sees: what nobody sees must not matter.
  const int64_t seen_begin = p.mask.begin(0, s.length_q, s.length_k);
  const int64_t seen_end = std::min(last, p.mask.end(s.length_q - 1, s.length_q, s.length_k));
  if (tile == seen_begin / kTile && seen_begin < seen_end)
    *head.variance = variance_of(head, seen_begin, seen_end, p.dim);
}

template void pack_tile<float>(const core::Problem&, const core::Operand&, const core::Operand&,
                               const PackedHead<float>&, int64_t);
template void pack_tile<double>(const core::Problem&, const core::Operand&, const core::Operand&,
                                const PackedHead<double>&, int64_t);

}  // namespace lla::cpu
