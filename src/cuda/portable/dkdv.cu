// Gradients that belong to keys: the block owns keys and walks over the queries that see them, all heads of their
// group, in one fixed order. dv = sum of p a G, dk = sum of scale p (a b - c) q + p b x - p a y (a, b, c as in dq.cu).
#include "cuda/common/launch.cuh"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {
namespace {

// What a tile of queries needs besides its vectors, in shared memory.
template <class T>
struct QueryConstants {
  T* max;
  T* omega;   // divided by the row's share of the block's power of two: see there
  T* excess;  // of the sum of p a over 1; in double it has no place, and no need
  T* mean_e;
  T* tau;
  T* mean_b;
  T* c;
  int32_t* kind;
  int32_t* exponent;
  int64_t* begin;
  int64_t* end;

  template <int kOther>
  __device__ static QueryConstants at(unsigned char* shared) {
    QueryConstants q;
    q.begin = reinterpret_cast<int64_t*>(shared);
    q.end = q.begin + kOther;
    q.max = reinterpret_cast<T*>(q.end + kOther);
    q.omega = q.max + kOther;
    q.mean_e = q.omega + kOther;
    q.tau = q.mean_e + kOther;
    q.mean_b = q.tau + kOther;
    q.c = q.mean_b + kOther;
    q.kind = reinterpret_cast<int32_t*>(q.c + kOther);
    q.exponent = q.kind + kOther;
    q.excess = sizeof(T) == sizeof(float) ? reinterpret_cast<T*>(q.exponent + kOther) : nullptr;
    return q;
  }
};

// The largest of the threads' numbers; `scratch` holds one a warp.
template <class C>
__device__ int32_t block_max(int32_t value, int32_t* scratch) {
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < C::kThreads / 32; ++warp) value = max(value, scratch[warp]);
  return value;
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) dkdv_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  static_assert(C::kOther *
                    (2 * sizeof(int64_t) + (sizeof(T) == sizeof(float) ? 7 : 6) * sizeof(T) + 2 * sizeof(int32_t)) <=
                C::kRowDataBytes);
  extern __shared__ __align__(16) unsigned char shared[];
  const Tile<T, kDim> own_k{reinterpret_cast<T*>(shared)};
  const Tile<T, kDim> own_v{reinterpret_cast<T*>(shared + C::kOwnBytes)};
  const Tile<T, kDim> tile{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)};  // q, x, y, G in turn
  const Weights<C, T> weights{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes + C::kOtherBytes)};
  const QueryConstants<T> constants =
      QueryConstants<T>::template at<C::kOther>(reinterpret_cast<unsigned char*>(weights.data) + C::kWeightBytes);

  const core::Problem& p = a.problem;
  const int64_t heads = p.heads_kv * p.batch;
  const int64_t head_kv = blockIdx.x % heads % p.heads_kv;
  const core::Sequence s = core::sequence(p, a.cu_seqlens_q, a.cu_seqlens_k, blockIdx.x % heads / p.heads_kv);
  const int64_t first_key = blockIdx.x / heads * C::kOwn;  // the first keys are seen by most queries of a causal mask
  if (first_key >= s.length_k) return;
  const int64_t keys = s.length_k - first_key < C::kOwn ? s.length_k - first_key : C::kOwn;
  const bool solved = !p.given_x();
  const T log2_factor = log2_scale<T>(p);
  const int columns = pieces<T>(p.dim), value_columns = pieces<T>(p.value_dim);
  load_tile<C::kOwn, C>(own_k, key_rows<T>(a, a.k, s, head_kv, p.dim), first_key, keys, nullptr, Always{});
  load_tile<C::kOwn, C>(own_v, key_rows<T>(a, a.v, s, head_kv, p.value_dim), first_key, keys, nullptr, Always{});

  // Queries that see any of these keys: begin and end of what a query sees grow with it.
  const int64_t shift = s.length_k - s.length_q;
  int64_t query_begin = p.mask.right < 0 ? 0 : first_key - shift - p.mask.right;
  int64_t query_end = p.mask.left < 0 ? s.length_q : first_key + keys - shift + p.mask.left;
  query_begin = query_begin < 0 ? 0 : query_begin;
  query_end = query_end > s.length_q ? s.length_q : query_end;

  // Rows come with gradients divided by powers of two of their own. Their sum is one of numbers divided by the largest
  // of these, which keeps it in range; a row's weights, which everything it adds is multiplied by once, bring the rest.
  int32_t block_exponent = kNoExponent;
  for (int64_t head = head_kv * p.group(); head < (head_kv + 1) * p.group(); ++head) {
    for (int64_t i = query_begin + threadIdx.x; i < query_end; i += C::kThreads) {
      block_exponent = max(block_exponent, a.rows.exponent[core::row_index(p, s, head, i)]);
    }
  }
  block_exponent = block_max<C>(block_exponent, reinterpret_cast<int32_t*>(weights.data));
  if (block_exponent == kNoExponent) block_exponent = 0;

  Accumulator<C, T> dk, dv;
  dk.zero();
  dv.zero();
  bool bad[C::kRows] = {};
  for (int64_t head = head_kv * p.group(); head < (head_kv + 1) * p.group(); ++head) {
    for (int64_t first = query_begin; first < query_end; first += C::kOther) {
      const int64_t count = query_end - first;
      const int64_t row = core::row_index(p, s, head, first);
      const auto load_queries = [&](const core::Operand& t, int64_t width) {
        load_tile<C::kOther, C>(tile, tensor_rows<T>(t, s.batch, s.start_q, head, width), first, count, nullptr,
                                Always{});
      };
      // Rows that were not solved have no x and y worth reading.
      const auto load_rows = [&](const T* array) {
        load_tile<C::kOther, C>(tile, array_rows<T>(array, row, p.dim), 0, count, nullptr,
                                [&](int i) { return is_regular(constants.kind[i]); });
      };
      __syncthreads();
      for (int i = threadIdx.x; i < C::kOther; i += C::kThreads) {
        const bool exists = i < count;
        constants.kind[i] = exists ? a.rows.kind[row + i] : static_cast<int32_t>(kEmpty);
        const bool counts = exists && (is_regular(constants.kind[i]) || constants.kind[i] == kSingle);
        constants.max[i] = counts ? a.rows.max[row + i] : T(0);
        constants.exponent[i] = counts ? a.rows.exponent[row + i] : kNoExponent;
        constants.omega[i] =
            counts ? PowerOfTwo<T>(block_exponent - constants.exponent[i])(a.rows.omega[row + i]) : T(1);
        if (constants.excess != nullptr)
          constants.excess[i] = counts && is_regular(constants.kind[i]) ? a.rows.tau_low[row + i] : T(0);
        constants.mean_e[i] = counts ? a.rows.mean_e[row + i] : T(0);
        constants.tau[i] = counts ? a.rows.tau[row + i] : T(0);
        constants.mean_b[i] = counts ? a.rows.mean_b[row + i] : T(0);
        constants.c[i] = counts ? a.rows.c[row + i] : T(0);
        constants.begin[i] = exists ? p.mask.begin(first + i, s.length_q, s.length_k) : 0;
        constants.end[i] = exists ? p.mask.end(first + i, s.length_q, s.length_k) : 0;
      }
      load_queries(a.q, p.dim);
      __syncthreads();
      T logit[1][C::kRows][C::kRows], e[1][C::kRows][C::kRows], f[1][C::kRows][C::kRows] = {},
                                                                gamma[1][C::kRows][C::kRows];
      product<C, 1>({own_k}, tile, columns, logit);
      __syncthreads();
      load_rows(a.rows.x);
      __syncthreads();
      product<C, 1>({own_k}, tile, columns, e);
      if (solved) {
        __syncthreads();
        load_rows(a.rows.y);
        __syncthreads();
        product<C, 1>({own_k}, tile, columns, f);
      }
      __syncthreads();
      load_queries(a.grad_o, p.value_dim);
      scale_tile<C::kOther, C>(tile, value_columns, [&](int i) {
        return constants.exponent[i] == kNoExponent ? 0 : -constants.exponent[i];
      });
      __syncthreads();
      product<C, 1>({own_v}, tile, value_columns, gamma);

      T pa[C::kRows][C::kRows], pb[C::kRows][C::kRows], ds[C::kRows][C::kRows];
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
        const int64_t key = first_key + team() + C::kRowTeams * r;
#pragma unroll
        for (int c = 0; c < C::kRows; ++c) {
          const int i = lane() + kLanes * c;
          const bool visible = key >= constants.begin[i] && key < constants.end[i];
          const int32_t kind = constants.kind[i];
          bad[r] |= visible && kind == kBad;
          const T excess = constants.excess != nullptr ? constants.excess[i] : T(0);
          const bool counts = visible && (is_regular(kind) || kind == kSingle);
          const T weight =
              counts ? exp2_of(logit[0][r][c] * log2_factor - constants.max[i]) / constants.omega[i] : T(0);
          const T one_plus_e = 1 - excess + (e[0][r][c] - constants.mean_e[i]);
          // A single key's value is its mean: b vanishes, and only dv is left.
          const T b = kind == kSingle ? T(0) : (gamma[0][r][c] - constants.tau[i]) - (f[0][r][c] + constants.mean_b[i]);
          pa[r][c] = weight * one_plus_e;
          pb[r][c] = weight * b;
          ds[r][c] = kind == kSingle ? T(0) : static_cast<T>(p.scale) * weight * (one_plus_e * b - constants.c[i]);
        }
      }
      weights.put(pa);
      accumulate(dv, weights, tile, value_columns);
      if (solved) {
        __syncthreads();
        load_rows(a.rows.y);
#pragma unroll
        for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
          for (int c = 0; c < C::kRows; ++c) pa[r][c] = -pa[r][c];
        }
        weights.put(pa);
        __syncthreads();
        accumulate(dk, weights, tile, columns);
      }
      __syncthreads();
      load_rows(a.rows.x);
      weights.put(pb);
      __syncthreads();
      accumulate(dk, weights, tile, columns);
      __syncthreads();
      load_queries(a.q, p.dim);
      weights.put(ds);
      __syncthreads();
      accumulate(dk, weights, tile, columns);
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const bool any_bad = row_any(bad[r]);
    const int own = team() + C::kRowTeams * r;
    if (own >= keys) continue;
    const PowerOfTwo<T> undo(block_exponent);
    const auto write = [&](const core::Operand& t, int64_t width, const Accumulator<C, T>& sum) {
      if (!t) return;
      const int64_t offset =
          s.batch * t.stride[0] + (s.start_k + first_key + own) * t.stride[1] + head_kv * t.stride[2];
      for_columns<C>(width, [&](int c, int i, int column) {
        store_as(t.data, t.dtype, offset + column * t.stride[3], any_bad ? nan_value<T>() : undo(sum.at[r][c].at[i]));
      });
    };
    write(a.dk, p.dim, dk);
    write(a.dv, p.value_dim, dv);
  }
}

}  // namespace

template <class T>
Status launch_dkdv(const Arguments<T>& a, cudaStream_t stream) {
  const core::Problem& p = a.problem;
  return with_bucket(dim_bucket(p.dim, p.value_dim), [&](auto bucket) {
    using C = Config<T, bucket.value>;
    static_assert(C::shared_bytes(2, 1) <= kSharedMemoryLimit);
    return launch(dkdv_kernel<T, bucket.value>, tile_blocks(p.seqlen_k, C::kOwn, p.heads_kv, p.batch), C::kThreads,
                  C::shared_bytes(2, 1), stream, "launching the dk and dv kernel", a);
  });
}

template Status launch_dkdv<float>(const Arguments<float>&, cudaStream_t);
template Status launch_dkdv<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
