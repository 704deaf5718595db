// Gradients that belong to keys: the block owns keys and walks over the queries that see them, all heads of their
// group, in one fixed order. dv = sum of p a G, dk = sum of scale p (a b - c) q + p b x - p a y (a, b, c as in dq.cu).
#include "cuda/portable/launch.cuh"

namespace lla::cuda::portable {
namespace {

// What a tile of queries needs besides its vectors, in shared memory.
template <class T>
struct QueryConstants {
  T* max;
  T* omega;   // divided by the row's share of the block's power of two: see there
  T* excess;  // of the sum of p a over 1
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
    q.excess = q.c + kOther;
    q.kind = reinterpret_cast<int32_t*>(q.excess + kOther);
    q.exponent = q.kind + kOther;
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

// What a block works on: its keys, and the queries that see any of them.
struct KeyBlock {
  int64_t number;  // of the sequence
  core::Sequence sequence;
  int64_t kv_head, first_key, keys;
  int64_t query_begin, query_end;

  template <class T>
  __device__ __forceinline__ KeyBlock(const Arguments<T>& a, int own) {
    const core::Problem& p = a.problem;
    const int64_t heads = p.heads_kv * p.batch;
    kv_head = blockIdx.x % heads % p.heads_kv;
    number = blockIdx.x % heads / p.heads_kv;
    sequence = core::sequence(p, a.cu_seqlens_q, a.cu_seqlens_k, number);
    first_key = blockIdx.x / heads * own;  // the first keys are seen by most queries of a causal mask
    keys = sequence.length_k - first_key < own ? sequence.length_k - first_key : own;
    // Begin and end of what a query sees grow with it.
    const int64_t shift = sequence.length_k - sequence.length_q;
    query_begin = p.mask.right < 0 ? 0 : first_key - shift - p.mask.right;
    query_end = p.mask.left < 0 ? sequence.length_q : first_key + keys - shift + p.mask.left;
    query_begin = query_begin < 0 ? 0 : query_begin;
    query_end = query_end > sequence.length_q ? sequence.length_q : query_end;
  }
};

// A block's memory and the stages of its walk over tiles of queries.
template <class T, int kDim>
struct KeyGradients {
  using C = Config<T, kDim>;
  using Products = T[C::kRows][C::kRows];  // of owned keys and a tile's queries
  static_assert(C::kOther * (2 * sizeof(int64_t) + 7 * sizeof(T) + 2 * sizeof(int32_t)) <= C::kRowDataBytes);

  const Arguments<T>& a;
  const core::Problem& p = a.problem;
  const KeyBlock& block;
  const Tile<T, kDim> own_k, own_v;
  const Tile<T, kDim> tile;  // q, x, y, G in turn
  const Weights<C, T> weights;
  const QueryConstants<T> constants;

  __device__ __forceinline__ KeyGradients(const Arguments<T>& arguments, const KeyBlock& of, unsigned char* shared)
      : a(arguments),
        block(of),
        own_k{reinterpret_cast<T*>(shared)},
        own_v{reinterpret_cast<T*>(shared + C::kOwnBytes)},
        tile{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)},
        weights{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes + C::kOtherBytes)},
        constants(QueryConstants<T>::template at<C::kOther>(reinterpret_cast<unsigned char*>(weights.data) +
                                                            C::kWeightBytes)) {}

  __device__ __forceinline__ void load_keys() const {
    const Source k = key_rows(a, block.number, block.sequence, block.kv_head);
    const Source v = value_rows(a, block.sequence, block.kv_head);
    load_tile<C::kOwn, C>(own_k, k, block.first_key, block.keys, nullptr, Always{});
    load_tile<C::kOwn, C>(own_v, v, block.first_key, block.keys, nullptr, Always{});
  }

  // Rows come with gradients divided by powers of two of their own. Their sum is one of numbers divided by the largest
  // of these, which keeps it in range; a row's weights, which everything it adds is multiplied by once, bring the rest.
  __device__ __forceinline__ int32_t largest_exponent() const {
    int32_t largest = kNoExponent;
    for (int64_t head = block.kv_head * p.group(); head < (block.kv_head + 1) * p.group(); ++head) {
      for (int64_t i = block.query_begin + threadIdx.x; i < block.query_end; i += C::kThreads) {
        largest = max(largest, a.rows.exponent[core::row_index(p, block.sequence, head, i)]);
      }
    }
    largest = block_max<C>(largest, reinterpret_cast<int32_t*>(weights.data));
    return largest == kNoExponent ? 0 : largest;
  }

  // What a tile of queries needs beside its vectors; `row` is its first.
  __device__ __forceinline__ void load_constants(int64_t first, int64_t count, int64_t row,
                                                 int32_t block_exponent) const {
    for (int i = threadIdx.x; i < C::kOther; i += C::kThreads) {
      const bool exists = i < count;
      constants.kind[i] = exists ? a.rows.kind[row + i] : static_cast<int32_t>(kEmpty);
      const bool counts = exists && (is_regular(constants.kind[i]) || constants.kind[i] == kSingle);
      constants.max[i] = counts ? a.rows.max[row + i] : T(0);
      constants.exponent[i] = counts ? a.rows.exponent[row + i] : kNoExponent;
      constants.omega[i] = counts ? PowerOfTwo<T>(block_exponent - constants.exponent[i])(a.rows.omega[row + i]) : T(1);
      constants.excess[i] = counts && is_regular(constants.kind[i]) ? a.rows.tau_low[row + i] : T(0);
      constants.mean_e[i] = counts ? a.rows.mean_e[row + i] : T(0);
      constants.tau[i] = counts ? a.rows.tau[row + i] : T(0);
      constants.mean_b[i] = counts ? a.rows.mean_b[row + i] : T(0);
      constants.c[i] = counts ? a.rows.c[row + i] : T(0);
      constants.begin[i] = exists ? p.mask.begin(first + i, block.sequence.length_q, block.sequence.length_k) : 0;
      constants.end[i] = exists ? p.mask.end(first + i, block.sequence.length_q, block.sequence.length_k) : 0;
    }
  }
  __device__ __forceinline__ void load_queries(const core::Operand& t, int64_t width, int64_t head, int64_t first,
                                               int64_t count) const {
    const Source rows = tensor_rows<T>(t, block.sequence.batch, block.sequence.start_q, head, width);
    load_tile<C::kOther, C>(tile, rows, first, count, nullptr, Always{});
  }
  // Rows that were not solved have no x and y worth reading.
  __device__ __forceinline__ void load_rows(const T* array, int64_t row, int64_t count) const {
    load_tile<C::kOther, C>(tile, array_rows<T>(array, row, p.dim), 0, count, nullptr,
                            [&](int i) { return is_regular(constants.kind[i]); });
  }

  // p a, p b and scale p (a b - c) of a tile, from its raw products. Notes rows that are bad.
  __device__ __forceinline__ void make_weights(Products& pa, Products& pb, Products& ds, bool (&bad)[C::kRows],
                                               const Products& logit, const Products& e, const Products& f,
                                               const Products& gamma, T log2_factor) const {
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      const int64_t key = block.first_key + team() + C::kRowTeams * r;
#pragma unroll
      for (int c = 0; c < C::kRows; ++c) {
        const int i = lane() + kLanes * c;
        const bool visible = key >= constants.begin[i] && key < constants.end[i];
        const int32_t kind = constants.kind[i];
        bad[r] |= visible && kind == kBad;
        const bool counts = visible && (is_regular(kind) || kind == kSingle);
        const T weight = counts ? weight_of(logit[r][c], log2_factor, constants.max[i]) / constants.omega[i] : T(0);
        const T one_plus_e = 1 - constants.excess[i] + (e[r][c] - constants.mean_e[i]);
        // A single key's value is its mean: b vanishes, and only dv is left.
        const T b = kind == kSingle ? T(0) : (gamma[r][c] - constants.tau[i]) - (f[r][c] + constants.mean_b[i]);
        pa[r][c] = weight * one_plus_e;
        pb[r][c] = weight * b;
        ds[r][c] = kind == kSingle ? T(0) : static_cast<T>(p.scale) * weight * (one_plus_e * b - constants.c[i]);
      }
    }
  }

  // A tile of queries of one head: what its queries add to dk and dv.
  __device__ __forceinline__ void add_queries(Accumulator<C, T>& dk, Accumulator<C, T>& dv, bool (&bad)[C::kRows],
                                              int64_t head, int64_t first, int32_t block_exponent,
                                              T log2_factor) const {
    const bool solved = !p.given_x();
    const int columns = pieces<T>(p.dim), value_columns = pieces<T>(p.value_dim);
    const int64_t count = block.query_end - first, row = core::row_index(p, block.sequence, head, first);
    T logit[1][C::kRows][C::kRows], e[1][C::kRows][C::kRows], f[1][C::kRows][C::kRows] = {},
                                                              gamma[1][C::kRows][C::kRows];
    __syncthreads();
    load_constants(first, count, row, block_exponent);
    // logit = K Qᵀ
    load_queries(a.q, p.dim, head, first, count);
    __syncthreads();
    product<C, 1>({own_k}, tile, columns, logit);
    // e = K Xᵀ
    __syncthreads();
    load_rows(a.rows.x, row, count);
    __syncthreads();
    product<C, 1>({own_k}, tile, columns, e);
    // f = K Yᵀ
    if (solved) {
      __syncthreads();
      load_rows(a.rows.y, row, count);
      __syncthreads();
      product<C, 1>({own_k}, tile, columns, f);
    }
    // gamma = V Gᵀ
    __syncthreads();
    load_queries(a.grad_o, p.value_dim, head, first, count);
    scale_tile<C::kOther, C>(tile, value_columns,
                             [&](int i) { return constants.exponent[i] == kNoExponent ? 0 : -constants.exponent[i]; });
    __syncthreads();
    product<C, 1>({own_v}, tile, value_columns, gamma);

    Products pa, pb, ds;
    make_weights(pa, pb, ds, bad, logit[0], e[0], f[0], gamma[0], log2_factor);
    // dv += (p a) G
    weights.put(pa);
    accumulate(dv, weights, tile, value_columns);
    // dk += (p a) (-Y) + (p b) X + dS Q
    if (solved) {
      __syncthreads();
      load_rows(a.rows.y, row, count);
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
    load_rows(a.rows.x, row, count);
    weights.put(pb);
    __syncthreads();
    accumulate(dk, weights, tile, columns);
    __syncthreads();
    load_queries(a.q, p.dim, head, first, count);
    weights.put(ds);
    __syncthreads();
    accumulate(dk, weights, tile, columns);
  }

  __device__ __forceinline__ void write(const core::Operand& t, int64_t width, const Accumulator<C, T>& sum, int r,
                                        bool bad, PowerOfTwo<T> undo) const {
    if (!t) return;
    const int64_t position = block.sequence.start_k + block.first_key + team() + C::kRowTeams * r;
    const int64_t offset = block.sequence.batch * t.stride[0] + position * t.stride[1] + block.kv_head * t.stride[2];
    for_columns<C>(width, [&](int c, int i, int column) {
      store_as(t.data, t.dtype, offset + column * t.stride[3], bad ? nan_value<T>() : undo(sum.at[r][c].at[i]));
    });
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) dkdv_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  unsigned char* const shared = dynamic_bytes;
  const KeyBlock block(a, C::kOwn);
  if (block.first_key >= block.sequence.length_k) return;
  const KeyGradients<T, kDim> gradients(a, block, shared);
  const core::Problem& p = a.problem;
  const T log2_factor = log2_scale<T>(p);
  gradients.load_keys();
  const int32_t block_exponent = gradients.largest_exponent();

  Accumulator<C, T> dk, dv;
  dk.zero();
  dv.zero();
  bool bad[C::kRows] = {};
  for (int64_t head = block.kv_head * p.group(); head < (block.kv_head + 1) * p.group(); ++head) {
    for (int64_t first = block.query_begin; first < block.query_end; first += C::kOther) {
      gradients.add_queries(dk, dv, bad, head, first, block_exponent, log2_factor);
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const bool any_bad = row_any(bad[r]);
    if (team() + C::kRowTeams * r >= block.keys) continue;
    const PowerOfTwo<T> undo(block_exponent);
    gradients.write(a.dk, p.dim, dk, r, any_bad, undo);
    gradients.write(a.dv, p.value_dim, dv, r, any_bad, undo);
  }
}

}  // namespace

template <class T>
Status launch_dkdv(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<2, 1>(a, a.problem.seqlen_k, a.problem.heads_kv, stream, "launching the dk and dv kernel",
                            [](auto bucket) { return dkdv_kernel<T, bucket.value>; });
}

template Status launch_dkdv<float>(const Arguments<float>&, cudaStream_t);
template Status launch_dkdv<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
