// The CPU backend's planner.
#pragma once

#include <string>

#include "plan/implementation.hpp"

namespace lla::cpu {

std::string refuse(const core::Problem& p, const core::Machine& machine);
core::Plan make_plan(const core::Problem& p, const core::Machine& machine);
core::Notes notes(const core::Problem& p, const core::Machine& machine, const core::Plan& plan);

}  // namespace lla::cpu
