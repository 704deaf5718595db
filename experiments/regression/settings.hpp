// What one test-time regression is: the paper's section 4 and its appendix "Piecewise Linear Data Generation".
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lla::experiments {

// The paper's grid; anything else is refused by the command.
inline constexpr std::array<int, 5> kPaperDims = {8, 16, 32, 64, 128};
inline constexpr std::array<int, 8> kPaperSegments = {8, 16, 32, 64, 128, 256, 512, 1024};
inline constexpr int kPaperLength = 1024;
inline constexpr int kPaperSequences = 10000;

// What the weights of LLA and softmax attention are made of.
enum class Kernel {
  dot,  // exp(scale q.k)
  rbf   // exp(-|q - k|^2 / h) with h = 2 / scale: the paper's kernel regression, equal to `dot` for keys of one length
};
inline constexpr std::array<const char*, 2> kKernelNames = {"dot", "rbf"};

// A setting is one set of data; every model sees it once for each of its ridges.
struct RegressionSetting {
  int length = kPaperLength;
  int d = 64;
  int segment = 256;
  int sequences = 256;
  std::vector<double> ridges{0.1};  // of LLA, relative to weights that sum to one (the paper's lambda is ridge * omega)
  std::vector<double> mesa_ridges{1};  // of MesaNet, on the plain sum of k k': another scale
  double scale = 0.125;                // of the logits
  double noise = 0.1;                  // standard deviation of each component of the values' noise
  Kernel kernel = Kernel::dot;
  bool qk_norm = false;  // keys of length sqrt(d), before the values are made from them
  // Absent: the paper's q_i = k_i, to be answered with v_i. Given, rho: q_i = sqrt(1 - rho^2) k_i + rho z_i with a
  // fresh z_i, mixed before the signs are folded in, to be answered with A_c q_i.
  std::optional<double> query_noise{};
  uint64_t seed = 1;

  bool operator==(const RegressionSetting&) const = default;
};

enum class Model { lla, softmax, linear, mesanet, random };
inline constexpr std::array<const char*, 5> kModelNames = {"lla", "softmax", "linear", "mesanet", "random"};

// One series of errors: a model with one ridge (0 for models that have none).
struct Series {
  Model model;
  double ridge;
};
inline constexpr size_t kPlainSeries = 5;  // of a setting with one ridge each
// All series of a setting, in the order of the models.
std::vector<Series> series(const RegressionSetting&);

// Empty when the setting makes sense, otherwise what is wrong with it.
std::string problem_with(const RegressionSetting&);

}  // namespace lla::experiments
