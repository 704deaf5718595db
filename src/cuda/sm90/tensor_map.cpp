#include "cuda/sm90/tensor_map.hpp"

#include <cudaTypedefs.h>

#include "core/text.hpp"
#include "cuda/common/runtime.hpp"

namespace lla::cuda::sm90 {
namespace {

// The encoder is a driver function: found at run time, so that the library loads without a driver.
Status find_encoder(PFN_cuTensorMapEncodeTiled_v12000& encode) {
  static void* const entry = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  if (entry == nullptr) return {LLA_CUDA_ERROR, "the driver has no cuTensorMapEncodeTiled"};
  encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  return {};
}

}  // namespace

namespace {

Status encode_tiles(CUtensorMap& map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* data, int rank,
                    const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                    CUtensorMapL2promotion promotion) {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  LLA_RETURN_IF_ERROR(find_encoder(encode));
  const cuuint32_t step[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), size, stride, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {LLA_CUDA_ERROR, core::cat("cuTensorMapEncodeTiled failed with code ", static_cast<int>(result))};
  }
  return {};
}

Status encode_halves(CUtensorMap& map, const void* data, int rank, const cuuint64_t* size, const cuuint64_t* stride,
                     const cuuint32_t* box, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return encode_tiles(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, data, rank, size, stride, box,
                      promotion);
}

}  // namespace

Status make_tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows) {
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  return encode_halves(map, data, 2, size, stride, box);
}

Status make_record_map(CUtensorMap& map, const void* data, int64_t records, int box_rows) {
  const cuuint64_t size[2] = {8, static_cast<cuuint64_t>(records)};
  const cuuint64_t stride[1] = {32};
  const cuuint32_t box[2] = {8, static_cast<cuuint32_t>(box_rows)};
  return encode_tiles(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_32B, data, 2, size, stride, box,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

Status make_cache_map(CUtensorMap& map, const core::Operand& cache, const int64_t (&sizes)[4], int box_slots) {
  const auto whole = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t size[4] = {whole(sizes[3]), whole(sizes[2]), whole(sizes[1]), whole(sizes[0])};
  const cuuint64_t stride[3] = {whole(cache.stride[2] * 2), whole(cache.stride[1] * 2), whole(cache.stride[0] * 2)};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(box_slots), 1};
  // A box's rows have 128 bytes. With 256 asked for at a time a cache comes at 4.1 instead of 4.5 TB/s (H200), also where
  // the other half is asked for next.
  return encode_halves(map, cache.data, 4, size, stride, box, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace lla::cuda::sm90
