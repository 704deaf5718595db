#include "validate/structs.hpp"

#include <cmath>

namespace lla::core {

lla_options default_options() {
  lla_options o{};
  o.struct_size = sizeof o;
  o.scale = std::nan("");
  o.tolerance = std::nan("");
  o.window_left = -1;
  o.window_right = -1;
  o.cached_weights_limit = int64_t{1} << 30;
  o.causal = 1;
  return o;
}

}  // namespace lla::core
