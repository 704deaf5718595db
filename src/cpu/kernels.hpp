// The kernels behind run-time dispatch: one call a block.
#pragma once

#include "core/problem.hpp"
#include "cpu/layout.hpp"

namespace lla::cpu {

struct PanelWidths {
  int64_t f32, f64;
};
PanelWidths panel_widths();

template <class T>
void run_forward_block(const core::ForwardCall& call, const PackedHead<T>& head, int64_t first_row, int64_t rows,
                       WorkerMemory<T>& memory);

// Pass A packs its rows into `queries`, pass B reads them. ridge_rows: see Layout.
template <class T>
void run_backward_rows(const core::BackwardCall& call, const PackedHead<T>& head, const PackedQueries<T>& queries,
                       int64_t first, int64_t rows, WorkerMemory<T>& memory, double* ridge_rows);
template <class T>
void run_backward_keys(const core::BackwardCall& call, const PackedHead<T>& head, const PackedQueries<T>& queries,
                       int64_t first, int64_t keys, WorkerMemory<T>& memory);

}  // namespace lla::cpu
