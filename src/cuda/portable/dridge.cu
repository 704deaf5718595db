// Gradient of a ridge shared by many rows: their sum, in one fixed order.
#include "cuda/common/launch.cuh"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {
namespace {

constexpr int kThreads = 1024;

// One block per head, or one for everything. Rows of a head: `segments` runs of `length` rows, `stride` apart. Nobody
// has written to the rows behind a packed batch's last sequence.
template <class T>
__global__ void __launch_bounds__(kThreads) dridge_kernel(const __grid_constant__ Arguments<T> a) {
  __shared__ double sums[kThreads];
  const core::Problem& p = a.problem;
  const bool per_head = p.ridge == core::RidgeShape::head;
  const int64_t head = per_head ? blockIdx.x : 0;
  const int64_t pitch = p.packed ? p.total_q : p.seqlen_q;
  const int64_t length = p.packed ? a.cu_seqlens_q[p.batch] : p.seqlen_q;
  const int64_t segments = per_head ? (p.packed ? 1 : p.batch) : p.rows() / (pitch > 0 ? pitch : 1);
  const int64_t stride = per_head ? p.heads_q * pitch : pitch;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < segments * length; i += kThreads) {
    sum += a.rows.dridge[i / length * stride + head * pitch + i % length];
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) store_as(a.dridge.data, a.dridge.dtype, head * a.dridge.stride[2], sums[0]);
}

}  // namespace

template <class T>
Status launch_dridge(const Arguments<T>& a, cudaStream_t stream) {
  const core::Problem& p = a.problem;
  if (p.ridge != core::RidgeShape::head && p.ridge != core::RidgeShape::scalar) return {};
  return launch(dridge_kernel<T>, p.ridge == core::RidgeShape::head ? p.heads_q : 1, kThreads, 0, stream,
                "launching the ridge gradient's sum", a);
}

template Status launch_dridge<float>(const Arguments<float>&, cudaStream_t);
template Status launch_dridge<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
