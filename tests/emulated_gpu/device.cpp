#include "device.hpp"

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

// AddressSanitizer wants to know whose stack is in use, and which shared memory the kernel may touch.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
static void start_switch(void** fake, const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(fake, stack, bytes);
}
static void finish_switch(void* fake, const void** stack, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake, stack, bytes);
}
static void allow(const void* from, size_t bytes) { __asan_unpoison_memory_region(from, bytes); }
static void forbid(const void* from, size_t bytes) { __asan_poison_memory_region(from, bytes); }
#else
static void start_switch(void**, const void*, size_t) {}
static void finish_switch(void*, const void**, size_t*) {}
static void allow(const void*, size_t) {}
static void forbid(const void*, size_t) {}
#endif

namespace emulated {

Thread* now = nullptr;
Index block_dim, grid_dim;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kNamedBarriers = 16, kLargestCluster = 16;

struct Fiber;

struct NamedBarrier {
  int arrived = 0;
  bool any = false, last_any = false;
  std::vector<Fiber*> waiting;
};

}  // namespace

struct Block {
  Index index;
  int rank = 0;
  unsigned char* shared = nullptr;
  int alive = 0;
  NamedBarrier barriers[kNamedBarriers];
  std::vector<std::unique_ptr<Warp>> warps;
};

namespace {

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Fiber : Thread {
  boost::context::fiber context;
  const char* waits_for = nullptr;  // null: it runs, or may
  const void* event = nullptr;
  bool ended = false;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> groups;  // of copies, ended
  boost::context::stack_context stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

}  // namespace

struct Warp {
  Block* block = nullptr;
  int number = 0;
  Fiber* lanes[kWarp] = {};
  uint32_t alive = 0, ready = 0, arrived = 0;
  bool listed = false, slow = false;
  // What all come together for.
  const char* what = nullptr;
  void* slots[kWarp] = {};
  WarpWork work = nullptr;
  // Products that are under way: by batches, the last one open.
  std::deque<std::vector<std::vector<GroupProduct>>> products;
};

void do_products(const std::vector<GroupProduct>& lanes);  // products.cpp

namespace {

struct Machine {
  std::vector<Warp*> ready;
  std::vector<std::function<void()>> copies;
  std::vector<std::unique_ptr<Block>> blocks;  // of the cluster
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> waiting;  // for transaction barriers
  NamedBarrier cluster;
  int unfinished = 0;
  boost::context::fiber scheduler;
  uint64_t random = 1;
  bool late_products = false;
  const void* stack = nullptr;  // the scheduler's
  size_t stack_bytes = 0;
};
Machine machine;

Fiber& self() { return *static_cast<Fiber*>(now); }

// Stacks and shared memory are kept from launch to launch.
struct Stacks {
  std::vector<boost::context::stack_context> free;
  boost::context::protected_fixedsize_stack source{kStackBytes};
  boost::context::stack_context take() {
    if (free.empty()) return source.allocate();
    const auto stack = free.back();
    free.pop_back();
    return stack;
  }
};
Stacks stacks;
void* bottom(const boost::context::stack_context& stack) { return static_cast<char*>(stack.sp) - stack.size; }
struct KeptStack {
  boost::context::stack_context allocate() { return stacks.take(); }
  void deallocate(boost::context::stack_context& stack) {
    allow(bottom(stack), stack.size);
    stacks.free.push_back(stack);
  }
};

unsigned char* shared_memory(int rank) {
  static unsigned char* blocks[kLargestCluster];
  if (rank >= kLargestCluster) fail("a cluster of too many blocks");
  if (blocks[rank] == nullptr) {
    blocks[rank] = static_cast<unsigned char*>(std::aligned_alloc(kSharedBytes, kSharedBytes));
  }
  return blocks[rank];
}

void make_ready(Fiber& f) {
  f.waits_for = nullptr;
  Warp& w = *f.warp;
  w.ready |= 1u << f.lane;
  if (!w.listed) w.listed = true, machine.ready.push_back(&w);
}

void sleep(const char* why, const void* event) {
  Fiber& f = self();
  f.waits_for = why, f.event = event;
  start_switch(&f.fake_stack, machine.stack, machine.stack_bytes);
  machine.scheduler = std::move(machine.scheduler).resume();
  finish_switch(f.fake_stack, &machine.stack, &machine.stack_bytes);
}

void wake_all(std::vector<Fiber*>& waiting) {
  for (Fiber* f : waiting) make_ready(*f);
  waiting.clear();
}

void finish_together(Warp& w) {
  const uint32_t all = w.arrived;
  w.arrived = 0;
  w.work(w.slots);
  for (int i = 0; i < kWarp; ++i) {
    w.slots[i] = nullptr;
    if (all >> i & 1 && w.lanes[i] != now && !w.lanes[i]->ended) make_ready(*w.lanes[i]);
  }
}

void release(NamedBarrier& b) {
  b.last_any = b.any, b.any = false, b.arrived = 0;
  wake_all(b.waiting);
}

void end_of_thread() {
  Fiber& f = self();
  f.ended = true;
  Warp& w = *f.warp;
  w.alive &= ~(1u << f.lane);
  --f.block->alive;
  --machine.unfinished;
  if (w.arrived != 0 && w.arrived == w.alive) finish_together(w);
  NamedBarrier& whole = f.block->barriers[0];
  if (whole.arrived > 0 && whole.arrived == f.block->alive) release(whole);
}

struct Ended {};  // what ends a thread

std::string place(const Fiber& f) {
  return "block " + std::to_string(f.block->index.x) + " warp " + std::to_string(f.warp->number) + " lane " +
         std::to_string(f.lane);
}

void report_and_fail() {
  std::string text = "the kernel does not end:";
  for (const auto& block : machine.blocks) {
    for (const auto& w : block->warps) {
      const char* last = nullptr;
      const void* event = nullptr;
      for (Fiber* f : w->lanes) {
        if (f == nullptr || f->ended || (f->waits_for == last && f->event == event)) continue;
        last = f->waits_for, event = f->event;
        text += "\n  " + place(*f) + " waits for " + last;
        if (event != nullptr && std::strcmp(last, "a transaction barrier") == 0) {
          text += " at shared address " + std::to_string(static_cast<const unsigned char*>(event) - block->shared);
        }
      }
    }
  }
  fail(text.c_str());
}

void land(size_t which) {
  std::swap(machine.copies[which], machine.copies.back());
  const auto copy = std::move(machine.copies.back());
  machine.copies.pop_back();
  copy();
}

void resume(Fiber& f) {
  now = &f;
  void* fake_stack = nullptr;
  start_switch(&fake_stack, bottom(f.stack), f.stack.size);
  f.context = std::move(f.context).resume();
  finish_switch(fake_stack, nullptr, nullptr);
}

void schedule() {
  int turns = 0;
  while (machine.unfinished > 0) {
    if (!machine.copies.empty() && (machine.ready.empty() || draw(16) == 0)) {
      land(draw(static_cast<uint32_t>(machine.copies.size())));
      continue;
    }
    if (machine.ready.empty()) report_and_fail();
    if (turns++ % 512 == 0) {  // some warps fall far behind for a while
      for (const auto& b : machine.blocks) {
        for (const auto& w : b->warps) w->slow = draw(4) == 0;
      }
    }
    size_t which = draw(static_cast<uint32_t>(machine.ready.size()));
    if (machine.ready[which]->slow && draw(64) != 0) which = draw(static_cast<uint32_t>(machine.ready.size()));
    Warp& w = *machine.ready[which];
    machine.ready[which] = machine.ready.back();
    machine.ready.pop_back();
    w.listed = false;
    uint32_t lanes = w.ready;
    w.ready = 0;
    while (lanes != 0) {
      const int lane = draw(8) == 0 ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
      lanes &= ~(1u << lane);
      resume(*w.lanes[lane]);
    }
  }
}

void start(Fiber& f, const std::function<void()>& thread) {
  f.stack = stacks.take();
  const boost::context::preallocated place(f.stack.sp, f.stack.size, f.stack);
  f.context = boost::context::fiber(std::allocator_arg, place, KeptStack{}, [&](boost::context::fiber&& back) {
    machine.scheduler = std::move(back);
    finish_switch(nullptr, &machine.stack, &machine.stack_bytes);
    try {
      thread();
    } catch (const Ended&) {
    }
    end_of_thread();
    start_switch(nullptr, machine.stack, machine.stack_bytes);
    return std::move(machine.scheduler);
  });
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what);
  std::fflush(nullptr);
  std::abort();
}

uint32_t draw(uint32_t below) {
  machine.random = machine.random * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>((machine.random >> 33) * below >> 31);
}

const Index& block_index() { return self().block->index; }

void together(const char* what, void* slot, WarpWork work) {
  Warp& w = *now->warp;
  if (w.arrived == 0) {
    w.what = what, w.work = work;
  } else if (w.what != what && std::strcmp(w.what, what) != 0) {
    fail((std::string("threads of one warp meet for different things: ") + w.what + " and " + what).c_str());
  }
  w.slots[now->lane] = slot;
  w.arrived |= 1u << now->lane;
  if (w.arrived == w.alive) {
    finish_together(w);
  } else {
    sleep(what, nullptr);
  }
}

bool barrier_sync(int id, int threads, bool mine) {
  Block& block = *now->block;
  NamedBarrier& b = block.barriers[id];
  const int wanted = threads == kWholeBlock ? block.alive : threads;
  b.any |= mine;
  if (++b.arrived == wanted) {
    release(b);
  } else {
    b.waiting.push_back(&self());
    sleep(threads == kWholeBlock ? "__syncthreads" : "a named barrier", &b);
  }
  return b.last_any;
}

void barrier_arrive(int id, int threads) {
  NamedBarrier& b = now->block->barriers[id];
  if (++b.arrived == threads) release(b);
}

void exit_thread() { throw Ended{}; }

// --- Transaction barriers ---

namespace {
void end_phase_if_done(TransactionBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = b.expected;
  const auto others =
      std::partition(machine.waiting.begin(), machine.waiting.end(), [&](const Fiber* f) { return f->event != &b; });
  for (auto f = others; f != machine.waiting.end(); ++f) make_ready(**f);
  machine.waiting.erase(others, machine.waiting.end());
}
}  // namespace

void init(TransactionBarrier& b, uint32_t count) { b.phase = 0, b.expected = count, b.pending = count, b.bytes = 0; }
void arrive(TransactionBarrier& b, uint32_t expected_bytes) {
  if (b.pending == 0) fail("more arrivals at a transaction barrier than it expects");
  b.bytes += expected_bytes;
  b.pending = b.pending - 1;
  end_phase_if_done(b);
}
void complete(TransactionBarrier& b, uint32_t bytes) {
  b.bytes -= bytes;
  end_phase_if_done(b);
}
void wait(TransactionBarrier& b, uint32_t parity) {
  while (b.phase == parity) {
    machine.waiting.push_back(&self());
    sleep("a transaction barrier", &b);
  }
}

// --- Memory ---

unsigned char* dynamic_shared() { return now->block->shared; }

uint32_t shared_address(const void* pointer) {
  const auto at = static_cast<const unsigned char*>(pointer) - now->block->shared;
  if (at < 0 || at >= static_cast<std::ptrdiff_t>(kSharedBytes)) fail("an address is not in the block's shared memory");
  return static_cast<uint32_t>(at);
}
void* shared_pointer(uint32_t address) {
  if (address >= kSharedBytes) fail("a shared address beyond the block's memory");
  return now->block->shared + address;
}
void* of_other_block(void* pointer, int rank) {
  return machine.blocks.at(static_cast<size_t>(rank))->shared + shared_address(pointer);
}
int block_rank() { return now->block->rank; }
void cluster_sync() {
  NamedBarrier& b = machine.cluster;
  if (++b.arrived == machine.unfinished) {
    release(b);
  } else {
    b.waiting.push_back(&self());
    sleep("the cluster's barrier", &b);
  }
}

void land_later(std::function<void()> copy) { machine.copies.push_back(std::move(copy)); }

namespace {
void do_copies(const std::vector<Copy>& copies) {
  for (const Copy& c : copies) {
    if (c.from != nullptr) {
      std::memcpy(c.to, c.from, c.bytes);
    } else {
      std::memset(c.to, 0, c.bytes);
    }
  }
}
}  // namespace

void copy_ahead(void* to, const void* from, int bytes) { self().copies.push_back({to, from, bytes}); }
void wait_copied_ahead() {
  end_group_ahead();
  wait_groups_ahead(0);
}
// A group lands at once, or when somebody waits for it.
void end_group_ahead() {
  auto& groups = self().groups;
  groups.push_back(std::move(self().copies));
  self().copies.clear();
  if (draw(2) == 0) do_copies(groups.back()), groups.back().clear();
}
void wait_groups_ahead(int pending) {
  for (auto& groups = self().groups; groups.size() > static_cast<size_t>(pending); groups.pop_front()) {
    do_copies(groups.front());
  }
}
void arrive_when_copied(TransactionBarrier& barrier) {
  land_later([&barrier, copies = std::move(self().copies)] {
    do_copies(copies);
    arrive(barrier);
  });
  self().copies.clear();
}

void load_box(uint32_t to, const Map& map, const int (&at)[4], TransactionBarrier& barrier) {
  unsigned char* const shared = now->block->shared;
  if (map.swizzle_bytes == 128 ? to % 128 != 0 : to % 16 != 0) fail("a box's place in shared memory is not aligned");
  land_later([=, map = map, at = std::to_array(at), &barrier] {
    const uint32_t rows = map.box[1] * (map.rank > 2 ? map.box[2] * map.box[3] : 1);
    const uint32_t row_bytes = map.box[0] * map.element_bytes;
    for (uint32_t row = 0; row < rows; ++row) {
      uint32_t rest = row;
      uint64_t offset = 0;
      bool inside = true;
      for (uint32_t d = 1; d < map.rank; ++d) {
        const int64_t index = at[d] + static_cast<int64_t>(rest % map.box[d]);
        rest /= map.box[d];
        inside = inside && index >= 0 && static_cast<uint64_t>(index) < map.size[d];
        offset += static_cast<uint64_t>(index) * map.stride[d];
      }
      for (uint32_t e = 0; e < map.box[0]; ++e) {
        const int64_t column = at[0] + static_cast<int64_t>(e);
        uint32_t place = to + row * row_bytes + e * map.element_bytes;
        if (map.swizzle_bytes == 128) place ^= (place >> 7 & 7) << 4;
        if (map.swizzle_bytes == 32) place ^= (place >> 7 & 1) << 4;
        if (inside && column >= 0 && static_cast<uint64_t>(column) < map.size[0]) {
          std::memcpy(shared + place, map.data + offset + static_cast<uint64_t>(column) * map.element_bytes,
                      map.element_bytes);
        } else {
          std::memset(shared + place, 0, map.element_bytes);
        }
      }
    }
    complete(barrier, rows * row_bytes);
  });
}

// --- Warpgroup products: a warp's part of one needs nothing of the other warps ---

void issue(const GroupProduct& p) {
  together("a warpgroup product", const_cast<GroupProduct*>(&p), [](void* const* slots) {
    Warp& w = *now->warp;
    std::vector<GroupProduct> lanes(kWarp);
    for (int i = 0; i < kWarp; ++i) {
      if (slots[i] == nullptr) fail("a warpgroup product without all threads");
      lanes[i] = *static_cast<const GroupProduct*>(slots[i]);
    }
    if (machine.late_products) {
      if (w.products.empty()) w.products.emplace_back();
      w.products.back().push_back(std::move(lanes));
    } else {
      do_products(lanes);
    }
  });
}
void commit_products() {
  int none = 0;
  together("the end of a batch of products", &none, [](void* const*) {
    if (machine.late_products) now->warp->products.emplace_back();
  });
}
void wait_products(int pending) {
  together("products to end", &pending, [](void* const* slots) {
    Warp& w = *now->warp;
    // The last batch is the one that has not been committed yet.
    while (!w.products.empty() &&
           static_cast<int>(w.products.size()) - 1 > *static_cast<const int*>(slots[now->lane])) {
      for (const auto& product : w.products.front()) do_products(product);
      w.products.pop_front();
    }
  });
}

// --- Launches ---

void run(const Launch& launch) {
  static const uint64_t seed = [] {
    const char* given = std::getenv("LLA_EMULATED_SEED");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
  }();
  static uint64_t launches = 0;
  machine.random = (seed << 32) + ++launches;
  draw(2);
  machine.late_products = draw(2) == 0;
  block_dim = launch.block, grid_dim = launch.grid;
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  if (blocks % launch.cluster != 0) fail("a grid is not whole clusters");
  for (unsigned first = 0; first < blocks; first += launch.cluster) {
    machine.blocks.clear();
    machine.fibers.clear();
    machine.cluster = {};
    for (int rank = 0; rank < launch.cluster; ++rank) {
      auto block = std::make_unique<Block>();
      const unsigned n = first + rank;
      block->index = {n % launch.grid.x, n / launch.grid.x % launch.grid.y, n / launch.grid.x / launch.grid.y};
      block->rank = rank;
      block->shared = shared_memory(rank);
      block->alive = static_cast<int>(threads);
      allow(block->shared, kSharedBytes);
      std::memset(block->shared, 0xff, launch.shared_bytes);  // NaN
      forbid(block->shared + launch.shared_bytes, kSharedBytes - launch.shared_bytes);
      for (unsigned t = 0; t < threads; ++t) {
        if (t % kWarp == 0) {
          block->warps.push_back(std::make_unique<Warp>());
          block->warps.back()->block = block.get();
          block->warps.back()->number = static_cast<int>(t / kWarp);
        }
        auto fiber = std::make_unique<Fiber>();
        fiber->index = {t % launch.block.x, t / launch.block.x % launch.block.y, t / launch.block.x / launch.block.y};
        fiber->lane = static_cast<int>(t % kWarp);
        fiber->warp = block->warps.back().get();
        fiber->block = block.get();
        fiber->warp->lanes[fiber->lane] = fiber.get();
        fiber->warp->alive |= 1u << fiber->lane;
        start(*fiber, launch.thread);
        make_ready(*fiber);
        machine.fibers.push_back(std::move(fiber));
      }
      machine.blocks.push_back(std::move(block));
    }
    machine.unfinished = static_cast<int>(threads) * launch.cluster;
    schedule();
    while (!machine.copies.empty()) land(0);
    machine.ready.clear();
  }
  machine.fibers.clear();
  machine.blocks.clear();
  now = nullptr;
}

}  // namespace emulated
