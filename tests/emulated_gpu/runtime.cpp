// The CUDA runtime and the one driver function that is asked for. Streams have nothing in them: a call does its work
// before it returns, but while a stream is captured it goes into the graph.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

struct EmulatedGraph {
  std::vector<std::function<void()>> steps;
};
struct EmulatedStream {
  EmulatedGraph* captured = nullptr;
};

namespace {

std::mutex allocations_lock;
std::map<const char*, size_t> allocations;
cudaError_t last_error = cudaSuccess;

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t do_or_capture(cudaStream_t stream, std::function<void()> step) {
  if (stream != nullptr && stream->captured != nullptr) {
    stream->captured->steps.push_back(std::move(step));
  } else {
    step();
  }
  return cudaSuccess;
}

static_assert(sizeof(emulated::Map) <= sizeof(CUtensorMap));

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* size,
                      const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step, CUtensorMapInterleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  emulated::Map out{};
  out.data = static_cast<unsigned char*>(data);
  out.rank = rank;
  out.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? 2 : 4;
  out.swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32 : 0;
  bool good = rank >= 1 && rank <= 5 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (cuuint32_t d = 0; good && d < rank; ++d) {
    out.size[d] = size[d], out.box[d] = box[d];
    out.stride[d] = d == 0 ? out.element_bytes : stride[d - 1];
    good = size[d] >= 1 && size[d] <= uint64_t{1} << 32 && box[d] >= 1 && box[d] <= 256 && step[d] == 1 &&
           (d == 0 || (stride[d - 1] % 16 == 0 && stride[d - 1] < uint64_t{1} << 40));
  }
  good = good && (out.swizzle_bytes == 0 || box[0] * out.element_bytes <= out.swizzle_bytes);
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &out, sizeof out);
  return CUDA_SUCCESS;
}

}  // namespace

namespace emulated {
void enqueue(cudaStream_t stream, Launch launch) {
  do_or_capture(stream, [launch = std::move(launch)] {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    run(launch);
  });
}
}  // namespace emulated

cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return answer(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return answer(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "emulated Hopper GPU");
  properties->major = 9;
  const char* const wanted = std::getenv("LLA_EMULATED_MULTIPROCESSORS");
  properties->multiProcessorCount = wanted != nullptr ? std::atoi(wanted) : 6;  // few: each block has a cost here
  properties->l2CacheSize = 60 << 20;
  properties->sharedMemPerBlockOptin = 227 * 1024;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (std::max<size_t>(bytes, 1) + 255) / 256 * 256);
  if (*memory == nullptr) return answer(cudaErrorMemoryAllocation);
  const std::lock_guard lock(allocations_lock);
  allocations[static_cast<const char*>(*memory)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(allocations_lock);
  allocations.erase(static_cast<const char*>(memory));
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return do_or_capture(stream, [=] { bytes > 0 ? std::memmove(to, from, bytes) : to; });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return do_or_capture(stream, [=] { std::memset(at, value, bytes); });
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, nullptr); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{8} << 30;
  *free = *total / 2;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const std::lock_guard lock(allocations_lock);
  auto next = allocations.upper_bound(static_cast<const char*>(pointer));
  const bool ours =
      next != allocations.begin() && (--next, static_cast<const char*>(pointer) <= next->first + next->second);
  *attributes = {ours ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, ours ? 0 : -1};
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = new EmulatedStream, cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return stream->captured = new EmulatedGraph, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->captured;
  stream->captured = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return *executable = new EmulatedGraph(*graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& step : executable->steps) step();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return delete executable, cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&encode_tiled) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
