// The only place where arguments are checked. What passes here is a legal problem; whether an implementation takes it
// is the planner's word.
#pragma once

#include "core/problem.hpp"

namespace lla::core {

// Whether data pointers must be there (a call) or may be null (a question about sizes and plans).
enum class Pointers { required, optional };

Status validate(const lla_forward_args& args, Pointers pointers, ForwardCall& call);
Status validate(const lla_backward_args& args, Pointers pointers, BackwardCall& call);

// Large enough, aligned, and clear of every tensor of checked arguments.
Status validate_workspace(const lla_forward_args& args, size_t needed);
Status validate_workspace(const lla_backward_args& args, size_t needed);

}  // namespace lla::core
