// What a model is: everything the paper leaves open is a field here; docs/experiments/models.md holds the table of
// choices.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lla::trained {

enum class Mixer { lla, softmax, parallax, mamba2, gla, hyena, gated_deltanet, mesanet, linear };

// As written in config files and records: "lla", "softmax", "parallax", "mamba2", ...
std::string_view name(Mixer mixer);
Mixer mixer_from_name(std::string_view name);  // throws std::invalid_argument with the list of names
const std::vector<Mixer>& all_mixers();
const std::vector<Mixer>& paper_mixers();  // the six of the paper's trained experiments

enum class Norm { none, rms, layer };
enum class Positions { none, learned, rope };  // learned: added to the embedding; rope: attention models only
enum class Ridge {
  per_dimension,
  per_head,
  infinite
};                                           // per_dimension: d_lambda = d_h shared by the heads, the paper's form
enum class RidgeForm { sigmoid, softplus };  // of W_lambda x; sigmoid: the paper's, at most 1

struct ModelConfig {
  Mixer mixer = Mixer::lla;
  int64_t layers = 2;
  int64_t width = 128;
  int64_t heads = 2;

  // What goes in and comes out. Tokens where vocabulary > 0, else vectors of input_width.
  int64_t vocabulary = 0;
  int64_t input_width = 0;
  int64_t output_width = 0;  // vectors out; with a vocabulary the logits are its size
  bool tied_head = true;     // the vocabulary's head is the embedding
  int64_t max_length = 0;    // for learned positions, Hyena's filters

  Norm norm = Norm::rms;  // before each mixer and MLP and before the head
  Positions positions = Positions::none;
  double rope_theta = 10000;
  bool qk_norm = false;   // attention models
  int64_t mlp_width = 0;  // SwiGLU; 0: no MLP
  double init_std = 0.02;

  // LLA.
  Ridge ridge = Ridge::per_dimension;
  RidgeForm ridge_form = RidgeForm::sigmoid;
  double ridge_min = 0;     // floor of lambda, the paper has none
  bool ridge_bias = false;  // of W_lambda

  // The others.
  bool short_convolution = false;  // width 4, depthwise, before the mixer (q, k, v or x, B, C)
  bool feature_map = false;        // SiLU on q, k, v (elu + 1 for linear attention)
  bool output_gate = false;        // of GLA, Gated DeltaNet, MesaNet, linear attention; Mamba-2 always has its own
  double key_ratio = 1;            // width of all keys over the model's
  double value_ratio = 1;
  int64_t state_width = 64;  // Mamba-2
  int64_t hyena_filter_width = 32;
  int64_t mesa_iterations = 30;  // of conjugate gradients
  int64_t chunk = 0;             // positions a chunk of the chunked forms; 0: each mixer's own choice
};

// The paper's set-ups, with what it leaves open chosen as in docs/experiments/models.md.
ModelConfig in_context_config(Mixer mixer, int64_t length, int64_t x_width = 32, int64_t y_width = 32);
ModelConfig recall_config(Mixer mixer, int64_t vocabulary, int64_t length);
ModelConfig tracking_config(Mixer mixer, int64_t vocabulary, int64_t length);
// Beyond it: bytes in, bytes out, SwiGLU width such that the parameters agree with softmax's within 1 %.
ModelConfig language_config(Mixer mixer, int64_t length = 1024);

// Throws std::invalid_argument with a sentence where a config asks for what there is not.
void check(const ModelConfig& config);

}  // namespace lla::trained
