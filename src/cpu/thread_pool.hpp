// A pool of threads shared by all calls of the process.
//
// parallel_for puts a job up and works on it itself; idle pool threads join while it has items and free seats. A call
// therefore never waits for a thread to become free, and calls from several user threads at once simply share the pool.
#pragma once

#include <cstdint>
#include <type_traits>

namespace lla::cpu {

namespace detail {
using ItemFunction = void (*)(void* context, int64_t item, int worker);
void run_items(int64_t items, int workers, ItemFunction function, void* context);
}  // namespace detail

// Calls function(item, worker) once for each item in [0, items), items taken in order by whoever is free.
// worker < workers names the seat; no two threads hold the same seat of one job.
template <class Function>
void parallel_for(int64_t items, int workers, Function&& function) {
  using F = std::remove_reference_t<Function>;
  detail::run_items(
      items, workers, [](void* context, int64_t item, int worker) { (*static_cast<F*>(context))(item, worker); },
      const_cast<void*>(static_cast<const void*>(&function)));
}

}  // namespace lla::cpu
