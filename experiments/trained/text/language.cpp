#include "text/language.hpp"

#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <unordered_set>

#include <fmt/core.h>

#include "builtin.hpp"
#include "tasks/settings.hpp"

namespace lla::trained {
namespace {

namespace fs = std::filesystem;
std::unique_ptr<Corpus> loaded;

// .../site-packages, from the libtorch this process runs with: site-packages/torch/lib/libtorch_cpu.so.
fs::path torch_site_packages() {
  Dl_info info;
  const auto* symbol = reinterpret_cast<const void*>(&at::globalContext);
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  return fs::weakly_canonical(info.dli_fname).parent_path().parent_path().parent_path();
}

fs::path python_standard_library() {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(
      ::popen("python3 -c \"import sysconfig; print(sysconfig.get_path('stdlib'))\" 2>/dev/null", "r"), &::pclose);
  char line[4096] = {};
  if (!pipe || std::fgets(line, sizeof line, pipe.get()) == nullptr) return {};
  std::string text(line);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// One window of the test: where it begins, and which of its predictions count.
struct Window {
  int64_t start, first, last;
};

// Windows over text[begin, end): half a window apart, so that every byte but the first is predicted once.
void cover(std::vector<Window>& windows, int64_t begin, int64_t end, int64_t length) {
  const int64_t predictions = end - begin - 1;
  for (int64_t done = 0; done < predictions;) {
    const int64_t start = done == 0 ? 0 : done - length / 2;
    const int64_t last = std::min(predictions, start + length);
    windows.push_back({begin + start, done - start, last - start});
    done = last;
  }
}

struct Sum {
  double bits = 0;
  int64_t bytes = 0;
  Json json() const { return {{"bytes", bytes}, {"bits_per_byte", bytes == 0 ? Json() : Json(bits / double(bytes))}}; }
};

constexpr int64_t kBand = 64;     // positions are put together by as many
constexpr int64_t kRepeated = 8;  // bytes that must have been seen before

}  // namespace

CorpusOptions corpus_options(const Json& settings) {
  Settings s(settings, "corpus");
  CorpusOptions o;
  s.boolean("any", false);
  const auto path = [&](const char* name, fs::path fallback) -> fs::path {
    const auto given = s.list<std::string>(name, {});
    return given.empty() ? fallback : fs::path(given[0]);
  };
  o.site_packages = path("site_packages", torch_site_packages());
  o.standard_library = path("standard_library", {});
  if (o.standard_library.empty()) o.standard_library = python_standard_library();
  o.test_bytes = s.whole("test_bytes", o.test_bytes, 1, int64_t{1} << 40);
  o.most_shared = s.number("most_shared", o.most_shared, 0, 1);
  s.finish();
  return o;
}

Json committed_manifest() { return Json::parse(kManifest); }

void load_corpus(const Json& settings) {
  if (loaded) return;
  auto read = std::make_unique<Corpus>(read_corpus(corpus_options(settings)));
  const bool any = settings.contains("any") && settings["any"] == true;
  const Json wanted = committed_manifest();
  for (const char* part : {"training", "validation", "test"}) {
    if (any || read->manifest[part] == wanted[part]) continue;
    throw Failure(
        fmt::format("the files found here are not those of the committed manifest: {} is {}, not {}; other "
                    "versions of the packages, or of Python. --set corpus.any=true takes them all the same",
                    part, read->manifest[part].dump(), wanted[part].dump()));
  }
  loaded = std::move(read);
}

const Corpus& corpus() {
  if (!loaded) throw Failure("the corpus was not read");
  return *loaded;
}

Layout language_layout(const Json& task_options) {
  Settings s(task_options, "language-model's task");
  Layout layout;
  layout.length = s.whole("length", 1024, 16, 1 << 16);
  s.has("budget");
  s.choice("budget", "steps", {"steps", "time", "control"});
  s.finish();
  layout.vocabulary = 256;
  layout.labels = layout.tail = layout.length;
  return layout;
}

Sources language_sources(const Stack& stack, const at::Device& device) {
  const int64_t length = language_layout(stack.task_options).length;
  Sources s;
  s.training = make_windows(corpus().training, length, device);
  s.validation = make_windows(corpus().validation, length, device);
  return s;
}

std::vector<float> nats_of(const Model& model, const at::Tensor& master, at::ScalarType compute,
                           const std::vector<uint8_t>& text, const std::vector<Window>& windows, int64_t length,
                           const at::Device& device) {
  const at::NoGradGuard no_grad;
  const StackedParameters weights(model.parameters(), master, compute, false);
  const auto size = static_cast<int64_t>(text.size());
  // Beyond the end there is nothing to predict; what stands there is not seen by what comes before.
  at::Tensor bytes = at::zeros({size + length + 1}, at::kByte);
  bytes.narrow(0, 0, size).copy_(at::from_blob(const_cast<uint8_t*>(text.data()), {size}, at::kByte));
  bytes = bytes.to(device);
  std::vector<float> nats(text.size(), 0);
  constexpr size_t kBatch = 32;
  const at::Tensor offsets = at::arange(length + 1, at::TensorOptions(device).dtype(at::kLong));
  for (size_t first = 0; first < windows.size(); first += kBatch) {
    const size_t last = std::min(windows.size(), first + kBatch);
    std::vector<int64_t> starts;
    for (size_t i = first; i < last; ++i) starts.push_back(windows[i].start);
    const at::Tensor at_rows = at::tensor(starts, at::kLong).to(device).unsqueeze(1) + offsets;
    const at::Tensor ids =
        bytes.index_select(0, at_rows.flatten()).view({1, at_rows.size(0), length + 1}).to(at::kLong);
    Labelled labelled;
    labelled.batch.tokens = ids.narrow(-1, 0, length);
    const at::Tensor out = outputs(model, weights, labelled);
    const at::Tensor labels = ids.narrow(-1, 1, length);
    const at::Tensor each = at::log_softmax(out, -1, at::kFloat).gather(-1, labels.unsqueeze(-1)).neg().to(at::kCPU);
    const float* values = each.contiguous().data_ptr<float>();
    for (size_t i = first; i < last; ++i) {
      const Window& w = windows[i];
      for (int64_t p = w.first; p < w.last; ++p) nats[w.start + p + 1] = values[(int64_t(i - first)) * length + p];
    }
  }
  return nats;
}

std::vector<float> nats_of(const Model& model, const at::Tensor& master, at::ScalarType compute,
                           const std::vector<uint8_t>& text, int64_t length, const at::Device& device) {
  std::vector<Window> windows;
  cover(windows, 0, static_cast<int64_t>(text.size()), length);
  return nats_of(model, master, compute, text, windows, length, device);
}

std::function<Json(const Model&, const at::Tensor&, at::ScalarType)> language_evaluation(const Stack& stack,
                                                                                         const at::Device& device) {
  const int64_t length = language_layout(stack.task_options).length;
  return [length, device](const Model& model, const at::Tensor& master, at::ScalarType compute) {
    // Each file after the newline that ends the one before it.
    std::vector<uint8_t> text = {'\n'};
    text.insert(text.end(), corpus().test.begin(), corpus().test.end());
    std::vector<Window> windows;
    std::vector<int64_t> ends;
    int64_t at = 0;
    for (const int64_t bytes : corpus().test_lengths) {
      cover(windows, at, at + bytes + 1, length);
      ends.push_back(at += bytes);
    }
    const std::vector<float> nats = nats_of(model, master, compute, text, windows, length, device);
    const double bit = 1 / std::log(2.0);
    Sum all, repeated, fresh;
    std::vector<Sum> bands((length + kBand - 1) / kBand);
    for (const Window& w : windows) {
      std::unordered_set<uint64_t> seen;
      uint64_t last_eight = 0;
      for (int64_t p = 0; p < w.last; ++p) {
        last_eight = last_eight << 8 | text[w.start + p];
        const bool before = p + 1 >= kRepeated && !seen.insert(last_eight).second;
        if (p < w.first) continue;
        const double bits = nats[w.start + p + 1] * bit;
        for (Sum* sum : {&all, before ? &repeated : &fresh, &bands[p / kBand]}) sum->bits += bits, ++sum->bytes;
      }
    }
    Json files = Json::array(), positions = Json::array();
    for (size_t f = 0, i = 1; f < ends.size(); ++f) {
      Sum sum;
      for (; i <= static_cast<size_t>(ends[f]); ++i) sum.bits += nats[i] * bit, ++sum.bytes;
      files.push_back({sum.bytes, sum.bits});
    }
    for (const Sum& sum : bands) positions.push_back(sum.json());
    return Json{{"test_bits_per_byte", all.bits / double(all.bytes)},
                {"test_files", files},
                {"test_by_position", positions},
                {"test_repeated", repeated.json()},
                {"test_fresh", fresh.json()}};
  };
}

}  // namespace lla::trained
