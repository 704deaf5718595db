// The forward over keys that do not lie in one dense tensor: which sequences it takes, which of their keys it copies,
// and where to. Plain functions for host and device: the tests run them on the CPU.
//
// Copies of a sequence begin at a multiple of kPrepassRows, so that every chunk of the pre-pass belongs to one
// sequence, and scales and statistics are a sequence's own: its bits do not depend on the others. Only keys that some
// row sees are copied. Masks are aligned to the end of the keys, so that leaving out the first ones changes none.
#pragma once

#include "core/problem.hpp"
#include "cuda/tensor/cache_parts.hpp"
#include "cuda/tensor/schedule.hpp"
#include "cuda/tensor/workspace.hpp"

namespace lla::cuda::tensor {

// Where sequences lie, as the caller says: in a cache or packed.
struct SequenceSource {
  core::Problem problem;
  core::KeyCache cache;  // none: packed keys
  const int32_t *cu_q, *cu_k;
  int64_t most_keys;  // of all sequences taken

  // Rows that sequence b and those before it claim; of the others the largest counts.
  constexpr int64_t claimed(int32_t b) const { return problem.cache && problem.packed ? cu_q[b + 1] : 0; }
};

// Sequence b, before it is known what those before it take. `claimed`: the largest claim of those before, or 0.
constexpr SequencePlace find_place(const SequenceSource& source, int32_t b, int64_t claimed) {
  const core::Problem& p = source.problem;
  const core::Sequence s = p.cache ? core::sequence(p, source.cu_q, source.cache, b, claimed)
                                   : core::sequence(p, source.cu_q, source.cu_k, b);
  SequencePlace place{};
  place.start_q = static_cast<int32_t>(s.start_q);
  place.length_q = static_cast<int32_t>(s.length_q);
  if (s.length_q <= 0 || (p.cache && decodes(s.length_q, p.group(), most_rows(p)))) return place;
  place.state = s.valid ? kTaken : kInvalid;
  if (!s.valid) return place;
  const core::KeyRange seen = core::visible_keys(p.mask, s);
  place.first_key = static_cast<int32_t>(s.start_k + seen.begin);
  place.keys = static_cast<int32_t>(seen.end - seen.begin);
  place.chunks = place.keys > 0 ? static_cast<int32_t>(prepass_chunks(place.keys)) : 1;
  return place;
}

// Then: `chunks_before` of the sequences taken before it, `keys_upto` theirs and its own.
constexpr void settle_place(SequencePlace& place, int64_t chunks_before, int64_t keys_upto, int64_t most_keys) {
  if (place.state != kTaken) return;
  if (keys_upto > most_keys) {
    place.state = kInvalid;
    place.chunks = 0;
  } else {
    place.first_chunk = static_cast<int32_t>(chunks_before);
  }
}

// What the kernels read of it (kOwnSpans): begin and end of its rows and of its keys' copies. Nothing where it is not
// theirs.
struct SequenceSpans {
  int32_t rows[2], keys[2];
};
constexpr SequenceSpans spans_of(const SequencePlace& place, bool theirs) {
  const int32_t first = place.first_chunk * kPrepassRows;
  const bool here = place.state == kTaken && theirs;
  return {{place.start_q, place.start_q + (here ? place.length_q : 0)}, {first, first + (here ? place.keys : 0)}};
}

}  // namespace lla::cuda::tensor
