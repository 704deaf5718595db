// Attention over a key-value cache where every sequence has few rows: what of it this backend takes, and how.
#pragma once

#include "plan/implementation.hpp"

namespace lla::cuda::sm90::decode {

// Pure decisions, for any machine.
std::string refuse(const core::Problem& problem, const core::Machine& machine);
core::Plan plan(const core::Problem& problem, const core::Machine& machine);
core::Notes notes(const core::Problem& problem, const core::Plan& plan);

Status forward(const core::ForwardCall& call, const core::Plan& plan);

}  // namespace lla::cuda::sm90::decode
