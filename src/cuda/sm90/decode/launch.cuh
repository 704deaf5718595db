// The launches of one head dimension and type; instantiations/ has one file for each.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/sm90/decode/launch.hpp"

namespace lla::cuda::sm90::decode {

inline Layout layout_of(const Launch& call) {
  return {call.rows, call.dim, call.form, call.multiprocessors, call.sharing > call.p.bundle, call.pieces, call.alone};
}

// Calls `part` with the parameters of one share of the rows after the other.
template <class Part>
Status for_each_share(const Launch& call, const Layout& at, const Part& part) {
  std::byte* const base = static_cast<std::byte*>(call.workspace);
  Params p = call.p;
  p.wave = wave_of(call.form, call.multiprocessors);
  p.invariant = call.pieces > 0;
  p.keys_are_shared = call.sharing > 1;
  p.partials = reinterpret_cast<float*>(base);
  p.records = reinterpret_cast<RowRecord*>(base + at.records);
  p.live_rows = reinterpret_cast<int32_t*>(base + at.live_rows);
  for (int64_t first = 0; first < call.rows; first += at.rows_at_once) {
    p.first_row = static_cast<int32_t>(first);
    p.row_count = static_cast<int32_t>(std::min<int64_t>(call.rows - first, at.rows_at_once));
    LLA_RETURN_IF_ERROR(part(p));
  }
  return {};
}

// Launches a kernel that puts rows together and solves them. Few rows have many parts each: a cluster puts those together.
// Where only the device knows how many there are, both are launched, and one has nothing to do.
template <class InClusters, class Alone>
Status launch_for_rows(const Params& p, int dim, int32_t rows, const InClusters& in_clusters, const Alone& alone) {
  const int32_t few = few_rows(p.multiprocessors, dim);
  if (!p.decide_by_live_rows) return rows <= few ? in_clusters(rows) : alone(rows);
  LLA_RETURN_IF_ERROR(in_clusters(std::min(few, rows)));
  return alone(rows);
}

}  // namespace lla::cuda::sm90::decode
