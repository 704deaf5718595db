// The direct solver: per row, form A about a point near the mean key, factor it, and in the forward write the output.
// Everything in double, for it takes the rows conjugate gradients in float cannot do: there x is dominated by
// directions in which the keys hardly vary, and the product of such an x with a key loses all digits of a float.
#include "cuda/common/launch.cuh"
#include "cuda/portable/factor.cuh"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {
namespace {

using D = DirectConfig;
constexpr int kWarps = D::kThreads / 32;

// One row and the block's scratch for it.
template <class T>
struct Row {
  const Arguments<T>& a;
  core::Sequence sequence;
  int64_t head, kv_head;
  const T* shift;
  Query query;
  int dim;  // padded to a multiple of 4
  Triangle matrix;
  double* tile;      // keys minus the centre, times sqrt(w); afterwards the factorisation's scratch
  double* query_at;  // q
  double* centre;    // the point A is formed about
  double* mean;      // mean key minus the centre
  double* smallest;  // pivots not above these say nothing
  double* x;
  double* gradient;    // backward: dL/do
  double* mean_value;  // backward: the point values are centred about
  double* root;        // per key of the tile: sqrt(w)
  double* gamma;       // per key of the tile: G.(v - mean_v), or forward w (1 + E)

  __device__ double key(int64_t j, int d) const {
    return load_as<double>(a.k.data, a.k.dtype, key_offset(a, a.k, sequence, kv_head, j) + d * a.k.stride[3]) -
           static_cast<double>(shift[d]);
  }
  __device__ double value(int64_t j, int d) const {
    return load_as<double>(a.v.data, a.v.dtype, key_offset(a, a.v, sequence, kv_head, j) + d * a.v.stride[3]);
  }
  __device__ double weight(double dot) const {
    return exp2(dot * a.problem.scale * std::numbers::log2e - static_cast<double>(a.rows.max[query.row]));
  }
};

template <class T>
__device__ void load_vectors(const Row<T>& row) {
  const core::Problem& p = row.a.problem;
  const Arguments<T>& a = row.a;
  const int64_t q_offset = row_offset(a.q, row.sequence, row.head, row.query.index);
  for (int d = threadIdx.x; d < row.dim + 4; d += D::kThreads) {
    const bool inside = d < p.dim;
    row.query_at[d] = inside ? load_as<double>(a.q.data, a.q.dtype, q_offset + d * a.q.stride[3]) : 0;
    row.centre[d] = inside ? static_cast<double>(a.rows.mean_k[row.query.row * p.dim + d]) : 0;
  }
  if (a.grad_o) {
    const int64_t g_offset = row_offset(a.grad_o, row.sequence, row.head, row.query.index);
    const int32_t exponent = a.rows.exponent[row.query.row];
    const PowerOfTwo<double> scale(exponent == kNoExponent ? 0 : -exponent);
    for (int d = threadIdx.x; d < p.value_dim; d += D::kThreads) {
      row.gradient[d] = scale(load_as<double>(a.grad_o.data, a.grad_o.dtype, g_offset + d * a.grad_o.stride[3]));
      row.mean_value[d] = static_cast<double>(a.rows.mean_v[row.query.row * p.value_dim + d]);
    }
  }
  for (int i = threadIdx.x; i < D::matrix_elements(p.dim); i += D::kThreads) row.matrix.data[i] = 0;
}

// Loads a tile of keys, centred and times sqrt(w); keys past the end become zero.
template <class T>
__device__ void load_keys(const Row<T>& row, int64_t first) {
  const core::Problem& p = row.a.problem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stride = row.dim + 4;
  for (int b = warp; b < D::kKeys; b += kWarps) {
    const int64_t j = first + b;
    const bool visible = j < row.query.end;
    double dot = 0, gamma = 0;
    for (int d = lane; d < p.dim && visible; d += 32) {
      const double k = row.key(j, d);
      row.tile[b * stride + d] = k - row.centre[d];
      dot += row.query_at[d] * k;
    }
    if (row.a.grad_o && visible) {
      for (int d = lane; d < p.value_dim; d += 32) gamma += row.gradient[d] * (row.value(j, d) - row.mean_value[d]);
    }
    dot = warp_sum(dot);
    gamma = warp_sum(gamma);
    const double root = visible ? sqrt(row.weight(dot)) : 0;
    for (int d = lane; d < stride; d += 32)
      row.tile[b * stride + d] = visible && d < p.dim ? root * row.tile[b * stride + d] : 0;
    if (lane == 0) {
      row.root[b] = root;
      row.gamma[b] = gamma;
    }
  }
}

// A, its right-hand side, and the mean key. Returns omega.
template <class T>
__device__ double form(const Row<T>& row) {
  const Arguments<T>& a = row.a;
  const core::Problem& p = a.problem;
  const int stride = row.dim + 4;
  double omega = 0, sum = 0, sum_gamma = 0, sum_gamma_k = 0;  // the sums of column threadIdx.x
  for (int64_t first = row.query.begin; first < row.query.end; first += D::kKeys) {
    __syncthreads();
    load_keys(row, first);
    __syncthreads();
    for (int b = 0; b < D::kKeys; ++b) {
      const double root = row.root[b];
      omega += root * root;
      sum_gamma += root * root * row.gamma[b];
      if (static_cast<int>(threadIdx.x) < row.dim) {
        const double weighted = root * row.tile[b * stride + threadIdx.x];
        sum += weighted;
        sum_gamma_k += weighted * row.gamma[b];
      }
    }
    add_products<4>(row.matrix, row.tile, stride, row.dim, 1, [](int) { return 1.0; });  // w is in the tile
  }
  const int64_t ridge_offset = row_offset(a.ridge, row.sequence, row.head, row.query.index);
  const auto ridge = [&](int d) {
    return load_as<double>(a.ridge.data, a.ridge.dtype, ridge_offset + d * a.ridge.stride[3]);
  };
  const int d = threadIdx.x;
  if (d < row.dim) row.mean[d] = sum / omega;
  __syncthreads();
  // Of column threadIdx.x.
  const auto mean_key = [&](int) { return static_cast<double>(row.shift[d]) + row.centre[d] + row.mean[d]; };
  const auto rhs = [&](int) {
    if (a.grad_o) return sum_gamma_k / omega - sum_gamma / omega * row.mean[d];
    return row.query_at[d] - static_cast<double>(row.shift[d]) - row.centre[d] - row.mean[d];
  };
  finish_matrix(row.matrix, {static_cast<int>(p.dim), row.dim, omega, row.query.keys()}, row.mean, row.smallest,
                mean_key, ridge, rhs);
  return omega;
}

// o = sum of w (1 + (k - mean).x) v / omega.
template <class T>
__device__ void write_output(const Row<T>& row, double omega) {
  const Arguments<T>& a = row.a;
  const core::Problem& p = a.problem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double sum = 0;  // of column threadIdx.x
  for (int64_t first = row.query.begin; first < row.query.end; first += D::kKeys) {
    __syncthreads();
    for (int b = warp; b < D::kKeys; b += kWarps) {
      const int64_t j = first + b;
      double dot = 0, e = 0;
      for (int d = lane; d < p.dim && j < row.query.end; d += 32) {
        const double k = row.key(j, d);
        dot += row.query_at[d] * k;
        e += (k - row.centre[d] - row.mean[d]) * row.x[d];
      }
      dot = warp_sum(dot);
      e = warp_sum(e);
      if (lane == 0) row.gamma[b] = j < row.query.end ? row.weight(dot) * (1 + e) : 0;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < p.value_dim) {
      const int64_t count = row.query.end - first < D::kKeys ? row.query.end - first : D::kKeys;
      for (int b = 0; b < count; ++b) sum += row.gamma[b] * row.value(first + b, threadIdx.x);
    }
  }
  if (static_cast<int>(threadIdx.x) < p.value_dim) {
    const int64_t offset = row_offset(a.o, row.sequence, row.head, row.query.index);
    store_as(a.o.data, a.o.dtype, offset + threadIdx.x * a.o.stride[3], sum / omega);
    report_overflow(a, row.query.row, kRegular, sum / omega);
  }
}

template <class T>
__device__ void solve_row(const Row<T>& row) {
  const Arguments<T>& a = row.a;
  const core::Problem& p = a.problem;
  __syncthreads();
  load_vectors(row);
  const double omega = form(row);
  const bool skipped = factor(row.matrix, row.dim, row.smallest, row.tile);
  back_substitute(row.matrix, row.dim, row.x);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < p.dim)
    a.solution[row.query.row * p.dim + threadIdx.x] = static_cast<T>(row.x[threadIdx.x]);
  if (threadIdx.x == 0) {
    if (a.info.iterations) a.info.iterations[row.query.row] = -1;
    if (a.info.residual) a.info.residual[row.query.row] = -1.0f;
    if (a.info.status) a.info.status[row.query.row] = skipped ? LLA_ROW_BREAKDOWN : LLA_ROW_OK;
  }
  if (!a.grad_o) write_output(row, omega);  // which waits for every thread, and may change the status
}

// Sets the row's place; false when there is nothing to do for it.
template <class T>
__device__ bool locate(const Arguments<T>& a, int64_t index, Row<T>& row) {
  const core::Problem& p = a.problem;
  const int64_t heads = p.heads_q * p.batch;
  if (index >= heads * p.seqlen_q) return false;
  const int64_t i = index % p.seqlen_q;
  row.head = index / p.seqlen_q % p.heads_q;
  row.kv_head = row.head / p.group();
  const int64_t number = index / p.seqlen_q / p.heads_q;
  row.shift = shift_of(a, number, row.kv_head);
  row.sequence = sequence_of(a, number);
  const core::Sequence& s = row.sequence;
  if (i >= s.length_q) return false;
  const core::KeyRange keys = core::visible_keys(p.mask, s, i, i);
  row.query = {true, i, core::row_index(p, s, row.head, i), keys.begin, keys.end};
  const int32_t kind = a.rows.kind[row.query.row];
  return (kind == kRegular && solved_directly(a, row.query)) || (kind == kUnfinished && a.rescue);
}

// A fixed number of blocks; rows are dealt out one by one, so that neighbours, which tend to need the same, spread out.
template <class T>
__global__ void __launch_bounds__(D::kThreads) direct_kernel(const __grid_constant__ Arguments<T> a) {
  unsigned char* const shared = dynamic_bytes;
  const core::Problem& p = a.problem;
  const int64_t dim = D::padded(p.dim);
  double* at = reinterpret_cast<double*>(shared);
  const auto take = [&](int64_t n) {
    double* here = at;
    at += n;
    return here;
  };
  Row<T> row{a};
  row.dim = static_cast<int>(dim);
  row.tile = take(D::kKeys * (dim + 4));
  row.query_at = take(dim + 4);
  row.centre = take(dim + 4);
  row.mean = take(dim + 4);
  row.smallest = take(dim + 4);
  row.x = take(dim + 4);
  row.root = take(2 * D::kKeys);
  row.gamma = take(2 * D::kKeys);
  row.gradient = take(kLargestDim);
  row.mean_value = take(kLargestDim);
  int32_t* needed = reinterpret_cast<int32_t*>(take(D::kThreads / 2));
  row.matrix.data = a.matrices ? a.matrices + blockIdx.x * D::matrix_elements(p.dim) : at;

  const int64_t rows = p.heads_q * p.batch * p.seqlen_q;
  for (int64_t first = 0; first < rows; first += int64_t{gridDim.x} * D::kThreads) {
    const auto index = [&](int t) { return first + int64_t{gridDim.x} * t + blockIdx.x; };
    __syncthreads();
    needed[threadIdx.x] = locate(a, index(threadIdx.x), row);
    __syncthreads();
    for (int t = 0; t < D::kThreads; ++t) {
      if (!needed[t]) continue;
      locate(a, index(t), row);
      solve_row(row);
    }
  }
}

}  // namespace

template <class T>
Status launch_direct(const Arguments<T>& a, cudaStream_t stream) {
  return launch(direct_kernel<T>, a.problem.rows() == 0 ? 0 : a.direct_blocks, D::kThreads,
                D::shared_bytes(a.problem.dim), stream, "launching the direct solver", a);
}

template Status launch_direct<float>(const Arguments<float>&, cudaStream_t);
template Status launch_direct<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
