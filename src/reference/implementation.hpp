// The reference in the list of implementations; it comes last.
#pragma once

#include "plan/implementation.hpp"

namespace lla::reference {

extern const core::Implementation implementation;

}  // namespace lla::reference
