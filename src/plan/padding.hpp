// Zeroes what a packed call writes behind the last sequence, whoever ran the call (core/padding.hpp).
#pragma once

#include "core/padding.hpp"

namespace lla::core {

// On CUDA it joins the call's stream; nothing waits.
Status zero_padding(const ForwardCall& call);
Status zero_padding(const BackwardCall& call);

}  // namespace lla::core
