// The models: every layer against a plain recurrence in fp64, gradients too, over several chunks and a ragged end; runs
// stacked against alone; the same bits twice; sizes.
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>

#include "models/blocks.hpp"
#include "models/chunks.hpp"
#include "models/model.hpp"
#include "recurrences.hpp"

namespace lla::trained {
namespace {

using at::Tensor;

// One thread: the tensors are small, and threads that wait for each other on a busy machine take a hundred times as
// long.
const int one_thread = (at::set_num_threads(1), 1);

double distance(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().to(at::kDouble), y = b.detach().to(at::kDouble);
  EXPECT_EQ(x.sizes(), y.sizes());
  return ((x - y).norm() / (y.norm() + 1e-300)).item<double>();
}

Tensor random(at::IntArrayRef size, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(size, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

// Far from initialisation, where gains are one and biases zero: nothing may hide there.
Tensor random_weights(const ParameterTable& table, int64_t runs, uint64_t seed) {
  std::vector<Tensor> rows;
  for (int64_t run = 0; run < runs; ++run) rows.push_back(table.init(seed + static_cast<uint64_t>(run)));
  Tensor master = at::stack(rows).to(at::kDouble);
  for (const Parameter& parameter : table.all()) {
    Tensor part = master.narrow(1, parameter.offset, parameter.size);
    part.add_(random(part.sizes(), seed + 100 + static_cast<uint64_t>(parameter.offset)), 0.1);
  }
  return master;
}

struct Case {
  const char* name;
  ModelConfig config;
  int64_t length, rows;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " L" << c.length << " rows " << c.rows; }

ModelConfig small(Mixer mixer) {
  ModelConfig config;
  config.mixer = mixer;
  config.width = 16;
  config.heads = 2;
  config.input_width = 6;
  config.output_width = 3;
  config.max_length = 24;
  config.state_width = 6;
  config.hyena_filter_width = 8;
  config.mesa_iterations = 24;
  config.init_std = 0.4;
  config.chunk = 4;
  return config;
}

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&](const char* name, const ModelConfig& config) {
    // Several chunks and a ragged end; whole chunks; less than a chunk. All rows and the last few.
    for (const auto& [length, rows] :
         {std::pair<int64_t, int64_t>{11, 11}, {11, 2}, {11, 6}, {12, 12}, {12, 3}, {3, 3}, {1, 1}}) {
      list.push_back({name, config, length, rows});
    }
  };
  for (const Mixer mixer : all_mixers()) {
    add(name(mixer).data(), small(mixer));
    ModelConfig config = small(mixer);
    if (mixer == Mixer::lla) {
      config.ridge = Ridge::per_head;
      config.ridge_min = 1e-3;
      config.ridge_bias = true;
      add("lla per head", config);
      config = small(mixer);
      config.ridge_form = RidgeForm::softplus;
      add("lla softplus", config);
      config = small(mixer);
      config.ridge = Ridge::infinite;
      add("lla infinite", config);
      config = small(mixer);
    }
    if (mixer == Mixer::lla || mixer == Mixer::softmax || mixer == Mixer::parallax) {
      config.positions = Positions::rope;
      config.qk_norm = true;
      add("rope", config);
      continue;
    }
    config.short_convolution = config.feature_map = true;
    if (mixer != Mixer::hyena && mixer != Mixer::mamba2) {
      config.output_gate = true;
      config.key_ratio = 0.5;
      config.value_ratio = 1.5;
    }
    add("all options", config);
    // Chunks beyond one block of the triangular inverse.
    config = small(mixer);
    config.chunk = 20;
    config.max_length = 45;
    list.push_back({"long", config, 45, 45});
  }
  return list;
}

class Recurrences : public ::testing::TestWithParam<Case> {};

TEST_P(Recurrences, OutputsAndGradients) {
  const auto& [name, config, length, rows] = GetParam();
  constexpr int64_t runs = 2, batch = 2;
  const Model model(config);
  const ParameterTable& table = model.parameters();
  const Tensor master = random_weights(table, runs, 7);
  const StackedParameters weights(table, master, at::kDouble, true);
  std::unique_ptr<Mixing> mixing;
  switch (config.mixer) {
    case Mixer::mamba2: mixing = make_mamba2(config, "layer0."); break;
    case Mixer::gla: mixing = make_gla(config, "layer0."); break;
    case Mixer::hyena: mixing = make_hyena(config, "layer0."); break;
    case Mixer::gated_deltanet: mixing = make_gated_deltanet(config, "layer0."); break;
    case Mixer::mesanet: mixing = make_mesanet(config, "layer0."); break;
    case Mixer::linear: mixing = make_linear(config, "layer0."); break;
    default: mixing = make_attention(config, "layer0.");
  }
  const Tensor x = random({runs, batch * length, config.width}, 3).requires_grad_();
  const Tensor out_grad = random({runs, batch * rows, config.width}, 4);
  const Tensor got = mixing->mix({weights, runs, batch, length, rows}, x, weights["layer0.gain"]);
  Tensor gradient = at::full_like(master, NAN);
  const Tensor x_gradient = ::torch::autograd::grad({(got * out_grad).sum()}, {x}, {}, /*retain_graph=*/true)[0];
  weights.gradients((got * out_grad).sum(), gradient);

  const StackedParameters plain(table, master, at::kDouble, true);
  const Tensor plain_x = x.detach().clone().requires_grad_();
  std::vector<Tensor> sequences;
  for (int64_t run = 0; run < runs; ++run) {
    for (int64_t b = 0; b < batch; ++b) {
      const Lookup lookup = [&](const std::string& part) { return plain["layer0." + part][run]; };
      const Tensor gained = plain_x[run].narrow(0, b * length, length) * lookup("gain");
      sequences.push_back(step_by_step(config, lookup, gained).narrow(0, length - rows, rows));
    }
  }
  const Tensor expected = at::stack(sequences).view({runs, batch * rows, config.width});
  Tensor expected_gradient = at::full_like(master, NAN);
  const Tensor expected_x = ::torch::autograd::grad({(expected * out_grad).sum()}, {plain_x}, {}, true)[0];
  plain.gradients((expected * out_grad).sum(), expected_gradient);

  constexpr double tolerance = 1e-9;
  EXPECT_LT(distance(got, expected), tolerance);
  EXPECT_LT(distance(x_gradient, expected_x), tolerance);
  for (const Parameter& parameter : table.all()) {
    if (parameter.name.rfind("layer0.", 0) != 0) continue;
    const Tensor expected_part = expected_gradient.narrow(1, parameter.offset, parameter.size);
    const Tensor part = gradient.narrow(1, parameter.offset, parameter.size);
    const double scale = expected_gradient.abs().max().item<double>();
    EXPECT_LT((part - expected_part).abs().max().item<double>(), tolerance * scale) << parameter.name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Recurrences, ::testing::ValuesIn(cases()));

// ---- Whole models ----

struct Step {
  Tensor output, gradient;
};

Step step(const Model& model, const Tensor& master, const Batch& batch, at::ScalarType dtype,
          SolveCounts* counts = nullptr) {
  const StackedParameters weights(model.parameters(), master, dtype, true);
  const Tensor output = model.forward(weights, batch, counts);
  Tensor gradient = at::full_like(master, NAN);
  const Tensor target = random(output.sizes(), 9, output.scalar_type()).to(output.device());
  weights.gradients((output - target).pow(2).mean(std::vector<int64_t>{1, 2, 3}).sum(), gradient);
  return {output.detach(), gradient};
}

ModelConfig token_model(Mixer mixer) {
  ModelConfig config = small(mixer);
  config.input_width = config.output_width = 0;
  config.vocabulary = 40;
  config.positions = Positions::learned;
  config.init_std = 0;
  return config;
}

Batch token_batch(int64_t runs, int64_t length) {
  Batch batch;
  batch.tokens = (random({runs, 3, length}, 5).abs() * 20).to(at::kLong).remainder(40);
  batch.positions = (random({runs, 3, 4}, 6).abs() * 20).to(at::kLong).remainder(length);
  return batch;
}

Batch vector_batch(int64_t runs, int64_t length, at::ScalarType dtype = at::kFloat) {
  Batch batch;
  batch.inputs = random({runs, 3, length, 6}, 5, dtype);
  batch.last = 3;
  return batch;
}

class Models : public ::testing::TestWithParam<Mixer> {};

TEST_P(Models, StackedRunsAreTheRunsAlone) {
  constexpr int64_t runs = 3;
  for (const bool tokens : {false, true}) {
    const Model model(tokens ? token_model(GetParam()) : small(GetParam()));
    const Tensor master = random_weights(model.parameters(), runs, 2).to(at::kFloat);
    const Batch batch = tokens ? token_batch(runs, 11) : vector_batch(runs, 11);
    const Step all = step(model, master, batch, at::kFloat);
    for (int64_t run = 0; run < runs; ++run) {
      Batch own = batch;
      for (Tensor* part : {&own.tokens, &own.inputs, &own.positions}) {
        if (part->defined()) *part = part->narrow(0, run, 1);
      }
      const StackedParameters weights(model.parameters(), master.narrow(0, run, 1), at::kFloat, true);
      const Tensor output = model.forward(weights, own);
      Tensor gradient = at::full({1, master.size(1)}, NAN);
      const Tensor target = random(all.output.sizes(), 9, at::kFloat).narrow(0, run, 1);
      weights.gradients((output - target).pow(2).mean(), gradient);
      EXPECT_LT(distance(output, all.output.narrow(0, run, 1)), 1e-5);
      EXPECT_LT(distance(gradient, all.gradient.narrow(0, run, 1)), 1e-4);
    }
  }
}

TEST_P(Models, SameBitsTwice) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool tokens : {false, true}) {
      const Model model(tokens ? token_model(GetParam()) : small(GetParam()));
      const Tensor master = at::stack({model.init(1), model.init(2)});
      EXPECT_TRUE(at::equal(master, at::stack({model.init(1), model.init(2)})));
      const Batch batch = tokens ? token_batch(2, 13) : vector_batch(2, 13);
      const Step once = step(model, master, batch, dtype), again = step(model, master, batch, dtype);
      EXPECT_TRUE(at::equal(once.output, again.output));
      EXPECT_TRUE(at::equal(once.gradient, again.gradient));
      EXPECT_TRUE(once.gradient.isfinite().all().item<bool>());
    }
  }
}

TEST_P(Models, OutputsWhereAskedAreThoseOfEveryPosition) {
  const Model vectors(small(GetParam())), words(token_model(GetParam()));
  Batch batch = vector_batch(2, 11, at::kDouble);
  const Tensor master = random_weights(vectors.parameters(), 2, 2),
               word_master = random_weights(words.parameters(), 2, 2);
  const Tensor few = step(vectors, master, batch, at::kDouble).output;
  batch.last = 0;
  EXPECT_LT(distance(few, step(vectors, master, batch, at::kDouble).output.narrow(2, 8, 3)), 1e-11);

  Batch labelled = token_batch(2, 11);
  const Tensor at_labels = step(words, word_master, labelled, at::kDouble).output;
  const Tensor places = labelled.positions.unsqueeze(-1).expand({-1, -1, -1, at_labels.size(3)});
  labelled.positions = Tensor();
  EXPECT_LT(distance(at_labels, step(words, word_master, labelled, at::kDouble).output.gather(2, places)), 1e-11);
}

TEST_P(Models, NothingComesFromTheFuture) {
  const Model model(small(GetParam()));
  const Tensor master = random_weights(model.parameters(), 1, 2);
  const StackedParameters weights(model.parameters(), master, at::kDouble, false);
  Batch batch;
  batch.inputs = random({1, 2, 11, 6}, 5);
  const Tensor before = model.forward(weights, batch);
  batch.inputs.narrow(2, 7, 4).add_(1);
  const Tensor after = model.forward(weights, batch);
  EXPECT_LT(distance(after.narrow(2, 0, 7), before.narrow(2, 0, 7)), 1e-12);
  EXPECT_GT(distance(after.narrow(2, 7, 1), before.narrow(2, 7, 1)), 1e-6);
}

// bf16 follows fp64 at the size of the experiments, in several chunks.
TEST_P(Models, Bf16FollowsFp64) {
  ModelConfig config = in_context_config(GetParam(), 80);
  const Model model(config);
  const Tensor master = at::stack({model.init(1), model.init(2)});
  Batch batch;
  batch.inputs = random({2, 2, 80, 64}, 5);
  batch.last = 16;
  const Step exact = step(model, master.to(at::kDouble), batch, at::kDouble);
  const Step rounded = step(model, master, batch, at::kBFloat16);
  EXPECT_LT(distance(rounded.output, exact.output), 0.03);
  EXPECT_LT(distance(rounded.gradient, exact.gradient), 0.06);
}

// The same on a GPU, where norms and the loss are kernels of their own.
TEST_P(Models, GpuFollowsFp64) {
  if (!at::globalContext().hasCUDA() || at::detail::getCUDAHooks().deviceCount() == 0) GTEST_SKIP() << "no GPU";
  const at::Device gpu(at::kCUDA, 0);
  const Model vectors(in_context_config(GetParam(), 80)), words(recall_config(GetParam(), 1024, 80));
  for (const bool tokens : {false, true}) {
    const Model& model = tokens ? words : vectors;
    const Tensor master = at::stack({model.init(1), model.init(2)});
    Batch batch;
    const Tensor labels = (random({2, 3, 5}, 6).abs() * 300).to(at::kLong).remainder(1024);
    if (tokens) {
      batch.tokens = (random({2, 3, 80}, 5).abs() * 300).to(at::kLong).remainder(1024);
      batch.positions = (random({2, 3, 5}, 7).abs() * 40).to(at::kLong).remainder(80);
    } else {
      batch.inputs = random({2, 3, 80, 64}, 5);
      batch.last = 16;
    }
    const auto gradient_on = [&](const at::Device& device, at::ScalarType dtype, at::ScalarType master_type) {
      const Tensor own = master.to(device, master_type);
      Batch moved = batch;
      for (Tensor* part : {&moved.tokens, &moved.inputs, &moved.positions}) {
        if (part->defined()) *part = part->to(device);
      }
      if (!tokens) return step(model, own, moved, dtype).gradient.cpu();
      const StackedParameters weights(model.parameters(), own, dtype, true);
      Tensor gradient = at::full_like(own, NAN);
      weights.gradients(model.losses(weights, model.features(weights, moved), labels.to(device)).sum(), gradient);
      return gradient.cpu();
    };
    const Tensor exact = gradient_on(at::kCPU, at::kDouble, at::kDouble);
    const Tensor ours = gradient_on(gpu, at::kBFloat16, at::kFloat);
    // Linear attention's normed output has no bound on its gradient where q.k is near zero.
    const bool unbounded = tokens && (GetParam() == Mixer::linear || GetParam() == Mixer::gla);
    if (!unbounded) {
      EXPECT_LT(distance(ours, exact), 0.06) << tokens;
    }
    EXPECT_TRUE(at::equal(ours, gradient_on(gpu, at::kBFloat16, at::kFloat)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Models, ::testing::ValuesIn(all_mixers()),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(Lla, StatusesAreCountedForwardAndBackward) {
  ModelConfig config = small(Mixer::lla);
  const Model model(config);
  SolveCounts counts;
  const Tensor master = at::stack({model.init(1), model.init(2)});
  Batch batch = vector_batch(2, 11);
  batch.inputs[1][0][10].fill_(NAN);
  step(model, master, batch, at::kFloat, &counts);
  const Tensor sums = counts.count(2, at::kCPU);
  // The first layer has 3 * 11 rows, the last 3 * 3, each for 2 heads.
  const int64_t rows = 3 * 2 * (11 + 3);
  EXPECT_TRUE(at::equal(sums.sum(-1), at::full({2, 2}, rows, at::kLong))) << sums;
  EXPECT_EQ(sums[0][0][0].item<int64_t>(), rows);
  EXPECT_GT(sums[0][1][3].item<int64_t>(), 0) << "rows with a NaN must be counted as such: " << sums;
}

TEST(Lla, InfiniteRidgeIsSoftmax) {
  ModelConfig config = small(Mixer::lla);
  config.ridge = Ridge::infinite;
  const Model model(config), softmax(small(Mixer::softmax));
  const Tensor master = random_weights(softmax.parameters(), 2, 2);
  ASSERT_EQ(model.parameters().total(), softmax.parameters().total());
  const Step ours = step(model, master, vector_batch(2, 11, at::kDouble), at::kDouble);
  const Step theirs = step(softmax, master, vector_batch(2, 11, at::kDouble), at::kDouble);
  EXPECT_LT(distance(ours.output, theirs.output), 1e-10);
  EXPECT_LT(distance(ours.gradient, theirs.gradient), 1e-10);
}

// lambda anywhere in (0, 1), floor or none: everything stays finite.
TEST(Lla, FiniteForAnyRidge) {
  for (const double bias : {-1000.0, -80.0, -30.0, -12.0, 0.0, 30.0, 1000.0}) {
    for (const double floor : {0.0, 1e-3}) {
      ModelConfig config = in_context_config(Mixer::lla, 80);
      config.ridge_bias = true;
      config.ridge_min = floor;
      const Model model(config);
      Tensor master = model.init(1).unsqueeze(0);
      for (const Parameter& parameter : model.parameters().all()) {
        if (parameter.name.find("ridge_bias") != std::string::npos) {
          master.narrow(1, parameter.offset, parameter.size).fill_(bias);
        }
      }
      Batch batch;
      batch.inputs = random({1, 2, 80, 64}, 5);
      batch.last = 16;
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const Step result = step(model, master, batch, dtype);
        EXPECT_TRUE(result.output.isfinite().all().item<bool>()) << bias << " " << floor;
        EXPECT_TRUE(result.gradient.isfinite().all().item<bool>()) << bias << " " << floor;
      }
    }
  }
}

// Decays so strong that a position forgets everything before it, and none at all.
TEST(Decays, ExtremesStayFinite) {
  for (const Mixer mixer : {Mixer::gla, Mixer::mamba2, Mixer::gated_deltanet, Mixer::mesanet}) {
    const char* bias = mixer == Mixer::gla ? "decay_bias" : "step_bias";
    for (const double value : {-60.0, 60.0}) {
      const Model model(in_context_config(mixer, 80));
      Tensor master = model.init(1).unsqueeze(0);
      for (const Parameter& parameter : model.parameters().all()) {
        if (parameter.name.find(bias) != std::string::npos) {
          master.narrow(1, parameter.offset, parameter.size).fill_(value);
        }
      }
      Batch batch;
      batch.inputs = random({1, 2, 80, 64}, 5);
      const Step result = step(model, master, batch, at::kFloat),
                 exact = step(model, master.to(at::kDouble), batch, at::kDouble);
      EXPECT_LT(distance(result.output, exact.output), 1e-4) << name(mixer) << " " << value;
      EXPECT_LT(distance(result.gradient, exact.gradient), 1e-3) << name(mixer) << " " << value;
    }
  }
}

// The language model's form on what text has: one byte over and over, where all keys of a chunk are equal, a short
// period, a line repeated. What bf16 carries from chunk to chunk stays near fp64's.
TEST(GatedDeltaNet, Bf16FollowsFp64WhereTextRepeats) {
  constexpr int64_t length = 1000;  // many chunks, the last with padding
  ModelConfig config = language_config(Mixer::gated_deltanet, length);
  config.layers = 1;
  const Model model(config);
  Tensor master = model.init(1).unsqueeze(0).to(at::kDouble);
  // As of a trained model: strengths and decays that depend on the byte, some heads that forget nothing.
  for (const Parameter& parameter : model.parameters().all()) {
    Tensor part = master.narrow(1, parameter.offset, parameter.size);
    if (parameter.name == "layer0.in") part.mul_(4);
    if (parameter.name == "layer0.step_bias") part.narrow(1, 0, 2).fill_(-20);
  }
  for (const int64_t period : {1, 2, 61, 997}) {
    Batch batch;
    batch.tokens = (at::arange(length, at::kLong).remainder(period) * 37 + 32).remainder(256).view({1, 1, length});
    const auto run = [&](at::ScalarType dtype) {
      const StackedParameters weights(model.parameters(), master.to(dtype == at::kDouble ? dtype : at::kFloat), dtype,
                                      false);
      return model.forward(weights, batch).to(at::kDouble).view({length, -1});
    };
    const Tensor exact = run(at::kDouble), rounded = run(at::kBFloat16);
    EXPECT_LT(distance(run(at::kFloat), exact), 1e-4) << period;
    // The end of the window as its beginning: nothing builds up.
    for (const int64_t first : {int64_t{0}, length / 2}) {
      EXPECT_LT(distance(rounded.narrow(0, first, length / 2), exact.narrow(0, first, length / 2)), 0.08)
          << period << " from " << first;
    }
  }
}

TEST(Chunks, TriangularInverse) {
  for (const int64_t size : {1, 7, 16, 17, 64, 68, 128}) {
    // Equal keys, full strength: the case in which powers grow most.
    const Tensor ones = at::ones({2, size, size}).tril(-1),
                 drawn = random({2, 3, size, size}, 1, at::kFloat).tanh().tril(-1) * 0.3;
    for (const Tensor& lower : {ones, drawn}) {
      const Tensor matrix = lower.to(at::kDouble) + at::eye(size, at::kDouble);
      EXPECT_LT(distance(unit_lower_inverse(lower, at::kFloat), at::linalg_inv(matrix)), 1e-4) << size;
    }
  }
}

TEST(Chunks, SizesArePaddedLittleAndAligned) {
  EXPECT_EQ(make_chunks(272, 64).size, 56);
  EXPECT_EQ(make_chunks(1024, 64).size, 64);
  EXPECT_EQ(make_chunks(40, 64).count, 1);
  EXPECT_EQ(make_chunks(130, 64).size, 72);
  EXPECT_EQ(make_chunks(101, 64).padding(), 11);
  EXPECT_EQ(make_chunks(272, 32).size, 32);
}

// Head and loss in one against torch's own, values and gradients; a label that is all but certain too.
TEST(LabelLosses, IsCrossEntropy) {
  for (const bool tied : {true, false}) {
    ModelConfig config = token_model(Mixer::softmax);
    config.tied_head = tied;
    const Model model(config);
    Tensor master = random_weights(model.parameters(), 2, 3);
    master.narrow(1, model.parameters().all()[model.parameters().index("gain")].offset, config.width).mul_(8);
    const Batch batch = token_batch(2, 11);
    const Tensor labels = batch.tokens.gather(2, batch.positions);
    const StackedParameters ours(model.parameters(), master, at::kDouble, true),
        plain(model.parameters(), master, at::kDouble, true);
    const Tensor loss = model.losses(ours, model.features(ours, batch), labels);
    const Tensor logits = model.forward(plain, batch);
    const Tensor each =
        at::nll_loss(at::log_softmax(logits.flatten(0, 2), -1), labels.flatten(), {}, at::Reduction::None);
    const Tensor expected = each.view({2, -1}).mean(1);
    const Tensor share = at::tensor({1.0, 3.0}, at::kDouble);
    Tensor gradient = at::full_like(master, NAN), expected_gradient = at::full_like(master, NAN);
    ours.gradients((loss * share).sum(), gradient);
    plain.gradients((expected * share).sum(), expected_gradient);
    EXPECT_LT(distance(loss, expected), 1e-12);
    EXPECT_LT(distance(gradient, expected_gradient), 1e-12);
  }
}

// ---- Sizes ----

double ratio(const ModelConfig& config, const ModelConfig& softmax) {
  return static_cast<double>(Model(config).parameters().count()) /
         static_cast<double>(Model(softmax).parameters().count());
}

TEST(Parameters, CountsAgreeWithSoftmaxOrTheDifferenceIsKnown) {
  const ModelConfig regression = in_context_config(Mixer::softmax, 272),
                    recall = recall_config(Mixer::softmax, 8192, 256),
                    tracking = tracking_config(Mixer::softmax, 8192 + 30, 256);
  for (const Mixer mixer : all_mixers()) {
    // W_lambda (width x head width) of LLA as in the paper, x (width x width) of Parallax: docs/experiments/models.md.
    const double known = mixer == Mixer::lla ? 1.115 : mixer == Mixer::parallax ? 1.23 : 1.10;
    EXPECT_LT(ratio(in_context_config(mixer, 272), regression), known) << name(mixer);
    EXPECT_GT(ratio(in_context_config(mixer, 272), regression), 0.90) << name(mixer);
    EXPECT_NEAR(ratio(recall_config(mixer, 8192, 256), recall), 1, 0.1) << name(mixer);
    EXPECT_NEAR(ratio(tracking_config(mixer, 8192 + 30, 256), tracking), 1, 0.1) << name(mixer);
    EXPECT_NEAR(ratio(language_config(mixer), language_config(Mixer::softmax)), 1, 0.01) << name(mixer);
  }
}

TEST(Parameters, OnlyMatricesDecay) {
  const Model model(language_config(Mixer::gated_deltanet));
  const Tensor mask = model.parameters().decay_mask();
  int64_t end = 0;
  for (const Parameter& parameter : model.parameters().all()) {
    const Tensor part = mask.narrow(0, parameter.offset, parameter.size);
    const bool matrix = parameter.shape.size() == 2 && parameter.name.find("convolution") == std::string::npos;
    EXPECT_EQ(part.min().item<float>(), matrix ? 1 : 0) << parameter.name;
    EXPECT_EQ(part.max().item<float>(), matrix ? 1 : 0) << parameter.name;
    EXPECT_EQ(parameter.offset % 64, 0);
    end = std::max(end, parameter.offset + parameter.size);
  }
  EXPECT_LE(end, model.parameters().total());
}

TEST(Config, RefusesWhatThereIsNot) {
  ModelConfig config = small(Mixer::gla);
  config.positions = Positions::rope;
  EXPECT_THROW(Model{config}, std::invalid_argument);
  config = small(Mixer::softmax);
  config.short_convolution = true;
  EXPECT_THROW(Model{config}, std::invalid_argument);
  config = small(Mixer::lla);
  config.heads = 3;
  EXPECT_THROW(Model{config}, std::invalid_argument);
  EXPECT_THROW(mixer_from_name("mamba"), std::invalid_argument);
  EXPECT_EQ(mixer_from_name("gated_deltanet"), Mixer::gated_deltanet);
}

}  // namespace
}  // namespace lla::trained
