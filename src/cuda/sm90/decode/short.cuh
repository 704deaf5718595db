// Short caches of few key heads, in one kernel: a cluster of blocks has a key head's keys and values in its shared memory
// (or, longer ones, in L2) and goes over them until the rows of the head, its query heads, are done. What the other
// kernels pass through the workspace these blocks read from one another.
//
//   logits -> weights relative to the block's largest -> the block's means
//   for every row: covariance of the block's keys about their own mean -> put together by all blocks
//   each row solved by a block of its own
//   e = (k - mean).x -> Σ w v, Σ w e v -> put together by the block that has solved the row
//
// Keys are multiplied as they came; w (k - mean), the other side of the covariance, is in three parts of bf16. E is summed
// up in fp32 from differences to the mean. So nothing is rounded but sums.
#pragma once

#include <cooperative_groups.h>

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/short_shared.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim>
struct ShortHead {
  using C = ShortConfig<kDim>;
  static constexpr int kParts = 3;                   // of bf16, that make up a number of fp32
  enum Pass : int { kLogits, kMeans, kCovariance };  // a row after the other, then e, then the values

  ShortShared<kDim>& s;
  const Params& p;
  Slabs<kDim>& slabs;
  const int rows, rank, blocks, stride;  // stride: of a row's weights
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;

  template <class T>
  __device__ __forceinline__ const T* of_block(const T* here, int block) const {
    return cooperative_groups::this_cluster().map_shared_rank(here, block);
  }
  __device__ __forceinline__ static void meet() { cooperative_groups::this_cluster().sync(); }

  __device__ __forceinline__ static uint32_t tile(const unsigned char* slab, int of_slab) {
    return raw_start(slab + of_slab * kWarpKeys * 128);
  }
  __device__ __forceinline__ static uint32_t chunks(uint32_t tile, int pair) {
    return raw_at<C::kBlockBytes>(tile, pair);
  }

  // Keys are the left operand, the query heads the right one's columns.
  __device__ void logits() {
    const bool mine = warp < kSlabTiles;
    uint32_t query[kDim / 16][2];
    if (mine) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          query[i][half] = *reinterpret_cast<const uint32_t*>(&s.query[g][16 * i + 8 * half + 2 * t]);
        }
      }
    }
    float top[2]{-INFINITY, -INFINITY};
    slabs.each(kLogits, [&](const unsigned char* slab, int from) {
      if (!mine) return;
      const uint32_t keys = tile(slab, warp);
      float sums[2][4]{};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        uint32_t v[4];
        load_matrices(v, chunks(keys, i));
        warp_product<true>(sums[i % 2], v, query[i][0], query[i][1]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * t + e % 2, key = from + warp * kWarpKeys + g + e / 2 * 8;
        const float logit = key < slabs.keys ? (sums[0][e] + sums[1][e]) * (2 * p.half_scale) : -INFINITY;
        top[e % 2] = fmaxf(top[e % 2], logit);
        if (row < rows) s.weight[row * stride + key] = logit;
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int by = 4; by < 32; by *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], by));
    }
    if (mine && g == 0) s.tops[warp][2 * t] = top[0], s.tops[warp][2 * t + 1] = top[1];
    __syncthreads();
    if (warp < rows) weigh();
    __syncthreads();
  }
  // A warp's row: from logits to weights.
  __device__ void weigh() {
    float top = -INFINITY, sum = 0;
    for (int i = 0; i < kSlabTiles; ++i) top = fmaxf(top, s.tops[i][warp]);
    const float base = top > -INFINITY ? top : 0;
    float* const weight = s.weight + warp * stride;
#pragma unroll 2
    for (int key = lane; key < stride; key += 32) {
      const float w = exp2_fast(weight[key] - base);
      weight[key] = w;
      sum += w;
    }
    sum = warp_sum(sum);
    if (lane == 0) s.max[warp] = top, s.omega[warp] = sum;
  }

  // About where a row's keys are: what the covariance is taken from may be off a little, for that follows from its sums.
  // Rows' weights in two parts are the left operand's sixteen rows. A warp has a tile and half of the columns.
  __device__ void means() {
    constexpr int kPairs = kDim / 32;
    float sums[2 * kPairs][4]{};
    const int of_slab = warp % kSlabTiles, first = warp / kSlabTiles * kPairs;
    slabs.each(kMeans, [&](const unsigned char* slab, int from) {
      uint32_t weights[4]{};
      if (g < rows) {
        const float* const weight = s.weight + g * stride + from + of_slab * kWarpKeys + 2 * t;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 w = *reinterpret_cast<const float2*>(weight + 8 * half);
          weights[2 * half] = narrow_pair<true>(w.x, w.y);
          const float2 leading = widen_pair<true>(weights[2 * half]);
          weights[2 * half + 1] = narrow_pair<true>(w.x - leading.x, w.y - leading.y);
        }
      }
      const uint32_t keys = tile(slab, of_slab);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        uint32_t v[4];
        load_transposed(v, chunks(keys, first + i));
        warp_product<true>(sums[2 * i], weights, v[0], v[1]);
        warp_product<true>(sums[2 * i + 1], weights, v[2], v[3]);
      }
    });
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      *reinterpret_cast<float2*>(&s.column_sums[of_slab][g][16 * first + 8 * i + 2 * t]) = {sums[i][0] + sums[i][2],
                                                                                            sums[i][1] + sums[i][3]};
    }
    __syncthreads();
    for (int at = thread; at < rows * kDim; at += kSolveThreads) {
      const int row = at / kDim, d = at % kDim;
      float sum = 0;
      for (int i = 0; i < kSlabTiles; ++i) sum += s.column_sums[i][row][d];
      s.mean[row][d] = s.omega[row] > 0 ? sum / s.omega[row] : 0;
    }
    __syncthreads();
  }

  // Σ w (k - mean)(k - mean)ᵀ of this block's keys, its lower half in the cyclic order of ShortConfig, where the others
  // find it; and the exact mean. The sum of what the keys are multiplied by, as it was rounded, is eight more columns: it
  // tells how far the mean was off.
  __device__ void covariance(int row) {
    constexpr int kTeams = C::kTeams, kBlocks = C::kBlocks;
    const int own = warp % kBlocks, team = warp / kBlocks;
    const bool last_offset = own < kBlocks / 2;
    float sums[C::kOffsets][2][4]{}, totals[4]{};
    const float centre[2]{s.mean[row][16 * own + g], s.mean[row][16 * own + 8 + g]};
    slabs.each(kCovariance + row, [&](const unsigned char* slab, int from) {
#pragma unroll 1
      for (int of_slab = team; of_slab < kSlabTiles; of_slab += kTeams) {
        const float* const weight = s.weight + row * stride + from + of_slab * kWarpKeys + 2 * t;
        const float2 w[2]{*reinterpret_cast<const float2*>(weight), *reinterpret_cast<const float2*>(weight + 8)};
        const uint32_t keys = tile(slab, of_slab);
        uint32_t mine[4], left[kParts][4];
        load_transposed(mine, chunks(keys, own));
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // keys 0-7 and 8-15 of this warp's first eight channels, then of the others
          const float2 k = widen_pair<true>(mine[i]);
          float a = w[i % 2].x * (k.x - centre[i / 2]), b = w[i % 2].y * (k.y - centre[i / 2]);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const uint32_t word = narrow_pair<true>(a, b);
            left[part][i % 2 * 2 + i / 2] = word;
            const float2 rounded = widen_pair<true>(word);
            a -= rounded.x, b -= rounded.y;
          }
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) warp_product<true>(totals, left[part], 0x3f803f80u, 0x3f803f80u);
#pragma unroll
        for (int o = 0; o < C::kOffsets; ++o) {
          if (o == C::kOffsets - 1 && !last_offset) continue;
          uint32_t v[4];
          load_transposed(v, chunks(keys, (own + o) % kBlocks));
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            warp_product<true>(sums[o][0], left[part], v[0], v[1]);
            warp_product<true>(sums[o][1], left[part], v[2], v[3]);
          }
        }
      }
    });
    const auto for_each_four = [&](const auto& look_at) {
#pragma unroll
      for (int o = 0; o < C::kOffsets; ++o) {
        if (o == C::kOffsets - 1 && !last_offset) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          look_at(sums[o][half], ((o * kBlocks + own) * 2 + half) * 32 + lane,
                  (own + o) % kBlocks * 16 + 8 * half + 2 * t);
        }
      }
    };
    if constexpr (kTeams > 1) {
      static_assert(kTeams == 2);
      float(&others)[kDim] = s.own_x;  // nobody has solved yet
      if (team == 1) {
        for_each_four([&](const float(&v)[4], int at, int) { s.sums[at] = {v[0], v[1], v[2], v[3]}; });
        if (t == 0) others[16 * own + g] = totals[0], others[16 * own + 8 + g] = totals[2];
      }
      __syncthreads();
      if (team == 0) {
        for_each_four([&](float(&v)[4], int at, int) {
          const float4 other = s.sums[at];
          v[0] += other.x, v[1] += other.y, v[2] += other.z, v[3] += other.w;
        });
        totals[0] += others[16 * own + g], totals[2] += others[16 * own + 8 + g];
      }
    }
    if (team == 0 && t == 0 && s.omega[row] > 0) {
      s.mean[row][16 * own + g] = centre[0] + totals[0] / s.omega[row];
      s.mean[row][16 * own + 8 + g] = centre[1] + totals[2] / s.omega[row];
    }
    __syncthreads();
    if (team == 0) {
      for_each_four([&](const float(&v)[4], int at, int column) {
        const float2 mean = *reinterpret_cast<const float2*>(&s.mean[row][column]);
        s.sums[at] = {fmaf(-totals[0], mean.x, v[0]), fmaf(-totals[0], mean.y, v[1]), fmaf(-totals[2], mean.x, v[2]),
                      fmaf(-totals[2], mean.y, v[3])};
      });
    }
  }

  // The blocks' weights of a row, and its mean. By every block for itself.
  __device__ void merge_means(int row) {
    if (warp == 0) {
      const bool there = lane < blocks;
      const float max = there ? *of_block(&s.max[row], lane) : -INFINITY;
      const float omega = there ? *of_block(&s.omega[row], lane) : 0;
      const float top = warp_reduce(max, [](float a, float b) { return fmaxf(a, b); });
      const float factor = max > -INFINITY ? exp2_fast(max - top) : omega;  // 0, or NaN
      const float inverse = 1 / warp_sum(factor * omega);
      if (there) s.factor[row][lane] = factor * inverse, s.share[row][lane] = factor * omega * inverse;
    }
    __syncthreads();
    if (thread < kDim) {
      float mean = 0;
#pragma unroll 1
      for (int first = 0; first < blocks; first += 4) {
        float of[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) of[i] = *of_block(&s.mean[row][thread], first + i);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mean = fmaf(s.share[row][first + i], of[i], mean);
          s.from_mean[first + i][thread] = of[i];
        }
      }
      s.whole_mean[row][thread] = mean;
#pragma unroll 4
      for (int i = 0; i < blocks; ++i) s.from_mean[i][thread] -= mean;
    }
    __syncthreads();
  }
  // This block's share of a row's covariance, from all blocks' sums into the matrix of the block that solves the row.
  __device__ void merge_covariance(int row) {
    Square<kDim>& to = *cooperative_groups::this_cluster().map_shared_rank(&s.square, row);
    const int begin = C::kSumFours * rank / blocks, end = C::kSumFours * (rank + 1) / blocks;
#pragma unroll 1
    for (int at = begin + thread; at < end; at += kSolveThreads) {
      const int pair = at / 64, first = pair % C::kBlocks, second = (first + pair / C::kBlocks) % C::kBlocks;
      const int of_lane = at % 32, i = 16 * first + of_lane / 4, j = 16 * second + at / 32 % 2 * 8 + of_lane % 4 * 2;
      float4 sum{0, 0, 0, 0};
#pragma unroll 1
      for (int first_block = 0; first_block < blocks; first_block += 4) {
        float4 of[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) of[b] = *of_block(&s.sums[at], first_block + b);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int block = first_block + b;
          const float factor = s.factor[row][block], share = s.share[row][block];
          const float low = share * s.from_mean[block][i], high = share * s.from_mean[block][i + 8];
          const float2 column = *reinterpret_cast<const float2*>(&s.from_mean[block][j]);
          sum.x = fmaf(low, column.x, fmaf(factor, of[b].x, sum.x)),
          sum.y = fmaf(low, column.y, fmaf(factor, of[b].y, sum.y));
          sum.z = fmaf(high, column.x, fmaf(factor, of[b].z, sum.z)),
          sum.w = fmaf(high, column.y, fmaf(factor, of[b].w, sum.w));
        }
      }
      const auto put = [&](float x, int a, int b) {
        if (first != second || b <= a) to.at(a, b) = to.at(b, a) = x;
      };
      put(sum.x, i, j), put(sum.y, i, j + 1), put(sum.z, i + 8, j), put(sum.w, i + 8, j + 1);
    }
  }

  // x of a row, by the block whose matrix it is. Returns whether a pivot was all rounding.
  __device__ bool solve(int row, float ridge, float q) {
    Element own;
    if (thread < kDim) {
      if (!(ridge >= 0) || !(fabsf(q) <= 3e38f)) s.bad = 1;
      own = {ridge, ridge, q - s.whole_mean[row][thread], s.square.at(thread, thread)};
    }
    const bool safe = prepare_row(s.square, s.matrix, own, s.own_x);
    const bool eliminated = solve_matrix(s.square, s.matrix, s.gradients, safe && !p.eliminate, s.own_x);
    return eliminated && thread < 32 && smallest_pivot(s.matrix) <= kLeastPivot;
  }

  // e = (k - mean).x of every key and row, times its weight. Four threads a key; of two keys that lie in the same banks one
  // begins with the other half of the chunks. What is not finite makes e so, and the row with it, whatever its weight.
  __device__ void along_x() {
    constexpr int kOwn = C::kChunks / 4;
    const int key = thread / 4, quarter = thread % 4;
    slabs.each(kCovariance + rows, [&](const unsigned char* slab, int from) {
      float e[kShortRows]{};
#pragma unroll 1
      for (int i = 0; i < kOwn; ++i) {
        const int chunk = quarter + 4 * ((i + key) % kOwn);
        const uint4 words = *reinterpret_cast<const uint4*>(slab + raw_offset<C::kBlockBytes>(key, chunk));
        const float2 k[4]{widen_pair<true>(words.x), widen_pair<true>(words.y), widen_pair<true>(words.z),
                          widen_pair<true>(words.w)};
#pragma unroll
        for (int row = 0; row < kShortRows; ++row) {
          if (row >= rows) break;
          float sum = e[row], more = 0;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 a = k[2 * half], b = k[2 * half + 1];
            const float4 mean = *reinterpret_cast<const float4*>(&s.whole_mean[row][8 * chunk + 4 * half]);
            const float4 x = *reinterpret_cast<const float4*>(&s.x[row][8 * chunk + 4 * half]);
            sum = fmaf(a.x - mean.x, x.x, sum), more = fmaf(a.y - mean.y, x.y, more);
            sum = fmaf(b.x - mean.z, x.z, sum), more = fmaf(b.y - mean.w, x.w, more);
          }
          e[row] = sum + more;
        }
      }
#pragma unroll
      for (int row = 0; row < kShortRows; ++row) {
        if (row >= rows) break;
        const float whole = keys_sum(e[row]);
        const int at = row * stride + from + key;
        if (quarter == 0) s.e[at] = s.weight[at] * whole;
      }
    });
  }

  // Σ w v and Σ w e v of this block's keys, where the others find them. A thread has two columns, of every so many keys.
  __device__ void values() {
    __syncthreads();
    if (warp < rows) {
      float sum = 0;
#pragma unroll 2
      for (int key = lane; key < stride; key += 32) sum += s.e[warp * stride + key];
      sum = warp_sum(sum);
      if (lane == 0) s.omega_e[warp] = sum;
    }
    constexpr int kOwn = kSlabKeys / C::kKeyGroups;
    const int pair = thread % (kDim / 2), group = thread / (kDim / 2);
    float2 plain[kShortRows]{}, with_e[kShortRows]{};
    slabs.each(kCovariance + rows + 1, [&](const unsigned char* slab, int from) {
#pragma unroll 1
      for (int first = group * kOwn; first < (group + 1) * kOwn; first += 4) {
        float2 v[4];
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int place = raw_offset<C::kBlockBytes>(first + i, pair / 4) + pair % 4 * 4;
          const uint32_t word = *reinterpret_cast<const uint32_t*>(slab + place);
          v[i] = widen_pair<true>(word);
          largest = ::max(largest, ::max(word & 0x7fff, word >> 16 & 0x7fff));
        }
        if (from == 0 && first == group * kOwn) {
          largest = __reduce_max_sync(0xffffffffu, largest);
          if (lane == 0) atomicMax(&s.largest_value, largest);
        }
#pragma unroll
        for (int row = 0; row < kShortRows; ++row) {
          if (row >= rows) break;
          const float4 w = *reinterpret_cast<const float4*>(&s.weight[row * stride + from + first]);
          const float4 we = *reinterpret_cast<const float4*>(&s.e[row * stride + from + first]);
          const auto add = [](float2& sum, const float4& of, const float2(&v)[4]) {
            sum.x = fmaf(of.x, v[0].x, fmaf(of.y, v[1].x, fmaf(of.z, v[2].x, fmaf(of.w, v[3].x, sum.x))));
            sum.y = fmaf(of.x, v[0].y, fmaf(of.y, v[1].y, fmaf(of.z, v[2].y, fmaf(of.w, v[3].y, sum.y))));
          };
          add(plain[row], w, v), add(with_e[row], we, v);
        }
      }
    });
#pragma unroll
    for (int row = 0; row < kShortRows; ++row) {
      if (row >= rows) break;
      float* const to = &s.terms[group][row * 2 * kDim + 2 * pair];
      *reinterpret_cast<float2*>(to) = plain[row], *reinterpret_cast<float2*>(to + kDim) = with_e[row];
    }
    __syncthreads();
#pragma unroll 1
    for (int at = thread; at < rows * 2 * kDim; at += kSolveThreads) {
      float sum = 0;
#pragma unroll
      for (int of = 0; of < C::kKeyGroups; ++of) sum += s.terms[of][at];
      s.output[at] = sum;
    }
  }

  // The output of a row, by the block that has solved it.
  __device__ void output(int row, const RowRecord& record, bool singular) {
    float plain = 0, with_e = 0, omega_e = 0;
    bool invalid = false;
    unsigned largest_value = 0;
    if (thread < kDim) {
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        const float factor = s.factor[row][block];
        plain = fmaf(factor, *of_block(&s.output[row * 2 * kDim + thread], block), plain);
        with_e = fmaf(factor, *of_block(&s.output[row * 2 * kDim + kDim + thread], block), with_e);
        omega_e = fmaf(factor, *of_block(&s.omega_e[row], block), omega_e);
        invalid |= *of_block(&s.invalid, block) != 0;
        largest_value = ::max(largest_value, *of_block(&s.largest_value, block));
      }
    }
    float o = fmaf(-omega_e, plain, with_e) + plain;
    const bool there = thread < p.value_dim;
    const bool bad = there && !(fabsf(o) <= 3e38f);
    invalid = __syncthreads_or(invalid);
    const bool nan = __syncthreads_or(bad) || s.bad;
    if (invalid || nan) o = NAN;
    if (there) store(record, o);
    const bool outgrown = __syncthreads_or(there && fabsf(o) >= least_infinite(p.o.dtype));
    const float least = least_output(size_of_terms(s.matrix, s.own_x), widen_pair<true>(largest_value).x);
    const bool doubtful = !__syncthreads_or(there && fabsf(o) >= least) && __syncthreads_or(there && o != 0);
    if (thread == 0) {
      report_row(p, record,
                 invalid                            ? LLA_ROW_INVALID
                 : nan                              ? LLA_ROW_NAN
                 : singular || outgrown || doubtful ? LLA_ROW_BREAKDOWN
                                                    : LLA_ROW_OK);
    }
  }
  __device__ __forceinline__ void store(const RowRecord& record, float o) const {
    const int64_t at = row_offset(p.o, record.batch, record.position, record.head);
    store_as(p.o.data, p.o.dtype, at + thread * p.o.stride[3], o);
  }
  // A row without a solve.
  __device__ void only(const RowRecord& record, float o, int32_t status) const {
    if (thread < p.value_dim) store(record, o);
    if (thread == 0) report_row(p, record, status);
  }
};

template <int kDim>
__global__ void __launch_bounds__(kSolveThreads, 1) short_kernel(const __grid_constant__ Params p, int blocks) {
  auto& s = *reinterpret_cast<ShortShared<kDim>*>(dynamic_tiles);
  namespace cg = cooperative_groups;
  const int rank = cg::this_cluster().block_rank(), key_head = blockIdx.x / blocks, thread = threadIdx.x;
  const int heads = p.heads_q / p.group, batch = key_head / heads, kv_head = key_head % heads, rows = p.group;
  wait_for_last_kernel();
  let_next_kernel_begin();
  if (!caches_are_short(p)) return;
  const Sequence sequence = sequence_at(p, batch, 0);
  const Keys seen = keys_of(p, sequence, 0);
  const int tiles = (seen.end - seen.begin + kWarpKeys - 1) / kWarpKeys;
  const auto tile_begin = [&](int block) { return min(seen.begin + tiles * block / blocks * kWarpKeys, seen.end); };
  const int first_key = tile_begin(rank), keys = tile_begin(rank + 1) - first_key;
  Slabs<kDim> slabs{s, p, batch, kv_head, first_key, keys, ShortHead<kDim>::kCovariance + rows + 1};
  ShortHead<kDim> head{s, p, slabs, rows, rank, blocks, slabs.slabs * kSlabKeys};
  RowRecord record{};  // of the row that this block solves
  record.batch = batch, record.head = kv_head * rows + rank;
  const bool solves = rank < rows;
  if (sequence.invalid || tiles == 0) {
    if (solves) head.only(record, sequence.invalid ? NAN : 0, sequence.invalid ? LLA_ROW_INVALID : LLA_ROW_OK);
    return;
  }
  slabs.begin();
  float ridge = INFINITY, q = 0;  // of this thread's column
  if (solves && thread < p.dim) {
    const int64_t at_ridge = row_offset(p.ridge, batch, 0, record.head);
    ridge = static_cast<const float*>(p.ridge.data)[at_ridge + thread * p.ridge.stride[3]];
    q = load_as<float>(p.q.data, DType::bf16, row_offset(p.q, batch, 0, record.head) + thread * p.q.stride[3]);
  }
  for (int at = thread; at < kShortRows * kDim; at += kSolveThreads) {
    const int row = at / kDim, d = at % kDim;
    const int64_t from = row_offset(p.q, batch, 0, kv_head * rows + row) + d * p.q.stride[3];
    s.query[row][d] = row < rows && d < p.dim ? static_cast<const uint16_t*>(p.q.data)[from] : 0;
  }
  if (thread == 0) s.invalid = 0, s.bad = 0, s.largest_value = 0;
  __syncthreads();
  head.logits();
  head.means();
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    head.covariance(row);
    head.meet();
    head.merge_means(row);
    head.merge_covariance(row);
    head.meet();
  }
  const bool singular = solves && head.solve(rank, ridge, q);
  head.meet();
  for (int at = thread; at < rows * kDim; at += kSolveThreads) {
    s.x[at / kDim][at % kDim] = *head.of_block(&s.own_x[at % kDim], at / kDim);
  }
  __syncthreads();
  head.along_x();
  head.values();
  if (slabs.invalid) s.invalid = 1;
  head.meet();
  if (solves) head.output(rank, record, singular);
  head.meet();  // nobody leaves whose sums are read
}

}  // namespace lla::cuda::sm90::decode
