// Last pass of the forward: o = mean_v + (S V - sum(S) mean_v) / omega with S = w ((k - mean_k).x).
#include "cuda/portable/launch.cuh"

namespace lla::cuda::portable {
namespace {

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) output_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  unsigned char* const shared = dynamic_bytes;
  const Tile<T, kDim> own_q{reinterpret_cast<T*>(shared)};
  const Tile<T, kDim> own_x{reinterpret_cast<T*>(shared + C::kOwnBytes)};
  const Tile<T, kDim> tile{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)};  // keys, then values
  const Weights<C, T> weights{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes + C::kOtherBytes)};

  const core::Problem& p = a.problem;
  const QueryBlock block = query_block(a, blockIdx.x, C::kOwn);
  if (block.count <= 0) return;
  const T log2_factor = log2_scale<T>(p);
  const Source k = key_rows(a, block.number, block.sequence, block.head / p.group());
  const Source v = value_rows(a, block.sequence, block.head / p.group());

  Query query[C::kRows];
  int32_t kind[C::kRows];
  bool written[C::kRows];  // by this kernel; the direct solver writes the rows it solves
  T omega[C::kRows], max[C::kRows], mean[C::kRows], sum[C::kRows];
  bool working = false;
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    query[r] = owned_query<C>(p, block, r);
    const Query& q = query[r];
    kind[r] = q.exists ? a.rows.kind[q.row] : static_cast<int32_t>(kEmpty);
    const bool left_to_direct = is_regular(kind[r]) && (solved_directly(a, q) || (a.rescue && kind[r] == kUnfinished));
    written[r] = q.exists && !left_to_direct && kind[r] != kElsewhere;
    const bool regular = written[r] && is_regular(kind[r]);
    omega[r] = regular ? a.rows.omega[q.row] : T(1);
    max[r] = regular ? a.rows.max[q.row] : T(0);
    mean[r] = sum[r] = 0;
    if (regular) {
      working = true;
      for_columns<C>(p.dim, [&](int, int, int column) {
        mean[r] += a.rows.x[q.row * p.dim + column] * a.rows.mean_k[q.row * p.dim + column];
      });
    }
    mean[r] = row_sum(mean[r]);
  }
  Accumulator<C, T> acc;
  acc.zero();
  if (__syncthreads_or(working)) {
    load_tile<C::kOwn, C>(own_q, query_rows<T>(a.q, block, p.dim), 0, block.count, nullptr, Always{});
    load_tile<C::kOwn, C>(own_x, array_rows<T>(a.rows.x, block.row, p.dim), 0, block.count, nullptr, Always{});
    for (int64_t first = block.key_begin; first < block.key_end; first += C::kOther) {
      __syncthreads();
      load_tile<C::kOther, C>(tile, k, first, block.key_end - first, nullptr, Always{});
      __syncthreads();
      T s[2][C::kRows][C::kRows], w[C::kRows][C::kRows];
      product<C, 2>({own_q, own_x}, tile, pieces<T>(p.dim), s);
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < C::kRows; ++c) {
          const bool visible = query[r].sees(first + lane() + kLanes * c);
          w[r][c] = visible ? weight_of(s[0][r][c], log2_factor, max[r]) * (s[1][r][c] - mean[r]) : T(0);
          sum[r] += w[r][c];
        }
      }
      weights.put(w);
      __syncthreads();
      load_tile<C::kOther, C>(tile, v, first, block.key_end - first, nullptr, Always{});
      __syncthreads();
      accumulate(acc, weights, tile, pieces<T>(p.value_dim));
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const T total = row_sum(sum[r]);
    if (!written[r]) continue;
    const int64_t offset = row_offset(a.o, block.sequence, block.head, query[r].index);
    for_columns<C>(p.value_dim, [&](int c, int e, int column) {
      const T mean_v = a.rows.mean_v[query[r].row * p.value_dim + column];
      // The mean alone is right for the rest: zero without keys, the value of a single key, NaN for a bad row.
      const T o = is_regular(kind[r]) ? mean_v + (acc.at[r][c].at[e] - total * mean_v) / omega[r] : mean_v;
      store_as(a.o.data, a.o.dtype, offset + column * a.o.stride[3], o);
      report_overflow(a, query[r].row, kind[r], o);
    });
  }
}

}  // namespace

template <class T>
Status launch_output(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<2, 1>(a, a.problem.seqlen_q, a.problem.heads_q, stream, "launching the output kernel",
                            [](auto bucket) { return output_kernel<T, bucket.value>; });
}

template Status launch_output<float>(const Arguments<float>&, cudaStream_t);
template Status launch_output<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
