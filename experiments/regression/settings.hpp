// What one test-time regression is: the paper's section 4 and its appendix "Piecewise Linear Data Generation".
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace lla::experiments {

// The paper's grid; anything else is refused by the command.
inline constexpr std::array<int, 5> kPaperDims = {8, 16, 32, 64, 128};
inline constexpr std::array<int, 8> kPaperSegments = {8, 16, 32, 64, 128, 256, 512, 1024};
inline constexpr int kPaperLength = 1024;
inline constexpr int kPaperSequences = 10000;

struct RegressionSetting {
  int length = kPaperLength;
  int d = 64;
  int segment = 256;
  int sequences = 256;
  double ridge = 0.1;     // of LLA, relative to the weights (design: A = covariance + ridge I)
  double mesa_ridge = 1;  // of MesaNet, on the unnormalised sum of k k'
  double scale = 0.125;   // of the logits
  double noise = 0.1;     // standard deviation of each component of the values' noise
  uint64_t seed = 1;

  bool operator==(const RegressionSetting&) const = default;
};

enum class Model { lla, softmax, linear, mesanet, random };
inline constexpr std::array<const char*, 5> kModelNames = {"lla", "softmax", "linear", "mesanet", "random"};
inline constexpr int kModels = static_cast<int>(kModelNames.size());

// Empty when the setting makes sense, otherwise what is wrong with it.
std::string problem_with(const RegressionSetting&);

}  // namespace lla::experiments
