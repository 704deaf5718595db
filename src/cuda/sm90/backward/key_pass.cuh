// The kernel behind key_pass.hpp. A block keeps 64 keys a warpgroup as the rows of every product, so that what the
// element-wise part makes of the scores is already the register operand of the products that sum over queries: nothing
// goes through shared memory but the tiles the copy engine brings.
//
// A step (64 queries): S = K Qᵀ; E = K Xᵀ; B = V Gᵀ - K Yᵀ (Y carries the sign), X and Y with low parts where they
// have; then, element by element, P a, P b and dS; then dv += (P a) G, dk += (P b) X + (P a) (-Y) + dS Q.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward/key_pass.hpp"
#include "cuda/sm90/backward/pass_block.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/tensor/backward/store.cuh"

namespace lla::cuda::sm90 {

template <int kDim_, bool kSolve_>
struct KeyPass {
  static constexpr int kDim = kDim_;
  static constexpr bool kSolve = kSolve_;
  static constexpr int kTile = kQueryTile * kDim;  // elements of a tile of 64 rows
  static constexpr int kTileBytes = kTile * 2;
  // Slots of two tiles (KeyPassSlot). A step's low parts come first: free as soon as E and B are done, they make room
  // for the next step's last tiles.
  static constexpr int kSlots = kDim == 128 ? 4 : 9;
  static_assert(kSlots >= kKeyPassSlots, "a step must fit");

  // Keys and values are the left operands of four products a step. From registers, where there is room for them, they
  // cost no reads of shared memory, and S, E and B have registers of their own.
  static constexpr bool kKeysInRegisters = kDim == 64;

  struct Shared {
    alignas(1024) __half keys[kPassWarpgroups][kTile];
    alignas(1024) __half values[kPassWarpgroups][kTile];
    alignas(1024) __half slots[kSlots][2 * kTile];
    // With kScoreSlot: constants (halves swapped, see ConstantsAt), and whether the next step has low parts.
    alignas(1024) RowConstants rows[kSlots][kQueryTile];
    int next_low[kSlots];
    PassBarriers<kSlots> barriers;
  };
};

// The keys of a block and the queries that see any of them.
struct KeyBlock {
  int32_t batch, head;  // key head
  int32_t first_key;
  int32_t length_q, length_k, start_q, start_k;
  int32_t first_query, end_query;

  __device__ __forceinline__ KeyBlock(const KeyPassParams& params, int64_t item) {
    // Heads in bundles that fit the cache together; in a bundle, the first keys (seen by most under a causal mask)
    // first.
    const Shape& s = params.shape;
    const int32_t blocks = (s.seqlen_k + kKeyBlock - 1) / kKeyBlock;
    const int32_t heads = s.batch * params.heads_kv;
    const int64_t per_bundle = int64_t{params.heads_together} * blocks;
    const int32_t bundle = static_cast<int32_t>(item / per_bundle);
    const int32_t within = static_cast<int32_t>(item - bundle * per_bundle);
    const int32_t in_bundle = min(params.heads_together, heads - bundle * params.heads_together);
    const int32_t pair = bundle * params.heads_together + within % in_bundle;
    first_key = within / in_bundle * kKeyBlock;
    batch = pair / params.heads_kv;
    head = pair % params.heads_kv;
    start_q = s.packed ? params.cu_q[batch] : 0;
    start_k = s.packed ? params.cu_k[batch] : 0;
    length_q = s.packed ? params.cu_q[batch + 1] - start_q : s.seqlen_q;
    length_k = s.packed ? params.cu_k[batch + 1] - start_k : s.seqlen_k;
    const int64_t offset = int64_t{length_k} - length_q;
    const int64_t last_key = min(first_key + kKeyBlock, length_k) - 1;
    const int64_t from = s.right < 0 ? 0 : first_key - offset - s.right;
    const int64_t to = s.left < 0 ? length_q : last_key - offset + s.left + 1;
    first_query = static_cast<int32_t>(max(from, int64_t{0})) / kOperandRows * kOperandRows;
    end_query = static_cast<int32_t>(min(to, int64_t{length_q}));
  }

  __device__ __forceinline__ bool empty() const { return first_key >= length_k; }
  __device__ __forceinline__ int32_t steps() const {
    return end_query > first_query ? (end_query - first_query + kQueryTile - 1) / kQueryTile : 0;
  }
  // Index of the (batch, head) in everything kept per head.
  __device__ __forceinline__ int32_t copy_index(const KeyPassParams& params) const {
    return kv_copy(params.shape, params.heads_kv, batch, head);
  }
  __device__ __forceinline__ int64_t key_row(const KeyPassParams& params) const {
    return first_key_row(params.shape, copy_index(params), head, start_k) + first_key;
  }
  // Whether a step has low parts.
  __device__ __forceinline__ bool low(const KeyPassParams& params, int32_t member, int32_t step) const {
    return params.low[operand_block(params.shape, batch, head * params.shape.group + member, first_query) + step] != 0;
  }
  __device__ __forceinline__ int64_t query_row(const KeyPassParams& params, int32_t query_head, int32_t query) const {
    return tensor::query_row(params.shape, batch, query_head, start_q, query);
  }
};

template <class Config>
__device__ __forceinline__ void key_pass_producer(const KeyPassParams& params, typename Config::Shared& shared,
                                                  const KeyBlock& block) {
  shared.barriers.resident.arrive_expecting(4 * Config::kTileBytes);
  const int64_t key_row = block.key_row(params);
#pragma unroll
  for (int g = 0; g < kPassWarpgroups; ++g) {
    load_tile<Config::kDim>(shared.keys[g], &params.keys, key_row + g * 64, shared.barriers.resident);
    load_tile<Config::kDim>(shared.values[g], &params.values, key_row + g * 64, shared.barriers.resident);
  }
  RingPosition<Config::kSlots> at;
  const int32_t steps = block.steps();
  bool low = steps > 0 && block.low(params, 0, 0);
  for (int32_t member = 0; member < params.shape.group; ++member) {
    const int64_t row0 = block.query_row(params, block.head * params.shape.group + member, block.first_query);
    for (int32_t step = 0; step < steps; ++step) {
      const int64_t row = row0 + int64_t{step} * kQueryTile;
      const bool last = step + 1 == steps;
      const bool next_low = !last                             ? block.low(params, member, step + 1)
                            : member + 1 < params.shape.group ? block.low(params, member + 1, 0)
                                                              : false;
      const auto bring = [&](KeyPassSlot which) {
        const bool constants = which == kScoreSlot;
        const int tiles = Config::kSolve || which == kScoreSlot ? 2 : 1;  // the others' second is y
        shared.barriers.empty[at.slot].wait(at.phase ^ 1);
        Barrier& full = shared.barriers.full[at.slot];
        if (constants) shared.next_low[at.slot] = next_low;
        full.arrive_expecting(tiles * Config::kTileBytes + (constants ? kQueryTile * sizeof(RowConstants) : 0));
#pragma unroll
        for (int half = 0; half < tiles; ++half) {
          load_tile<Config::kDim>(shared.slots[at.slot] + half * Config::kTile,
                                  &params.queries[tile_of_slot(which, half)], row, full);
        }
        if (constants) load_box(shared.rows[at.slot], &params.constants, 0, static_cast<int>(row), full);
        at.advance(1);
      };
      if (low) bring(kLowSlot);
      bring(kScoreSlot);
      bring(kGradientSlot);
      low = next_low;
    }
  }
}

// Constants of queries come from shared memory, which the products keep busy: they are read well before they are
// needed. The threads of a quad read those of columns 0, 2, 4 and 6 of every eight at once, 64 bytes apart: two of them
// would want the same banks. The copy engine therefore swaps the halves of every other four rows (its swizzle of 32
// bytes).
struct ConstantsAt {
  const char *head, *tail;  // of a thread's first query: a0, b0, inverse, minus_c; logit, shift, edge, inverse_ds

  __device__ __forceinline__ ConstantsAt(const RowConstants* rows, int column) {
    const char* const first = reinterpret_cast<const char*>(rows + column);
    const int swapped = column / 4 * 16;
    head = first + swapped, tail = first + (16 - swapped);
  }
  // Of a thread's 16 queries: two in every eight.
  __device__ __forceinline__ static int offset(int i) { return (8 * (i / 2) + i % 2) * sizeof(RowConstants); }
};

// What makes weights of scores: logit and shift of a thread's 16 queries.
struct LogitConstants {
  float2 query[16];

  __device__ __forceinline__ explicit LogitConstants(const ConstantsAt& at) {
#pragma unroll
    for (int i = 0; i < 16; ++i) query[i] = *reinterpret_cast<const float2*>(at.tail + ConstantsAt::offset(i));
  }
};
// The rest, of 4 queries: those of column blocks 2 kStep and 2 kStep + 1.
struct StepConstants {
  float4 head[4];  // a0, b0, inverse, minus_c
  float2 tail[4];  // edge, inverse_ds

  template <int kStep>
  __device__ __forceinline__ void load(const ConstantsAt& at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int offset = ConstantsAt::offset(4 * kStep + i);
      head[i] = *reinterpret_cast<const float4*>(at.head + offset);
      tail[i] = *reinterpret_cast<const float2*>(at.tail + offset + 8);
    }
  }
};

// W as fp16 pairs of the two queries a thread holds side by side; word 2j + h is rows h of column block j.
__device__ __forceinline__ void key_pass_weights(uint32_t (&w)[16], const float (&s)[32], const LogitConstants& c) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 c0 = c.query[2 * j], c1 = c.query[2 * j + 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      w[2 * j + h] =
          pack(exp2_fast(fmaf(s[4 * j + 2 * h], c0.x, c0.y)), exp2_fast(fmaf(s[4 * j + 2 * h + 1], c1.x, c1.y)));
    }
  }
}

// Which of a thread's elements are visible: key - query within [low, high], and the query there at all.
struct KeyPassMask {
  int32_t key, query;  // of the thread's first element; `query` is the step's
  int32_t low, high, end_query, end_key;

  __device__ __forceinline__ KeyPassMask(const KeyPassParams& params, const KeyBlock& block, int32_t first)
      : key(first) {
    const int32_t offset = block.length_k - block.length_q;
    low = params.shape.left < 0 ? INT32_MIN : offset - params.shape.left;
    high = params.shape.right < 0 ? INT32_MAX : offset + params.shape.right;
    end_query = block.length_q;
    end_key = block.length_k;
  }

  __device__ __forceinline__ bool operator()(int row8, int column) const {
    const int32_t k = key + row8, q = query + column;
    return k - q >= low && k - q <= high && q < end_query && k < end_key;
  }
};

// pa, pb, ds: register operands of 64 keys x 16 queries, those of column blocks 2 kStep and 2 kStep + 1.
template <bool kMasked, int kStep>
__device__ __forceinline__ void key_pass_elements(uint32_t (&pa)[4], uint32_t (&pb)[4], uint32_t (&ds)[4],
                                                  const uint32_t (&w)[16], const float (&e)[32], const float (&b)[32],
                                                  const StepConstants& constants, const KeyPassMask& mask) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    constexpr int kFirst = 2 * kStep;
    const int j = kFirst + i;
    float out_a[2][2], out_b[2][2], out_s[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float4 head = constants.head[2 * i + c];
      const float2 tail = constants.tail[2 * i + c];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 pair = unpack(w[2 * j + h]);
        const float weight = c == 0 ? pair.x : pair.y;
        const float a1 = fmaf(e[4 * j + 2 * h + c], tail.x, head.x);
        const float b1 = fmaf(b[4 * j + 2 * h + c], tail.x, head.y);
        const float normalized = weight * head.z;
        const bool visible = !kMasked || mask(8 * h, 8 * j + c);
        out_a[h][c] = visible ? normalized * a1 : 0.f;
        out_b[h][c] = visible ? normalized * b1 : 0.f;
        out_s[h][c] = visible ? weight * tail.y * fmaf(a1, b1, head.w) : 0.f;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pa[2 * i + h] = pack(out_a[h][0], out_a[h][1]);
      pb[2 * i + h] = pack(out_b[h][0], out_b[h][1]);
      ds[2 * i + h] = pack_saturated(out_s[h][0], out_s[h][1]);
    }
  }
}

// 16 queries: their operands and the products that take them, which run while the next 16 are prepared. `constants` are
// theirs, and then those of the next.
template <class Config, int kStep>
__device__ __forceinline__ void key_pass_step(float (&dk)[Config::kDim / 2], float (&dv)[Config::kDim / 2],
                                              const uint32_t (&w)[16], const float (&e)[32], const float (&b)[32],
                                              StepConstants& constants, const ConstantsAt& constants_at, bool whole,
                                              const KeyPassMask& mask, const __half* q, const __half* g,
                                              const __half* x, const __half* y) {
  uint32_t pa[4], pb[4], ds[4];
  if (whole) {
    key_pass_elements<false, kStep>(pa, pb, ds, w, e, b, constants, mask);
  } else {
    key_pass_elements<true, kStep>(pa, pb, ds, w, e, b, constants, mask);
  }
  pin(pa);
  pin(pb);
  pin(ds);
  if constexpr (kStep < 3) constants.load<kStep + 1>(constants_at);
  // dv += (P a) G;  dk += (P a) (-Y) + (P b) X + dS Q
  mma_fence();
  product_step<Config::kDim, kQueryTile>(dv, pa, g, kStep);
  if constexpr (Config::kSolve) product_step<Config::kDim, kQueryTile>(dk, pa, y, kStep);
  product_step<Config::kDim, kQueryTile>(dk, pb, x, kStep);
  product_step<Config::kDim, kQueryTile>(dk, ds, q, kStep);
  mma_commit();
}

// The tiles of one step in the ring.
template <class Config>
struct StepTiles {
  using Position = RingPosition<Config::kSlots>;
  typename Config::Shared& shared;
  const Position first, scores;
  const bool low;  // whether it has low parts

  __device__ __forceinline__ StepTiles(typename Config::Shared& of, const Position& position, bool has_low)
      : shared(of), first(position), scores(has_low ? position.ahead(1) : position), low(has_low) {}

  __device__ __forceinline__ Position at(int slot) const {
    return slot == kLowSlot ? first : scores.ahead(slot - kScoreSlot);
  }
  __device__ __forceinline__ Position behind() const { return at(kKeyPassSlots); }
  __device__ __forceinline__ const __half* tile(QueryOperand operand) const {
    const TilePlace place = tile_place(operand);
    return shared.slots[at(place.slot).slot] + place.half * Config::kTile;
  }
  __device__ __forceinline__ void wait(int slot) const {
    const Position p = at(slot);
    shared.barriers.full[p.slot].wait(p.phase);
  }
  __device__ __forceinline__ void release(int slot) const { shared.barriers.empty[at(slot).slot].arrive_for_warp(); }
  // Of a step that only the other warpgroup sees.
  __device__ __forceinline__ void pass_by() const {
    __syncwarp();
    for (int slot = low ? kLowSlot : kScoreSlot; slot < kKeyPassSlots; ++slot) wait(slot), release(slot);
  }
};

// E = K Xᵀ. Both ways commit themselves: a commit behind a branch would be a batch of its own to the assembler, and who
// waits for all batches but one would wait for E, too.
template <class Config, class Left>
__device__ __forceinline__ void issue_e(float (&e)[32], const StepTiles<Config>& tiles, const Left& keys) {
  if (tiles.low) {
    keep_branch();  // not to be merged with the other way
    mma_fence();
    product_transposed<Config::kDim, 64>(e, keys.words, tiles.tile(kOpXHigh));
    product_transposed<Config::kDim, 64, true>(e, keys.words, tiles.tile(kOpXLow));
    mma_commit();
  } else {
    mma_fence();
    product_transposed<Config::kDim, 64>(e, keys.words, tiles.tile(kOpXHigh));
    mma_commit();
  }
}

// B = V Gᵀ - K Yᵀ (Y carries the sign)
template <class Config, class Left>
__device__ __forceinline__ void issue_b(float (&b)[32], const StepTiles<Config>& tiles, const Left& keys,
                                        const Left& values) {
  if (Config::kSolve && tiles.low) {
    keep_branch();
    mma_fence();
    product_transposed<Config::kDim, 64>(b, values.words, tiles.tile(kOpG));
    product_transposed<Config::kDim, 64, true>(b, keys.words, tiles.tile(kOpYHigh));
    product_transposed<Config::kDim, 64, true>(b, keys.words, tiles.tile(kOpYLow));
    mma_commit();
  } else {
    mma_fence();
    product_transposed<Config::kDim, 64>(b, values.words, tiles.tile(kOpG));
    if constexpr (Config::kSolve) product_transposed<Config::kDim, 64, true>(b, keys.words, tiles.tile(kOpYHigh));
    mma_commit();
  }
}

// The assembler moves arithmetic past a wait for products, which then hides nothing, but not past a branch: this is
// one. The tile is there and held, so nobody waits.
template <class Config>
__device__ __forceinline__ void finish_before(const StepTiles<Config>& tiles) {
  tiles.wait(kScoreSlot);
}

// W, E and B of 64 keys and a step's 64 queries. Lets go of its low parts. `constants` are those of its first 16
// queries.
template <class Config, class Left>
__device__ __forceinline__ void key_pass_products(uint32_t (&w)[16], float (&e)[32], float (&b)[32],
                                                  StepConstants& constants, const StepTiles<Config>& tiles,
                                                  const Left& keys, const Left& values,
                                                  const ConstantsAt& constants_at) {
  if (tiles.low) tiles.wait(kLowSlot);
  if constexpr (Config::kKeysInRegisters) {
    float s[32];
    tiles.wait(kGradientSlot);
    // S = K Qᵀ
    mma_fence();
    product_transposed<Config::kDim, 64>(s, keys.words, tiles.tile(kOpQ));
    mma_commit();
    issue_e(e, tiles, keys);
    issue_b(b, tiles, keys, values);
    const LogitConstants logits(constants_at);
    mma_wait<2>();
    pin(s);
    key_pass_weights(w, s, logits);
    pin(w);
    finish_before(tiles);
  } else {
    float(&s)[32] = b;  // B takes the registers of S once these have become W
    // S = K Qᵀ
    mma_fence();
    product_transposed<Config::kDim, 64>(s, keys.words, tiles.tile(kOpQ));
    mma_commit();
    issue_e(e, tiles, keys);
    const LogitConstants logits(constants_at);
    mma_wait<1>();
    pin(s);
    key_pass_weights(w, s, logits);
    pin(w);
    tiles.wait(kGradientSlot);
    issue_b(b, tiles, keys, values);
  }
  constants.load<0>(constants_at);
  mma_wait<0>();
  pin(e);
  pin(b);
  if (tiles.low) tiles.release(kLowSlot);
}

template <int kDim>
__device__ __forceinline__ void store_keys(const KeyPassParams& params, const KeyBlock& block, int32_t first_key,
                                           const float (&dk)[kDim / 2], const float (&dv)[kDim / 2], bool any_query,
                                           const Lane& lane) {
  // Without a query nobody has written the exponents.
  const int2 exponents =
      any_query ? reinterpret_cast<const int2*>(params.head_exponents)[block.copy_index(params)] : make_int2(0, 0);
  const PowerOfTwo of_dk(exponents.x), of_dv(exponents.y);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t key = first_key + lane.row + 8 * h;
    if (key >= block.length_k) continue;
    store_row<kDim>(params.dk, block.batch, block.start_k + key, block.head, params.dim, lane.column, dk, h, of_dk);
    store_row<kDim>(params.dv, block.batch, block.start_k + key, block.head, params.value_dim, lane.column, dv, h,
                    of_dv);
  }
}

template <class Config>
__device__ __forceinline__ void key_pass_consumer(const KeyPassParams& params, typename Config::Shared& shared,
                                                  const KeyBlock& block, int warpgroup) {
  constexpr int kDim = Config::kDim;
  const Lane lane(threadIdx.x % kWarpgroupThreads);
  float dk[kDim / 2], dv[kDim / 2];
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;

  const int32_t steps = uniform(block.steps());
  const int32_t first_key = uniform(block.first_key) + warpgroup * 64;
  KeyPassMask mask(params, block, first_key + lane.row);
  shared.barriers.resident.wait(0);
  using Left = LeftOperand<kDim, Config::kKeysInRegisters>;
  const Left keys(shared.keys[warpgroup], lane), values(shared.values[warpgroup], lane);
  RingPosition<Config::kSlots> at;
  const int32_t total = steps * params.shape.group;
  int32_t first_query = uniform(block.first_query);
  const int32_t end_query = first_query + steps * kQueryTile;
  bool next_low = uniform(total > 0 && block.low(params, 0, 0)) != 0;
  for (int32_t step = total; step > 0; --step, first_query += kQueryTile) {
    if (first_query == end_query) first_query -= steps * kQueryTile;  // of the next head
    const StepTiles<Config> tiles(shared, at, next_low);
    const ConstantsAt constants_at(shared.rows[tiles.scores.slot], lane.column);
    at = tiles.behind();

    const int32_t nearest = first_key - first_query - (kQueryTile - 1), farthest = first_key + 63 - first_query;
    tiles.wait(kScoreSlot);
    next_low = uniform(shared.next_low[tiles.scores.slot]) != 0;
    if (nearest > mask.high || farthest < mask.low) {
      tiles.pass_by();
      continue;
    }
    float e[32], b[32];
    uint32_t w[16];
    StepConstants constants;
    key_pass_products<Config>(w, e, b, constants, tiles, keys, values, constants_at);
    mask.query = first_query + lane.column;
    const bool whole = nearest >= mask.low && farthest <= mask.high && first_query + kQueryTile <= block.length_q &&
                       first_key + 64 <= block.length_k;
    const auto run = [&]<int kStep>() {
      key_pass_step<Config, kStep>(dk, dv, w, e, b, constants, constants_at, whole, mask, tiles.tile(kOpQ),
                                   tiles.tile(kOpG), tiles.tile(kOpXHigh), tiles.tile(kOpYHigh));
    };
    run.template operator()<0>();
    run.template operator()<1>();
    run.template operator()<2>();
    run.template operator()<3>();
    mma_wait<0>();
    pin(dk);
    pin(dv);
    __syncwarp();  // one lane speaks for all that have read the constants that came with Q
    tiles.release(kScoreSlot);
    tiles.release(kGradientSlot);
  }
  store_keys<kDim>(params, block, first_key, dk, dv, total > 0, lane);
}

template <int kDim, bool kSolve>
__global__ void __launch_bounds__(kPassThreads, 1) key_pass_kernel(const __grid_constant__ KeyPassParams params) {
  using Config = KeyPass<kDim, kSolve>;
  auto& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_tiles);
  const KeyBlock block(params, blockIdx.x);
  if (block.empty()) return;
  run_pass_block(
      shared.barriers, [&] { key_pass_producer<Config>(params, shared, block); },
      [&](int warpgroup) { key_pass_consumer<Config>(params, shared, block, warpgroup); });
}

template <int kDim, bool kSolve>
Status launch_key_pass(const KeyPassParams& params, cudaStream_t stream) {
  using Config = KeyPass<kDim, kSolve>;
  const int64_t blocks =
      (int64_t{params.shape.seqlen_k} + kKeyBlock - 1) / kKeyBlock * params.shape.batch * params.heads_kv;
  constexpr size_t kShared = sizeof(typename Config::Shared);
  static_assert(kShared <= 227 * 1024);
  return launch(key_pass_kernel<kDim, kSolve>, blocks, kPassThreads, kShared, stream, "the gradient of keys and values",
                params);
}

}  // namespace lla::cuda::sm90
