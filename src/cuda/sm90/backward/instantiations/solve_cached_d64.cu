#include "cuda/sm90/backward/solve.cuh"

namespace lla::cuda::sm90 {
template Status launch_solve<64, true>(const CUtensorMap&, const CUtensorMap&, const SolveParams&, int, cudaStream_t);
}
