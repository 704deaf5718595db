// How a long run talks to whoever started it: it reports how far it is and asks whether to go on.
#pragma once

#include <functional>
#include <string>

namespace lla::experiments {

struct Progress {
  // Fraction of the whole run that is done, and what is being done.
  std::function<void(double fraction, const std::string& what)> report = [](double, const std::string&) {};
  // True to stop at the next safe point, with everything so far on disk.
  std::function<bool()> stop = [] { return false; };
};

}  // namespace lla::experiments
