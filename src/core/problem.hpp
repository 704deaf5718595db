// The canonical description of one call. validate/ makes it from the public arguments; planner and kernels read only
// this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/tolerance.hpp"
#include "lla/lla.hpp"

namespace lla::core {

enum class Operation { forward, backward };
enum class Device { cpu, cuda };

// What the ridge varies over.
enum class RidgeShape { none /* x is given */, scalar, head, token, dimension };

// Which keys a query sees: query i of a sequence (q of lq) sees keys [begin, end) of lk, aligned bottom-right.
// causal is folded into right = 0; -1 means unbounded.
struct Mask {
  int64_t left = -1;
  int64_t right = -1;

  constexpr int64_t begin(int64_t i, int64_t lq, int64_t lk) const {
    return left < 0 ? 0 : std::clamp<int64_t>(i + lk - lq - left, 0, lk);
  }
  constexpr int64_t end(int64_t i, int64_t lq, int64_t lk) const {
    return right < 0 ? lk : std::clamp<int64_t>(i + lk - lq + right + 1, 0, lk);
  }
};

// Sizes, types and options: everything a decision may depend on, no pointers.
struct Problem {
  Operation operation = Operation::forward;
  Device device = Device::cpu;
  int device_index = 0;
  DType dtype = DType::f32;      // q, k, v
  DType out_dtype = DType::f32;  // o, or the gradients of q, k, v, x
  bool packed = false;
  int64_t batch = 0;     // sequences
  int64_t seqlen_q = 0;  // longest sequence when packed
  int64_t seqlen_k = 0;
  int64_t total_q = 0;  // rows of q over all sequences: batch * seqlen_q unless packed
  int64_t total_k = 0;
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t dim = 0;
  int64_t value_dim = 0;
  RidgeShape ridge = RidgeShape::scalar;
  double scale = 1;
  Mask mask;
  double tolerance = 1e-3;
  int max_iterations = 64;
  Solver solver = Solver::automatic;
  Weights weights = Weights::automatic;
  int64_t cached_weights_limit = int64_t{1} << 30;
  bool dense_rows = true;  // every row of q, k, v, o is contiguous and 16-byte aligned, with 16-byte strides

  constexpr bool given_x() const { return ridge == RidgeShape::none; }
  constexpr int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }  // without heads: any
  constexpr int64_t rows() const { return total_q * heads_q; }  // rows of the saved and info outputs
};

// A (batch, position, head, channel) view; packed tensors have stride[0] == 0, broadcast dimensions stride 0.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::none;
  int64_t stride[4] = {0, 0, 0, 0};

  constexpr explicit operator bool() const { return dtype != DType::none; }
};

// Row order of the saved and info outputs: r = (b Hq + h) Lq + i, packed h total_q + position.
struct RowOutputs {
  int32_t* iterations = nullptr;
  float* residual = nullptr;
  int32_t* status = nullptr;
};

// Offsets, in elements, of the sections of the saved vector (documented at lla_saved_size).
struct SavedLayout {
  int64_t max, omega, mean_k, mean_v, x, size;

  explicit SavedLayout(const Problem& p) {
    int64_t at = 0;
    const auto take = [&](int64_t n) { return std::exchange(at, at + (n + 3) / 4 * 4); };
    max = take(p.rows());
    omega = take(p.rows());
    mean_k = take(p.rows() * p.dim);
    mean_v = take(p.rows() * p.value_dim);
    x = take(p.rows() * p.dim);
    size = at;
  }
};

struct ForwardCall {
  Problem problem;
  Operand q, k, v, ridge, x, o;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  void* saved = nullptr;  // f32, or f64 where dtype is f64; null when not asked for
  RowOutputs info;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};

struct BackwardCall {
  Problem problem;
  Operand q, k, v, ridge, x, grad_o;
  Operand dq, dk, dv, dridge, dx;  // absent where not wanted
  const void* saved = nullptr;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  RowOutputs info;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};

inline StopRule stop_rule(const Problem& p) {
  return p.operation == Operation::forward ? forward_stop_rule(p.tolerance)
                                           : backward_stop_rule(p.tolerance, p.dtype, p.dim);
}

// One sequence of a call: where its rows start and how many there are.
struct Sequence {
  int64_t batch;    // index for the batch stride
  int64_t start_q;  // position offset (0 unless packed)
  int64_t start_k;
  int64_t length_q;
  int64_t length_k;
};

constexpr Sequence sequence(const Problem& p, const int32_t* cu_q, const int32_t* cu_k, int64_t b) {
  if (!p.packed) return {b, 0, 0, p.seqlen_q, p.seqlen_k};
  return {0, cu_q[b], cu_k[b], cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]};
}

// Index of a query's row in the saved and info outputs.
constexpr int64_t row_index(const Problem& p, const Sequence& s, int64_t head, int64_t i) {
  return p.packed ? head * p.total_q + s.start_q + i : (s.batch * p.heads_q + head) * p.seqlen_q + i;
}

}  // namespace lla::core
