#include "cuda/sm90/backward/row_pass.cuh"

namespace lla::cuda::sm90 {
template Status launch_row_pass<128, false>(const RowPassParams&, cudaStream_t);
}
