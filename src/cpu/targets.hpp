// Which SIMD targets the kernels are compiled for. Include before any Highway header.
#pragma once

// SSE (a register block would hardly fit) and SVE (vectors of unknown length) are left to the baseline: EMU128 or NEON.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
