// The parts of a row put together, in a fixed order, by a block or by the blocks of a cluster: weights, means, the
// covariance.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/conjugate.cuh"
#include "cuda/sm90/decode/load.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kMostParts = kMostBlocks;
inline constexpr int kPiecesAtOnce = 16;
inline constexpr int kOutputSums = 8;  // over every eighth quad, however many blocks share a row: the same bits

template <int kDim>
struct SolveShared {
  union {
    Square<kDim> square;
    Matrix<kDim> matrix;
  };
  GradientsShared<kDim> gradients;
  float matrix_factor[2][kMostParts];                      // of the products of each consumer warpgroup
  float key_factor[kMostParts], value_factor[kMostParts];  // scales relative to the first part's
  float heaviest_share[kMostParts];                        // of all weights
  float away[kMostParts];                                  // heaviest_share (k - mean) x
  float pieces[kPiecesAtOnce][kDim];
  float mean_key[kDim], stream_mean[kDim], from_mean[kDim], x[kDim];
  float mean_value[kDim], value_sum[kDim];
  float raw_mean[kDim];  // of two passes: of the keys as they are but the heaviest, times the root of their weight
  float output[kDim / 16][kOutputSums][16];
  float stream_x, from_mean_x;
  int32_t bad;
  unsigned largest_output;  // |o|, as bits
};

__device__ __forceinline__ void scale(float4& x, float f) { x.x *= f, x.y *= f, x.z *= f, x.w *= f; }
__device__ __forceinline__ void add_scaled(float4& x, float f, const float4& y) {
  x.x = fmaf(f, y.x, x.x), x.y = fmaf(f, y.y, x.y), x.z = fmaf(f, y.z, x.z), x.w = fmaf(f, y.w, x.w);
}

// Matrices lie in strips of 16 rows, as one warp of the consumers holds them: rows g and g + 8 of a thread, of every
// eight columns (a quad) two. Of a cluster each block takes a strip and its warps the quads in turn; but the first
// block, which solves meanwhile, leaves its strip of the values' products to the second. A block alone has its warps
// take strips of the values' products; of the keys' it takes 64 rows with four warps, quad by quad.
//
// kBundle: rows whose partials lie together; where there are several, a first pass has made them, without values.
template <int kDim, int kCluster, int kBundle = 1>
struct RowParts {
  static constexpr bool kValues = kBundle == 1;
  static constexpr int kSums = (kValues ? 2 : 1) * kDim;  // columns of keys, and of values
  static constexpr bool kAlone = kCluster == 1;
  static constexpr int kWarps = kSolveThreads / 32;
  static constexpr int kStrips = kDim / 16 / kCluster;             // of a block
  static constexpr int kSplit = kWarps / kStrips;                  // warps that share a strip's quads
  static constexpr int kQuads = (kDim / 8 + kSplit - 1) / kSplit;  // of a warp, at most
  static constexpr int kAtOnce = kQuads < 8 ? kQuads : 8;
  static constexpr int kTeams = kAlone ? kWarps / 4 : kWarps;  // of warps, that take the keys' quads in turn
  static constexpr int kFirstTiles = kDim / 8 / kTeams;        // of a team, of the first 64 rows
  static constexpr int kKeyTiles = kAlone && kDim == 128 ? kFirstTiles + 8 / kTeams : kFirstTiles;

  static constexpr int kPartsAtOnce = kAlone ? 1 : 8;  // instructions that run once cost what it takes to fetch them

  SolveShared<kDim>& s;
  const Params& p;
  const RowRecord record;
  const int parts;
  const float* const partials;  // of the first part
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank;
  int strip;            // this warp's, of the values' products
  const int sub;        // and which of its quads
  float total, stream;  // weights: of all keys, of all but the heaviest
  float key_scale, value_scale;
  float first_sum = 0, first_heavy = 0;  // see ask_for_means

  __device__ RowParts(SolveShared<kDim>& shared, const Params& params, const RowRecord& of, int row, int rank_,
                      int of_bundle = 0)
      : s(shared),
        p(params),
        record(of),
        parts(of.last - of.first + 1),
        partials(params.partials + (int64_t{row + of.first} * kBundle + of_bundle) * partial_floats(kDim, kValues)),
        rank(rank_),
        strip(rank_ + (threadIdx.x / 32 / kSplit) * kCluster),
        sub(threadIdx.x / 32 % kSplit) {}

  __device__ __forceinline__ const float* partial(int part) const {
    return partials + int64_t{part} * kBundle * partial_floats(kDim, kValues);
  }
  // 0: reference key, 1: heaviest key, 2: its value.
  __device__ __forceinline__ const float* vector(int part, int which) const {
    return partial(part) + kPartialHead + which * kDim;
  }

  // Weights of the parts relative to the row's maximum. Says whether the row is not usable. Every warp for itself.
  __device__ bool weigh() {
    const auto head_of = [&](int part) { return *reinterpret_cast<const PartialHead*>(partial(part)); };
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto plus = [](float a, float b) { return a + b; };
    float top = -INFINITY, invalid = record.invalid != 0;
#pragma unroll 1
    for (int i = lane; i < parts; i += 32) {
      const PartialHead head = head_of(i);
      if (head.omega != 0) top = fmaxf(top, static_cast<float>(head.omega_max));
      if (head.heaviest_omega != 0) top = fmaxf(top, static_cast<float>(head.heaviest_max));
      invalid += static_cast<float>(head.invalid);
    }
    const PartialHead first = head_of(0);
    top = warp_reduce(top, larger);
    invalid = warp_reduce(invalid, plus);
    key_scale = first.key_scale, value_scale = first.value_scale;
    const int max = top > -INFINITY ? static_cast<int>(top) : 0;
    const auto heaviest_of = [&](const PartialHead& head) {
      return head.heaviest_omega * four_to(min(head.heaviest_max - max, 40));
    };
    float omega = 0, heaviest = 0;
#pragma unroll 1
    for (int i = lane; i < parts; i += 32) {
      const PartialHead head = head_of(i);
      omega += head.omega * four_to(min(head.omega_max - max, 40));
      heaviest += heaviest_of(head);
    }
    stream = warp_reduce(omega, plus);
    total = stream + warp_reduce(heaviest, plus);
#pragma unroll 1
    for (int i = thread; i < parts; i += kSolveThreads) {
      const PartialHead head = head_of(i);
      s.key_factor[i] = key_scale / head.key_scale;
      s.value_factor[i] = value_scale / head.value_scale;
      for (int g = 0; g < 2; ++g) s.matrix_factor[g][i] = four_to(min(head.matrix_max[g] - max, 40));
      s.heaviest_share[i] = heaviest_of(head) / total;  // exactly 1 where there is one key
    }
    __syncthreads();
    return invalid > 0;
  }

  // Asks for what means needs of the first part.
  __device__ __forceinline__ void ask_for_means() {
    if (thread >= kSums) return;
    first_sum = partial(0)[sum_place()];
    first_heavy = vector(0, thread >= kDim ? 2 : 1)[thread % kDim];
  }
  // Sums over keys of column d: in the quad behind those of the keys.
  __device__ __forceinline__ static int sum_offset(const ProductTile& block, int d) {
    return partial_matrix(kDim) + block.from + (block.quads * 128 + d % 64 / 16 * 32 + d % 8 * 4) * 4 + d % 16 / 8 * 2;
  }
  // This thread's column: of the keys, then of the values.
  __device__ __forceinline__ ProductTile sum_tile() const {
    const int d = thread % kDim;
    return thread >= kDim ? value_tile(kDim, d / 64) : key_tile(kDim, d / 64, kValues);
  }
  __device__ __forceinline__ int sum_place() const { return sum_offset(sum_tile(), thread % kDim); }
  __device__ void means() {
    static_assert(kSolveThreads >= 2 * kDim);
    const float inverse = 1 / total;
    if (thread < kSums) {
      const bool value = thread >= kDim;
      const int d = thread % kDim;
      const int at = sum_place(), group = sum_tile().warpgroup;
      float sum = 0, heavy = 0;
      const auto add = [&](int i, float part_sum, float part_heavy) {
        const float scale = value ? s.value_factor[i] : s.key_factor[i];
        sum = fmaf(s.matrix_factor[group][i] * scale, part_sum, sum);
        heavy = fmaf(s.heaviest_share[i] * (value ? 1 : scale), part_heavy, heavy);
      };
      add(0, first_sum, first_heavy);
#pragma unroll 1
      for (int from = 1; from < parts; from += kPartsAtOnce) {
        float sums[kPartsAtOnce], heaviest[kPartsAtOnce];
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
          const int part = min(from + i, parts - 1);
          sums[i] = partial(part)[at], heaviest[i] = vector(part, value ? 2 : 1)[d];
        }
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
          if (from + i < parts) add(from + i, sums[i], heaviest[i]);
        }
      }
      if (value) {
        s.value_sum[d] = sum;
        s.mean_value[d] = fmaf(sum * inverse, 1 / value_scale, heavy);
      } else {
        const float mean = fmaf(sum, inverse, heavy), of_stream = stream > 0 ? sum / stream : 0;
        s.mean_key[d] = mean, s.stream_mean[d] = of_stream, s.from_mean[d] = of_stream - mean;
      }
    }
    __syncthreads();
  }

  // The e-th of this warp's tiles of the keys' products: strip, quad, and whether it has anything of the lower triangle.
  struct Tile {
    int strip, quad;
    bool there;
  };
  __device__ __forceinline__ Tile key_tile_at(int e) const {
    const bool second = kAlone ? e >= kFirstTiles : kDim == 128 && rank >= 4;  // 64 rows
    const int in_block = kAlone ? warp % 4 : rank % 4;
    const int quad = (kAlone ? warp / 4 : warp) + (kAlone && second ? e - kFirstTiles : e) * kTeams;
    const bool lower = quad <= 2 * in_block + 1, mirrored = kDim == 128 && !second && quad >= 8;
    return {in_block + (second ? 4 : 0), quad, lower || mirrored};
  }
  // This thread's four elements of a tile.
  __device__ __forceinline__ float4 element(int part, const ProductTile& block, const Tile& tile) const {
    const float* const from = partial(part) + partial_matrix(kDim) + block.from + (tile.strip % 4 * 32 + lane) * 4;
    return tile.there ? *reinterpret_cast<const float4*>(from + tile.quad * 512) : float4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void load_keys(float4 (&v)[kKeyTiles], int part) const {
#pragma unroll
    for (int e = 0; e < kKeyTiles; ++e) {
      const Tile tile = key_tile_at(e);
      v[e] = element(part, key_tile(kDim, tile.strip / 4, kValues), tile);
    }
  }
  __device__ __forceinline__ Tile value_tile_at(int n) const {
    const int quad = sub + n * kSplit;
    return {strip, quad, quad < kDim / 8};
  }
  // Quads of this warp's strip of the values' products, from the n-th of its own on.
  __device__ __forceinline__ void load_values(float4 (&v)[kAtOnce], int part, int n) const {
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) v[e] = element(part, value_tile(kDim, strip / 4), value_tile_at(n + e));
  }

  // The first part's tiles, and all others': many loads in flight.
  template <int kCount, class Load, class Factor>
  __device__ __forceinline__ void add_parts(float4 (&sum)[kCount], const Load& load, const Factor& factor) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) scale(sum[e], factor(0, e));
    constexpr int kParts = kAlone ? 1 : 16 / kCount;
#pragma unroll 1
    for (int first = 1; first < parts; first += kParts) {
      float4 v[kParts][kCount];
#pragma unroll
      for (int i = 0; i < kParts; ++i) load(v[i], min(first + i, parts - 1));
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (first + i >= parts) break;
#pragma unroll
        for (int e = 0; e < kCount; ++e) add_scaled(sum[e], factor(first + i, e), v[i][e]);
      }
    }
  }
  __device__ __forceinline__ void add_values(float4 (&sum)[kAtOnce], int n) const {
    const float* const weights = s.matrix_factor[value_tile(kDim, strip / 4).warpgroup];
    add_parts(
        sum, [&](float4(&v)[kAtOnce], int part) { load_values(v, part, n); },
        [&](int part, int) { return weights[part] * s.key_factor[part] * s.value_factor[part]; });
  }
  __device__ __forceinline__ void add_keys(float4 (&sum)[kKeyTiles]) const {
    add_parts(
        sum, [&](float4(&v)[kKeyTiles], int part) { load_keys(v, part); },
        [&](int part, int e) {
          const int group = key_tile(kDim, key_tile_at(e).strip / 4).warpgroup;
          return s.matrix_factor[group][part] * s.key_factor[part] * s.key_factor[part];
        });
  }

  // The heaviest key of a part, from the mean.
  __device__ __forceinline__ float piece_at(int part, int d) const {
    return fmaf(vector(part, 1)[d], s.key_factor[part], -s.mean_key[d]);
  }
  // This block's tiles of the covariance, into the first block's matrix, both halves from one. `sum`: the first part's.
  __device__ void covariance(Square<kDim>& to, float4 (&sum)[kKeyTiles]) {
    add_keys(sum);
    const float inverse = 1 / total, part = stream * inverse;
    const auto row_of = [&](const Tile& tile) { return 16 * tile.strip + lane / 4; };
    const auto column_of = [&](const Tile& tile) {
      return key_tile(kDim, tile.strip / 4).first_column + 8 * tile.quad + 2 * (lane % 4);
    };
#pragma unroll
    for (int e = 0; e < kKeyTiles; ++e) {
      const Tile tile = key_tile_at(e);
      if (!tile.there) continue;
      const int i = row_of(tile), j = column_of(tile);
      const float2 from = *reinterpret_cast<const float2*>(&s.from_mean[j]);
      const float2 mean = *reinterpret_cast<const float2*>(&s.stream_mean[j]);
      const auto centred = [&](float x, int row, float from_column, float mean_column) {
        const float outer = s.stream_mean[row] * mean_column;
        return fmaf(x, inverse, part * fmaf(s.from_mean[row], from_column, -outer));
      };
      const float4 v = sum[e];
      sum[e] = {centred(v.x, i, from.x, mean.x), centred(v.y, i, from.y, mean.y), centred(v.z, i + 8, from.x, mean.x),
                centred(v.w, i + 8, from.y, mean.y)};
    }
#pragma unroll 1
    for (int first = 0; first < parts; first += kPiecesAtOnce) {
      const int count = min(kPiecesAtOnce, parts - first);
      __syncthreads();
#pragma unroll kPartsAtOnce
      for (int e = thread; e < count * kDim; e += kSolveThreads) {
        const int piece = first + e / kDim, d = e % kDim;
        s.pieces[e / kDim][d] = piece_at(piece, d);
      }
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const float weight = s.heaviest_share[first + i];
        if (weight == 0) continue;
        const float* d = s.pieces[i];
#pragma unroll
        for (int e = 0; e < kKeyTiles; ++e) {
          const Tile tile = key_tile_at(e);
          if (!tile.there) continue;
          const float low = weight * d[row_of(tile)], high = weight * d[row_of(tile) + 8];
          const float2 k = *reinterpret_cast<const float2*>(&d[column_of(tile)]);
          sum[e].x = fmaf(low, k.x, sum[e].x), sum[e].y = fmaf(low, k.y, sum[e].y);
          sum[e].z = fmaf(high, k.x, sum[e].z), sum[e].w = fmaf(high, k.y, sum[e].w);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kKeyTiles; ++e) {
      const Tile tile = key_tile_at(e);
      if (!tile.there) continue;
      const int i = row_of(tile), j = column_of(tile);
      const bool mirrored = kDim == 128 && tile.strip < 4 && tile.quad >= 8;
      const auto put = [&](float x, int row, int col) {
        if (mirrored || col <= row) to.at(row, col) = to.at(col, row) = x;
      };
      put(sum[e].x, i, j), put(sum[e].y, i, j + 1), put(sum[e].z, i + 8, j), put(sum[e].w, i + 8, j + 1);
    }
  }
};

}  // namespace lla::cuda::sm90::decode
