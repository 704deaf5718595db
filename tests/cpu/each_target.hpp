// Runs a check on every SIMD target this build has and this machine supports, best first.
#pragma once

#include "cpu/targets.hpp"
#include "hwy/targets.h"

namespace lla::test {

template <class Check>
void on_each_target(const Check& check) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    check(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

}  // namespace lla::test
