// Gradients that belong to queries. With a = 1 + (k - mean_k).x, b = G.v - G.mean_v - (k - mean_k).y and c = sum of p a
// b: dq = scale (sum of p a b k - c mean_k) + y, and the ridge's is -x y. Leaves the row's constants for the pass over
// queries: sums of p a = 1 and of p b = 0 hold exactly, but not after rounding, and what they are off by here is taken
// out of a and b there. In a peaked row the one heavy key's a is 1 less what the others have, while x.k of long keys
// and a long x has lost those digits.
#include "cuda/portable/launch.cuh"

namespace lla::cuda::portable {
namespace {

// -x y, summed over what the ridge does not vary over within the row; NaN for a bad row.
template <class C, class T>
__device__ void write_ridge_gradient(const Arguments<T>& a, const QueryBlock& block, const Query& q, int32_t kind,
                                     PowerOfTwo<T> undo) {
  const core::Problem& p = a.problem;
  T sum = 0;
  const bool per_dimension = p.ridge == core::RidgeShape::dimension;
  if (q.exists) {
    const int64_t offset = row_offset(a.dridge, block.sequence, block.head, q.index);
    for_columns<C>(p.dim, [&](int, int, int column) {
      const int64_t at = q.row * p.dim + column;
      const T gradient = kind == kBad ? nan_value<T>() : is_regular(kind) ? -a.rows.x[at] * a.rows.y[at] : T(0);
      sum += gradient;
      if (per_dimension) {
        store_as(a.dridge.data, a.dridge.dtype, offset + column * a.dridge.stride[3], undo(gradient));
      }
    });
  }
  sum = row_sum(sum);
  if (!q.exists || lane() != 0 || per_dimension) return;
  if (p.ridge == core::RidgeShape::token) {
    store_as(a.dridge.data, a.dridge.dtype, row_offset(a.dridge, block.sequence, block.head, q.index), undo(sum));
  } else {
    a.rows.dridge[q.row] = undo.wide(sum);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) dq_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  unsigned char* const shared = dynamic_bytes;
  const Tile<T, kDim> own_q{reinterpret_cast<T*>(shared)};
  const Tile<T, kDim> own_x{reinterpret_cast<T*>(shared + C::kOwnBytes)};
  const Tile<T, kDim> own_y{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)};
  const Tile<T, kDim> own_g{reinterpret_cast<T*>(shared + 3 * C::kOwnBytes)};
  const Tile<T, kDim> tile{reinterpret_cast<T*>(shared + 4 * C::kOwnBytes)};  // values, then keys
  const Weights<C, T> weights{reinterpret_cast<T*>(shared + 4 * C::kOwnBytes + C::kOtherBytes)};

  const core::Problem& p = a.problem;
  const QueryBlock block = query_block(a, blockIdx.x, C::kOwn);
  if (block.count <= 0) return;
  const bool solved = !p.given_x();
  const T log2_factor = log2_scale<T>(p);
  const Source k = key_rows(a, block.number, block.sequence, block.head / p.group());
  const Source v = value_rows(a, block.sequence, block.head / p.group());
  load_tile<C::kOwn, C>(own_q, query_rows<T>(a.q, block, p.dim), 0, block.count, nullptr, Always{});
  load_tile<C::kOwn, C>(own_g, query_rows<T>(a.grad_o, block, p.value_dim), 0, block.count, nullptr, Always{});
  load_tile<C::kOwn, C>(own_x, array_rows<T>(a.rows.x, block.row, p.dim), 0, block.count, nullptr, Always{});
  // Without a solve y is zero; loading nothing writes just that.
  load_tile<C::kOwn, C>(own_y, array_rows<T>(a.rows.y, block.row, p.dim), 0, solved ? block.count : 0, nullptr,
                        Always{});
  __syncthreads();

  // A bad row has no exponent, and what it computes is not used.
  const auto exponent = [&](int own) {
    const int32_t found = own < block.count ? a.rows.exponent[block.row + own] : kNoExponent;
    return found == kNoExponent ? 0 : found;
  };
  scale_tile<C::kOwn, C>(own_g, pieces<T>(p.value_dim), [&](int row) { return -exponent(row); });
  __syncthreads();

  Query query[C::kRows];
  int32_t kind[C::kRows];
  T omega[C::kRows], max[C::kRows], mean_e[C::kRows], tau[C::kRows], mean_b[C::kRows], sum[C::kRows], sum_a[C::kRows],
      sum_b[C::kRows];
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    query[r] = owned_query<C>(p, block, r);
    const Query& q = query[r];
    kind[r] = q.exists ? a.rows.kind[q.row] : static_cast<int32_t>(kEmpty);
    mean_e[r] = tau[r] = mean_b[r] = sum[r] = sum_a[r] = sum_b[r] = 0;
    omega[r] = 1;
    max[r] = 0;
    const int own = team() + C::kRowTeams * r;
    if (is_regular(kind[r])) {
      omega[r] = a.rows.omega[q.row];
      max[r] = a.rows.max[q.row];
      tau[r] = a.rows.tau[q.row];
      for_columns<C>(p.dim, [&](int c, int e, int column) {
        const T mean_k = a.rows.mean_k[q.row * p.dim + column];
        mean_e[r] += own_x.vec(own, lane() + kLanes * c).at[e] * mean_k;
        mean_b[r] -= own_y.vec(own, lane() + kLanes * c).at[e] * mean_k;
      });
    }
    mean_e[r] = row_sum(mean_e[r]);
    mean_b[r] = row_sum(mean_b[r]) + (is_regular(kind[r]) ? a.rows.tau_low[q.row] : T(0));
  }
  Accumulator<C, T> acc;
  acc.zero();
  for (int64_t first = block.key_begin; first < block.key_end; first += C::kOther) {
    T s[3][C::kRows][C::kRows], gamma[1][C::kRows][C::kRows], u[C::kRows][C::kRows];
    __syncthreads();
    load_tile<C::kOther, C>(tile, v, first, block.key_end - first, nullptr, Always{});
    __syncthreads();
    product<C, 1>({own_g}, tile, pieces<T>(p.value_dim), gamma);
    __syncthreads();
    load_tile<C::kOther, C>(tile, k, first, block.key_end - first, nullptr, Always{});
    __syncthreads();
    product<C, 3>({own_q, own_x, own_y}, tile, pieces<T>(p.dim), s);
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kRows; ++c) {
        const bool visible = query[r].sees(first + lane() + kLanes * c);
        const T w = visible ? weight_of(s[0][r][c], log2_factor, max[r]) : T(0);
        const T one_plus_e = 1 + (s[1][r][c] - mean_e[r]);
        const T b = (gamma[0][r][c] - tau[r]) - (s[2][r][c] + mean_b[r]);
        u[r][c] = w * one_plus_e * b;
        sum[r] += u[r][c];
        sum_a[r] += w * one_plus_e;
        sum_b[r] += w * b;
      }
    }
    weights.put(u);
    accumulate(acc, weights, tile, pieces<T>(p.dim));
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const Query& q = query[r];
    const T total = row_sum(sum[r]), total_a = row_sum(sum_a[r]), total_b = row_sum(sum_b[r]);
    const PowerOfTwo<T> undo(exponent(team() + C::kRowTeams * r));
    if (a.dridge) write_ridge_gradient<C>(a, block, q, kind[r], undo);
    if (!q.exists) continue;
    if (lane() == 0) {
      const bool regular = is_regular(kind[r]);
      const T excess_b = regular ? total_b / omega[r] : T(0);
      a.rows.tau_low[q.row] = regular ? total_a / omega[r] - 1 : T(0);  // from here on: what a is off by
      a.rows.mean_e[q.row] = mean_e[r];
      a.rows.mean_b[q.row] = mean_b[r];
      if (regular) a.rows.tau[q.row] = tau[r] + excess_b;
      a.rows.c[q.row] = (total - excess_b * total_a) / omega[r];
    }
    if (!a.dq) continue;
    const int64_t offset = row_offset(a.dq, block.sequence, block.head, q.index);
    for_columns<C>(p.dim, [&](int c, int e, int column) {
      const int64_t at = q.row * p.dim + column;
      T gradient = kind[r] == kBad ? nan_value<T>() : T(0);
      if (is_regular(kind[r])) {
        gradient = static_cast<T>(p.scale) * ((acc.at[r][c].at[e] - total * a.rows.mean_k[at]) / omega[r]);
        if (solved) gradient += a.rows.y[at];
      }
      store_as(a.dq.data, a.dq.dtype, offset + column * a.dq.stride[3], undo(gradient));
    });
  }
}

}  // namespace

template <class T>
Status launch_dq(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<4, 1>(a, a.problem.seqlen_q, a.problem.heads_q, stream, "launching the dq kernel",
                            [](auto bucket) { return dq_kernel<T, bucket.value>; });
}

template Status launch_dq<float>(const Arguments<float>&, cudaStream_t);
template Status launch_dq<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
