#include "train/source.hpp"

#include <algorithm>

#include <fmt/core.h>

#include "common/parallel.hpp"
#include "tasks/draws.hpp"

namespace lla::trained {
namespace {

constexpr uint64_t kOrderPurpose = 0x6f72646572;  // "order": apart from every task's own draws

class Examples : public Source {
 public:
  Examples(const Task& task, std::vector<uint64_t> seeds, Part part, int64_t count, const at::Device& device,
           at::ScalarType dtype, int threads)
      : layout_(task.layout()), seeds_(std::move(seeds)), count_(count) {
    const int64_t all = static_cast<int64_t>(seeds_.size()) * count;
    const auto make = [&](at::Tensor& into, bool wanted, std::vector<int64_t> shape, at::ScalarType type) {
      shape.insert(shape.begin(), all);
      if (wanted) into = at::empty(shape, at::TensorOptions(device).dtype(type));
    };
    make(features_, layout_.features > 0, {layout_.length, layout_.features}, dtype);
    make(ids_, layout_.vocabulary > 0, {layout_.length}, at::kInt);
    make(positions_, true, {layout_.labels}, at::kInt);
    make(targets_, layout_.targets > 0, {layout_.labels, layout_.targets}, at::kFloat);
    make(label_ids_, layout_.targets == 0, {layout_.labels}, at::kInt);
    // Through the host in pieces: a training set is gigabytes.
    constexpr int64_t kPiece = 8192;
    for (size_t s = 0; s < seeds_.size(); ++s) {
      for (int64_t first = 0; first < count; first += kPiece) {
        put(task, seeds_[s], part, first, std::min(kPiece, count - first), static_cast<int64_t>(s) * count, threads);
      }
    }
  }

  int64_t count() const override { return count_; }

  Labelled take(const at::Tensor& rows) const override {
    const at::Tensor flat = rows.flatten();
    const auto pick = [&](const at::Tensor& from) {
      if (!from.defined()) return at::Tensor();
      std::vector<int64_t> shape = rows.sizes().vec();
      for (int64_t i = 1; i < from.dim(); ++i) shape.push_back(from.size(i));
      return from.index_select(0, flat).view(shape);
    };
    const auto whole = [](const at::Tensor& t) { return t.defined() ? t.to(at::kLong) : t; };
    Labelled out;
    out.batch.inputs = pick(features_);
    out.batch.tokens = whole(pick(ids_));
    out.batch.last = layout_.tail;
    if (layout_.tail > layout_.labels) out.places = whole(pick(positions_)) - (layout_.length - layout_.tail);
    out.targets = pick(targets_);
    out.labels = whole(pick(label_ids_));
    return out;
  }

  at::Tensor order(const std::vector<uint64_t>& seeds, int64_t epoch, int64_t steps, int64_t batch) const override {
    const auto runs = static_cast<int64_t>(seeds.size());
    at::Tensor rows = at::empty({steps, runs, batch}, at::kLong);
    int64_t* out = rows.data_ptr<int64_t>();
    std::vector<int64_t> shuffled(count_);
    for (int64_t r = 0; r < runs; ++r) {
      const int64_t base = place(seeds[r]) * count_;
      for (int64_t i = 0; i < count_; ++i) shuffled[i] = base + i;
      Draws(experiments::Stream(seeds[r], static_cast<uint64_t>(epoch), kOrderPurpose)).shuffle(shuffled);
      for (int64_t s = 0; s < steps; ++s) std::copy_n(&shuffled[s * batch], batch, out + (s * runs + r) * batch);
    }
    return rows;
  }

  at::Tensor rows(const std::vector<uint64_t>& seeds, int64_t first, int64_t last) const override {
    std::vector<at::Tensor> each;
    for (const uint64_t seed : seeds) each.push_back(at::arange(first, last, at::kLong) + place(seed) * count_);
    return at::stack(each);
  }

 private:
  int64_t place(uint64_t seed) const { return std::find(seeds_.begin(), seeds_.end(), seed) - seeds_.begin(); }

  void put(const Task& task, uint64_t seed, Part part, int64_t first, int64_t n, int64_t base, int threads) {
    const auto host = [&](const at::Tensor& like, at::ScalarType type) {
      if (!like.defined()) return at::Tensor();
      std::vector<int64_t> shape = like.sizes().vec();
      shape[0] = n;
      return at::empty(shape, type);
    };
    const at::Tensor features = host(features_, at::kFloat), ids = host(ids_, at::kInt),
                     positions = host(positions_, at::kInt), targets = host(targets_, at::kFloat),
                     label_ids = host(label_ids_, at::kInt);
    const auto row = [](const at::Tensor& t, auto* type, int64_t i) {
      using T = std::remove_pointer_t<decltype(type)>;
      return t.defined() ? t.data_ptr<T>() + i * t.stride(0) : nullptr;
    };
    experiments::parallel_for(n, threads, [&](int64_t i, int) {
      task.generate(
          seed, part, first + i,
          {row(features, (float*)nullptr, i), row(ids, (int32_t*)nullptr, i), row(positions, (int32_t*)nullptr, i),
           row(targets, (float*)nullptr, i), row(label_ids, (int32_t*)nullptr, i)});
    });
    const auto copy = [&](at::Tensor& to, const at::Tensor& from) {
      if (to.defined()) to.narrow(0, base + first, n).copy_(from);
    };
    copy(features_, features), copy(ids_, ids), copy(positions_, positions), copy(targets_, targets);
    copy(label_ids_, label_ids);
  }

  Layout layout_;
  std::vector<uint64_t> seeds_;
  int64_t count_;
  at::Tensor features_, ids_, positions_, targets_, label_ids_;
};

class Windows : public Source {
 public:
  Windows(const std::vector<uint8_t>& text, int64_t length, const at::Device& device) : length_(length) {
    bytes_ = at::from_blob(const_cast<uint8_t*>(text.data()), {static_cast<int64_t>(text.size())}, at::kByte).clone();
    bytes_ = bytes_.to(device);
    offsets_ = at::arange(length + 1, at::TensorOptions(device).dtype(at::kLong));
    if (count() < 1) throw Failure(fmt::format("a text of {} bytes has no window of {}", text.size(), length));
  }

  int64_t count() const override { return (bytes_.size(0) - 1) / length_; }

  Labelled take(const at::Tensor& rows) const override {
    std::vector<int64_t> shape = rows.sizes().vec();
    shape.push_back(length_ + 1);
    const at::Tensor ids = bytes_.index_select(0, (rows.unsqueeze(-1) + offsets_).flatten()).view(shape).to(at::kLong);
    Labelled out;
    out.batch.tokens = ids.narrow(-1, 0, length_);
    out.labels = ids.narrow(-1, 1, length_);
    return out;
  }

  at::Tensor order(const std::vector<uint64_t>& seeds, int64_t epoch, int64_t steps, int64_t batch) const override {
    const auto runs = static_cast<int64_t>(seeds.size());
    at::Tensor rows = at::empty({steps, runs, batch}, at::kLong);
    int64_t* out = rows.data_ptr<int64_t>();
    for (int64_t r = 0; r < runs; ++r) {
      Draws draw(experiments::Stream(seeds[r], static_cast<uint64_t>(epoch), kOrderPurpose));
      for (int64_t s = 0; s < steps; ++s) {
        for (int64_t b = 0; b < batch; ++b) out[(s * runs + r) * batch + b] = draw.below(bytes_.size(0) - length_);
      }
    }
    return rows;
  }

  at::Tensor rows(const std::vector<uint64_t>& seeds, int64_t first, int64_t last) const override {
    const at::Tensor one = at::arange(first, last, at::kLong) * length_;
    return one.expand({static_cast<int64_t>(seeds.size()), last - first}).contiguous();
  }

 private:
  int64_t length_;
  at::Tensor bytes_, offsets_;
};

}  // namespace

std::unique_ptr<Source> make_examples(std::shared_ptr<const Task> task, const std::vector<uint64_t>& seeds, Part part,
                                      int64_t count, const at::Device& device, at::ScalarType features, int threads) {
  return std::make_unique<Examples>(*task, seeds, part, count, device, features, threads);
}

std::unique_ptr<Source> make_windows(const std::vector<uint8_t>& text, int64_t length, const at::Device& device) {
  return std::make_unique<Windows>(text, length, device);
}

namespace {

at::Tensor labelled_features(const Model& model, const StackedParameters& weights, const Labelled& labelled,
                             SolveCounts* counts) {
  at::Tensor features = model.features(weights, labelled.batch, counts);
  if (labelled.places.defined()) {
    const at::Tensor places = labelled.places.unsqueeze(-1);
    features = features.gather(2, places.expand({-1, -1, -1, features.size(-1)}));
  }
  return features;
}

}  // namespace

at::Tensor outputs(const Model& model, const StackedParameters& weights, const Labelled& labelled,
                   SolveCounts* counts) {
  return model.head(weights, labelled_features(model, weights, labelled, counts));
}

at::Tensor losses(const Model& model, const StackedParameters& weights, const Labelled& labelled, SolveCounts* counts) {
  const at::Tensor features = labelled_features(model, weights, labelled, counts);
  if (labelled.targets.defined()) return losses(model.head(weights, features), labelled);
  return model.losses(weights, features, labelled.labels);
}

at::Tensor losses(const at::Tensor& outputs, const Labelled& labelled) {
  if (labelled.targets.defined()) {
    return (outputs.to(at::kFloat) - labelled.targets).square().flatten(1).mean(1);
  }
  const at::Tensor chances = at::log_softmax(outputs.flatten(0, -2), -1, at::kFloat);
  const at::Tensor each = at::nll_loss(chances, labelled.labels.flatten(), {}, at::Reduction::None);
  return each.view({outputs.size(0), -1}).mean(1);
}

at::Tensor hits(const at::Tensor& outputs, const Labelled& labelled) {
  return outputs.argmax(-1).eq(labelled.labels).flatten(1).sum(1);
}

}  // namespace lla::trained
