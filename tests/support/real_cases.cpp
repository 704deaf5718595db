#include "support/real_cases.hpp"

#include <map>

#include "data/case_file.hpp"
#include "support/golden.hpp"

namespace lla::test {

std::vector<RealCase> real_cases() {
  std::map<std::string, std::map<std::string, data::CaseArray>> heads;
  for (auto& [name, array] : data::read_case_file(test_data_file("cases.bin"))) {
    const size_t slash = name.find('/');
    heads[name.substr(0, slash)][name.substr(slash + 1)] = std::move(array);
  }
  std::vector<RealCase> cases;
  for (auto& [name, arrays] : heads) {
    const std::vector<int64_t>& size = arrays.at("q").size;
    Spec spec = self_attention(size.at(0), size.at(1));
    spec.dtype = DType::bf16;
    spec.ridge = RidgeShape::token;
    cases.push_back({name,
                     spec,
                     {arrays.at("q").values,
                      arrays.at("k").values,
                      arrays.at("v").values,
                      arrays.at("ridge").values,
                      {},
                      arrays.at("grad_o").values}});
  }
  return cases;
}

Inputs last_rows(const RealCase& head, int64_t rows, int64_t keys) {
  const auto part = [](const std::vector<double>& from, int64_t first, int64_t count, int64_t width) {
    return std::vector<double>(from.begin() + first * width, from.begin() + (first + count) * width);
  };
  Inputs last;
  last.q = part(head.inputs.q, keys - rows, rows, head.spec.dim);
  last.k = part(head.inputs.k, 0, keys, head.spec.dim);
  last.v = part(head.inputs.v, 0, keys, head.spec.value_dim);
  last.ridge = part(head.inputs.ridge, keys - rows, rows, 1);
  return last;
}

}  // namespace lla::test
