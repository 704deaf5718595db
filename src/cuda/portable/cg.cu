// Conjugate gradients, matrix-free: A u = (U K - sum(U) mean_k) / omega + ridge u with U = w (u.k - u.mean_k). A row
// stops at its tolerance, a block when all its rows have. Vectors of a row live in the row arrays: they are touched
// once an iteration, the keys in between.
#include "cuda/common/launch.cuh"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {
namespace {

// What a row's solve needs from one iteration to the next.
template <class T>
struct Solve {
  bool active = false;
  int iterations = 0;
  T squared = 0;                                 // of the residual
  T start = 0;                                   // of the right-hand side, squared
  T limit = 0;                                   // of `squared`: where to stop
  T promised = 0;                                // of `squared`: what makes the row OK
  bool ended = false;                            // no further step is possible
  T product = 0;                                 // x . right-hand side: the sum of step * squared
  T steepest = 0;                                // largest curvature per squared length so far
  T ridge = std::numeric_limits<T>::infinity();  // the smallest of the row's
  T omega = 1, max = 0;
  int64_t ridge_offset = 0;
  int32_t exponent = 0;  // the right-hand side is divided by this power of two: squares stay in range
  int32_t status = LLA_ROW_OK;

  __device__ T residual() const { return start > T(0) ? sqrt(squared / start) : T(0); }
};

// How far b - A x may be from the recurrence's residual, relative to b: products with keys are off by epsilon |k| |u|
// (src/cpu/stop-inl.hpp, where the same is estimated and checked).
template <class T>
__device__ T drift(const Solve<T>& s, T x_squares, T mean_squares) {
  const T key_squares = mean_squares + 16 * s.steepest;  // the second for the keys' variance, which is not known
  return 2 * std::numeric_limits<T>::epsilon() * sqrt(key_squares * s.steepest * x_squares / s.start);
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) cg_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Tile<T, kDim> own_q{reinterpret_cast<T*>(shared)};
  const Tile<T, kDim> direction{reinterpret_cast<T*>(shared + C::kOwnBytes)};
  const Tile<T, kDim> keys{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)};
  const Weights<C, T> weights{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes + C::kOtherBytes)};

  const core::Problem& p = a.problem;
  const QueryBlock block = query_block(a, blockIdx.x, C::kOwn);
  if (block.count <= 0) return;
  const int columns = pieces<T>(p.dim);
  const T log2_factor = log2_scale<T>(p);
  const core::StopRule stop = core::stop_rule(p);
  // Below this share of the largest curvature a step is rounding noise blown up.
  constexpr T kEpsilon = std::numeric_limits<T>::epsilon();
  constexpr T kNoise = 8 * kEpsilon;
  const Source k = key_rows<T>(a, a.k, block.sequence, block.head / p.group(), p.dim);
  load_tile<C::kOwn, C>(own_q, query_rows<T>(a.q, block, p.dim), 0, block.count, nullptr, Always{});

  const auto direction_at = [&](int r, int c) -> Vec<T>& {
    return direction.vec(team() + C::kRowTeams * r, lane() + kLanes * c);
  };
  Query query[C::kRows];
  Solve<T> solve[C::kRows];
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    query[r] = owned_query<C>(p, block, r);
    Solve<T>& s = solve[r];
    const Query& q = query[r];
    s.active = q.exists && a.rows.kind[q.row] == kRegular && !solved_directly(a, q);
    if (s.active) {
      s.omega = a.rows.omega[q.row];
      s.max = a.rows.max[q.row];
      s.ridge_offset = row_offset(a.ridge, block.sequence, block.head, q.index);
    }
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      if (lane() + kLanes * c < columns) direction_at(r, c) = Vec<T>{};
    }
    T largest = 0, mean_squares = 0;
    if (s.active) {
      for_columns<C>(
          p.dim, [&](int, int, int column) { largest = fmax(largest, fabs(a.rows.residual[q.row * p.dim + column])); });
    }
    s.exponent = exponent_of(row_max(largest));
    if (s.exponent == kNoExponent) s.exponent = 0;
    const PowerOfTwo<T> scale(-s.exponent);
    if (s.active) {
      for_columns<C>(p.dim, [&](int c, int e, int column) {
        const int64_t at = q.row * p.dim + column;
        const T ridge = ridge_at(a, s.ridge_offset, column);
        const T value = removes(ridge) ? T(0) : scale(a.rows.residual[at]);
        s.ridge = fmin(s.ridge, ridge);
        a.rows.residual[at] = value;
        a.solution[at] = 0;
        direction_at(r, c).at[e] = value;
        s.squared += value * value;
        mean_squares += a.rows.mean_k[at] * a.rows.mean_k[at];
      });
    }
    s.start = s.squared = row_sum(s.squared);
    s.limit = s.promised = static_cast<T>(stop.start(s.start, q.keys()));
    s.ridge = -row_max(-s.ridge);
    // Rounding of u.k - u.mean_k alone makes a curvature of the square of a few epsilon |mean_k|: less is no curvature.
    s.steepest = T(0.5) * static_cast<T>(p.dim) * kEpsilon * row_sum(mean_squares);
  }

  while (true) {
    bool working = false;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      Solve<T>& s = solve[r];
      bool done = s.active && s.squared <= s.limit;
      T lost = 0;
      if (__any_sync(~0u, done)) {  // by what is known of the solution by now; all threads, for the sums
        T squares = 0, ridge_product = 0, ridge_squares = 0, mean_squares = 0;
        if (done) {
          for_columns<C>(p.dim, [&](int, int, int column) {
            const int64_t at = query[r].row * p.dim + column;
            const T x = a.solution[at], ridge = ridge_at(a, s.ridge_offset, column);
            mean_squares += a.rows.mean_k[at] * a.rows.mean_k[at];
            if (removes(ridge)) return;
            squares += x * x;
            ridge_product += ridge * x * x;
            ridge_squares += ridge * x * ridge * x;
          });
        }
        squares = row_sum(squares);
        mean_squares = row_sum(mean_squares);
        core::SolveSizes sizes;
        sizes.rhs_squares = s.start;
        sizes.rhs_product = s.product;
        sizes.ridge_product = row_sum(ridge_product);
        sizes.ridge_squares = row_sum(ridge_squares);
        sizes.smallest_ridge = s.ridge;
        sizes.unit_squares = ldexp(1.0, -2 * s.exponent);
        if (done && s.start > T(0)) {  // zero has the solution zero
          if (stop.backward) sizes.spread = a.rows.c[query[r].row] * sizes.unit_squares;
          // What the row will report, drift included, is to be within the limit. A drift that leaves no room below what
          // was promised may be a miss.
          const T most = sqrt(static_cast<T>(stop.limit(sizes, query[r].keys())) / s.start);
          const T promised = sqrt(s.promised / s.start);
          lost = drift(s, squares, mean_squares);
          const bool doubtful =
              2 * lost > fmax(promised, static_cast<T>(stop.backward ? 0 : core::default_tolerance(a.problem.dtype)));
          const T within = doubtful ? most : most - fmin(lost, T(0.5) * most);
          s.limit = within * within * s.start;
          done = s.squared <= s.limit;
          if (done && doubtful) s.status = LLA_ROW_BREAKDOWN;
        }
      }
      if (!s.active) continue;
      const bool spent = s.iterations == p.max_iterations;
      const bool hopeless = !isfinite(s.squared);  // the right-hand side itself overflowed
      // What was aimed at may be more than what was promised. The direct solver, where there is one to turn to, gives it.
      const bool kept = !a.rescue && s.squared <= s.promised;
      if (!done && !kept && (spent || hopeless)) s.status = hopeless ? LLA_ROW_BREAKDOWN : LLA_ROW_MAX_ITERATIONS;
      if (!done && !kept && s.ended) s.status = LLA_ROW_BREAKDOWN;
      if (done || spent || hopeless || s.ended || s.status != LLA_ROW_OK) {
        s.active = false;
        const int64_t row = query[r].row;
        const PowerOfTwo<T> undo(s.exponent);
        for_columns<C>(p.dim, [&](int, int, int column) {
          T& x = a.solution[row * p.dim + column];
          x = undo(x);
        });
        if (lane() == 0) {
          if (s.status != LLA_ROW_OK) a.rows.kind[row] = kUnfinished;
          if (a.info.iterations) a.info.iterations[row] = s.iterations;
          if (a.info.residual) a.info.residual[row] = static_cast<float>(s.residual() + lost);
          if (a.info.status) a.info.status[row] = s.status;
        }
      }
      working |= s.active;
    }
    if (!__syncthreads_or(working)) return;
    const bool warp_works = __any_sync(~0u, working);

    T mean[C::kRows], sum[C::kRows], weight_squares[C::kRows];
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      mean[r] = sum[r] = weight_squares[r] = 0;
      if (solve[r].active) {
        for_columns<C>(p.dim, [&](int c, int e, int column) {
          mean[r] += direction_at(r, c).at[e] * a.rows.mean_k[query[r].row * p.dim + column];
        });
      }
      mean[r] = row_sum(mean[r]);
    }
    Accumulator<C, T> acc;
    acc.zero();
    for (int64_t first = block.key_begin; first < block.key_end; first += C::kOther) {
      __syncthreads();
      load_tile<C::kOther, C>(keys, k, first, block.key_end - first, nullptr, Always{});
      __syncthreads();
      if (!warp_works) continue;
      T s[2][C::kRows][C::kRows], u[C::kRows][C::kRows];
      product<C, 2>({own_q, direction}, keys, columns, s);
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < C::kRows; ++c) {
          const bool visible = query[r].sees(first + lane() + kLanes * c);
          const T w = visible ? exp2_of(s[0][r][c] * log2_factor - solve[r].max) : T(0);
          u[r][c] = w * (s[1][r][c] - mean[r]);
          sum[r] += u[r][c];
          weight_squares[r] += w * w;
        }
      }
      weights.put(u);
      accumulate(acc, weights, keys, columns);
    }

#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      Solve<T>& s = solve[r];
      const Query& q = query[r];
      const T total = row_sum(sum[r]);
      const T effective_keys = s.omega * s.omega / row_sum(weight_squares[r]);
      T curvature = 0, length = 0, next = 0;
      if (s.active) {
        for_columns<C>(p.dim, [&](int c, int e, int column) {
          const T ridge = ridge_at(a, s.ridge_offset, column);
          const T u = direction_at(r, c).at[e];
          T& applied = acc.at[r][c].at[e];  // becomes A u
          applied = (applied - total * a.rows.mean_k[q.row * p.dim + column]) / s.omega + ridge * u;
          if (removes(ridge)) applied = 0;
          curvature += u * applied;
          length += u * u;
        });
      }
      curvature = row_sum(curvature);
      length = row_sum(length);
      s.steepest = fmax(s.steepest, curvature / length);
      const bool flat = !(curvature > kNoise * s.steepest * length);
      const T step = s.squared / curvature;
      if (s.active && !flat) {
        for_columns<C>(p.dim, [&](int c, int e, int column) {
          const T left = a.rows.residual[q.row * p.dim + column] - step * acc.at[r][c].at[e];
          acc.at[r][c].at[e] = left;
          next += left * left;
        });
      }
      next = row_sum(next);
      if (!s.active) continue;
      if (flat || !isfinite(next)) {  // the last x stands
        s.ended = true;
        continue;
      }
      for_columns<C>(p.dim, [&](int c, int e, int column) {
        T& u = direction_at(r, c).at[e];
        a.solution[q.row * p.dim + column] += step * u;
        const T left = acc.at[r][c].at[e];
        a.rows.residual[q.row * p.dim + column] = left;
        u = left + next / s.squared * u;
      });
      s.product += step * s.squared;
      s.squared = next;
      ++s.iterations;
      // A tiny ridge and weights on few keys: the tolerance can be met and the output still be wrong, because the
      // residual says little about the directions that decide it.
      const bool doubtful = s.ridge < T(1e-3) * s.steepest && effective_keys <= T(2) * static_cast<T>(p.dim);
      if (a.rescue && doubtful) s.status = LLA_ROW_BREAKDOWN;
    }
    __syncwarp();  // the new directions are read by the other threads of their rows
  }
}

}  // namespace

template <class T>
Status launch_cg(const Arguments<T>& a, cudaStream_t stream) {
  const core::Problem& p = a.problem;
  return with_bucket(dim_bucket(p.dim, p.value_dim), [&](auto bucket) {
    using C = Config<T, bucket.value>;
    static_assert(C::shared_bytes(2, 1) <= kSharedMemoryLimit);
    return launch(cg_kernel<T, bucket.value>, tile_blocks(p.seqlen_q, C::kOwn, p.heads_q, p.batch), C::kThreads,
                  C::shared_bytes(2, 1), stream, "launching the conjugate-gradient kernel", a);
  });
}

template Status launch_cg<float>(const Arguments<float>&, cudaStream_t);
template Status launch_cg<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
