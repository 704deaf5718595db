// The backends of this build: each declares its entry of the implementation list.
#pragma once

#include "cpu/cpu.hpp"
#include "reference/implementation.hpp"
#if LLA_HAVE_CUDA
#include "cuda/portable/portable.hpp"
#include "cuda/sm90/sm90.hpp"
#endif
