#include "train/checkpoint.hpp"

#include <cstring>
#include <fstream>
#include <iterator>

#include <fmt/core.h>

#include "text/digest.hpp"

namespace lla::trained {
namespace {

using experiments::Failure;
using experiments::Json;

constexpr std::string_view kMagic = "lla checkpoint 1";  // 16 bytes

const std::map<std::string, at::ScalarType> kTypes = {{"f32", at::kFloat}, {"f64", at::kDouble}, {"i64", at::kLong}};

std::string type_name(at::ScalarType type) {
  for (const auto& [name, value] : kTypes) {
    if (value == type) return name;
  }
  throw Failure("a checkpoint holds f32, f64 and i64 only");
}

}  // namespace

// magic, length of the head (8 bytes), head (JSON), the tensors' bytes, SHA-256 of all before (64 hexadecimal digits).
void write_checkpoint(const experiments::fs::path& path, const Checkpoint& checkpoint) {
  Json head = {{"state", checkpoint.state}, {"tensors", Json::array()}};
  std::string data;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
    head["tensors"].push_back({{"name", name}, {"type", type_name(host.scalar_type())}, {"shape", host.sizes().vec()}});
    data.append(static_cast<const char*>(host.data_ptr()), host.nbytes());
  }
  const std::string text = head.dump();
  const uint64_t length = text.size();
  std::string file(kMagic);
  file.append(reinterpret_cast<const char*>(&length), sizeof length);
  file += text;
  file += data;
  file += sha256(file);
  experiments::fs::create_directories(path.parent_path());
  experiments::write_atomically(path, file);
}

Checkpoint read_checkpoint(const experiments::fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(in), {}};
  const auto damaged = [&] {
    return Failure(
        fmt::format("{} is damaged or no checkpoint of this program; move it away to begin anew", path.string()));
  };
  const size_t fixed = kMagic.size() + sizeof(uint64_t), tail = 64;
  if (file.size() < fixed + tail || std::string_view(file).substr(0, kMagic.size()) != kMagic) throw damaged();
  const size_t end = file.size() - tail;
  if (sha256(std::string_view(file).substr(0, end)) != std::string_view(file).substr(end)) throw damaged();
  uint64_t length;
  std::memcpy(&length, file.data() + kMagic.size(), sizeof length);
  const Json head = Json::parse(file.begin() + fixed, file.begin() + fixed + length);
  Checkpoint out{head["state"], {}};
  size_t at = fixed + length;
  for (const Json& entry : head["tensors"]) {
    const at::Tensor tensor =
        at::empty(entry["shape"].get<std::vector<int64_t>>(), kTypes.at(entry["type"].get<std::string>()));
    if (at + tensor.nbytes() > end) throw damaged();
    std::memcpy(tensor.data_ptr(), file.data() + at, tensor.nbytes());
    at += tensor.nbytes();
    out.tensors[entry["name"]] = tensor;
  }
  return out;
}

}  // namespace lla::trained
