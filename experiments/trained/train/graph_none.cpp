// Built without CUDA's headers: the CPU only.
#include "train/graph.hpp"

namespace lla::trained {

std::unique_ptr<Replay> make_replay(const at::Device&, bool, std::function<void()> step, const std::function<void()>&) {
  return std::make_unique<PlainReplay>(std::move(step));
}
void require_determinism() {}
int device_count() { return 0; }
std::string device_name(const at::Device&) { return ""; }
void synchronize(const at::Device&) {}
struct DeviceScope::State {};
DeviceScope::DeviceScope(const at::Device&) {}
DeviceScope::~DeviceScope() = default;

}  // namespace lla::trained
