// Saved calls, once more.
#pragma once

#include <string>
#include <vector>

#include "plan/implementation.hpp"

namespace lla::app {

// Runs the calls of the file on each implementation and prints a line for each: whether every result is finite where
// the reference's is, within what the call's tolerance promises. Throws std::runtime_error when the file cannot be
// used.
bool replay(const std::string& path, const std::vector<const core::Implementation*>& implementations);

}  // namespace lla::app
