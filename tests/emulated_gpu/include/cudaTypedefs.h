#pragma once

#include "cuda.h"

using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                                       void* data, const cuuint64_t* size, const cuuint64_t* stride,
                                                       const cuuint32_t* box, const cuuint32_t* step,
                                                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);
