#include "validate/overlap.hpp"

#include <algorithm>
#include <cstdint>

namespace lla::core {
namespace {

constexpr int kPatience = 4096;

// `step` bytes, taken between `least` and `most` times.
struct Term {
  int64_t step, least, most;
};

// Whether some choice of counts makes the terms add up to a target. The terms come largest step first, so each leaves
// the rest only a narrow target: in views made of nested dimensions two or three counts are tried for each.
class Search {
 public:
  void add(int64_t step, int64_t least, int64_t most) {
    for (int i = 0; i < count_; ++i) {
      if (terms_[i].step != step) continue;
      terms_[i].least += least;
      terms_[i].most += most;
      return;
    }
    terms_[count_++] = {step, least, most};
  }

  bool reaches(int64_t target) {
    std::sort(terms_, terms_ + count_, [](const Term& a, const Term& b) { return a.step > b.step; });
    for (int i = count_ - 1; i >= 0; --i) {
      rest_[i] = {rest_[i + 1].least + terms_[i].step * terms_[i].least,
                  rest_[i + 1].most + terms_[i].step * terms_[i].most};
    }
    return reaches(0, target);
  }

 private:
  struct Range {
    int64_t least = 0, most = 0;
  };

  bool reaches(int at, int64_t target) {
    if (target < rest_[at].least || target > rest_[at].most) return false;
    if (at == count_ || ++tried_ > kPatience) return true;  // nothing is left, or nobody waits for the answer
    const Term& t = terms_[at];
    const int64_t first = std::max(t.least, divide_up(target - rest_[at + 1].most, t.step));
    const int64_t last = std::min(t.most, divide_down(target - rest_[at + 1].least, t.step));
    for (int64_t n = first; n <= last; ++n) {
      if (reaches(at + 1, target - n * t.step)) return true;
    }
    return false;
  }

  static int64_t divide_down(int64_t a, int64_t b) { return a / b - (a % b < 0); }
  static int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b > 0); }

  Term terms_[2 * LLA_MAX_DIMS + 1];
  Range rest_[2 * LLA_MAX_DIMS + 2];  // what the terms from here on can add up to
  int count_ = 0;
  int tried_ = 0;
};

}  // namespace

// A checked view that has elements spans less than 2^60 bytes, so nothing here overflows.
Extent extent_of(const Tensor& t) {
  if (t.dtype == LLA_DTYPE_NONE || t.data == nullptr || empty(t)) return {};
  const int64_t width = size_of(static_cast<DType>(t.dtype));
  int64_t bytes = width;
  for (int i = 0; i < t.ndim; ++i) bytes += (t.size[i] - 1) * t.stride[i] * width;
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  return {begin, begin + static_cast<uintptr_t>(bytes)};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const Extent ea = extent_of(a), eb = extent_of(b);
  if (ea.begin == ea.end || eb.begin == eb.end || ea.end <= eb.begin || eb.end <= ea.begin) return false;
  // A byte of a's element is a byte of b's: begin(a) + steps(a) + byte(a) = begin(b) + steps(b) + byte(b).
  const int64_t width_a = size_of(static_cast<DType>(a.dtype)), width_b = size_of(static_cast<DType>(b.dtype));
  Search search;
  search.add(1, -(width_b - 1), width_a - 1);
  for (int i = 0; i < a.ndim; ++i) {
    if (a.size[i] > 1 && a.stride[i] > 0) search.add(a.stride[i] * width_a, 0, a.size[i] - 1);
  }
  for (int i = 0; i < b.ndim; ++i) {
    if (b.size[i] > 1 && b.stride[i] > 0) search.add(b.stride[i] * width_b, -(b.size[i] - 1), 0);
  }
  return search.reaches(static_cast<int64_t>(eb.begin - ea.begin));
}

Status distinct(std::span<const NamedTensor> read, std::span<const NamedTensor> written) {
  struct Placed {
    const NamedTensor* named;
    Extent extent;
  };
  constexpr size_t kMost = 20;  // tensors of a call
  Placed placed[kMost];
  Placed* end = placed;
  const auto place = [&](const NamedTensor& t) {
    if (present(t.tensor) && t.tensor.data != nullptr) *end++ = {&t, extent_of(t.tensor)};
  };
  std::for_each(read.begin(), read.end(), place);
  Placed* const first_written = end;
  std::for_each(written.begin(), written.end(), place);
  for (const Placed* out = first_written; out != end; ++out) {
    for (const Placed* other = placed; other != out; ++other) {
      if (other->extent.end <= out->extent.begin || out->extent.end <= other->extent.begin) continue;
      if (overlap(other->named->tensor, out->named->tensor))
        return invalid(cat(out->named->name, ": is written to, but overlaps ", other->named->name));
    }
  }
  return {};
}

}  // namespace lla::core
