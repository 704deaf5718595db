// The only place where arguments are checked. What passes here is a legal problem; whether an implementation takes it
// is the planner's word.
#pragma once

#include "core/cache_append.hpp"
#include "core/problem.hpp"

namespace lla::core {

// Whether data pointers must be there (a call) or may be null (a question about sizes and plans; the outputs of a call
// whose memory comes on demand).
enum class Pointers { required, optional, outputs_later };

// The arguments are complete (validate/structs.hpp).
Status validate(const lla_forward_args& args, Pointers pointers, ForwardCall& call);
Status validate(const lla_backward_args& args, Pointers pointers, BackwardCall& call);

// The outputs of a checked call once their memory is there.
Status validate_outputs(const lla_forward_args& args, ForwardCall& call);
Status validate(const lla_cache_append_args& args, CacheAppendCall& call);

// Large enough, aligned, and clear of every tensor of checked arguments.
Status validate_workspace(const lla_forward_args& args, size_t needed);
Status validate_workspace(const lla_backward_args& args, size_t needed);

}  // namespace lla::core
