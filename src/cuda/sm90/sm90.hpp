// The Hopper backend: tensor-core kernels for compute capability 9.0.
#pragma once

#include "plan/implementation.hpp"

namespace lla::cuda::sm90 {

extern const core::Implementation implementation;

// Pure decisions, for any machine (plan.cpp; tested without a GPU).
std::string refuse(const core::Problem& problem, const core::Machine& machine);
core::Plan plan(const core::Problem& problem, const core::Machine& machine);
core::Notes notes(const core::Problem& problem, const core::Machine& machine, const core::Plan& plan);

Status forward(const core::ForwardCall& call, const core::Plan& plan);
Status backward(const core::BackwardCall& call, const core::Plan& plan);

}  // namespace lla::cuda::sm90
