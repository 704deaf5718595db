// decode-inl.hpp compiled for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_kernel.cpp"
#include "cpu/targets.hpp"
#include "hwy/foreach_target.h"  // after it everything below is seen once per target

#include "cpu/decode_solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

template <class T>
void statistics(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker) {
  return unit.call->problem.given_x() ? steered_sums_of_span(unit, span, worker)
                                      : statistics_of_span(unit, span, worker);
}

template <class T>
DecodeSteps<T> steps_of() {
  return {sizes_of<T>, statistics<T>, merge_piece<T>, solve_row<T>, apply_to_span<T>, output_of_row<T>};
}
DecodeSteps<float> steps_f32() { return steps_of<float>(); }
DecodeSteps<double> steps_f64() { return steps_of<double>(); }

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::cpu {

HWY_EXPORT(steps_f32);
HWY_EXPORT(steps_f64);

template <>
DecodeSteps<float> decode_steps() {
  return HWY_DYNAMIC_DISPATCH(steps_f32)();
}
template <>
DecodeSteps<double> decode_steps() {
  return HWY_DYNAMIC_DISPATCH(steps_f64)();
}

}  // namespace lla::cpu
#endif
