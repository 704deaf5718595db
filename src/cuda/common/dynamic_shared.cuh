// The block's shared memory of a size that the launch tells. Not from a function: the compiler would no longer know where
// it begins.
#pragma once

namespace lla::cuda {

extern __shared__ __align__(16) unsigned char dynamic_bytes[];
extern __shared__ __align__(1024) unsigned char dynamic_tiles[];  // as swizzled tiles want it

}  // namespace lla::cuda
