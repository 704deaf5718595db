// The kernel behind solve.hpp: the forward's roles with other passes around the same conjugate gradients.
//   1. t (scores, G Vᵀ, U K with U = W (gamma - tau))   -> right-hand side; cached weights, live tiles
//   2. conjugate gradients, as in the forward           -> y
//   3. c = Σ λ x y + x·r from the last residual, without another pass
#pragma once

#include "cuda/common/runtime.hpp"
#include "cuda/sm90/backward/solve.hpp"
#include "cuda/sm90/forward/kernel.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct SolveProducer : Producer<Config> {
  __device__ __forceinline__ void run_item(int64_t item, int parity) {
    const ForwardBlock b = this->block(item);
    this->stream_all(b, true);
    bool wanted[Config::kMembers];
    const bool more = this->another_pass(wanted);
    const int live = this->t.live[parity].total(b.tiles.count());
    this->solve(b, live, parity, more, wanted);  // the consumers let go of what was fetched for nothing
  }
};

template <class Config>
struct SolveConsumer : Consumer<Config> {
  using Base = Consumer<Config>;
  using Base::group, Base::next, Base::p, Base::parity, Base::rows, Base::s, Base::t;
  using typename Base::DirectionWords;
  using typename Base::Scores;
  using typename Base::Vector;
  using typename Base::Words;
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;

  const SolveParams& solve_params;

  // t: sums over keys of U k, U = W (gamma - tau) with the scale and centre of `d`; G lies where residuals will. Finds
  // the largest weights on the way.
  __device__ __forceinline__ void target_pass(Vector& target, Pair<float>& sums, Pair<float>& largest,
                                              const Direction& d) {
    __half2 most[2] = {};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) target[e] = 0;
    sums[0] = sums[1] = 0;
    const int count = uniform(this->tiles().count);
    const int parts = uniform(this->tiles().few_keys) ? 2 : 1;
    const TileRange own = uniform(this->tiles().own), clear = uniform(this->tiles().clear);
    for (int tile = 0; tile < count; ++tile) {
      const auto key = next.take(), value = next.take();
      t.ring.wait(key);
      if (tile >= own.begin && tile < own.end) {
        Words w;
        Scores scores, gamma;
        define(scores);
        define(gamma);
        mma_fence();
        this->issue_logits(scores, key);
        t.ring.wait(value);
        mma_fence();
        product_transposed<kDim, kKeys>(gamma, s.spare_operand(group), this->tile_at(value));
        mma_commit();
        mma_wait<1>();
        pin(scores);
        this->mask(scores, tile, clear);
        make_weights<kKeys>(w, scores, rows);
        this->keep_weights(w, tile);
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i)
          most[i & 1] = __hmax2(most[i & 1], *reinterpret_cast<const __half2*>(&w[i]));
        mma_wait<0>();
        pin(gamma);
        t.ring.release(value);
        weight_scores<kKeys>(gamma, w, d.scale, d.centre);
        this->add_parts(target, sums, gamma, this->tile_at(key), parts);
        t.ring.release(key);
      } else {
        t.ring.release(key);
        t.ring.wait(value);
        t.ring.release(value);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = quad_sum(sums[r]);
      largest[r] = quad_max(fmaxf(__low2float(most[r]), __high2float(most[r])));
    }
  }

  // A row of a saved section as a fragment, times `scale`.
  __device__ __forceinline__ void load_saved(Vector& to, const float* section, int dim, const Block& block,
                                             const OwnRows& own_rows, float scale, const Lane& lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* row = section + row_index(p, block, own_rows.row[r]) * dim + lane.column;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const float2 v = 8 * i + lane.column < dim ? *reinterpret_cast<const float2*>(row + 8 * i) : make_float2(0, 0);
        to[4 * i + 2 * r] = v.x * scale;
        to[4 * i + 2 * r + 1] = v.y * scale;
      }
    }
  }

  // Saved statistics, G, t and the first direction. Returns whether a row of this thread is to be solved.
  __device__ __forceinline__ bool prepare(const ForwardBlock& b, DirectionWords& direction, Direction& d) {
    const Lane lane = Base::own_lane();
    const OwnRows own_rows(b.block, this->tiles().first_row, lane);
    const HeadScales head(p, b.head_index);
    Solve solve;
    Pair<bool> good;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t index = row_index(p, b.block, own_rows.row[r]);
      const float bound = p.saved.max[index], omega = p.saved.omega[index];
      good[r] = finite(s.row_scales(group)[lane.row + 8 * r]) && finite(bound) && finite(omega);
      rows.shift[r] = kWeightExponent - (good[r] ? bound : 0.0f);
      solve.omega[r] = good[r] ? omega * kWeightScale : 0.0f;
      solve.ridge[r] = p.ridge.per_dim ? 0.0f : row_ridge(p.ridge, b.block, own_rows.row[r]);
      good[r] = good[r] && solve.ridge[r] >= 0;
    }
    this->sync_group();  // every thread has read the scales of the queries
    load_rows<kDim>(s.spare_operand(group), s.row_scales(group), solve_params.g, p.value_dim, 1.0f, b.block,
                    this->tiles().first_row, lane.thread);
    fence_async_proxy();
    this->sync_group();

    Vector rhs, mean;
    Pair<float> g_scale, tau = {0, 0};
    load_saved(mean, p.saved.mean_v, p.value_dim, b.block, own_rows, head.value, lane);
    Pair<float> squares = {0, 0};
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 g = unpack(tile_word<uint32_t>(s.spare_operand(group), lane.tile_offset(i / 2, i & 1)));
      squares[i & 1] += g.x * g.x + g.y * g.y;
      tau[i & 1] += g.x * mean[2 * i] + g.y * mean[2 * i + 1];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      g_scale[r] = s.row_scales(group)[lane.row + 8 * r];
      good[r] = good[r] && finite(g_scale[r]);
      squares[r] = quad_sum(squares[r]);
      const float sum = quad_sum(tau[r]);
      tau[r] = good[r] ? sum : 0.0f;
    }
    // Values are scaled below 2^15, so their norm is below 2^15 sqrt(dim).
    finish_direction(d, squares, tau, 0x1p15f * (kDim == 64 ? 8.0f : 11.3138f));
    Pair<float> sums, largest;
    target_pass(rhs, sums, largest, d);
    if (lane.column == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float rest = solve.omega[r] > 0 ? fmaxf(solve.omega[r] - largest[r], 0.0f) / solve.omega[r] : 1.0f;
        if (own_rows.exists[r]) solve_params.rest[row_index(p, b.block, own_rows.row[r])] = rest;
      }
    }

    load_saved(mean, p.saved.mean_k, p.dim, b.block, own_rows, head.key, lane);
    Pair<float> undo;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool weighted = good[r] && solve.omega[r] > 0 && d.scale[r] > 0;
      undo[r] = weighted ? 1.0f / (solve.omega[r] * d.scale[r]) / g_scale[r] / head.value : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      if (!good[r]) mean[e] = 0;
      rhs[e] = good[r] ? fmaf(-sums[r], mean[e], rhs[e]) * undo[r] : 0.0f;
    }
    if (p.ridge.per_dim) {
      load_ridge<kDim>(this->section(WorkspaceLayout::kRidge), rhs, mean, solve.ridge, good, p, b.block, own_rows.row,
                       lane);
    }
    Fragment<kDim>::store_half(reinterpret_cast<uint4*>(this->section(WorkspaceLayout::kMeanHalf)), mean, lane.thread);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      solve.active[r] = good[r] && own_rows.exists[r] && solve.omega[r] > 0 && solve.ridge[r] < INFINITY;
    }
    start_solve<kDim>(solve, rhs);
#pragma unroll
    for (int r = 0; r < 2; ++r) solve.status[r] = good[r] ? LLA_ROW_OK : LLA_ROW_NAN;
    this->sync_group();  // G has been read by all
    Fragment<kDim>::store(s.residual[group], rhs, lane.thread);
    make_direction<kDim>(direction, rhs, mean, nullptr, lane, head.key_norm, solve, d);
    Fragment<kDim>::fill(this->section(WorkspaceLayout::kX), 0.0f, lane.thread);
    SolveMemory::store(this->row_state(), solve, lane);
    if constexpr (Config::kCached) fence_async_proxy_global();  // the copy engine will read the weights
    return solve.active[0] || solve.active[1];
  }

  // y, c and the info of the rows.
  __device__ __forceinline__ void write_rows(const ForwardBlock& b) {
    const Lane lane = Base::own_lane();
    const OwnRows own_rows(b.block, this->tiles().first_row, lane);
    const float back = 1.0f / HeadScales(p, b.head_index).key;
    Solve solve;
    SolveMemory::load(this->row_state(), solve, lane);
    Vector y, x;
    Fragment<kDim>::load(y, this->section(WorkspaceLayout::kX), lane.thread);
    load_saved(x, p.saved.x, p.dim, b.block, own_rows, 1.0f, lane);
    Pair<float> c = {0, 0};
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float4 r4 = reinterpret_cast<const float4*>(s.residual[group])[i * kWarpgroup + lane.thread];
      const float residual[4] = {r4.x, r4.y, r4.z, r4.w};
      float4 l4 = make_float4(solve.ridge[0], solve.ridge[0], solve.ridge[1], solve.ridge[1]);
      if (p.ridge.per_dim) {
        l4 = reinterpret_cast<const float4*>(this->section(WorkspaceLayout::kRidge))[i * kWarpgroup + lane.thread];
      }
      const float lambda[4] = {l4.x, l4.y, l4.z, l4.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = 4 * i + j;
        c[j / 2] = fmaf(x[e], (lambda[j] < INFINITY ? lambda[j] * y[e] : 0.0f) + residual[j], c[j / 2]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      c[r] = quad_sum(c[r]);
      if (!own_rows.exists[r]) continue;
      const bool bad = solve.status[r] == LLA_ROW_NAN;
      const int64_t index = row_index(p, b.block, own_rows.row[r]);
      float* const row = solve_params.y + index * kDim + lane.column;
      const float scale = bad ? NAN : back;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        *reinterpret_cast<float2*>(row + 8 * i) = make_float2(y[4 * i + 2 * r] * scale, y[4 * i + 2 * r + 1] * scale);
      }
      if (lane.column != 0) continue;
      solve_params.c[index] = c[r] * scale;
      if (p.info.iterations != nullptr) p.info.iterations[index] = solve.iterations[r];
      if (p.info.residual != nullptr) {
        p.info.residual[index] = solve.rr_start[r] > 0 ? sqrtf(solve.rr[r] / solve.rr_start[r]) : 0.0f;
      }
      if (p.info.status != nullptr) p.info.status[index] = solve.status[r];
    }
  }

  __device__ __forceinline__ void run_item() {
    DirectionWords direction;
    Direction d;
    this->begin(this->block());
    const bool active = prepare(this->block(), direction, d);
    const bool more = this->publish(active);
    const bool other = this->other_needs_pass();
    const int live = uniform(t.live[parity].total(this->tiles().count));
    this->solve(direction, d, live, more, other);
    if (more || other) release_ahead(min(live, kTilesAhead));
    write_rows(this->block());
  }

  // After a pass the producer has fetched the first tiles and weights of one more.
  __device__ __forceinline__ void release_ahead(int ahead) {
    auto walk = t.warp_walk(parity, this->member);
    for (int i = 0; i < ahead; ++i) {
      this->pass_by(1);
      walk.advance();
      if (!Config::kCached || !walk.takes(this->member)) continue;
      const auto slot = this->next_weights.take();
      s.weight_ring[group].wait(slot);
      s.weight_ring[group].release(slot);
    }
  }
};

template <int kDim, bool kCached>
__global__ void __launch_bounds__(ForwardConfig<kDim, kCached>::kThreads, 1)
    solve_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                 const __grid_constant__ SolveParams p) {
  using Config = ForwardConfig<kDim, kCached>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& s = *reinterpret_cast<ForwardShared<Config>*>(memory);
  s.init();
  const int warpgroup = own_warpgroup();
  SolveProducer<Config> producer{{s, p, &keys, &values, p.weights + blockIdx.x * p.weights_stride, own_warp()}};
  SolveConsumer<Config> consumer{{{s, p, warpgroup - 1}}, p};
  run_roles<Config>(warpgroup, producer, consumer);
}

template <int kDim, bool kCached>
Status launch_solve(const CUtensorMap& keys, const CUtensorMap& values, const SolveParams& params, int workers,
                    cudaStream_t stream) {
  using Config = ForwardConfig<kDim, kCached>;
  const auto kernel = solve_kernel<kDim, kCached>;
  constexpr size_t bytes = sizeof(ForwardShared<Config>);
  if (Status s = allow_shared_memory(kernel, bytes, "the solve of the backward pass"); !s) return s;
  kernel<<<workers, Config::kThreads, bytes, stream>>>(keys, values, params);
  return launched("the solve of the backward pass");
}

}  // namespace lla::cuda::sm90
