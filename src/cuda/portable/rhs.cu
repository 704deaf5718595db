// First pass of the backward after the statistics: t = sum of p (G.v - G.mean_v) k, the right-hand side of the solve
// for y, or, with x given, already its gradient.
//
// Where one key has nearly all the weight, its G.v - tau is a difference of equal numbers and tau's own rounding would
// be all that is left of it. The weighted sum of the differences as computed says by how much tau misses; the later
// passes subtract that too, so that the differences sum to zero as they must.
#include "cuda/portable/launch.cuh"

namespace lla::cuda::portable {
namespace {

// Of the row's largest gradient, plus that of the largest of its mean value: their products are of size 1 then.
template <class C, class T, int kDim>
__device__ int32_t gradient_exponent(const Arguments<T>& a, const Query& q, int32_t kind, Tile<T, kDim> gradients,
                                     int own) {
  const core::Problem& p = a.problem;
  T gradient = 0, value = 0;
  if (kind == kRegular || kind == kSingle) {
    for_columns<C>(p.value_dim, [&](int c, int e, int column) {
      gradient = fmax(gradient, fabs(gradients.vec(own, lane() + kLanes * c).at[e]));
      value = fmax(value, fabs(a.rows.mean_v[q.row * p.value_dim + column]));
    });
  }
  const int32_t of_gradient = exponent_of(row_max(gradient)), of_value = exponent_of(row_max(value));
  return of_gradient == kNoExponent ? kNoExponent : of_gradient + (of_value == kNoExponent ? 0 : of_value);
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) rhs_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  unsigned char* const shared = dynamic_bytes;
  const Tile<T, kDim> own_q{reinterpret_cast<T*>(shared)};
  const Tile<T, kDim> own_g{reinterpret_cast<T*>(shared + C::kOwnBytes)};
  const Tile<T, kDim> tile{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)};  // values, then keys
  const Weights<C, T> weights{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes + C::kOtherBytes)};
  int32_t* bad_gradient = reinterpret_cast<int32_t*>(reinterpret_cast<unsigned char*>(weights.data) + C::kWeightBytes);

  const core::Problem& p = a.problem;
  const QueryBlock block = query_block(a, blockIdx.x, C::kOwn);
  if (block.count <= 0) return;
  const T log2_factor = log2_scale<T>(p);
  const Source k = key_rows(a, block.number, block.sequence, block.head / p.group());
  const Source v = value_rows(a, block.sequence, block.head / p.group());
  for (int i = threadIdx.x; i < C::kOwn; i += C::kThreads) bad_gradient[i] = 0;
  __syncthreads();
  load_tile<C::kOwn, C>(own_q, query_rows<T>(a.q, block, p.dim), 0, block.count, nullptr, Always{});
  load_tile<C::kOwn, C>(own_g, query_rows<T>(a.grad_o, block, p.value_dim), 0, block.count, bad_gradient, Always{});
  __syncthreads();

  Query query[C::kRows];
  int32_t kind[C::kRows];
  T omega[C::kRows], max[C::kRows], tau[C::kRows], sum[C::kRows], squares[C::kRows];
  int32_t exponent[C::kRows];
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    query[r] = owned_query<C>(p, block, r);
    const Query& q = query[r];
    kind[r] = q.exists ? a.rows.kind[q.row] : static_cast<int32_t>(kEmpty);
    exponent[r] = gradient_exponent<C>(a, q, kind[r], own_g, team() + C::kRowTeams * r);
  }
  scale_tile<C::kOwn, C>(own_g, pieces<T>(p.value_dim), [&](int row) {
    const int32_t own = exponent[row / C::kRowTeams];
    return own == kNoExponent ? 0 : -own;
  });
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const Query& q = query[r];
    bool bad = bad_gradient[team() + C::kRowTeams * r] != 0;
    tau[r] = sum[r] = squares[r] = 0;
    omega[r] = 1;
    max[r] = 0;
    if (kind[r] == kRegular) {
      omega[r] = a.rows.omega[q.row];
      max[r] = a.rows.max[q.row];
      for_columns<C>(p.dim, [&](int, int, int column) { bad |= !isfinite(a.rows.x[q.row * p.dim + column]); });
      for_columns<C>(p.value_dim, [&](int c, int e, int column) {
        tau[r] += own_g.vec(team() + C::kRowTeams * r, lane() + kLanes * c).at[e] *
                  a.rows.mean_v[q.row * p.value_dim + column];
      });
    }
    tau[r] = row_sum(tau[r]);
    if (row_any(bad) && kind[r] != kEmpty) kind[r] = kBad;
  }
  Accumulator<C, T> acc;
  acc.zero();
  for (int64_t first = block.key_begin; first < block.key_end; first += C::kOther) {
    T s[1][C::kRows][C::kRows], gamma[1][C::kRows][C::kRows], u[C::kRows][C::kRows];
    __syncthreads();
    load_tile<C::kOther, C>(tile, v, first, block.key_end - first, nullptr, Always{});
    __syncthreads();
    product<C, 1>({own_g}, tile, pieces<T>(p.value_dim), gamma);
    __syncthreads();
    load_tile<C::kOther, C>(tile, k, first, block.key_end - first, nullptr, Always{});
    __syncthreads();
    product<C, 1>({own_q}, tile, pieces<T>(p.dim), s);
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int c = 0; c < C::kRows; ++c) {
        const bool visible = query[r].sees(first + lane() + kLanes * c);
        u[r][c] = visible ? weight_of(s[0][r][c], log2_factor, max[r]) * (gamma[0][r][c] - tau[r]) : T(0);
        sum[r] += u[r][c];
        squares[r] += u[r][c] * (gamma[0][r][c] - tau[r]);
      }
    }
    weights.put(u);
    accumulate(acc, weights, tile, pieces<T>(p.dim));
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const T total = row_sum(sum[r]), spread = row_sum(squares[r]);
    const Query& q = query[r];
    if (!q.exists) continue;
    for_columns<C>(p.dim, [&](int c, int e, int column) {
      const int64_t at = q.row * p.dim + column;
      const T t = kind[r] == kRegular ? (acc.at[r][c].at[e] - total * a.rows.mean_k[at]) / omega[r] : T(0);
      if (p.given_x()) {
        if (!a.dx) return;
        const int64_t offset = row_offset(a.dx, block.sequence, block.head, q.index) + column * a.dx.stride[3];
        store_as(a.dx.data, a.dx.dtype, offset, kind[r] == kBad ? nan_value<T>() : PowerOfTwo<T>(exponent[r])(t));
      } else {
        a.rows.residual[at] = t;
        a.rows.y[at] = 0;
      }
    });
    if (lane() != 0) continue;
    a.rows.exponent[q.row] = exponent[r];
    a.rows.tau[q.row] = kind[r] == kRegular ? tau[r] : T(0);
    a.rows.tau_low[q.row] = kind[r] == kRegular ? total / omega[r] : T(0);
    // The solve's stop rule reads it here; c itself comes after the solve.
    a.rows.c[q.row] = kind[r] == kRegular ? spread / omega[r] : T(0);
    if (kind[r] == kBad) {
      a.rows.kind[q.row] = kBad;
      if (a.info.status) a.info.status[q.row] = LLA_ROW_NAN;
    }
  }
}

}  // namespace

template <class T>
Status launch_rhs(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<2, 1>(a, a.problem.seqlen_q, a.problem.heads_q, stream, "launching the right-hand-side kernel",
                            [](auto bucket) { return rhs_kernel<T, bucket.value>; });
}

template Status launch_rhs<float>(const Arguments<float>&, cudaStream_t);
template Status launch_rhs<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
