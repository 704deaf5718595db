// decode-inl.hpp compiled for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_kernel.cpp"
#include "cpu/targets.hpp"
#include "hwy/foreach_target.h"  // after it everything below is seen once per target

#include "cpu/decode_solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

DecodeSizes sizes_f32(int64_t dim, int64_t value_dim) { return sizes_of<float>(dim, value_dim); }
DecodeSizes sizes_f64(int64_t dim, int64_t value_dim) { return sizes_of<double>(dim, value_dim); }

template <class T>
void statistics(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker) {
  return unit.call->problem.given_x() ? steered_sums_of_span(unit, span, worker)
                                      : statistics_of_span(unit, span, worker);
}
void statistics_f32(DecodeUnit<float>& unit, int64_t span, const DecodeWorker<float>& worker) {
  statistics(unit, span, worker);
}
void statistics_f64(DecodeUnit<double>& unit, int64_t span, const DecodeWorker<double>& worker) {
  statistics(unit, span, worker);
}
void apply_f32(DecodeUnit<float>& unit, int64_t span, const DecodeWorker<float>& worker) {
  apply_to_span(unit, span, worker);
}
void apply_f64(DecodeUnit<double>& unit, int64_t span, const DecodeWorker<double>& worker) {
  apply_to_span(unit, span, worker);
}
void merge_f32(DecodeUnit<float>& unit, int64_t row, int64_t piece) { merge_piece(unit, row, piece); }
void merge_f64(DecodeUnit<double>& unit, int64_t row, int64_t piece) { merge_piece(unit, row, piece); }
void solve_f32(DecodeUnit<float>& unit, int64_t row) { solve_row(unit, row); }
void solve_f64(DecodeUnit<double>& unit, int64_t row) { solve_row(unit, row); }
bool output_f32(DecodeUnit<float>& unit, int64_t row, double* output) { return output_of_row(unit, row, output); }
bool output_f64(DecodeUnit<double>& unit, int64_t row, double* output) { return output_of_row(unit, row, output); }

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::cpu {

HWY_EXPORT(sizes_f32);
HWY_EXPORT(sizes_f64);
HWY_EXPORT(statistics_f32);
HWY_EXPORT(statistics_f64);
HWY_EXPORT(apply_f32);
HWY_EXPORT(apply_f64);
HWY_EXPORT(merge_f32);
HWY_EXPORT(merge_f64);
HWY_EXPORT(solve_f32);
HWY_EXPORT(solve_f64);
HWY_EXPORT(output_f32);
HWY_EXPORT(output_f64);

template <>
DecodeSizes decode_sizes<float>(int64_t dim, int64_t value_dim) {
  return HWY_DYNAMIC_DISPATCH(sizes_f32)(dim, value_dim);
}
template <>
DecodeSizes decode_sizes<double>(int64_t dim, int64_t value_dim) {
  return HWY_DYNAMIC_DISPATCH(sizes_f64)(dim, value_dim);
}
template <>
void decode_statistics(DecodeUnit<float>& unit, int64_t span, const DecodeWorker<float>& worker) {
  HWY_DYNAMIC_DISPATCH(statistics_f32)(unit, span, worker);
}
template <>
void decode_statistics(DecodeUnit<double>& unit, int64_t span, const DecodeWorker<double>& worker) {
  HWY_DYNAMIC_DISPATCH(statistics_f64)(unit, span, worker);
}
template <>
void decode_apply(DecodeUnit<float>& unit, int64_t span, const DecodeWorker<float>& worker) {
  HWY_DYNAMIC_DISPATCH(apply_f32)(unit, span, worker);
}
template <>
void decode_apply(DecodeUnit<double>& unit, int64_t span, const DecodeWorker<double>& worker) {
  HWY_DYNAMIC_DISPATCH(apply_f64)(unit, span, worker);
}
template <>
void decode_merge(DecodeUnit<float>& unit, int64_t row, int64_t piece) {
  HWY_DYNAMIC_DISPATCH(merge_f32)(unit, row, piece);
}
template <>
void decode_merge(DecodeUnit<double>& unit, int64_t row, int64_t piece) {
  HWY_DYNAMIC_DISPATCH(merge_f64)(unit, row, piece);
}
template <>
void decode_solve(DecodeUnit<float>& unit, int64_t row) {
  HWY_DYNAMIC_DISPATCH(solve_f32)(unit, row);
}
template <>
void decode_solve(DecodeUnit<double>& unit, int64_t row) {
  HWY_DYNAMIC_DISPATCH(solve_f64)(unit, row);
}
template <>
bool decode_output(DecodeUnit<float>& unit, int64_t row, double* output) {
  return HWY_DYNAMIC_DISPATCH(output_f32)(unit, row, output);
}
template <>
bool decode_output(DecodeUnit<double>& unit, int64_t row, double* output) {
  return HWY_DYNAMIC_DISPATCH(output_f64)(unit, row, output);
}

}  // namespace lla::cpu
#endif
