// The emulated GPU itself: what its threads, barriers, copies and products do, and what it says of kernels that no GPU
// would run.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cute/arch/mma_sm90_gmma.hpp>
#include <functional>
#include <utility>
#include <vector>

#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90 {
namespace {

void launch(unsigned blocks, unsigned threads, std::function<void()> kernel, int cluster = 1) {
  emulated::Launch launch;
  launch.grid = {blocks, 1, 1}, launch.block = {threads, 1, 1};
  launch.shared_bytes = 64 * 1024;
  launch.cluster = cluster;
  launch.thread = std::move(kernel);
  emulated::run(launch);
}
int thread() { return static_cast<int>(threadIdx.x); }
template <class T>
T& shared_at(size_t offset) {
  return *reinterpret_cast<T*>(emulated::dynamic_shared() + offset);
}

TEST(EmulatedGpu, ThreadsOfAWarpExchange) {
  std::vector<int> sums(96), up(96);
  std::vector<unsigned> votes(96);
  launch(1, 96, [&] {
    int sum = thread();
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    sums[thread()] = sum;
    up[thread()] = __shfl_up_sync(~0u, thread(), 3);
    votes[thread()] = __ballot_sync(~0u, thread() % 3 == 0);
  });
  for (int t = 0; t < 96; ++t) {
    EXPECT_EQ(sums[t], 31 * 16 + t / 32 * 32 * 32);
    EXPECT_EQ(up[t], t % 32 < 3 ? t : t - 3);
    EXPECT_EQ(votes[t] >> (t % 32) & 1, t % 3 == 0);
  }
}

// What a thread has written before a barrier all see behind it, whatever the order in which they run.
TEST(EmulatedGpu, BarriersHoldThreadsBack) {
  for (int turn = 0; turn < 20; ++turn) {
    std::vector<int> seen(128);
    launch(2, 128, [&] {
      shared_at<int>(4 * thread()) = thread() + 1;
      __syncthreads();
      seen[thread()] = shared_at<int>(4 * ((thread() + 77) % 128));
      __syncthreads();
      if (thread() >= 64) {  // half of them
        named_sync(3, 64);
        shared_at<int>(4 * thread()) = -1;
        named_sync(3, 64);
        EXPECT_EQ(shared_at<int>(4 * (64 + (thread() + 1) % 64)), -1);
      }
      EXPECT_EQ(__syncthreads_or(thread() == 5), 1);
      EXPECT_EQ(__syncthreads_and(thread() != 5), 0);
    });
    for (int t = 0; t < 128; ++t) EXPECT_EQ(seen[t], (t + 77) % 128 + 1);
  }
}

// A ring of one slot: whoever fills it and whoever reads it wait for each other.
TEST(EmulatedGpu, TransactionBarriersCountArrivalsAndBytes) {
  constexpr int kRounds = 9;
  alignas(16) int numbers[kRounds][4];
  for (int i = 0; i < 4 * kRounds; ++i) numbers[i / 4][i % 4] = 100 + i;
  std::vector<int> sums(kRounds);
  launch(1, 64, [&] {
    auto &full = shared_at<Barrier>(0), &empty = shared_at<Barrier>(8);
    if (thread() == 0) full.init(1), empty.init(1);
    __syncthreads();
    for (unsigned round = 0; round < kRounds; ++round) {
      if (thread() == 0) {
        empty.wait(round % 2 ^ 1);
        full.arrive_expecting(16);
        load_bytes_once(&shared_at<int>(16), numbers[round], 16, full);
      } else if (thread() == 32) {
        full.wait(round % 2);
        for (int i = 0; i < 4; ++i) sums[round] += shared_at<int>(16 + 4 * i);
        empty.arrive();
      }
    }
  });
  for (int round = 0; round < kRounds; ++round) EXPECT_EQ(sums[round], 406 + 16 * round);
}

TEST(EmulatedGpu, ClustersReachEachOthersMemory) {
  std::vector<int> got(4 * 32);
  launch(
      4, 32,
      [&] {
        const int rank = emulated::block_rank();
        shared_at<int>(4 * thread()) = 1000 * rank + thread();
        emulated::cluster_sync();
        const int other = rank ^ 1;
        got[blockIdx.x * 32 + thread()] =
            *static_cast<int*>(emulated::of_other_block(&shared_at<int>(4 * thread()), other));
        emulated::cluster_sync();
      },
      2);
  for (int i = 0; i < 128; ++i) EXPECT_EQ(got[i], 1000 * (i / 32 % 2 ^ 1) + i % 32);
}

// Boxes that reach beyond the tensor, swizzled, and the products of both majors from what they bring.
TEST(EmulatedGpu, BoxesAndProductsOfWarpgroups) {
  constexpr int kRows = 50, kColumns = 64;
  std::vector<__half> numbers(kRows * kColumns);
  const auto value = [](int row, int column) {
    return row < kRows ? static_cast<float>((row * 7 + column * 3) % 11 - 5) : 0.0f;
  };
  for (int i = 0; i < kRows * kColumns; ++i) numbers[i] = __float2half_rn(value(i / kColumns, i % kColumns));
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  CUtensorMap map;
  const cuuint64_t size[2] = {kColumns, kRows}, stride[1] = {kColumns * 2};
  const cuuint32_t box[2] = {64, 64}, step[2] = {1, 1};
  ASSERT_EQ(reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
                &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, numbers.data(), size, stride, box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            CUDA_SUCCESS);
  using cute::SM90::GMMA::Major;
  using cute::SM90::GMMA::ScaleOut;
  std::vector<float> along(64 * 64, NAN), across(64 * 64, NAN);
  const auto kernel = [&] {
    auto& loaded = shared_at<Barrier>(16 * 1024);
    if (thread() == 0) loaded.init(1);
    __syncthreads();
    if (thread() == 0) {
      loaded.arrive_expecting(64 * 128);
      load_box(emulated::dynamic_shared(), &map, 0, 0, loaded);
    }
    loaded.wait(0);
    const auto descriptor = [](int bytes) {
      return uint64_t{(1024 >> 4) | 1u << 30} << 32 | uint64_t{64 * 128 / 16} << 16 | static_cast<uint64_t>(bytes / 16);
    };
    const auto multiply = [&]<Major kMajor>(std::integral_constant<Major, kMajor>, std::vector<float>& to) {
      float c[32];
      [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
        for (int k = 0; k < 64; k += 16) {
          const uint64_t operand = descriptor(kMajor == Major::K ? k * 2 : k * 128);
          cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<kMajor, kMajor>::fma(operand, operand, c[kIndex]...,
                                                                           k == 0 ? ScaleOut::Zero : ScaleOut::One);
        }
      }
      (std::make_index_sequence<32>{});
      mma_commit();
      mma_wait<0>();
      for (int e = 0; e < 32; ++e) {
        const int row = thread() / 32 * 16 + thread() % 32 / 4 + e / 2 % 2 * 8;
        to[row * 64 + e / 4 * 8 + thread() % 4 * 2 + e % 2] = c[e];
      }
    };
    multiply(std::integral_constant<Major, Major::K>{}, along);
    multiply(std::integral_constant<Major, Major::MN>{}, across);
  };
  for (int turn = 0; turn < 4; ++turn) {  // products at once and late
    launch(1, 128, kernel);
    for (int i = 0; i < 64; ++i) {
      for (int j = 0; j < 64; ++j) {
        float of_rows = 0, of_columns = 0;
        for (int k = 0; k < 64; ++k) of_rows += value(i, k) * value(j, k), of_columns += value(k, i) * value(k, j);
        ASSERT_EQ(along[i * 64 + j], of_rows) << i << ", " << j;
        ASSERT_EQ(across[i * 64 + j], of_columns) << i << ", " << j;
      }
    }
  }
}

TEST(EmulatedGpu, ProductsAndMatricesOfWarps) {
  std::vector<float> got(16 * 8, NAN);
  const auto a = [](int row, int k) { return static_cast<float>((row * 5 + k * 3) % 13 - 6); };
  const auto b = [](int k, int column) { return static_cast<float>((k * 7 + column) % 9 - 4); };
  launch(1, 32, [&] {
    const auto place = [](int row, int k) -> __half& { return shared_at<__half>(row * 32 + k * 2); };
    for (int i = thread(); i < 256; i += 32) place(i / 16, i % 16) = __float2half_rn(a(i / 16, i % 16));
    __syncwarp();
    // Rows 0 to 7 and 8 to 15 of the first eight columns, then of the others: what mma.sync wants.
    uint32_t left[4];
    load_matrices(left, shared_address(&place(thread() % 16, thread() / 16 * 8)));
    const int g = thread() / 4, t = thread() % 4;
    const auto pair = [&](int k) {
      const __half2 h = __floats2half2_rn(b(k, g), b(k + 1, g));
      uint32_t word;
      std::memcpy(&word, &h, 4);
      return word;
    };
    float c[4]{};
    warp_product<false>(c, left, pair(2 * t), pair(2 * t + 8));
    for (int e = 0; e < 4; ++e) got[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = c[e];
    // Transposed and stored again the matrices are each other's mirror images.
    uint32_t mirrored[4];
    load_transposed(mirrored, shared_address(&place(thread() % 16, thread() / 16 * 8)));
    __syncwarp();
    store_matrices(shared_address(&place(thread() % 16, thread() / 16 * 8)), mirrored);
    __syncwarp();
    for (int i = thread(); i < 256; i += 32) {
      const int row = i / 16, k = i % 16;
      EXPECT_EQ(__half2float(place(row, k)), a(row / 8 * 8 + k % 8, k / 8 * 8 + row % 8));
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a(row, k) * b(k, column);
      EXPECT_EQ(got[row * 8 + column], sum);
    }
  }
}

// Tensor cores cut off what they cannot hold.
TEST(EmulatedGpu, SumsAreCutOff) {
  launch(1, 32, [&] {
    const __half2 one = __floats2half2_rn(1, 0);
    uint32_t word;
    std::memcpy(&word, &one, 4);
    const uint32_t a[4] = {thread() % 4 == 0 ? word : 0, thread() % 4 == 0 ? word : 0, 0, 0};
    float c[4] = {0x1p25f + 4, 0x1p25f + 4, -0x1p25f, 0};
    warp_product<false>(c, a, thread() % 4 == 0 ? word : 0, 0);
    EXPECT_EQ(c[0], 0x1p25f + 4);   // 1 more is less than the last digit
    EXPECT_EQ(c[2], -0x1p25f + 2);  // towards zero: 1 less is rounded away from it
    EXPECT_EQ(c[3], 1);
  });
}

using EmulatedGpuDeathTest = testing::Test;

TEST(EmulatedGpuDeathTest, SaysWhoWaitsForEver) {
  EXPECT_DEATH(launch(1, 64,
                      [] {
                        auto& never = shared_at<Barrier>(8);
                        if (thread() == 0) never.init(2);
                        __syncthreads();
                        if (thread() == 3) never.arrive();
                        if (thread() >= 32) never.wait(0);
                      }),
               "does not end:\n  block 0 warp 1 lane 0 waits for a transaction barrier at shared address 8");
}

TEST(EmulatedGpuDeathTest, SaysThatAWarpHasSplit) {
  EXPECT_DEATH(launch(1, 32,
                      [] {
                        if (thread() < 16) {
                          __syncwarp();
                        } else {
                          __shfl_sync(~0u, 1, 0);
                        }
                      }),
               "threads of one warp meet for different things");
}

TEST(EmulatedGpuDeathTest, SaysThatABarrierHadMoreArrivalsThanItExpects) {
  EXPECT_DEATH(launch(1, 32,
                      [] {
                        auto& b = shared_at<Barrier>(0);
                        if (thread() == 0) b.init(1), b.arrive_expecting(16), b.arrive();
                      }),
               "more arrivals");
}

}  // namespace
}  // namespace lla::cuda::sm90
