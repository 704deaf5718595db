// Counts what the kernels executed, so that a benchmark can divide by it. Totals of the process; take differences.
#pragma once

#include <atomic>
#include <cstdint>

namespace lla::cpu {

struct Work {
  uint64_t product_flops = 0;  // matrix products over (query, visible key) pairs, in the problem's arithmetic
  uint64_t direct_flops = 0;   // products that form the direct solver's matrices, in double
  uint64_t iteration_pairs =
      0;                     // sum over panels of iterations * pairs; over pairs it is the mean number of iterations
  uint64_t cg_pairs = 0;     // pairs of panels that ran conjugate gradients
  uint64_t direct_rows = 0;  // rows solved directly

  Work operator-(const Work& o) const {
    return {product_flops - o.product_flops, direct_flops - o.direct_flops, iteration_pairs - o.iteration_pairs,
            cg_pairs - o.cg_pairs, direct_rows - o.direct_rows};
  }
};

// Adds what one block did; called once a block by any thread.
void add_work(const Work& work);
Work work_done();

}  // namespace lla::cpu
