// The host shim's scheduler: CUDA threads as fibers, their barriers and warp operations, and the
// order in which they run, which is adversarial: see `Order`.
//
// Built without sanitizers: the kernels are instrumented, the scheduler only tells
// AddressSanitizer about its stacks and about memory that must not be touched yet.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fiber.h"
#include "host.h"
#include "runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace minidecode_shim {

Thread* running = nullptr;

namespace {

constexpr int kWarp = 32;
constexpr unsigned kMaxThreads = 32768;  // resident at once: a cluster, or a cooperative grid
constexpr int kMaxIdleRounds = 10000;    // of threads that only poll

// ---- threads, warps, blocks, clusters ----

enum class Wait { kNothing, kWarp, kBlock, kCluster, kGrid, kDependency, kPoll, kExited };

struct Fiber : Thread {
  Context context;
  unsigned warp;  // of the block
  unsigned lane;
  Wait wait;
  // the warp operation it waits in
  WarpOp op;
  unsigned mask;
  uint64_t value;
  int operand, width, size;
  uint64_t result;
  // the cluster barrier's phase it arrived in
  unsigned cluster_phase;
  bool cluster_arrived;
};

struct Warp {
  uint32_t live;     // lanes that exist and have not exited
  uint32_t ready;    // could run
  uint32_t polling;  // called yield()
  uint32_t pending;  // wait in a warp operation
  Fiber* lanes[kWarp];
};

struct Cluster {
  unsigned live = 0, arrived = 0, phase = 0;
  std::vector<Fiber*> waiting;
};

struct BlockState : Block {
  Cluster* cluster;
  std::vector<Warp> warps;
  uint32_t ready_warps;  // bit i: warps[i].ready != 0
  unsigned threads, exited, at_barrier;
  int folded, fold_result;
  bool started, finished;
  std::unique_ptr<char[]> saved;  // its static shared memory while another block runs
  Region dynamic;
};

// Which ready thread runs next. Each rotates the warps and the lanes and goes up or down through
// them, so one warp always runs as far ahead of the others as the barriers let it.
struct Order {
  bool warps_down, lanes_down;
  unsigned warp_rotation;
  bool random;
};

struct Copy {
  BlockState* owner;
  char* to;
  const char* from;
  uint32_t bytes;
  uint64_t* barrier;
};

struct State {
  void (*invoke)(const void*) = nullptr;
  const void* closure = nullptr;
  Region statics;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<BlockState>> blocks;  // resident ones: a cluster, or the whole grid
  std::vector<Cluster> clusters;
  BlockState* active = nullptr;  // whose static shared memory is in place
  Context main;
  Order order = {};
  bool early_copies = false;
  bool blocks_down = false;
  unsigned remaining = 0;  // threads
  unsigned polling = 0;
  int idle_rounds = 0;
  std::vector<Copy> copies;
  std::vector<Fiber*> at_dependency, at_grid;
  bool late_armed = false;
  bool cooperative = false;
  uint64_t random = 1;
};

State& state() {
  static State* s = new State;  // never destroyed: fibers may be suspended at exit
  return *s;
}

Fiber* self() { return static_cast<Fiber*>(running); }
BlockState& block_of(const Fiber& f) { return *static_cast<BlockState*>(f.block); }
Warp& warp_of(const Fiber& f) { return block_of(f).warps[f.warp]; }

uint32_t random_bits() {
  uint64_t& x = state().random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return uint32_t(x >> 16);
}

void make_ready(Fiber& f) {
  f.wait = Wait::kNothing;
  warp_of(f).ready |= 1u << f.lane;
  block_of(f).ready_warps |= 1u << f.warp;
}

void make_waiting(Fiber& f, Wait wait) {
  f.wait = wait;
  Warp& warp = warp_of(f);
  warp.ready &= ~(1u << f.lane);
  if (warp.ready == 0) block_of(f).ready_warps &= ~(1u << f.warp);
}

unsigned first_bit(uint32_t bits, unsigned rotation, bool down) {
  rotation &= 31;
  const uint32_t turned = rotation == 0 ? bits : (bits >> rotation) | (bits << (32 - rotation));
  const unsigned found =
      down ? 31 - unsigned(__builtin_clz(turned)) : unsigned(__builtin_ctz(turned));
  return (found + rotation) & 31;
}

// ---- what a stuck launch looks like ----

const char* name_of(WarpOp op) {
  switch (op) {
    case WarpOp::kIndex:
      return "__shfl_sync";
    case WarpOp::kUp:
      return "__shfl_up_sync";
    case WarpOp::kDown:
      return "__shfl_down_sync";
    case WarpOp::kXor:
      return "__shfl_xor_sync";
    case WarpOp::kBallot:
      return "__ballot_sync";
    case WarpOp::kAny:
      return "__any_sync";
    case WarpOp::kAll:
      return "__all_sync";
    case WarpOp::kSync:
      return "__syncwarp";
  }
  return "?";
}

const char* name_of(Wait wait) {
  switch (wait) {
    case Wait::kNothing:
      return "ready";
    case Wait::kWarp:
      return "in a warp operation";
    case Wait::kBlock:
      return "at __syncthreads";
    case Wait::kCluster:
      return "at a cluster barrier";
    case Wait::kGrid:
      return "at a grid barrier";
    case Wait::kDependency:
      return "in the dependent-launch wait";
    case Wait::kPoll:
      return "polling";
    case Wait::kExited:
      return "exited";
  }
  return "?";
}

[[noreturn]] void stuck(const char* what) {
  State& s = state();
  fprintf(stderr, "%s\n", what);
  for (const auto& block : s.blocks) {
    if (block->finished) continue;
    std::map<Wait, int> counts;
    for (const Warp& warp : block->warps) {
      for (const Fiber* f : warp.lanes) {
        if (f != nullptr) ++counts[f->wait];
      }
    }
    fprintf(stderr, "  block (%u, %u, %u):", block->index.x, block->index.y, block->index.z);
    const char* separator = " ";
    for (const auto& [wait, count] : counts) {
      fprintf(stderr, "%s%d threads %s", separator, count, name_of(wait));
      separator = ", ";
    }
    fprintf(stderr, "\n");
    for (const Warp& warp : block->warps) {
      if (warp.pending == 0) continue;
      const Fiber& f = *warp.lanes[__builtin_ctz(warp.pending)];
      fprintf(stderr,
              "  warp %u: lanes %08x wait, the first of them in %s(%08x); live lanes %08x\n",
              f.warp, warp.pending, name_of(f.op), f.mask, warp.live);
      break;
    }
  }
  fail("%s", what);
}

// ---- the scheduler ----

void place(BlockState& block) {
  State& s = state();
  if (s.active == &block) return;
  const bool several = s.blocks.size() > 1;
  if (several && s.active != nullptr && !s.active->finished) {
    copy_bytes(s.active->saved.get(), s.statics.begin, s.statics.bytes);
  }
  if (!block.started) {
    block.started = true;
    fill_ones(s.statics.begin, s.statics.bytes);
    allow(block.dynamic.begin, block.dynamic.bytes);
    fill_ones(block.dynamic.begin, block.dynamic.bytes);
    if (several) allow(block.saved.get(), s.statics.bytes);
  } else {
    copy_bytes(s.statics.begin, block.saved.get(), s.statics.bytes);
  }
  s.active = &block;
  blockIdx = block.index;
}

void wake_pollers() {
  State& s = state();
  for (const auto& block : s.blocks) {
    for (Warp& warp : block->warps) {
      for (uint32_t bits = warp.polling; bits != 0; bits &= bits - 1) {
        make_ready(*warp.lanes[__builtin_ctz(bits)]);
      }
      warp.polling = 0;
    }
  }
  s.polling = 0;
}

void release_late() {
  State& s = state();
  for (const Region& region : host().settings.late) allow(region.begin, region.bytes);
  s.late_armed = false;
  for (Fiber* f : s.at_dependency) make_ready(*f);
  s.at_dependency.clear();
}

char* address_in(BlockState& owner, const void* address) {
  State& s = state();
  char* p = static_cast<char*>(const_cast<void*>(address));
  if (s.statics.holds(p) && s.active != &owner) {
    return owner.saved.get() + (p - s.statics.begin);
  }
  return p;
}

struct Mbarrier {  // as it lies in the kernel's 8 bytes
  uint32_t phase : 1, expected : 15, pending : 16;
  int32_t bytes;
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t), "an mbarrier is 8 bytes");

Mbarrier load_mbarrier(const uint64_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 8 != 0) fail("an mbarrier is not 8-byte aligned");
  if (*p == ~uint64_t(0)) fail("an mbarrier is used before its init is visible");
  Mbarrier b;
  copy_bytes(reinterpret_cast<char*>(&b), reinterpret_cast<const char*>(p), sizeof(b));
  return b;
}

void store_mbarrier(uint64_t* p, Mbarrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.pending = b.expected;
    state().idle_rounds = 0;
  }
  copy_bytes(reinterpret_cast<char*>(p), reinterpret_cast<const char*>(&b), sizeof(b));
}

void land(const Copy& copy) {
  memcpy(address_in(*copy.owner, copy.to), copy.from, copy.bytes);
  uint64_t* barrier = reinterpret_cast<uint64_t*>(address_in(*copy.owner, copy.barrier));
  Mbarrier b = load_mbarrier(barrier);
  b.bytes -= int32_t(copy.bytes);
  store_mbarrier(barrier, b);
}

Fiber* pick() {
  State& s = state();
  for (;;) {
    BlockState* block = s.active;
    if (block->ready_warps == 0) {
      block = nullptr;
      for (size_t i = 0; i < s.blocks.size() && block == nullptr; ++i) {
        BlockState* other = s.blocks[s.blocks_down ? s.blocks.size() - 1 - i : i].get();
        if (other->ready_warps != 0) block = other;
      }
    }
    if (block != nullptr) {
      const Order& o = s.order;
      const unsigned w =
          first_bit(block->ready_warps, o.random ? random_bits() : o.warp_rotation, o.warps_down);
      Warp& warp = block->warps[w];
      return warp.lanes[first_bit(warp.ready, o.random ? random_bits() : 0, o.lanes_down)];
    }
    if (!s.at_dependency.empty()) {
      release_late();
    } else if (!s.copies.empty()) {
      for (const Copy& copy : std::exchange(s.copies, {})) land(copy);
      wake_pollers();
    } else if (s.polling > 0) {
      if (++s.idle_rounds > kMaxIdleRounds) stuck("deadlock: threads poll for ever");
      wake_pollers();
    } else {
      stuck("deadlock: no thread can run");
    }
  }
}

void switch_to(Context& from, Fiber& next) {
  place(block_of(next));
  running = &next;
  threadIdx = next.index;
  if (&from != &next.context) switch_context(from, next.context);
}

void hand_over(Fiber& f) { switch_to(f.context, *pick()); }

void complete(Warp& warp, uint32_t group) {
  for (uint32_t bits = group; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    Fiber& f = *warp.lanes[lane];
    const int first = lane & ~(f.width - 1), past = first + f.width;
    int source = lane;
    uint64_t votes = 0;
    switch (f.op) {
      case WarpOp::kIndex:
        source = first + (f.operand & (f.width - 1));
        break;
      case WarpOp::kUp:
        source = lane - f.operand < first ? lane : lane - f.operand;
        break;
      case WarpOp::kDown:
        source = lane + f.operand >= past ? lane : lane + f.operand;
        break;
      case WarpOp::kXor:
        source = (lane ^ f.operand) >= past ? lane : lane ^ f.operand;
        break;
      case WarpOp::kSync:
        break;
      case WarpOp::kBallot:
      case WarpOp::kAny:
      case WarpOp::kAll:
        for (uint32_t b = group; b != 0; b &= b - 1) {
          const int other = __builtin_ctz(b);
          votes |= (warp.lanes[other]->value & 1) << other;
        }
        break;
    }
    if (f.op == WarpOp::kBallot) {
      f.result = votes;
    } else if (f.op == WarpOp::kAny) {
      f.result = votes != 0;
    } else if (f.op == WarpOp::kAll) {
      f.result = votes == group;
    } else {  // a lane that takes no part has nothing to give: ones are NaN in every float type
      f.result = group >> source & 1 ? warp.lanes[source]->value : ~uint64_t(0);
    }
  }
  warp.pending &= ~group;
  for (uint32_t bits = group; bits != 0; bits &= bits - 1) {
    make_ready(*warp.lanes[__builtin_ctz(bits)]);
  }
  state().idle_rounds = 0;
}

// Completes the operation that `f` waits in if every live lane of its mask has come.
bool try_complete(Fiber& f) {
  Warp& warp = warp_of(f);
  const uint32_t group = f.mask & warp.live;
  if ((warp.pending & group) != group) return false;
  for (uint32_t bits = group; bits != 0; bits &= bits - 1) {
    const Fiber& other = *warp.lanes[__builtin_ctz(bits)];
    if (other.mask != f.mask) return false;
    if (other.op != f.op || other.width != f.width || other.size != f.size) {
      fail(
          "divergent warp: lane %u is in %s (width %d, %d bytes), lane %u in %s (width %d, %d "
          "bytes), both with mask %08x",
          f.lane, name_of(f.op), f.width, f.size, other.lane, name_of(other.op), other.width,
          other.size, f.mask);
    }
  }
  complete(warp, group);
  return true;
}

void settle_cluster(Cluster& cluster) {
  if (cluster.arrived < cluster.live || cluster.live == 0) return;
  ++cluster.phase;
  cluster.arrived = 0;
  for (Fiber* f : std::exchange(cluster.waiting, {})) make_ready(*f);
  state().idle_rounds = 0;
}

void finish(Fiber& f) {
  State& s = state();
  BlockState& block = block_of(f);
  Warp& warp = warp_of(f);
  make_waiting(f, Wait::kExited);
  warp.live &= ~(1u << f.lane);
  for (uint32_t bits = warp.pending; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    if (warp.pending >> lane & 1) try_complete(*warp.lanes[lane]);
  }
  --block.cluster->live;
  if (f.cluster_arrived) --block.cluster->arrived;
  settle_cluster(*block.cluster);
  s.idle_rounds = 0;
  --s.remaining;
  if (++block.exited == block.threads) {
    for (const Copy& copy : s.copies) {
      if (copy.owner == &block) fail("a block ended before its bulk copies had arrived");
    }
    block.finished = true;
    forbid(block.dynamic.begin, block.dynamic.bytes);
    if (s.blocks.size() > 1) forbid(block.saved.get(), s.statics.bytes);
  }
  if (s.remaining == 0) {
    switch_context(f.context, s.main);
  } else {
    hand_over(f);
  }
}

void fiber_main() {
  arrive_on_stack();
  for (;;) {  // a stack serves one thread after another
    State& s = state();
    s.invoke(s.closure);
    finish(*self());
  }
}

// ---- launching ----

size_t volume(dim3 d) { return size_t(d.x) * d.y * d.z; }

uint3 unravel(size_t i, dim3 d) {
  return {unsigned(i % d.x), unsigned(i / d.x % d.y), unsigned(i / d.x / d.y)};
}

struct Plan {
  dim3 grid, block, cluster{1, 1, 1};
  size_t dynamic_bytes;
  bool dependent = false, cooperative = false;
};

cudaError_t read_config(const cudaLaunchConfig_t& config, const KernelLimits& limits, Plan* plan) {
  const Settings& settings = host().settings;
  plan->grid = config.gridDim;
  plan->block = config.blockDim;
  plan->dynamic_bytes = config.dynamicSmemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& a = config.attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension) {
      plan->cluster = dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
      if (settings.major < 9) return cudaErrorNotSupported;
    } else if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      plan->dependent = a.val.programmaticStreamSerializationAllowed != 0;
      if (settings.major < 9) return cudaErrorNotSupported;
    } else if (a.id == cudaLaunchAttributeCooperative) {
      plan->cooperative = a.val.cooperative != 0;
    }
  }
  const dim3 g = plan->grid, b = plan->block, c = plan->cluster;
  if (volume(g) == 0 || volume(b) == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 ||
      b.x > 1024 || b.y > 1024 || b.z > 64 || volume(b) > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  if (volume(c) == 0 || g.x % c.x != 0 || g.y % c.y != 0 || g.z % c.z != 0 ||
      volume(c) > (limits.large_cluster ? 16 : 8)) {
    return cudaErrorInvalidClusterSize;
  }
  if (plan->dynamic_bytes > size_t(limits.dynamic_shared)) return cudaErrorInvalidValue;
  const size_t resident = (plan->cooperative ? volume(g) : volume(c)) * volume(b);
  if (resident > kMaxThreads) return cudaErrorCooperativeLaunchTooLarge;
  return cudaSuccess;
}

void prepare_blocks(const Plan& plan) {
  State& s = state();
  const size_t count = plan.cooperative ? volume(plan.grid) : volume(plan.cluster);
  const unsigned threads = unsigned(volume(plan.block));
  while (s.fibers.size() < count * threads) {
    s.fibers.push_back(std::make_unique<Fiber>());
    prepare_stack(s.fibers.back()->context, fiber_main);
  }
  s.blocks.clear();
  for (size_t i = 0; i < count; ++i) {
    auto block = std::make_unique<BlockState>();
    block->block_dim = plan.block;
    block->grid_dim = plan.grid;
    block->cluster_dim = plan.cluster;
    block->threads = threads;
    block->warps.resize((threads + kWarp - 1) / kWarp);
    void* memory = nullptr;
    if (posix_memalign(&memory, 1024, std::max<size_t>(plan.dynamic_bytes, 1)) != 0) {
      fail("no memory");
    }
    block->dynamic = {static_cast<char*>(memory), plan.dynamic_bytes};
    if (plan.dynamic_bytes == 0) forbid(memory, 1);
    if (count > 1) block->saved.reset(new char[s.statics.bytes + 1]);
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = *s.fibers[i * threads + t];
      f.index = unravel(t, plan.block);
      f.block = block.get();
      f.warp = t / kWarp;
      f.lane = t % kWarp;
      block->warps[f.warp].lanes[f.lane] = &f;
    }
    s.blocks.push_back(std::move(block));
  }
}

// Makes every thread of the resident blocks ready to start.
void reset_blocks(const Plan& plan, size_t group) {
  State& s = state();
  const size_t per_cluster = volume(plan.cluster);
  const dim3 clusters(plan.grid.x / plan.cluster.x, plan.grid.y / plan.cluster.y,
                      plan.grid.z / plan.cluster.z);
  s.clusters.assign(s.blocks.size() / per_cluster, Cluster{});
  s.active = nullptr;
  s.remaining = 0;
  s.polling = 0;
  s.idle_rounds = 0;
  for (size_t i = 0; i < s.blocks.size(); ++i) {
    BlockState& block = *s.blocks[i];
    const uint3 cluster = unravel(plan.cooperative ? i / per_cluster : group, clusters);
    const uint3 within = unravel(i % per_cluster, plan.cluster);
    block.cluster = &s.clusters[i / per_cluster];
    block.cluster->live += block.threads;
    block.rank = unsigned(i % per_cluster);
    block.index = {cluster.x * plan.cluster.x + within.x, cluster.y * plan.cluster.y + within.y,
                   cluster.z * plan.cluster.z + within.z};
    block.exited = block.at_barrier = 0;
    block.folded = 0;
    block.started = block.finished = false;
    forbid(block.dynamic.begin, block.dynamic.bytes);
    if (s.blocks.size() > 1) forbid(block.saved.get(), s.statics.bytes);
    for (unsigned t = 0; t < block.threads; t += kWarp) {
      Warp& warp = block.warps[t / kWarp];
      const unsigned lanes = std::min<unsigned>(kWarp, block.threads - t);
      warp.live = warp.ready = lanes == kWarp ? ~0u : (1u << lanes) - 1;
      warp.polling = warp.pending = 0;
      for (unsigned lane = 0; lane < lanes; ++lane) {
        warp.lanes[lane]->wait = Wait::kNothing;
        warp.lanes[lane]->cluster_arrived = false;
      }
    }
    block.ready_warps = block.warps.size() == 32 ? ~0u : (1u << block.warps.size()) - 1;
    s.remaining += block.threads;
  }
}

void choose_order(size_t group) {
  State& s = state();
  const unsigned kind = unsigned(host().settings.order + group) % 4;
  const unsigned warps = unsigned(s.blocks[0]->warps.size());
  s.random = 0x9e3779b97f4a7c15u * (group + 1) + unsigned(host().settings.order);
  s.order = {kind == 1, kind == 1 || kind == 2, kind == 2 ? warps / 2 : 0, kind == 3};
  s.early_copies = kind % 2 == 1;
  s.blocks_down = kind % 2 == 1;
}

void run_group(const Plan& plan, size_t group) {
  State& s = state();
  choose_order(group);
  reset_blocks(plan, group);
  s.late_armed = plan.dependent && !host().settings.late.empty();
  if (s.late_armed) {
    for (const Region& region : host().settings.late) forbid(region.begin, region.bytes);
  }
  s.active = s.blocks[s.blocks_down ? s.blocks.size() - 1 : 0].get();
  Fiber& first = *pick();
  s.active = nullptr;
  switch_to(s.main, first);
  running = nullptr;
  if (s.late_armed) release_late();
}

}  // namespace

// ---- what device code calls ----

uint64_t warp_collective(WarpOp op, unsigned mask, uint64_t value, int operand, int width,
                         int size) {
  Fiber& f = *self();
  if (!(mask >> f.lane & 1))
    fail("%s(%08x) by lane %u, which is not in it", name_of(op), mask, f.lane);
  if (width < 1 || width > kWarp || (width & (width - 1)) != 0) {
    fail("%s: width %d is no power of two up to 32", name_of(op), width);
  }
  f.op = op;
  f.mask = mask;
  f.value = value;
  f.operand = operand;
  f.width = width;
  f.size = size;
  make_waiting(f, Wait::kWarp);
  warp_of(f).pending |= 1u << f.lane;
  if (!try_complete(f)) hand_over(f);
  return f.result;
}

unsigned active_mask() { return warp_of(*self()).live; }

int block_barrier(Fold fold, bool predicate) {
  Fiber& f = *self();
  BlockState& block = block_of(f);
  block.folded += predicate;
  if (++block.at_barrier < block.threads) {
    make_waiting(f, Wait::kBlock);
    hand_over(f);
  } else {
    block.fold_result = block.folded;
    block.folded = 0;
    block.at_barrier = 0;
    for (Warp& warp : block.warps) {
      for (uint32_t bits = warp.live; bits != 0; bits &= bits - 1) {
        make_ready(*warp.lanes[__builtin_ctz(bits)]);
      }
    }
    state().idle_rounds = 0;
  }
  switch (fold) {
    case Fold::kNone:
      return 0;
    case Fold::kCount:
      return block.fold_result;
    case Fold::kAnd:
      return block.fold_result == int(block.threads);
    case Fold::kOr:
      return block.fold_result > 0;
  }
  return 0;
}

void cluster_arrive() {
  Fiber& f = *self();
  if (f.cluster_arrived) fail("a second arrival at the cluster barrier without a wait");
  Cluster& cluster = *block_of(f).cluster;
  f.cluster_phase = cluster.phase;
  f.cluster_arrived = true;
  ++cluster.arrived;
  settle_cluster(cluster);
}

void cluster_wait() {
  Fiber& f = *self();
  if (!f.cluster_arrived) fail("a wait at the cluster barrier without an arrival");
  Cluster& cluster = *block_of(f).cluster;
  if (cluster.phase == f.cluster_phase) {
    make_waiting(f, Wait::kCluster);
    cluster.waiting.push_back(&f);
    hand_over(f);
  }
  f.cluster_arrived = false;
}

void grid_barrier() {
  Fiber& f = *self();
  State& s = state();
  if (!s.cooperative) fail("a grid barrier in a launch that is not cooperative");
  size_t threads = 0;
  for (const auto& block : s.blocks) threads += block->threads;
  s.at_grid.push_back(&f);
  if (s.at_grid.size() < threads) {
    make_waiting(f, Wait::kGrid);
    hand_over(f);
  } else {
    for (Fiber* other : std::exchange(s.at_grid, {})) make_ready(*other);
    s.idle_rounds = 0;
  }
}

void* shared_of_rank(const void* address, unsigned rank) {
  Fiber& f = *self();
  State& s = state();
  BlockState& block = block_of(f);
  if (rank >= volume(block.cluster_dim)) fail("map_shared_rank(%u): no such block", rank);
  if (rank == block.rank) return const_cast<void*>(address);
  for (const auto& other : s.blocks) {
    if (other->cluster != block.cluster || other->rank != rank) continue;
    if (s.statics.holds(address)) return address_in(*other, address);
    if (block.dynamic.holds(address)) {
      return other->dynamic.begin + (static_cast<const char*>(address) - block.dynamic.begin);
    }
  }
  fail("map_shared_rank: %p is not in shared memory", address);
}

void* dynamic_shared_memory() {
  if (running == nullptr) fail("dynamic shared memory is declared outside a kernel");
  return block_of(*self()).dynamic.begin;
}

void yield() {
  Fiber& f = *self();
  make_waiting(f, Wait::kPoll);
  warp_of(f).polling |= 1u << f.lane;
  ++state().polling;
  hand_over(f);
}

void dependency_wait() {
  State& s = state();
  if (!s.late_armed) return;
  Fiber& f = *self();
  make_waiting(f, Wait::kDependency);
  s.at_dependency.push_back(&f);
  hand_over(f);
}

void mbarrier_init(uint64_t* barrier, int arrivals) {
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0) fail("an mbarrier is not 8-byte aligned");
  if (arrivals < 1 || arrivals > 0x7fff) fail("an mbarrier of %d arrivals", arrivals);
  Mbarrier b = {};
  b.expected = b.pending = unsigned(arrivals);
  store_mbarrier(barrier, b);
}

void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes) {
  Mbarrier b = load_mbarrier(barrier);
  if (b.pending == 0) fail("one arrival too many at an mbarrier");
  b.bytes += int32_t(expected_bytes);
  --b.pending;
  store_mbarrier(barrier, b);
}

void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (load_mbarrier(barrier).phase == (parity & 1)) yield();
}

void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  State& s = state();
  BlockState& block = block_of(*self());
  const uintptr_t bits = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if ((bits | bytes) % 16 != 0) {
    fail("bulk copy of %u bytes from %p to %p: not multiples of 16", bytes, global, shared);
  }
  if (!s.statics.holds(shared) && !block.dynamic.holds(shared)) {
    fail("bulk copy to %p, which is not shared memory", shared);
  }
  const Copy copy{&block, static_cast<char*>(shared), static_cast<const char*>(global), bytes,
                  barrier};
  if (s.early_copies) {
    land(copy);
  } else {
    s.copies.push_back(copy);
  }
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   void (*invoke)(const void*), const void* closure, char* static_begin,
                   char* static_end) {
  State& s = state();
  if (running != nullptr) fail("a kernel is launched from a kernel");
  check_stream(config.stream, "launch");
  Plan plan;
  const cudaError_t status = read_config(config, host().limits[kernel], &plan);
  if (status != cudaSuccess) return remember(status);
  ++host().launches;
  s.invoke = invoke;
  s.closure = closure;
  s.statics = {static_begin, size_t(static_end - static_begin)};
  s.cooperative = plan.cooperative;
  blockDim = plan.block;
  gridDim = plan.grid;
  find_main_stack(s.main);
  prepare_blocks(plan);
  const size_t groups = plan.cooperative ? 1 : volume(plan.grid) / volume(plan.cluster);
  const size_t limit = size_t(host().settings.max_groups);
  for (size_t i = 0; i < groups; ++i) {
    const size_t group = host().settings.order & 1 ? groups - 1 - i : i;
    if (limit > 0 && group >= limit / 2 && group < groups - std::min(groups, (limit + 1) / 2)) {
      continue;
    }
    run_group(plan, group);
  }
  for (const auto& block : s.blocks) free(block->dynamic.begin);
  s.blocks.clear();
  return cudaSuccess;
}

}  // namespace minidecode_shim
