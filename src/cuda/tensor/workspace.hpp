// What the Hopper kernels keep in the caller's workspace, and where. Plain C++: planned and tested without a GPU.
#pragma once

#include <cstdint>
#include <utility>

#include "core/problem.hpp"
#include "cuda/tensor/cache_parts.hpp"
#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::tensor {

// Found by the pre-pass, per (batch, key head); packed: per key head (per sequence, too, with own spans). Floats are
// kept as bits of non-negative numbers, whose order is that of integers, so that atomicMax makes them.
struct HeadStatistics {
  uint32_t largest_key;    // of |k|, finite elements
  uint32_t largest_value;  // of |v|
  uint32_t largest_norm;   // of the scaled fp16 keys
  uint32_t marked;         // keys and values that are marked: Mark; kShifted
};

// In HeadStatistics::marked: the head's keys are k - c, c not zero.
inline constexpr uint32_t kShifted = 1u << 31;

// The limit of (largest - least) / |largest + least| up to which a head's keys are shifted along an axis. All have one
// sign then, and the difference to the middle, rounded to 8 bits, is exact in fp16: of f16 keys, which have three bits
// more than bf16's, only if they are closer together. (f32 keys are rounded to fp16 anyway.)
constexpr float shift_limit(bool f16) { return f16 ? 0.5f : 0.85f; }

// What the pre-pass found of a key or value. A row below 2^-28 of its head's largest element keeps fewer than 11 bits
// as fp16 with the head's scale.
enum Mark : uint8_t { kOrdinary = 0, kNotFinite = 1, kTooSmall = 2 };
inline constexpr float kLeastOfLargest = 0x1p-28f;

// Zeroed in every call.
struct Header {
  uint32_t next_item;
  uint32_t unused[3];
};

inline constexpr int64_t kWorkspaceAlignment = 1024;

// Head dimension the kernels work in.
constexpr int padded_dim(int64_t dim, int64_t value_dim) { return dim <= 64 && value_dim <= 64 ? 64 : 128; }

// Positions of a head a block of the pre-pass takes.
inline constexpr int kPrepassRows = 128;
constexpr int64_t prepass_chunks(int64_t positions) { return (positions + kPrepassRows - 1) / kPrepassRows; }

// What the forward does with a sequence that has own spans, found on the device (cache/places.hpp).
enum PlaceState : int32_t { kNotTaken = 0, kTaken = 1, kInvalid = 2 };
struct SequencePlace {
  int32_t start_q, length_q;    // its rows
  int32_t first_key, keys;      // where the copied keys begin in the sequence (packed: in the tensor), and how many
  int32_t first_chunk, chunks;  // of the pre-pass, kPrepassRows positions of the copies each
  int32_t state;
};

// Sequences whose keys are copied to places of their own, with statistics of their own.
constexpr bool has_own_spans(const core::Problem& p) { return p.cache || (p.packed && p.batch_invariant); }
// Keys of all of them at most, and the positions their copies take: each may fill its last chunk partly, and a tile may
// reach into one chunk more.
constexpr int64_t most_own_keys(const core::Problem& p) {
  return std::min(p.total_k, most_forward_sequences(p) * p.seqlen_k);
}
constexpr int64_t own_positions(const core::Problem& p) {
  return (prepass_chunks(most_own_keys(p)) + most_forward_sequences(p) + 1) * kPrepassRows;
}
// The kernels for few and for many keys (x given), or with and without kept weights, each take their own sequences: two
// lists of spans.
inline constexpr int kSpanLists = 2;

// Bytes from the start of the workspace.
struct WorkspaceLayout {
  int64_t header, head_statistics;  // a header for each list of spans
  int64_t chunk_maxima;             // behind both: of |k| and |v|, per head and kPrepassRows positions
  int64_t chunk_bounds, key_shift;  // least and largest keys of the same, and c per head; none where x is given
  int64_t key_marks, value_marks;   // a Mark per key and head
  int64_t keys, values;             // scaled fp16, [head][position][padded dim]
  int64_t scratch, scratch_stride;  // fp32 rows of each resident block, in fragment order
  int64_t weights, weights_stride;  // cached weights of each resident block; stride 0 when recomputed
  int64_t places, live_chunks;      // own spans: SequencePlace of each sequence; chunks in use
  int64_t spans;                    // [list][rows, keys][sequence][begin, end]
  int64_t size;

  // A block's scratch: these vectors, the ones that may be saved first, then the rows' solver state.
  static constexpr int kMeanK = 0, kMeanV = 1, kX = 2, kRidge = 3, kMeanHalf = 4, kVectors = 5;
  static constexpr int64_t kRowState = 12;  // floats of a row: SolveMemory

  WorkspaceLayout(const core::Problem& p, int workers, int64_t weights_bytes_per_worker) {
    int64_t at = 0;
    const auto take = [&](int64_t bytes) {
      return std::exchange(at, at + (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
    };
    const int64_t dim = padded_dim(p.dim, p.value_dim);
    const bool own = has_own_spans(p);
    const int64_t heads = (own || p.packed ? 1 : p.batch) * p.heads_kv;
    const int64_t statistics = (own ? p.batch : 1) * heads;
    const int64_t keys_per_head = own ? own_positions(p) : p.packed ? p.total_k : p.seqlen_k;
    header = take(kSpanLists * sizeof(Header));
    head_statistics = take(statistics * static_cast<int64_t>(sizeof(HeadStatistics)));
    chunk_maxima = take(heads * prepass_chunks(keys_per_head) * 2 * 4);
    chunk_bounds = take(p.given_x() ? 0 : heads * prepass_chunks(keys_per_head) * 2 * dim * 4);
    key_shift = take(p.given_x() ? 0 : statistics * dim * 4);
    key_marks = take(heads * keys_per_head);
    value_marks = take(heads * keys_per_head);
    keys = take(heads * keys_per_head * dim * 2);
    values = take(heads * keys_per_head * dim * 2);
    scratch_stride = int64_t{kBlockRows} * (dim * kVectors + kRowState) * 4;
    scratch = take(scratch_stride * workers);
    weights_stride = weights_bytes_per_worker;
    weights = take(weights_stride * workers);
    places = take(own ? p.batch * int64_t{sizeof(SequencePlace)} : 0);
    live_chunks = take(own ? 4 : 0);
    spans = take(own ? kSpanLists * p.batch * int64_t{sizeof(int32_t)} * 4 : 0);
    size = at;
  }
};

}  // namespace lla::cuda::tensor
