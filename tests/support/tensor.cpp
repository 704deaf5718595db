#include "support/tensor.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "core/convert.hpp"
#include "core/text.hpp"

namespace lla::test {
namespace {

int64_t count(const std::vector<int64_t>& size) {
  return std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>());
}

// Strides for the layout, and the number of elements of memory they need.
int64_t set_strides(lla_tensor& t, Layout layout, int64_t first) {
  std::vector<int> order(static_cast<size_t>(t.ndim));  // outermost first
  std::iota(order.begin(), order.end(), 0);
  if (layout == Layout::head_major && t.ndim >= 3) std::swap(order[order.size() - 3], order[order.size() - 2]);
  const int64_t gap = layout == Layout::padded ? 3 : 0;
  int64_t stride = layout == Layout::scattered ? 2 : 1;
  for (size_t i = order.size(); i-- > 0;) {
    t.stride[order[i]] = stride;
    stride = stride * std::max<int64_t>(t.size[order[i]], 1) + gap;
  }
  return first + stride;
}

}  // namespace

const char* name(Layout layout) {
  switch (layout) {
    case Layout::dense: return "dense";
    case Layout::head_major: return "head-major";
    case Layout::padded: return "padded";
    case Layout::scattered: return "scattered";
  }
  return "?";
}

double load_element(const uint8_t* data, DType dtype, int64_t index) {
  return dtype == DType::i32 ? reinterpret_cast<const int32_t*>(data)[index] : core::load(data, dtype, index);
}

void store_element(uint8_t* data, DType dtype, int64_t index, double value) {
  if (dtype == DType::i32) {
    reinterpret_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
  } else {
    core::store(data, dtype, index, value);
  }
}

double rounded(double value, DType dtype) {
  double storage = 0;
  core::store(&storage, dtype, 0, value);
  return core::load(&storage, dtype, 0);
}

std::vector<double> rounded(std::vector<double> values, DType dtype) {
  for (double& value : values) value = rounded(value, dtype);
  return values;
}

lla_tensor described(DType dtype, const std::vector<int64_t>& size, Layout layout, int cuda_device) {
  lla_tensor t{};
  t.dtype = static_cast<int32_t>(dtype);
  t.device_type = cuda_device < 0 ? LLA_CPU : LLA_CUDA;
  t.device_index = std::max(0, cuda_device);
  t.ndim = static_cast<int32_t>(size.size());
  std::copy(size.begin(), size.end(), t.size);
  set_strides(t, layout, 0);
  return t;
}

TestTensor::TestTensor(Memory& memory, std::string name, DType dtype, std::vector<int64_t> size, Layout layout)
    : name_(std::move(name)),
      view_(described(dtype, size, layout, memory.cuda_device())),
      first_(layout == Layout::padded ? 1 : 0) {
  const int64_t elements = set_strides(view_, layout, first_);
  const size_t width = static_cast<size_t>(core::size_of(dtype));
  buffer_ = std::make_unique<GuardedBuffer>(memory, count(size) == 0 ? 0 : static_cast<size_t>(elements) * width);
  view_.data = static_cast<uint8_t*>(buffer_->data()) + static_cast<size_t>(first_) * width;
}

TestTensor::TestTensor(Memory& memory, std::string name, DType dtype, std::vector<int64_t> size, Layout layout,
                       const std::vector<double>& values)
    : TestTensor(memory, std::move(name), dtype, size, layout) {
  const std::vector<int64_t> at = offsets();
  if (at.size() != values.size())
    ADD_FAILURE() << name_ << ": " << values.size() << " values for " << at.size() << " elements";
  uploaded_ = buffer_->read();
  for (size_t i = 0; i < at.size(); ++i) store_element(uploaded_.data(), dtype, at[i], values[i]);
  buffer_->write(uploaded_);
}

std::vector<int64_t> TestTensor::offsets() const {
  std::vector<int64_t> at(1, first_);
  for (int d = 0; d < view_.ndim; ++d) {
    std::vector<int64_t> next;
    next.reserve(at.size() * static_cast<size_t>(view_.size[d]));
    for (int64_t base : at) {
      for (int64_t i = 0; i < view_.size[d]; ++i) next.push_back(base + i * view_.stride[d]);
    }
    at = std::move(next);
  }
  return at;
}

std::vector<double> TestTensor::values() const {
  if (!buffer_) return {};
  const std::vector<uint8_t> bytes = buffer_->read();
  std::vector<double> result;
  for (int64_t at : offsets()) result.push_back(load_element(bytes.data(), static_cast<DType>(view_.dtype), at));
  return result;
}

void TestTensor::expect_intact() const {
  if (!buffer_) return;
  EXPECT_TRUE(buffer_->guards_intact()) << name_ << ": written outside its memory";
  std::vector<uint8_t> now = buffer_->read();
  if (!uploaded_.empty()) {
    EXPECT_TRUE(now == uploaded_) << name_ << ": an input was changed";
    return;
  }
  const int64_t width = core::size_of(static_cast<DType>(view_.dtype));
  for (int64_t at : offsets()) std::memset(now.data() + at * width, kPoison, static_cast<size_t>(width));
  EXPECT_TRUE(std::all_of(now.begin(), now.end(), [](uint8_t b) { return b == kPoison; }))
      << name_ << ": written between its elements";
}

void TestTensor::expect_untouched() const {
  if (!buffer_) return;
  const std::vector<uint8_t> now = buffer_->read();
  EXPECT_TRUE(std::all_of(now.begin(), now.end(), [](uint8_t b) { return b == kPoison; }))
      << name_ << ": was written to";
  EXPECT_TRUE(buffer_->guards_intact()) << name_ << ": written outside its memory";
}

}  // namespace lla::test
