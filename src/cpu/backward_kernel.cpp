// The two passes of the backward, compiled for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward_kernel.cpp"
#include "cpu/targets.hpp"
#include "hwy/foreach_target.h"  // after it everything below is seen once per target

#include "cpu/backward_keys-inl.hpp"
#include "cpu/backward_rows-inl.hpp"
#include "cpu/kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

void rows_f32(const core::BackwardCall& call, const PackedHead<float>& head, const PackedQueries<float>& queries,
              int64_t first, int64_t rows, WorkerMemory<float>& memory, double* ridge_rows) {
  backward_rows(call, head, queries, first, rows, memory, ridge_rows);
}
void rows_f64(const core::BackwardCall& call, const PackedHead<double>& head, const PackedQueries<double>& queries,
              int64_t first, int64_t rows, WorkerMemory<double>& memory, double* ridge_rows) {
  backward_rows(call, head, queries, first, rows, memory, ridge_rows);
}
void keys_f32(const core::BackwardCall& call, const PackedHead<float>& head, const PackedQueries<float>& queries,
              int64_t first, int64_t keys, WorkerMemory<float>& memory) {
  backward_keys(call, head, queries, first, keys, memory);
}
void keys_f64(const core::BackwardCall& call, const PackedHead<double>& head, const PackedQueries<double>& queries,
              int64_t first, int64_t keys, WorkerMemory<double>& memory) {
  backward_keys(call, head, queries, first, keys, memory);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::cpu {

HWY_EXPORT(rows_f32);
HWY_EXPORT(rows_f64);
HWY_EXPORT(keys_f32);
HWY_EXPORT(keys_f64);

template <>
void run_backward_rows(const core::BackwardCall& call, const PackedHead<float>& head,
                       const PackedQueries<float>& queries, int64_t first, int64_t rows, WorkerMemory<float>& memory,
                       double* ridge_rows) {
  HWY_DYNAMIC_DISPATCH(rows_f32)(call, head, queries, first, rows, memory, ridge_rows);
}
template <>
void run_backward_rows(const core::BackwardCall& call, const PackedHead<double>& head,
                       const PackedQueries<double>& queries, int64_t first, int64_t rows, WorkerMemory<double>& memory,
                       double* ridge_rows) {
  HWY_DYNAMIC_DISPATCH(rows_f64)(call, head, queries, first, rows, memory, ridge_rows);
}
template <>
void run_backward_keys(const core::BackwardCall& call, const PackedHead<float>& head,
                       const PackedQueries<float>& queries, int64_t first, int64_t keys, WorkerMemory<float>& memory) {
  HWY_DYNAMIC_DISPATCH(keys_f32)(call, head, queries, first, keys, memory);
}
template <>
void run_backward_keys(const core::BackwardCall& call, const PackedHead<double>& head,
                       const PackedQueries<double>& queries, int64_t first, int64_t keys,
                       WorkerMemory<double>& memory) {
  HWY_DYNAMIC_DISPATCH(keys_f64)(call, head, queries, first, keys, memory);
}

}  // namespace lla::cpu
#endif
