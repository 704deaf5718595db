// One step, replayed: a captured CUDA graph where there is a GPU and this program was built with CUDA's headers, plain
// calls elsewhere. The same function is called either way.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "torch.hpp"

namespace lla::trained {

class Replay {
 public:
  virtual ~Replay() = default;
  virtual void operator()() = 0;
};

// Calls the step again.
class PlainReplay : public Replay {
 public:
  explicit PlainReplay(std::function<void()> step) : step_(std::move(step)) {}
  void operator()() override { step_(); }

 private:
  std::function<void()> step_;
};

// Calls `step` a few times to warm up and once to capture it; the caller restores whatever the warm-up changed, in
// `restore`, which is called before the capture. On the CPU, or with `captured` false, nothing is called here.
std::unique_ptr<Replay> make_replay(const at::Device& device, bool captured, std::function<void()> step,
                                    const std::function<void()>& restore);

// The same bits from the same inputs, from now on and in the whole process: some of torch's kernels (the gradient of its
// attention over several blocks of keys) add in whatever order they come to unless told otherwise. Before the first call
// of cuBLAS.
void require_determinism();

// Devices and their names; none without CUDA.
int device_count();
std::string device_name(const at::Device& device);
void synchronize(const at::Device& device);
// Makes `device` the current one of this thread, on a stream of its own that captures are made on.
class DeviceScope {
 public:
  explicit DeviceScope(const at::Device& device);
  ~DeviceScope();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lla::trained
