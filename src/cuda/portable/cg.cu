// Conjugate gradients, matrix-free: A d = (U K - sum(U) mean_k) / omega + ridge d with U = w (d.k - d.mean_k). A row
// stops at its tolerance, a block when all its rows have. Vectors of a row live in the row arrays: they are touched
// once an iteration, the keys in between.
#include "cuda/portable/launch.cuh"

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
  T concentration = 0;                           // sum of the squared weights
  T ridge = std::numeric_limits<T>::infinity();  // the smallest of the row's
  T omega = 1, max = 0;
  int64_t ridge_offset = 0;
  int32_t exponent = 0;  // the right-hand side is divided by this power of two: squares stay in range
  int32_t status = LLA_ROW_OK;

  __device__ T residual() const { return start > T(0) ? sqrt(squared / start) : T(0); }
};

// Of a row's keys: the second part for their variance, which is not known.
template <class T>
__device__ T mean_key_square(const Solve<T>& s, T mean_squares) {
  return mean_squares + 16 * s.steepest;
}

// How far b - A x may be from the recurrence's residual, relative to b: products with keys are off by epsilon |k| |d|
// (src/cpu/stop-inl.hpp, where the same is estimated and checked).
template <class T>
__device__ T drift(const Solve<T>& s, T x_squares, T mean_squares) {
  const T key_squares = mean_key_square(s, mean_squares);
  return 2 * std::numeric_limits<T>::epsilon() * sqrt(key_squares * s.steepest * x_squares / s.start);
}

// What rounding x.k may do, whatever the residual of the recurrence: the products of a long x (a small ridge, a query
// far from its keys) lose digits at random, and at the size of x.mean. Where one key has all the weight nothing is left
// of it: a key less its mean is zero.
template <class T>
struct Noise {
  T output;    // against one
  T residual;  // relative to b

  // One has become `row_unit` in the units of x.
  __device__ Noise(const Solve<T>& s, T x_squares, T x_mean, T mean_squares, T dim, T row_unit) {
    const T key_squares = mean_key_square(s, mean_squares);
    const T squares = x_squares * key_squares / dim + x_mean * x_mean;
    const T balance = fmin(s.concentration, fmax(1 - s.concentration, T(0)));
    const T covariance = fmin(balance * key_squares, dim * s.steepest);  // at least its trace
    output = std::numeric_limits<T>::epsilon() * sqrt(squares * balance) / row_unit;
    residual = std::numeric_limits<T>::epsilon() * sqrt(squares * covariance / s.start);
  }
};
inline constexpr double kMostOutputNoise = 1e-3;  // a tenth of what an OK row may be off by

// Vectors and keys of a block, in shared memory, and which rows its threads own.
template <class T, int kDim>
struct SolveBlock {
  using C = Config<T, kDim>;
  const Arguments<T>& a;
  const core::Problem& p = a.problem;
  const QueryBlock block;
  const Tile<T, kDim> own_q, direction, keys;
  const Weights<C, T> weights;

  __device__ __forceinline__ SolveBlock(const Arguments<T>& arguments, unsigned char* shared)
      : a(arguments),
        block(query_block(arguments, blockIdx.x, C::kOwn)),
        own_q{reinterpret_cast<T*>(shared)},
        direction{reinterpret_cast<T*>(shared + C::kOwnBytes)},
        keys{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes)},
        weights{reinterpret_cast<T*>(shared + 2 * C::kOwnBytes + C::kOtherBytes)} {}

  __device__ __forceinline__ Vec<T>& direction_at(int r, int c) const {
    return direction.vec(team() + C::kRowTeams * r, lane() + kLanes * c);
  }

  // The right-hand side, divided by a power of two, as residual and first direction; x = 0; where to stop.
  __device__ __forceinline__ void begin(int r, const Query& q, Solve<T>& s, const core::StopRule& stop) const {
    s.active = q.exists && a.rows.kind[q.row] == kRegular && !solved_directly(a, q);
    if (s.active) {
      s.omega = a.rows.omega[q.row];
      s.max = a.rows.max[q.row];
      s.ridge_offset = row_offset(a.ridge, block.sequence, block.head, q.index);
    }
#pragma unroll
    for (int c = 0; c < C::kColumns; ++c) {
      if (lane() + kLanes * c < pieces<T>(p.dim)) direction_at(r, c) = Vec<T>{};
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
    // Rounding of d.k - d.mean_k alone makes a curvature of the square of a few epsilon |mean_k|: less is no curvature.
    s.steepest = T(0.5) * static_cast<T>(p.dim) * std::numeric_limits<T>::epsilon() * row_sum(mean_squares);
  }

  // A row at its limit, or at its last step: whether it is done by what is known of the solution by now, and what is
  // hidden of its residual. All threads take part, for the sums.
  __device__ __forceinline__ bool done_by_solution(bool done, bool last, const Query& q, Solve<T>& s,
                                                   const core::StopRule& stop, T& lost) const {
    T squares = 0, ridge_product = 0, ridge_squares = 0, mean_squares = 0, with_mean = 0;
    if (done) {
      for_columns<C>(p.dim, [&](int, int, int column) {
        const int64_t at = q.row * p.dim + column;
        const T x = a.solution[at], ridge = ridge_at(a, s.ridge_offset, column);
        mean_squares += a.rows.mean_k[at] * a.rows.mean_k[at];
        if (removes(ridge)) return;
        squares += x * x;
        with_mean += x * a.rows.mean_k[at];
        ridge_product += ridge * x * x;
        ridge_squares += ridge * x * ridge * x;
      });
    }
    squares = row_sum(squares);
    mean_squares = row_sum(mean_squares);
    with_mean = row_sum(with_mean);
    core::SolveSizes sizes;
    sizes.rhs_squares = s.start;
    sizes.rhs_product = s.product;
    sizes.ridge_product = row_sum(ridge_product);
    sizes.ridge_squares = row_sum(ridge_squares);
    sizes.smallest_ridge = s.ridge;
    sizes.row_unit_squares = ldexp(1.0, -2 * s.exponent);
    if (!done || !(s.start > T(0))) return done;  // zero has the solution zero
    if (stop.backward) sizes.spread = a.rows.c[q.row] * sizes.row_unit_squares;
    // What the row will report is to be within the limit. What is hidden and leaves no room below what was promised
    // may be a miss.
    const T most = sqrt(static_cast<T>(stop.limit(sizes, q.keys())) / s.start);
    const T promised = sqrt(s.promised / s.start);
    const Noise<T> noise(s, squares, with_mean, mean_squares, static_cast<T>(p.dim),
                         static_cast<T>(sqrt(sizes.row_unit_squares)));
    lost = drift(s, squares, mean_squares) + noise.residual;
    const bool doubtful =
        2 * lost > fmax(promised, static_cast<T>(stop.backward ? 0 : core::default_tolerance(p.dtype))) ||
        (!stop.backward && noise.output > static_cast<T>(kMostOutputNoise));
    const T within = doubtful ? most : most - fmin(lost, T(0.5) * most);
    s.limit = within * within * s.start;
    done = last || s.squared <= s.limit;
    if (done && doubtful) s.status = LLA_ROW_BREAKDOWN;
    return done;
  }

  // x in its own units, and what the row reports.
  __device__ __forceinline__ void finish(int64_t row, Solve<T>& s, T lost) const {
    s.active = false;
    const PowerOfTwo<T> undo(s.exponent);
    for_columns<C>(p.dim, [&](int, int, int column) {
      T& x = a.solution[row * p.dim + column];
      x = undo(x);
    });
    if (lane() != 0) return;
    if (s.status != LLA_ROW_OK) a.rows.kind[row] = kUnfinished;
    if (a.info.iterations) a.info.iterations[row] = s.iterations;
    if (a.info.residual) a.info.residual[row] = static_cast<float>(s.residual() + lost);
    if (a.info.status) a.info.status[row] = s.status;
  }

  // Whether the row stops here; if so it is finished.
  __device__ __forceinline__ void stop_or_go_on(const Query& q, Solve<T>& s, const core::StopRule& stop) const {
    const int limit = a.rescue ? core::iterations_before_direct(p.max_iterations, p.dim) : p.max_iterations;
    const bool spent = s.iterations == limit;
    const bool hopeless = !isfinite(s.squared);  // the right-hand side itself overflowed
    // What was aimed at may be more than what was promised. The direct solver, where there is one to turn to, gives
    // it.
    const bool last = s.active && !a.rescue && (spent || s.ended) && s.squared <= s.promised;
    bool done = last || (s.active && s.squared <= s.limit);
    T lost = 0;
    if (__any_sync(~0u, done)) done = done_by_solution(done, last, q, s, stop, lost);
    if (!s.active) return;
    if (!done && (spent || hopeless)) s.status = hopeless ? LLA_ROW_BREAKDOWN : LLA_ROW_MAX_ITERATIONS;
    if (!done && s.ended) s.status = LLA_ROW_BREAKDOWN;
    if (done || spent || hopeless || s.ended || s.status != LLA_ROW_OK) finish(q.row, s, lost);
  }

  // acc = Σ U k with U = w (d.k - d.mean_k), `sum` = Σ U and `weight_squares` = Σ w² over a row's keys, each thread its
  // own.
  __device__ __forceinline__ void pass(Accumulator<C, T>& acc, T (&sum)[C::kRows], T (&weight_squares)[C::kRows],
                                       const Query (&query)[C::kRows], const Solve<T> (&solve)[C::kRows],
                                       const Source& k, T log2_factor, bool warp_works) const {
    const int columns = pieces<T>(p.dim);
    T mean[C::kRows];
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
          const T w = visible ? weight_of(s[0][r][c], log2_factor, solve[r].max) : T(0);
          u[r][c] = w * (s[1][r][c] - mean[r]);
          sum[r] += u[r][c];
          weight_squares[r] += w * w;
        }
      }
      weights.put(u);
      accumulate(acc, weights, keys, columns);
    }
  }

  // One step from the sums of a pass: x, the residual and the next direction.
  __device__ __forceinline__ void step(int r, const Query& q, Solve<T>& s, Accumulator<C, T>& acc, T sum,
                                       T weight_squares) const {
    // Below this share of the largest curvature a step is rounding noise blown up.
    constexpr T kNoise = 8 * std::numeric_limits<T>::epsilon();
    const T total = row_sum(sum);
    s.concentration = row_sum(weight_squares) / (s.omega * s.omega);
    T curvature = 0, length = 0, next = 0;
    if (s.active) {
      for_columns<C>(p.dim, [&](int c, int e, int column) {
        const T ridge = ridge_at(a, s.ridge_offset, column);
        const T d = direction_at(r, c).at[e];
        T& applied = acc.at[r][c].at[e];  // becomes A d
        applied = (applied - total * a.rows.mean_k[q.row * p.dim + column]) / s.omega + ridge * d;
        if (removes(ridge)) applied = 0;
        curvature += d * applied;
        length += d * d;
      });
    }
    curvature = row_sum(curvature);
    length = row_sum(length);
    s.steepest = fmax(s.steepest, curvature / length);
    const bool flat = !(curvature > kNoise * s.steepest * length);
    const T stride = s.squared / curvature;
    if (s.active && !flat) {
      for_columns<C>(p.dim, [&](int c, int e, int column) {
        const T left = a.rows.residual[q.row * p.dim + column] - stride * acc.at[r][c].at[e];
        acc.at[r][c].at[e] = left;
        next += left * left;
      });
    }
    next = row_sum(next);
    if (!s.active) return;
    if (flat || !isfinite(next)) {  // the last x stands
      s.ended = true;
      return;
    }
    for_columns<C>(p.dim, [&](int c, int e, int column) {
      T& d = direction_at(r, c).at[e];
      a.solution[q.row * p.dim + column] += stride * d;
      const T left = acc.at[r][c].at[e];
      a.rows.residual[q.row * p.dim + column] = left;
      d = left + next / s.squared * d;
    });
    s.product += stride * s.squared;
    s.squared = next;
    ++s.iterations;
    // A tiny ridge and weights on few keys: the tolerance can be met and the output still be wrong, because the
    // residual says little about the directions that decide it.
    const bool doubtful = s.ridge < T(1e-3) * s.steepest && T(1) <= T(2) * static_cast<T>(p.dim) * s.concentration;
    if (a.rescue && doubtful) s.status = LLA_ROW_BREAKDOWN;
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads, 2) cg_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  unsigned char* const shared = dynamic_bytes;
  const SolveBlock<T, kDim> rows(a, shared);
  const QueryBlock& block = rows.block;
  if (block.count <= 0) return;
  const core::Problem& p = a.problem;
  const T log2_factor = log2_scale<T>(p);
  const core::StopRule stop = core::stop_rule(p);
  const Source k = key_rows(a, block.number, block.sequence, block.head / p.group());
  load_tile<C::kOwn, C>(rows.own_q, query_rows<T>(a.q, block, p.dim), 0, block.count, nullptr, Always{});

  Query query[C::kRows];
  Solve<T> solve[C::kRows];
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    query[r] = owned_query<C>(p, block, r);
    rows.begin(r, query[r], solve[r], stop);
  }
  while (true) {
    bool working = false;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      rows.stop_or_go_on(query[r], solve[r], stop);
      working |= solve[r].active;
    }
    if (!__syncthreads_or(working)) return;
    T sum[C::kRows], weight_squares[C::kRows];
    Accumulator<C, T> acc;
    rows.pass(acc, sum, weight_squares, query, solve, k, log2_factor, __any_sync(~0u, working));
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) rows.step(r, query[r], solve[r], acc, sum[r], weight_squares[r]);
    __syncwarp();  // the new directions are read by the other threads of their rows
  }
}

}  // namespace

template <class T>
Status launch_cg(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<2, 1>(a, a.problem.seqlen_q, a.problem.heads_q, stream, "launching the conjugate-gradient kernel",
                            [](auto bucket) { return cg_kernel<T, bucket.value>; });
}

template Status launch_cg<float>(const Arguments<float>&, cudaStream_t);
template Status launch_cg<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
