// First pass of forward and backward: what each row sees, its integer maximum, omega and the mean key and value.
#include "cuda/portable/decode.hpp"
#include "cuda/portable/launch.cuh"

namespace lla::cuda::portable {
namespace {

// What this thread finds in its part of the row's ridge or given x.
struct Parameters {
  bool bad = false;   // an illegal ridge, or an x that is not finite
  bool zero = false;  // a ridge of zero
};

// x of a row with one key: A is the ridge alone. Where that says nothing x stays zero, as it does for a removed
// dimension.
template <class T>
__device__ T single_key_solution(T rhs, T ridge) {
  const T x = removes(ridge) ? T(0) : rhs / ridge;
  return isfinite(x) ? x : T(0);
}

template <class C, class T>
__device__ Parameters parameters(const Arguments<T>& a, const QueryBlock& block, const Query& q) {
  const core::Problem& p = a.problem;
  Parameters found;
  if (!q.exists) return found;
  const core::Operand& t = p.given_x() ? a.x : a.ridge;
  const int64_t offset = row_offset(t, block.sequence, block.head, q.index);
  for_columns<C>(p.dim, [&](int, int, int column) {
    const T value = load_as<T>(t.data, t.dtype, offset + column * t.stride[3]);
    found.bad |= p.given_x() ? !isfinite(value) : !(value >= T(0));
    found.zero |= !p.given_x() && value == T(0);
  });
  return found;
}

template <class C, class T>
struct RowResult {
  int32_t kind;
  int32_t status;
  T max, omega;
  const Accumulator<C, T>* sum_k;
  const Accumulator<C, T>* sum_v;
};

template <class C, class T>
__device__ void write_row(const Arguments<T>& a, const QueryBlock& block, const Query& q, int r,
                          const RowResult<C, T>& result) {
  const core::Problem& p = a.problem;
  const int64_t kv_head = block.head / p.group();
  const T* const shift = shift_of(a, block.number, kv_head);
  // One key: the mean is that key to the last bit, which a quotient of rounded sums is not.
  const auto mean = [&](const core::Operand& t, T sum, int column) {
    if (result.kind == kEmpty) return T(0);
    if (result.kind == kBad) return nan_value<T>();
    if (result.kind == kRegular) return sum / result.omega;
    return load_as<T>(t.data, t.dtype, key_offset(a, t, block.sequence, kv_head, q.begin) + column * t.stride[3]);
  };
  for_columns<C>(p.value_dim, [&](int c, int e, int column) {
    a.rows.mean_v[q.row * p.value_dim + column] = mean(a.v, result.sum_v->at[r][c].at[e], column);
  });
  for_columns<C>(p.dim, [&](int c, int e, int column) {
    const int64_t at = q.row * p.dim + column;
    const T mean_k = mean(a.k, result.sum_k->at[r][c].at[e], column) - (result.kind == kSingle ? shift[column] : T(0));
    a.rows.mean_k[at] = mean_k;
    if (a.problem.operation == core::Operation::backward) return;
    const bool regular = result.kind == kRegular;
    if (p.given_x()) {
      const int64_t offset = row_offset(a.x, block.sequence, block.head, q.index);
      const T given = load_as<T>(a.x.data, a.x.dtype, offset + column * a.x.stride[3]);
      a.rows.x[at] = regular ? given : result.kind == kBad ? nan_value<T>() : T(0);
    } else {
      const int64_t offset = row_offset(a.q, block.sequence, block.head, q.index);
      const T query = load_as<T>(a.q.data, a.q.dtype, offset + column * a.q.stride[3]) - shift[column];
      a.rows.residual[at] = regular ? query - mean_k : T(0);
      T x = result.kind == kBad ? nan_value<T>() : T(0);
      if (result.kind == kSingle) {
        x = single_key_solution(query - mean_k,
                                ridge_at(a, row_offset(a.ridge, block.sequence, block.head, q.index), column));
      }
      a.rows.x[at] = x;
    }
  });
  if (lane() != 0) return;
  a.rows.max[q.row] = result.kind == kRegular || result.kind == kSingle ? result.max : T(0);
  a.rows.omega[q.row] = result.kind == kEmpty ? T(0) : result.kind == kBad ? nan_value<T>() : result.omega;
  a.rows.kind[q.row] = result.kind;
  // Rows that are solved will say so themselves. A single key under conjugate gradients takes the one step it would
  // take.
  const bool stepped = result.kind == kSingle && !p.given_x() && !solved_directly(a, q);
  if (a.info.iterations) a.info.iterations[q.row] = stepped ? (p.operation == core::Operation::forward ? 1 : 0) : -1;
  // Its x is exact but for rounding.
  if (a.info.residual) a.info.residual[q.row] = stepped ? std::numeric_limits<float>::epsilon() : -1.0f;
  if (a.info.status) a.info.status[q.row] = result.status;
}

// Whether the pages of all keys some row of the sequence sees are there. All threads of the block take part.
template <class C, class T>
__device__ bool has_pages(const Arguments<T>& a, const core::Sequence& s) {
  bool missing = false;
  if (a.cache.page_size > 0) {
    const core::KeyRange seen = core::visible_keys(a.problem.mask, s);
    const int64_t end = (seen.end + a.cache.page_size - 1) / a.cache.page_size;
    for (int64_t i = seen.begin / a.cache.page_size + threadIdx.x; i < end && seen.begin < seen.end; i += C::kThreads) {
      missing |= !a.cache.has_page(a.cache.table[s.batch * a.cache.table_stride + i]);
    }
  }
  return !__syncthreads_or(missing);
}

// Rows of a sequence that is out of bounds: NaN, and nothing of its keys is read. It may claim more rows than the bound
// its tiles were counted by, so each of them takes every rows-of-all-tiles-th too.
template <class C, class T>
__device__ void write_invalid(const Arguments<T>& a, const QueryBlock& block) {
  const core::Problem& p = a.problem;
  const core::Sequence& s = block.sequence;
  const int64_t step = (p.seqlen_q + C::kOwn - 1) / C::kOwn * C::kOwn;
  for (int64_t first = block.first; first < s.length_q; first += step) {
    for (int64_t i = first + team(); i < first + C::kOwn && i < s.length_q; i += C::kRowTeams) {
      const int64_t row = core::row_index(p, s, block.head, i), offset = row_offset(a.o, s, block.head, i);
      for_columns<C>(p.value_dim, [&](int, int, int column) {
        store_as(a.o.data, a.o.dtype, offset + column * a.o.stride[3], nan_value<T>());
      });
      if (lane() != 0) continue;
      a.rows.kind[row] = kElsewhere;
      if (a.info.iterations) a.info.iterations[row] = -1;
      if (a.info.residual) a.info.residual[row] = -1.0f;
      if (a.info.status) a.info.status[row] = LLA_ROW_INVALID;
    }
  }
}

// Rows of a sequence that is decoded: later passes leave them alone.
template <class C, class T>
__device__ void leave_to_decode(const Arguments<T>& a, const QueryBlock& block) {
  for (int64_t i = threadIdx.x; i < block.count; i += C::kThreads) a.rows.kind[block.row + i] = kElsewhere;
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) stats_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  unsigned char* const shared = dynamic_bytes;
  const Tile<T, kDim> own_q{reinterpret_cast<T*>(shared)};
  const Tile<T, kDim> keys{reinterpret_cast<T*>(shared + C::kOwnBytes)};
  const Tile<T, kDim> values{reinterpret_cast<T*>(shared + C::kOwnBytes + C::kOtherBytes)};
  const Weights<C, T> weights{reinterpret_cast<T*>(shared + C::kOwnBytes + 2 * C::kOtherBytes)};
  int32_t* bad_query = reinterpret_cast<int32_t*>(reinterpret_cast<unsigned char*>(weights.data) + C::kWeightBytes);
  int32_t* bad_key = bad_query + C::kOwn;

  const core::Problem& p = a.problem;
  const QueryBlock block = query_block(a, blockIdx.x, C::kOwn);
  if (decodes(p, block.sequence.length_q)) return leave_to_decode<C>(a, block);
  if (p.cache && (!block.sequence.valid || !has_pages<C>(a, block.sequence))) return write_invalid<C>(a, block);
  if (block.count <= 0) return;
  const Source k = key_rows(a, block.number, block.sequence, block.head / p.group());
  const Source v = value_rows(a, block.sequence, block.head / p.group());
  const T log2_factor = log2_scale<T>(p);

  for (int i = threadIdx.x; i < C::kOwn + C::kOther; i += C::kThreads) bad_query[i] = 0;
  __syncthreads();
  load_tile<C::kOwn, C>(own_q, query_rows<T>(a.q, block, p.dim), 0, block.count, bad_query, Always{});

  Query query[C::kRows];
  T max[C::kRows], omega[C::kRows];
  Parameters found[C::kRows];
  Accumulator<C, T> sum_k, sum_v;
  sum_k.zero();
  sum_v.zero();
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    query[r] = owned_query<C>(p, block, r);
    max[r] = -std::numeric_limits<T>::infinity();
    omega[r] = 0;
    found[r] = parameters<C>(a, block, query[r]);
  }

  for (int64_t first = block.key_begin; first < block.key_end; first += C::kOther) {
    __syncthreads();
    for (int i = threadIdx.x; i < C::kOther; i += C::kThreads) bad_key[i] = 0;
    __syncthreads();
    load_tile<C::kOther, C>(keys, k, first, block.key_end - first, bad_key, Always{});
    load_tile<C::kOther, C>(values, v, first, block.key_end - first, bad_key, Always{});
    __syncthreads();
    T dot[1][C::kRows][C::kRows], w[C::kRows][C::kRows];
    product<C, 1>({own_q}, keys, pieces<T>(p.dim), dot);
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      T largest = max[r];
#pragma unroll
      for (int c = 0; c < C::kRows; ++c) {
        const int column = lane() + kLanes * c;
        if (!query[r].sees(first + column)) continue;
        largest = fmax(largest, dot[0][r][c] * log2_factor);
        found[r].bad |= bad_key[column] != 0;
      }
      const T next = ceil(row_max(largest));
      if (next > max[r]) {  // also the first time: the sums are zero then, and so is the factor
        const T factor = exp2_of(max[r] - next);
        sum_k.scale(r, factor);
        sum_v.scale(r, factor);
        omega[r] *= factor;
        max[r] = next;
      }
#pragma unroll
      for (int c = 0; c < C::kRows; ++c) {
        const bool visible = query[r].sees(first + lane() + kLanes * c);
        w[r][c] = visible ? weight_of(dot[0][r][c], log2_factor, max[r]) : T(0);
        omega[r] += w[r][c];
      }
    }
    weights.put(w);
    accumulate(sum_k, weights, keys, pieces<T>(p.dim));
    accumulate(sum_v, weights, values, pieces<T>(p.value_dim));
  }
  __syncthreads();  // bad_query is complete even if there was no key
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const T total = row_sum(omega[r]);
    const bool any_bad = row_any(found[r].bad || bad_query[team() + C::kRowTeams * r] != 0);
    const bool any_zero = row_any(found[r].zero);
    if (!query[r].exists) continue;
    const int64_t n = query[r].keys();
    // Logits out of range leave an omega that is no number, or none at all.
    const bool usable = isfinite(total) && total > T(0) && !any_bad;
    const int32_t kind = n == 0 ? kEmpty : !usable ? kBad : n == 1 ? kSingle : kRegular;
    // One key and no ridge: A is zero somewhere, and whoever solved it would have to say so.
    const bool flat = kind == kSingle && any_zero;
    const int32_t status = kind == kBad ? LLA_ROW_NAN : flat ? LLA_ROW_BREAKDOWN : LLA_ROW_OK;
    write_row<C, T>(a, block, query[r], r, {kind, status, max[r], total, &sum_k, &sum_v});
  }
}

}  // namespace

template <class T>
Status launch_stats(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<1, 2>(a, a.problem.seqlen_q, a.problem.heads_q, stream, "launching the statistics kernel",
                            [](auto bucket) { return stats_kernel<T, bucket.value>; });
}

template Status launch_stats<float>(const Arguments<float>&, cudaStream_t);
template Status launch_stats<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
