// Between the caller's rows and a panel's lanes.
#if defined(LLA_CPU_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_LANES_INL_HPP
#undef LLA_CPU_LANES_INL_HPP
#else
#define LLA_CPU_LANES_INL_HPP
#endif

#include "cpu/panel-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// Where a lane's row lies in the caller's tensors.
struct RowPlace {
  int64_t batch, position, head;
  int64_t index;  // in the saved and info outputs
};

template <class T>
RowPlace row_place(const core::Problem& p, const PackedHead<T>& head, int64_t row) {
  const int64_t i = row / p.group(), h = head.kv_head * p.group() + row % p.group();
  return {head.sequence.batch, head.sequence.start_q + i, h, core::row_index(p, head.sequence, h, i)};
}

inline int64_t row_offset(const core::Operand& t, const RowPlace& at) {
  return cpu::row_offset(t, at.batch, at.position, at.head);
}

template <class T>
void put_lane(T* array, int64_t lane, int64_t channels, const T* row) {
  for (int64_t c = 0; c < channels; ++c) array[c * kPanel<T> + lane] = row[c];
}

template <class T>
void get_lane(const T* array, int64_t lane, int64_t channels, T* row) {
  for (int64_t c = 0; c < channels; ++c) row[c] = array[c * kPanel<T> + lane];
}

// Reads a row of t into each lane of array; a row beyond `limit` marks its lane bad and reads as zero. Unused lanes are
// zero.
template <class T>
void read_lanes(Panel<T>& panel, const core::Problem& p, const PackedHead<T>& head, const core::Operand& t,
                int64_t channels, Bits<T> limit, T* array) {
  T row[kMaxChannels];
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    bool good = l < panel.rows;
    if (good && read_row(t, row_offset(t, row_place(p, head, panel.first_row + l)), channels, row) >= limit) {
      good = false;
      panel.mark_bad(l);
    }
    if (!good) std::fill_n(row, channels, T{0});
    put_lane(array, l, channels, row);
  }
}

// The ridge of each lane, channel by channel; negative or NaN marks the lane bad.
template <class T>
void read_ridge(Panel<T>& panel, const core::Problem& p, const PackedHead<T>& head, const core::Operand& ridge) {
  T row[kMaxChannels];
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    std::fill_n(row, p.dim, T{1});
    if (l < panel.rows) {
      const int64_t offset = row_offset(ridge, row_place(p, head, panel.first_row + l));
      if (p.ridge == core::RidgeShape::dimension) {
        read_row(ridge, offset, p.dim, row);
      } else {
        read_row(ridge, offset, 1, row);
        std::fill_n(row, p.dim, row[0]);
      }
      const bool good = std::all_of(row, row + p.dim, [](T x) { return x >= 0; });
      if (!good) {
        panel.mark_bad(l);
        std::fill_n(row, p.dim, T{1});
      }
    }
    put_lane(panel.ridge, l, p.dim, row);
  }
}

// What the keys' shift takes off each lane's logits (in the units of panel.q), in two parts.
template <class T>
void find_offsets(Panel<T>& panel, const PackedHead<T>& head, int64_t dim) {
  if (!head.shifted) return;
  double sums[kPanel<T>] = {};
  for (int64_t c = 0; c < dim; ++c) {
    if (head.shift[c] == 0) continue;
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      sums[l] += static_cast<double>(panel.q[c * kPanel<T> + l]) * static_cast<double>(head.shift[c]);
    }
  }
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    panel.offset[l] = static_cast<T>(std::ceil(sums[l]));
    panel.offset_rest[l] = static_cast<T>(sums[l] - std::ceil(sums[l]));
  }
}

// Bad by its keys or values: the row sees one that is not finite.
template <class T>
void mark_bad_keys(Panel<T>& panel, const PackedHead<T>& head) {
  for (int64_t l = 0; l < panel.rows; ++l) {
    if (head.any_bad(panel.lane_begin[l], panel.lane_end[l])) panel.mark_bad(l);
  }
}

template <class T>
void write_info(const Panel<T>& panel, const core::Problem& p, const PackedHead<T>& head,
                const core::RowOutputs& info) {
  for (int64_t l = 0; l < panel.rows; ++l) {
    const int64_t r = row_place(p, head, panel.first_row + l).index;
    const bool solved = !p.given_x() && !panel.bad[l] && !panel.empty(l);
    if (info.iterations) info.iterations[r] = solved ? panel.iterations[l] : -1;
    if (info.residual) info.residual[r] = solved ? static_cast<float>(panel.relative_residual[l]) : -1.0f;
    if (info.status) info.status[r] = panel.bad[l] ? LLA_ROW_NAN : panel.status[l];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
