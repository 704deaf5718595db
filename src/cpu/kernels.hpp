// The kernels behind run-time dispatch: one call a block.
#pragma once

#include "core/problem.hpp"
#include "cpu/memory.hpp"

namespace lla::cpu {

struct PanelWidths {
  int64_t f32, f64;
};
PanelWidths panel_widths();

template <class T>
void run_forward_block(const core::ForwardCall& call, const PackedHead<T>& head, int64_t first_row, int64_t rows,
                       WorkerMemory<T>& memory);

}  // namespace lla::cpu
