#include "cuda/common/launch.cuh"
#include "cuda/sm90/decode/launch.hpp"
#include "cuda/sm90/decode/solve.cuh"
#include "cuda/sm90/decode/stream.cuh"

namespace lla::cuda::sm90::decode {
namespace {

template <int kDim, bool kBf16, int kCluster>
Status launch_solve(const Params& p, int rows, cudaStream_t stream) {
  const auto kernel = solve_kernel<kDim, kBf16, kCluster>;
  constexpr size_t kBytes = sizeof(SolveShared<kDim>);
  LLA_RETURN_IF_ERROR(allow_shared_memory(kernel, kBytes, "launching the decode solver"));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kCluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * kCluster));
  config.blockDim = dim3(kSolveThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return to_status(cudaLaunchKernelEx(&config, kernel, p), "launching the decode solver");
}

template <int kDim, bool kBf16>
Status launch_all(Params p, const Layout& at, int64_t rows, int blocks, cudaStream_t stream) {
  using C = Config<kDim, kBf16>;
  for (int64_t first = 0; first < rows; first += at.rows_at_once) {
    p.first_row = static_cast<int32_t>(first);
    p.row_count = static_cast<int32_t>(rows - first < at.rows_at_once ? rows - first : at.rows_at_once);
    LLA_RETURN_IF_ERROR(launch_early(stream_kernel<C>, dim3(static_cast<unsigned>(blocks)), C::kThreads,
                                     sizeof(Shared<C>), stream, "launching the decode kernel", p));
    // Few rows have many parts each: a cluster puts them together.
    const auto solve = p.row_count * 4 <= blocks ? launch_solve<kDim, kBf16, 8> : launch_solve<kDim, kBf16, 1>;
    LLA_RETURN_IF_ERROR(solve(p, p.row_count, stream));
  }
  return {};
}

}  // namespace

Status launch_decode(Params p, const Layout& at, void* workspace, int64_t rows, int dim, bool bf16, int multiprocessors,
                     cudaStream_t stream) {
  std::byte* const base = static_cast<std::byte*>(workspace);
  p.slots = reinterpret_cast<float*>(base + at.slots);
  p.records = reinterpret_cast<RowRecord*>(base + at.records);
  p.live_rows = reinterpret_cast<int32_t*>(base + at.live_rows);
  if (dim == 64) {
    return bf16 ? launch_all<64, true>(p, at, rows, multiprocessors, stream)
                : launch_all<64, false>(p, at, rows, multiprocessors, stream);
  }
  return bf16 ? launch_all<128, true>(p, at, rows, multiprocessors, stream)
              : launch_all<128, false>(p, at, rows, multiprocessors, stream);
}

}  // namespace lla::cuda::sm90::decode
