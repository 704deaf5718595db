// forward-inl.hpp compiled for every SIMD target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward_kernel.cpp"
#include "cpu/targets.hpp"
#include "hwy/foreach_target.h"  // after it everything below is seen once per target

#include "cpu/forward-inl.hpp"
#include "cpu/kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

void forward_f32(const core::ForwardCall& call, const PackedHead<float>& head, int64_t first, int64_t rows,
                 WorkerMemory<float>& m) {
  forward_block(call, head, first, rows, m);
}
void forward_f64(const core::ForwardCall& call, const PackedHead<double>& head, int64_t first, int64_t rows,
                 WorkerMemory<double>& m) {
  forward_block(call, head, first, rows, m);
}
const char* target_name() { return hwy::TargetName(HWY_TARGET); }
PanelWidths widths() { return {kPanel<float>, kPanel<double>}; }

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu/cpu.hpp"

namespace lla::cpu {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_f64);
HWY_EXPORT(target_name);
HWY_EXPORT(widths);

template <>
void run_forward_block(const core::ForwardCall& call, const PackedHead<float>& head, int64_t first_row, int64_t rows,
                       WorkerMemory<float>& memory) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(call, head, first_row, rows, memory);
}
template <>
void run_forward_block(const core::ForwardCall& call, const PackedHead<double>& head, int64_t first_row, int64_t rows,
                       WorkerMemory<double>& memory) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(call, head, first_row, rows, memory);
}

std::string simd_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

PanelWidths panel_widths() { return HWY_DYNAMIC_DISPATCH(widths)(); }

}  // namespace lla::cpu
#endif
