// A GPU on the CPU, for tests: runs the source of the CUDA kernels, compiled as C++, on any machine. Every thread of a
// block is a fiber; what CUDA C++ and PTX have names for (warps that work together, barriers, the copy engine, tensor
// cores) is done here.
//
// It shows whether kernels compute what they should, whether they end, and with AddressSanitizer whether they stay within
// their memory. What a GPU may do in any order happens in one drawn at random: warps take turns as they please, some far
// behind the others, copies land late and out of order, products are done at once or when somebody waits for them. It
// does not know of races within a warp's step, of fences, of time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulated {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

inline constexpr int kWarp = 32;
inline constexpr size_t kSharedBytes = 256 * 1024;  // of a block: what a descriptor of a product can name

struct Block;
struct Warp;

struct Thread {
  Index index;
  int lane;
  Warp* warp;
  Block* block;
};

// The one that runs.
extern Thread* now;
extern Index block_dim, grid_dim;
const Index& block_index();

// Ends the program's test run with a sentence: the kernel does what no GPU allows, or waits for ever.
[[noreturn]] void fail(const char* what);

// --- Threads that wait for each other -------------------------------------------------------------------------------
// All threads of the warp come here, each with a slot of its own; the last one lets `work` loose on all of them. Slots of
// threads that have ended are null.
using WarpWork = void (*)(void* const* slots);
void together(const char* what, void* slot, WarpWork work);

// A named barrier (0 is __syncthreads, of all threads that have not ended). Returns whether any brought `mine`.
bool barrier_sync(int id, int threads, bool mine);
void barrier_arrive(int id, int threads);
inline constexpr int kWholeBlock = -1;

void exit_thread();

// --- Transaction barriers -------------------------------------------------------------------------------------------
struct TransactionBarrier {  // in a kernel's own eight bytes
  uint64_t phase : 1, expected : 15, pending : 16;
  int64_t bytes : 32;
};
static_assert(sizeof(TransactionBarrier) == 8);
void init(TransactionBarrier& barrier, uint32_t count);
void arrive(TransactionBarrier& barrier, uint32_t expected_bytes = 0);
void complete(TransactionBarrier& barrier, uint32_t bytes);
void wait(TransactionBarrier& barrier, uint32_t parity);

// --- Memory ---------------------------------------------------------------------------------------------------------
unsigned char* dynamic_shared();
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address);
void* of_other_block(void* pointer, int rank);  // of the cluster
int block_rank();
void cluster_sync();

// Done at some later time, at the latest when nobody can go on without it.
void land_later(std::function<void()> copy);
// Copies that a thread has asked for: until they are waited for, or an arrival follows them.
void copy_ahead(void* to, const void* from, int bytes);
void wait_copied_ahead();
void end_group_ahead();
void wait_groups_ahead(int pending);
void arrive_when_copied(TransactionBarrier& barrier);

// --- Tensor maps (include/cuda.h) -----------------------------------------------------------------------------------
struct Map {
  unsigned char* data;
  uint32_t rank, element_bytes, swizzle_bytes;
  uint32_t box[5];
  uint64_t size[5], stride[5];  // stride[0]: element_bytes
};
void load_box(uint32_t to, const Map& map, const int (&at)[4], TransactionBarrier& barrier);

// --- Tensor cores ---------------------------------------------------------------------------------------------------
// Of a thread: 4 numbers of 16 x 8, from 4 and 2 words.
struct WarpProduct {
  float* c;
  const uint32_t *a, *b;
};
void multiply_f16(WarpProduct& p);
void multiply_bf16(WarpProduct& p);
void multiply_tf32(WarpProduct& p);

// A warpgroup's 64 x columns += 64 x 16 times 16 x columns, of one thread.
struct GroupProduct {
  static constexpr int kMost = 128;
  int columns;
  bool bf16, a_in_registers, a_across, b_across;  // across: MN-major
  bool add, negative;
  uint32_t a[4];
  uint64_t a_descriptor, b_descriptor;
  float* c[kMost];
};
void issue(const GroupProduct& p);
void commit_products();
void wait_products(int pending);

// Four 8 x 8 matrices of 16 bits.
void load_matrices(uint32_t* to, uint32_t address, bool transposed);
void store_matrices(uint32_t address, const uint32_t* from);

// --- Launches -------------------------------------------------------------------------------------------------------
struct Launch {
  Index grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;
  std::function<void()> thread;  // the kernel with its arguments
};
void run(const Launch& launch);

// A number below `below`, of the order that is drawn.
uint32_t draw(uint32_t below);

}  // namespace emulated
