// The producer thread of the forward.
#pragma once

#include "cuda/sm90/solve/producer.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct ForwardProducer : Producer<Config> {
  using Base = Producer<Config>;
  using Base::feed;
  using typename Base::Progress;

  // A pass over every tile, before weights are known.
  __device__ __forceinline__ void bring_all(const ForwardItem& b) {
#pragma unroll 1
    for (int i = 0; i < b.tiles.count(); ++i) this->load(this->keys, b, i);
  }

  __device__ __forceinline__ void run_item(int parity) {
    const ForwardItem b = feed.tiles[parity].item;
    do {
      bring_all(b);
    } while (this->another_pass());  // the bounds of the logits were wrong
    const bool more = this->another_pass();
    const int live = feed.live[parity].total(b.tiles.count());
    Progress at = this->solve(b, live, parity, more);
    while (true) {
      this->bring(b, at, live, true);
      if (live >= 2) this->load(this->values, b, at.older);
      if (live >= 1) this->load(this->values, b, at.newer);
      if (!this->another_pass()) break;  // that was for the mean value
      at = Progress{feed.thread_walk(parity, b.tiles.count())};
    }
  }
};

}  // namespace lla::cuda::sm90
