#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdlib>

#include "train/graph.hpp"

namespace lla::trained {
namespace {

class Captured : public Replay {
 public:
  Captured(const std::function<void()>& step, const std::function<void()>& restore) {
    // Libraries choose their algorithms and take their workspaces at the first calls, which a capture does not allow.
    for (int i = 0; i < 3; ++i) step();
    restore();
    c10::cuda::getCurrentCUDAStream().synchronize();
    // Autograd works on threads of its own, other devices on others: only this thread's calls are checked.
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    step();
    graph_.capture_end();
  }
  void operator()() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<Replay> make_replay(const at::Device& device, bool captured, std::function<void()> step,
                                    const std::function<void()>& restore) {
  if (device.is_cuda() && captured) return std::make_unique<Captured>(step, restore);
  return std::make_unique<PlainReplay>(std::move(step));
}

void require_determinism() {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // torch asks for it; its size is the default's
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

int device_count() { return c10::cuda::device_count(); }

std::string device_name(const at::Device& device) {
  return device.is_cuda() ? at::cuda::getDeviceProperties(device.index())->name : "";
}

void synchronize(const at::Device& device) {
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
}

struct DeviceScope::State {
  c10::cuda::CUDAGuard guard;
  c10::cuda::CUDAStreamGuard stream;
  explicit State(const at::Device& device)
      : guard(device), stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}
};

DeviceScope::DeviceScope(const at::Device& device) {
  if (device.is_cuda()) state_ = std::make_unique<State>(device);
}
DeviceScope::~DeviceScope() = default;

}  // namespace lla::trained
