#include "cpu/work.hpp"

namespace lla::cpu {
namespace {

struct Totals {
  std::atomic<uint64_t> product_flops{0}, direct_flops{0}, iteration_pairs{0}, cg_pairs{0}, direct_rows{0};
};
Totals totals;

}  // namespace

void add_work(const Work& w) {
  constexpr auto order = std::memory_order_relaxed;
  totals.product_flops.fetch_add(w.product_flops, order);
  totals.direct_flops.fetch_add(w.direct_flops, order);
  totals.iteration_pairs.fetch_add(w.iteration_pairs, order);
  totals.cg_pairs.fetch_add(w.cg_pairs, order);
  totals.direct_rows.fetch_add(w.direct_rows, order);
}

Work work_done() {
  return {totals.product_flops, totals.direct_flops, totals.iteration_pairs, totals.cg_pairs, totals.direct_rows};
}

}  // namespace lla::cpu
