// Decoding: per span of a row's keys, Σ w, Σ w k and Σ w k kᵀ about the row's first key; per row, these put together in
// the order of the spans, factored and solved; per span again, Σ w (1 + (k - mean)·x) v; per row, the output. All in
// double, where a far first key costs nothing. With x given the second pass over the keys is the only one.
#include "cuda/portable/decode.hpp"

#include "cuda/common/launch.cuh"
#include "cuda/portable/factor.cuh"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {
namespace {

using D = DirectConfig;
constexpr int kWarps = D::kThreads / 32;
constexpr int kPerLane = kLargestDim / 32;

struct DecodeArguments {
  Arguments<double> a;
  DecodeLayout layout;
  double* workspace;
  int64_t first_row;  // of this launch

  __device__ double* span(int64_t row, int64_t s) const {
    return workspace + ((row - first_row) * layout.spans + s) * layout.span_elements;
  }
  __device__ double* record(int64_t row) const {
    return workspace + layout.rows_at_once * layout.spans * layout.span_elements +
           (row - first_row) * layout.row_elements;
  }
};
// Heads of a span and of a row.
enum Head { kMax = 0, kOmega = 1, kFlag = 2, kSumE = 3 };  // flag: of a span, a value not finite; of a row, its kind

// A row that is decoded here, and what it sees.
struct DecodedRow {
  const Arguments<double>& a;
  core::Sequence sequence{};
  int64_t head = 0, index = 0, begin = 0, end = 0;
  bool exists = false;

  __device__ DecodedRow(const DecodeArguments& d, int64_t row) : a(d.a) {
    const core::Problem& p = a.problem;
    const int64_t queries = most_decoded_queries(p);
    if (row >= d.layout.rows) return;
    sequence = sequence_of(a, row / queries / p.heads_q);
    head = row / queries % p.heads_q;
    index = row % queries;
    exists = index < sequence.length_q && decodes(p, sequence.length_q);
    if (!exists || !sequence.valid) return;
    const core::KeyRange keys = core::visible_keys(p.mask, sequence, index, index);
    begin = keys.begin, end = keys.end;
  }
  __device__ int64_t keys() const { return end - begin; }
  __device__ int64_t spans() const { return KeySpans::count(keys()); }
  __device__ bool has_key(int64_t j) const {
    return a.cache.page_size == 0 || a.cache.has_page(a.cache.page(sequence.batch, j));
  }
  __device__ double load(const core::Operand& t, int64_t j, int d) const {
    return load_as<double>(t.data, t.dtype, key_offset(a, t, sequence, head / a.problem.group(), j) + d * t.stride[3]);
  }
  __device__ double own(const core::Operand& t, int d) const {
    return load_as<double>(t.data, t.dtype, row_offset(t, sequence, head, index) + d * t.stride[3]);
  }
  // The point sums are taken about: any will do, as long as it is everybody's.
  __device__ double centre(int d) const {
    const double k = keys() > 0 && has_key(begin) ? load(a.k, begin, d) : 0;
    return isfinite(k) ? k : 0;
  }
  __device__ double log2_scale() const { return a.problem.scale * std::numbers::log2e; }
};

// This block's span; false where there is none.
__device__ bool span_of_block(const DecodedRow& row, int64_t s, int64_t& begin, int64_t& end) {
  if (!row.exists || !row.sequence.valid || s >= row.spans()) return false;
  const int64_t each = KeySpans::keys_of_each(row.keys());
  begin = min(row.begin + s * each, row.end);
  end = min(begin + each, row.end);
  return true;
}

// ---- sums of keys ---------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(D::kThreads) decode_form_kernel(const __grid_constant__ DecodeArguments d) {
  double* const memory = reinterpret_cast<double*>(dynamic_bytes);
  const core::Problem& p = d.a.problem;
  const int64_t number = d.first_row + blockIdx.x / d.layout.spans, s = blockIdx.x % d.layout.spans;
  const DecodedRow row(d, number);
  int64_t begin, end;
  if (!span_of_block(row, s, begin, end)) return;
  const int dim = static_cast<int>(D::padded(p.dim)), stride = dim + 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double* const tile = memory;
  double* const query = tile + D::kKeys * stride;
  double* const centre = query + stride;
  double* const logits = centre + stride;
  double* const slot = d.span(number, s);
  double* const in_slot = slot + DecodeLayout::kHead + dim;
  const Triangle matrix{D::matrix_in_shared(p.dim) ? logits + D::kKeys : in_slot};
  for (int i = threadIdx.x; i < D::matrix_elements(p.dim); i += D::kThreads) matrix.data[i] = 0;
  for (int c = threadIdx.x; c < stride; c += D::kThreads) {
    query[c] = c < p.dim ? row.own(d.a.q, c) : 0;
    centre[c] = c < p.dim ? row.centre(c) : 0;
  }
  double max = -std::numeric_limits<double>::infinity(), omega = 0, sum = 0;  // sum: of column threadIdx.x
  bool bad = false;
  for (int64_t first = begin; first < end; first += D::kKeys) {
    __syncthreads();
    for (int b = warp; b < D::kKeys; b += kWarps) {
      const int64_t j = first + b;
      const bool visible = j < end && row.has_key(j);
      double dot = 0;
      for (int c = lane; c < stride; c += 32) {
        double k = visible && c < p.dim ? row.load(d.a.k, j, c) : 0;
        bad |= !isfinite(k);
        k = isfinite(k) ? k : 0;
        dot += query[c] * k;
        tile[b * stride + c] = visible && c < p.dim ? k - centre[c] : 0;
      }
      dot = warp_sum(dot);
      if (lane == 0) logits[b] = visible ? dot * row.log2_scale() : -std::numeric_limits<double>::infinity();
    }
    __syncthreads();
    double next = max, weights[D::kKeys];
#pragma unroll
    for (int b = 0; b < D::kKeys; ++b) next = fmax(next, ceil(logits[b]));
    const double factor = max == next ? 1 : exp2(max - next);
    max = next;
    omega *= factor, sum *= factor;
#pragma unroll
    for (int b = 0; b < D::kKeys; ++b) {
      weights[b] = max > -std::numeric_limits<double>::infinity() ? exp2(logits[b] - max) : 0;
      omega += weights[b];
      if (static_cast<int>(threadIdx.x) < dim) sum += weights[b] * tile[b * stride + threadIdx.x];
    }
    add_products<D::kKeys>(matrix, tile, stride, dim, factor, [&](int b) { return weights[b]; });
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) slot[kMax] = max, slot[kOmega] = omega, slot[kFlag] = bad;
  if (static_cast<int>(threadIdx.x) < dim) slot[DecodeLayout::kHead + threadIdx.x] = sum;
  if (matrix.data == in_slot) return;
  for (int i = threadIdx.x; i < D::matrix_elements(p.dim); i += D::kThreads) in_slot[i] = matrix.data[i];
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// The spans' weights relative to the row's maximum. All threads of the block take part.
struct Merged {
  double max = -std::numeric_limits<double>::infinity(), omega = 0;
  bool bad = false;
  const double* factor;  // of each span, in shared memory

  __device__ Merged(const DecodeArguments& d, const DecodedRow& row, int64_t number) {
    __shared__ double maxima[KeySpans::kMost], omegas[KeySpans::kMost], factors[KeySpans::kMost];
    const int spans = static_cast<int>(row.spans()), s = threadIdx.x;
    bool mine = false;
    if (s < spans) {
      const double* const head = d.span(number, s);
      maxima[s] = head[kMax], omegas[s] = head[kOmega], mine = head[kFlag] != 0;
    }
    bad = __syncthreads_or(mine);
    for (int i = 0; i < spans; ++i) max = fmax(max, maxima[i]);
    if (s < spans) factors[s] = maxima[s] > -std::numeric_limits<double>::infinity() ? exp2(maxima[s] - max) : 0;
    __syncthreads();
    for (int i = 0; i < spans; ++i) omega += factors[i] * omegas[i];
    factor = factors;
  }
};

__device__ void report(const DecodedRow& row, int64_t index, int32_t status) {
  const core::RowOutputs& info = row.a.info;
  const int64_t at = core::row_index(row.a.problem, row.sequence, row.head, index);
  if (info.iterations) info.iterations[at] = -1;
  if (info.residual) info.residual[at] = -1.0f;
  if (info.status) info.status[at] = status;
}

__device__ void write_output(const DecodedRow& row, int64_t index, int d, double o) {
  const core::Operand& to = row.a.o;
  store_as(to.data, to.dtype, row_offset(to, row.sequence, row.head, index) + d * to.stride[3], o);
}

// Whether all pages the sequence's rows see are there.
__device__ bool has_pages(const DecodedRow& row) {
  bool missing = false;
  const core::KeyCache& cache = row.a.cache;
  if (cache.page_size > 0) {
    const core::KeyRange seen = core::visible_keys(row.a.problem.mask, row.sequence);
    const int64_t last = (seen.end + cache.page_size - 1) / cache.page_size;
    for (int64_t i = seen.begin / cache.page_size + threadIdx.x; i < last && seen.begin < seen.end; i += D::kThreads)
      missing |= !cache.has_page(cache.table[row.sequence.batch * cache.table_stride + i]);
  }
  return !__syncthreads_or(missing);
}

// Rows that are no one's to solve: of invalid sequences, without keys, with one, or with what is not finite. Writes
// them and says so. `usable`: the sums are finite.
__device__ bool write_special(const DecodedRow& row, bool usable) {
  const core::Problem& p = row.a.problem;
  const double nan = nan_value<double>();
  const bool invalid = !row.sequence.valid || !has_pages(row);
  bool bad = false, zero = false;
  for (int c = threadIdx.x; c < p.dim; c += D::kThreads) {
    const double parameter = row.own(p.given_x() ? row.a.x : row.a.ridge, c);
    bad |= !isfinite(row.own(row.a.q, c)) || (p.given_x() ? !isfinite(parameter) : !(parameter >= 0));
    zero |= !p.given_x() && parameter == 0;
  }
  bool bad_value = false;
  if (!invalid && row.keys() == 1) {
    for (int c = threadIdx.x; c < p.value_dim; c += D::kThreads)
      bad_value |= !isfinite(row.load(row.a.v, row.begin, c));
    for (int c = threadIdx.x; c < p.dim; c += D::kThreads) bad_value |= !isfinite(row.load(row.a.k, row.begin, c));
  }
  bad = __syncthreads_or(bad) || !usable;
  bad_value = __syncthreads_or(bad_value);
  zero = __syncthreads_or(zero);
  if (invalid) {  // it may claim more rows than its bound: each of them takes every so-manieth too
    for (int64_t i = row.index; i < row.sequence.length_q; i += most_decoded_queries(p)) {
      for (int c = threadIdx.x; c < p.value_dim; c += D::kThreads) write_output(row, i, c, nan);
      if (threadIdx.x == 0) report(row, i, LLA_ROW_INVALID);
    }
    return true;
  }
  if (row.keys() > 1 && !bad) return false;
  bad = row.keys() > 0 && (bad || bad_value);
  for (int c = threadIdx.x; c < p.value_dim; c += D::kThreads) {
    write_output(row, row.index, c, row.keys() == 0 ? 0 : bad ? nan : row.load(row.a.v, row.begin, c));
  }
  // One key and no ridge: A is zero somewhere.
  const bool flat = row.keys() == 1 && zero;
  if (threadIdx.x == 0) report(row, row.index, bad ? LLA_ROW_NAN : flat ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
  return true;
}

__global__ void __launch_bounds__(D::kThreads) decode_solve_kernel(const __grid_constant__ DecodeArguments d) {
  double* const memory = reinterpret_cast<double*>(dynamic_bytes);
  const core::Problem& p = d.a.problem;
  const int64_t number = d.first_row + blockIdx.x;
  const DecodedRow row(d, number);
  if (!row.exists) return;
  double* const record = d.record(number);
  if (threadIdx.x == 0) record[kFlag] = 0;
  if (!row.sequence.valid || row.keys() < 2) {
    write_special(row, true);
    return;
  }
  const Merged merged(d, row, number);
  const bool usable = isfinite(merged.omega) && merged.omega > 0 && !merged.bad;
  if (write_special(row, usable)) return;
  const int dim = static_cast<int>(D::padded(p.dim)), stride = dim + 4;
  double* const panel = memory;
  double* const mean = panel + 4 * stride;
  double* const smallest = mean + stride;
  double* const x = smallest + stride;
  double* const centre = x + stride;
  const auto in_slot = [&](int64_t s) { return d.span(number, s) + DecodeLayout::kHead + dim; };
  const Triangle matrix{D::matrix_in_shared(p.dim) ? centre + stride : in_slot(0)};
  for (int i = threadIdx.x; i < D::matrix_elements(p.dim); i += D::kThreads) {
    double sum = 0;
    for (int64_t s = 0; s < row.spans(); ++s) sum += merged.factor[s] * in_slot(s)[i];
    matrix.data[i] = sum;
  }
  for (int c = threadIdx.x; c < dim; c += D::kThreads) {
    double sum = 0;
    for (int64_t s = 0; s < row.spans(); ++s) sum += merged.factor[s] * d.span(number, s)[DecodeLayout::kHead + c];
    mean[c] = sum / merged.omega;
    centre[c] = c < p.dim ? row.centre(c) : 0;
  }
  __syncthreads();
  const auto ridge = [&](int c) { return row.own(d.a.ridge, c); };
  const auto mean_key = [&](int c) { return centre[c] + mean[c]; };
  const auto rhs = [&](int c) { return row.own(d.a.q, c) - centre[c] - mean[c]; };
  finish_matrix(matrix, {static_cast<int>(p.dim), dim, merged.omega, row.keys()}, mean, smallest, mean_key, ridge, rhs);
  const bool skipped = factor(matrix, dim, smallest, panel);
  back_substitute(matrix, dim, x);
  __syncthreads();
  for (int c = threadIdx.x; c < dim; c += D::kThreads) {
    record[DecodeLayout::kHead + c] = centre[c] + mean[c];
    record[DecodeLayout::kHead + dim + c] = x[c];
  }
  if (threadIdx.x != 0) return;
  record[kMax] = merged.max, record[kOmega] = merged.omega, record[kFlag] = 1;
  report(row, row.index, skipped ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
}

// ---- sums of values -------------------------------------------------------------------------------------------------

// A warp takes every kWarps-th key. Solved rows: Σ w (1 + E) v with the row's maximum. With x given: Σ w, Σ w e, Σ w v
// and Σ w e v with the warp's own, e = (k - centre)·x.
template <bool kGiven>
__global__ void __launch_bounds__(D::kThreads) decode_values_kernel(const __grid_constant__ DecodeArguments d) {
  __shared__ double heads[kWarps][4];
  __shared__ double sums[kWarps][kLargestDim];
  const core::Problem& p = d.a.problem;
  const int64_t number = d.first_row + blockIdx.x / d.layout.spans, s = blockIdx.x % d.layout.spans;
  const DecodedRow row(d, number);
  int64_t begin, end;
  if (!span_of_block(row, s, begin, end)) return;
  const double* const record = d.record(number);
  if (!kGiven && record[kFlag] == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = static_cast<int>(D::padded(p.dim));
  double query[kPerLane], x[kPerLane], centre[kPerLane], sum[kPerLane] = {}, sum_e[kPerLane] = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int c = lane + 32 * i;
    const bool inside = c < p.dim;
    query[i] = inside ? row.own(d.a.q, c) : 0;
    x[i] = !inside ? 0 : kGiven ? row.own(d.a.x, c) : record[DecodeLayout::kHead + dim + c];
    centre[i] = !inside ? 0 : kGiven ? row.centre(c) : record[DecodeLayout::kHead + c];
  }
  double max = kGiven ? -std::numeric_limits<double>::infinity() : record[kMax], omega = 0, total_e = 0;
  bool bad = false;
  for (int64_t j = begin + warp; j < end; j += kWarps) {
    if (!row.has_key(j)) continue;
    double dot = 0, e = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = lane + 32 * i;
      if (c >= p.dim) continue;
      const double k = row.load(d.a.k, j, c);
      bad |= !isfinite(k);
      dot += query[i] * k;
      e += (k - centre[i]) * x[i];
    }
    dot = warp_sum(dot) * row.log2_scale();
    e = warp_sum(e);
    if (kGiven && ceil(dot) > max) {
      const double factor = exp2(max - ceil(dot));
      max = ceil(dot);
      omega *= factor, total_e *= factor;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum[i] *= factor, sum_e[i] *= factor;
    }
    const double w = exp2(dot - max), u = kGiven ? w : w * (1 + e);
    omega += w, total_e += w * e;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int c = lane + 32 * i;
      if (c >= p.value_dim) continue;
      const double v = row.load(d.a.v, j, c);
      bad |= !isfinite(v);
      sum[i] += u * v;
      if (kGiven) sum_e[i] += w * e * v;
    }
  }
  bad = __syncthreads_or(bad);
  if (lane == 0) heads[warp][kMax] = max, heads[warp][kOmega] = omega, heads[warp][kSumE] = total_e;
  __syncthreads();
  double largest = max, factor[kWarps];
  if (kGiven) {
    for (int w = 0; w < kWarps; ++w) largest = fmax(largest, heads[w][kMax]);
  }
  for (int w = 0; w < kWarps; ++w) factor[w] = !kGiven ? 1 : heads[w][kOmega] != 0 ? exp2(heads[w][kMax] - largest) : 0;
  double* const slot = d.span(number, s);
  if (threadIdx.x == 0) {
    double all = 0, all_e = 0;
    for (int w = 0; w < kWarps; ++w) all += factor[w] * heads[w][kOmega], all_e += factor[w] * heads[w][kSumE];
    slot[kMax] = largest, slot[kOmega] = all, slot[kFlag] = bad, slot[kSumE] = all_e;
  }
  const auto store = [&](const double(&mine)[kPerLane], double* to) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[warp][lane + 32 * i] = mine[i];
    __syncthreads();
    for (int c = threadIdx.x; c < p.value_dim; c += D::kThreads) {
      double all = 0;
      for (int w = 0; w < kWarps; ++w) all += factor[w] * sums[w][c];
      to[c] = all;
    }
  };
  store(sum, slot + DecodeLayout::kHead);
  if (kGiven) store(sum_e, slot + DecodeLayout::kHead + p.value_dim);
}

template <bool kGiven>
__global__ void __launch_bounds__(D::kThreads) decode_output_kernel(const __grid_constant__ DecodeArguments d) {
  const core::Problem& p = d.a.problem;
  const int64_t number = d.first_row + blockIdx.x;
  const DecodedRow row(d, number);
  if (!row.exists || (!kGiven && d.record(number)[kFlag] == 0)) return;
  if (kGiven && (!row.sequence.valid || row.keys() < 2)) {
    write_special(row, true);
    return;
  }
  const Merged merged(d, row, number);  // solved rows: all factors are 1
  if (kGiven && write_special(row, isfinite(merged.omega) && merged.omega > 0 && !merged.bad)) return;
  const double omega = kGiven ? merged.omega : d.record(number)[kOmega];
  double mean_e = 0;
  for (int64_t s = 0; kGiven && s < row.spans(); ++s) mean_e += merged.factor[s] * d.span(number, s)[kSumE] / omega;
  bool overflow = false;
  for (int c = threadIdx.x; c < p.value_dim; c += D::kThreads) {
    double sum = 0, sum_e = 0;
    for (int64_t s = 0; s < row.spans(); ++s) {
      const double* const slot = d.span(number, s) + DecodeLayout::kHead;
      sum += merged.factor[s] * slot[c];
      if (kGiven) sum_e += merged.factor[s] * slot[p.value_dim + c];
    }
    double o = sum / omega;
    if (kGiven) o += sum_e / omega - mean_e * o;
    overflow |= !(fabs(o) <= core::largest_finite(d.a.o.dtype));
    write_output(row, row.index, c, merged.bad ? nan_value<double>() : o);
  }
  overflow = __syncthreads_or(overflow);
  if (threadIdx.x != 0) return;
  if (kGiven || merged.bad || overflow)
    report(row, row.index, merged.bad ? LLA_ROW_NAN : overflow ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
}

}  // namespace

Status launch_decode(const Arguments<double>& a, void* workspace, cudaStream_t stream) {
  const core::Problem& p = a.problem;
  DecodeArguments d{a, DecodeLayout(p), static_cast<double*>(workspace), 0};
  const size_t shared = D::shared_bytes(p.dim);
  for (; d.first_row < d.layout.rows; d.first_row += d.layout.rows_at_once) {
    const int64_t rows = std::min(d.layout.rows - d.first_row, d.layout.rows_at_once), parts = rows * d.layout.spans;
    const auto values = p.given_x() ? decode_values_kernel<true> : decode_values_kernel<false>;
    const auto output = p.given_x() ? decode_output_kernel<true> : decode_output_kernel<false>;
    if (!p.given_x()) {
      LLA_RETURN_IF_ERROR(
          launch(decode_form_kernel, parts, D::kThreads, shared, stream, "launching decode's sums of keys", d));
      LLA_RETURN_IF_ERROR(
          launch(decode_solve_kernel, rows, D::kThreads, shared, stream, "launching decode's solve", d));
    }
    LLA_RETURN_IF_ERROR(launch(values, parts, D::kThreads, 0, stream, "launching decode's sums of values", d));
    LLA_RETURN_IF_ERROR(launch(output, rows, D::kThreads, 0, stream, "launching decode's output", d));
  }
  return {};
}

}  // namespace lla::cuda::portable
