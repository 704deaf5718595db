#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {
struct cluster_group {
  static unsigned block_rank() { return static_cast<unsigned>(emulated::block_rank()); }
  static void sync() { emulated::cluster_sync(); }
  template <class T>
  static T* map_shared_rank(T* pointer, int rank) {
    return static_cast<T*>(emulated::of_other_block(const_cast<void*>(static_cast<const void*>(pointer)), rank));
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
