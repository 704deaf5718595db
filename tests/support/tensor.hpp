// A tensor of a test: poisoned memory with guard zones, any layout, and a check that nothing outside its elements was
// written.
#pragma once

#include <string>
#include <vector>

#include "lla/lla.hpp"
#include "support/memory.hpp"

namespace lla::test {

// How the elements lie in memory. Every layout but `dense` leaves gaps or reorders, and keeps NaN in the gaps.
enum class Layout {
  dense,
  head_major,  // (B, H, L, C) in memory
  padded,      // rows of odd length at an odd offset, so that nothing is aligned
  scattered,   // channels two elements apart
};
const char* name(Layout layout);

double load_element(const uint8_t* data, DType dtype, int64_t index);
void store_element(uint8_t* data, DType dtype, int64_t index, double value);
// The value as the type holds it.
double rounded(double value, DType dtype);
std::vector<double> rounded(std::vector<double> values, DType dtype);

// A view without memory: sizes and the strides of a layout, for questions. `cuda_device` < 0 means host memory.
lla_tensor described(DType dtype, const std::vector<int64_t>& size, Layout layout, int cuda_device);

class TestTensor {
 public:
  // Absent: the zeroed view.
  TestTensor() = default;
  // An output: poisoned.
  TestTensor(Memory& memory, std::string name, DType dtype, std::vector<int64_t> size, Layout layout = Layout::dense);
  // An input holding `values` in row-major order.
  TestTensor(Memory& memory, std::string name, DType dtype, std::vector<int64_t> size, Layout layout,
             const std::vector<double>& values);

  const lla_tensor& view() const { return view_; }
  std::vector<double> values() const;  // row-major
  // Adds a test failure where a byte outside the elements of an output changed, or any byte of an input.
  void expect_intact() const;
  // Adds a test failure if any byte of an output changed.
  void expect_untouched() const;

 private:
  std::vector<int64_t> offsets() const;  // of each element, row-major

  std::string name_;
  lla_tensor view_{};
  int64_t first_ = 0;  // offset of the first element in the buffer
  std::unique_ptr<GuardedBuffer> buffer_;
  std::vector<uint8_t> uploaded_;  // what an input held at the start
};

}  // namespace lla::test
