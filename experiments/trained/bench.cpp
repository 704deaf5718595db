// How long a step of every model takes on a GPU (forward, loss, gradients; inside a captured graph), how much of it is
// the attention operator, how far bf16 is from fp32, and which kernels it is made of.
//
//     lla_trained_bench [MODEL...] [--profile FOLDER]
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>

#include "models/model.hpp"
#include "train/graph.hpp"

namespace lla::trained {
namespace {

struct Shape {
  const char* name;
  const char* file;
  int64_t runs, batch, length, asked, vocabulary;  // vocabulary 0: vectors
};
// The language model is asked everywhere; it has few mixers.
constexpr Shape shapes[] = {{"in-context L=256", "in-context", 4, 256, 272, 16, 0},
                            {"recall L=256, 64 pairs", "recall", 3, 256, 256, 64, 8192},
                            {"language model L=1024", "language", 1, 16, 1024, 1024, 256}};

bool is_language(const Shape& shape) { return shape.asked == shape.length; }

ModelConfig config_of(const Shape& shape, Mixer mixer) {
  if (is_language(shape)) return language_config(mixer, shape.length);
  return shape.vocabulary > 0 ? recall_config(mixer, shape.vocabulary, shape.length)
                              : in_context_config(mixer, shape.length);
}

struct Data {
  Batch batch;
  at::Tensor labels, targets;
};

Data make_data(const Shape& shape, int64_t batch, const at::Device& device) {
  Data data;
  const auto whole = at::TensorOptions(device).dtype(at::kLong);
  if (shape.vocabulary > 0) {
    data.batch.tokens = at::randint(shape.vocabulary, {shape.runs, batch, shape.length}, whole);
    if (!is_language(shape)) data.batch.positions = at::randint(shape.length, {shape.runs, batch, shape.asked}, whole);
    data.labels = at::randint(shape.vocabulary, {shape.runs, batch, shape.asked}, whole);
  } else {
    data.batch.inputs = at::randn({shape.runs, batch, shape.length, 64}, whole.dtype(at::kBFloat16));
    data.batch.last = shape.asked;
    data.targets = at::randn({shape.runs, batch, shape.asked, 32}, whole.dtype(at::kFloat));
  }
  return data;
}

at::Tensor loss_of(const Model& model, const StackedParameters& weights, const Data& data) {
  if (data.labels.defined()) return model.losses(weights, model.features(weights, data.batch), data.labels).sum();
  return (model.forward(weights, data.batch).to(at::kFloat) - data.targets).square().flatten(1).mean(1).sum();
}

double milliseconds(const at::Device& device, Replay& replay, int repeats) {
  replay();
  synchronize(device);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) replay();
  synchronize(device);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / repeats;
}

// The attention operators of both layers alone, forward and backward, at the shapes the model gives them.
double attention_milliseconds(const at::Device& device, const Shape& shape, Mixer mixer) {
  if (is_language(shape) || (mixer != Mixer::lla && mixer != Mixer::softmax)) return 0;
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  const int64_t sequences = shape.runs * shape.batch;
  struct Layer {
    at::Tensor q, k, v, ridge, slope;
  };
  std::vector<Layer> layers;
  for (const int64_t rows : {shape.length, shape.vocabulary > 0 ? shape.length : shape.asked}) {
    // Views of one product, as in the model.
    const at::Tensor all = at::randn({sequences, shape.length, 3 * 128}, options) * 0.6;
    const auto part = [&](int64_t i, int64_t count) {
      return all.narrow(1, shape.length - count, count)
          .narrow(2, i * 128, 128)
          .unflatten(2, {2, 64})
          .detach()
          .requires_grad_();
    };
    const at::Tensor ridge = at::rand({sequences, rows, 1, 64}, options.dtype(at::kFloat)).requires_grad_();
    layers.push_back({part(0, rows), part(1, shape.length), part(2, shape.length), ridge,
                      at::randn({sequences, rows, 2, 64}, options)});
  }
  const auto step = [&] {
    for (const Layer& layer : layers) {
      at::Tensor o;
      std::vector<at::Tensor> inputs{layer.q, layer.k, layer.v};
      if (mixer == Mixer::lla) {
        o = lla::torch::attention(layer.q, layer.k, layer.v, layer.ridge.expand({-1, -1, 2, -1}));
        inputs.push_back(layer.ridge);
      } else if (layer.q.size(1) == layer.k.size(1)) {
        o = at::scaled_dot_product_attention(layer.q.transpose(1, 2), layer.k.transpose(1, 2), layer.v.transpose(1, 2),
                                             {}, 0, true)
                .transpose(1, 2);
      } else {
        o = std::get<0>(at::_scaled_dot_product_flash_attention(layer.q.transpose(1, 2), layer.k.transpose(1, 2),
                                                                layer.v.transpose(1, 2), 0, true))
                .transpose(1, 2);
      }
      ::torch::autograd::grad({o}, inputs, {layer.slope});
    }
  };
  const auto replay = make_replay(device, true, step, [] {});
  return milliseconds(device, *replay, 5);
}

void profile(const std::string& file, const std::function<void()>& step, const at::Device& device) {
  namespace profiler = ::torch::autograd::profiler;
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  const std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU, profiler::ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  step();
  synchronize(device);
  const auto result = profiler::disableProfiler();
  std::map<std::string, std::pair<int, double>> kernels;
  for (const auto& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    auto& [count, time] = kernels[event.name()];
    ++count;
    time += static_cast<double>(event.durationNs()) * 1e-3;
  }
  std::vector<std::pair<double, std::string>> sorted;
  for (const auto& [name, sums] : kernels) {
    sorted.emplace_back(sums.second, std::to_string(sums.first) + " x " + name.substr(0, 300));
  }
  std::sort(sorted.rbegin(), sorted.rend());
  std::ofstream out(file);
  for (const auto& [time, name] : sorted) out << static_cast<int64_t>(time) << " us  " << name << "\n";
}

void bench(const Shape& shape, Mixer mixer, const std::string& folder) {
  const at::Device device(at::kCUDA, 0);
  const Model model(config_of(shape, mixer));
  std::vector<at::Tensor> start;
  for (int64_t run = 0; run < shape.runs; ++run) start.push_back(model.init(static_cast<uint64_t>(run)));
  const at::Tensor master = at::stack(start).to(device);

  // bf16 against fp32, on a few sequences.
  double difference = 0;
  {
    const Data few = make_data(shape, 8, device);
    at::Tensor gradients[2] = {at::zeros_like(master), at::zeros_like(master)};
    for (const bool full : {true, false}) {
      const StackedParameters weights(model.parameters(), master, full ? at::kFloat : at::kBFloat16, true);
      weights.gradients(loss_of(model, weights, few), gradients[full]);
    }
    difference = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item<double>();
  }
  const Data data = make_data(shape, shape.batch, device);
  at::Tensor gradient = at::zeros_like(master);
  const auto step = [&] {
    const StackedParameters weights(model.parameters(), master, at::kBFloat16, true);
    weights.gradients(loss_of(model, weights, data), gradient);
  };
  const auto replay = make_replay(device, true, step, [] {});
  const double time = milliseconds(device, *replay, 5);
  const at::Tensor once = gradient.clone();
  (*replay)();
  const bool same = at::equal(once, gradient);
  if (!folder.empty()) {
    profile(folder + "/" + shape.file + "-" + std::string(name(mixer)) + ".txt", step, device);
  }
  const double attention = attention_milliseconds(device, shape, mixer);
  std::printf("%-24s %-15s %8.2f ms  %6.3f a run  attention %7.2f ms  bf16 %.1e  %s\n", shape.name,
              std::string(name(mixer)).c_str(), time, time / static_cast<double>(shape.runs), attention, difference,
              same ? "same bits" : "DIFFERENT BITS");
  std::fflush(stdout);
}

}  // namespace
}  // namespace lla::trained

int main(int argc, char** argv) {
  using namespace lla::trained;
  std::vector<Mixer> mixers;
  std::string folder;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--profile" && i + 1 < argc) {
      folder = argv[++i];
    } else {
      mixers.push_back(mixer_from_name(argv[i]));
    }
  }
  if (mixers.empty()) mixers = all_mixers();
  require_determinism();
  const DeviceScope scope(at::Device(at::kCUDA, 0));
  for (const Mixer mixer : mixers) {
    for (const Shape& shape : shapes) {
      const bool own =
          mixer == Mixer::lla || mixer == Mixer::softmax || mixer == Mixer::parallax || mixer == Mixer::gated_deltanet;
      if (is_language(shape) && !own) continue;
      try {
        bench(shape, mixer, folder);
      } catch (const std::exception& error) {
        std::printf("%s %s: %.300s\n", shape.name, std::string(name(mixer)).c_str(), error.what());
      }
    }
  }
}
