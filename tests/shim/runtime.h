// The host shim's scheduler, as the device-side headers see it.
//
// One OS thread runs everything. Every CUDA thread is a fiber that runs until it has to wait (a
// barrier, a warp operation whose partners have not arrived) and then hands over to another one.
// Which one is chosen is adversarial on purpose: see `Order` in scheduler.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime_api.h"

// Of the running thread. Variables, not macros: cudaLaunchConfig_t has members of these names.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace minidecode_shim {

struct Block;

struct Thread {
  uint3 index;
  Block* block;
};

struct Block {
  uint3 index;
  dim3 block_dim;
  dim3 grid_dim;
  dim3 cluster_dim;  // in blocks
  unsigned rank;     // of the block in its cluster
};

extern Thread* running;

enum class WarpOp { kIndex, kUp, kDown, kXor, kBallot, kAny, kAll, kSync };

// Waits for the lanes that `mask` names, then returns this lane's result. `size` is that of the
// shuffled type: lanes that disagree about the operation, its width or its type are an error.
uint64_t warp_collective(WarpOp op, unsigned mask, uint64_t value, int operand, int width,
                         int size);
unsigned active_mask();

enum class Fold { kNone, kCount, kAnd, kOr };
int block_barrier(Fold fold, bool predicate);

void cluster_arrive();
void cluster_wait();
void grid_barrier();

// The same shared-memory address in the block of that rank.
void* shared_of_rank(const void* address, unsigned rank);
void* dynamic_shared_memory();

// Lets every other thread run first: for loops that poll memory.
void yield();

// Until a thread comes here, the buffers that the caller named as written by the previous kernel
// cannot be touched; the call returns when no thread of the block can run without it.
void dependency_wait();

// Bulk copies and the mbarrier they complete on.
void mbarrier_init(uint64_t* barrier, int arrivals);
void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes);
void mbarrier_wait(uint64_t* barrier, uint32_t parity);
void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Runs `invoke(closure)` once per thread of the grid. [static_begin, static_end) is the memory that
// holds the library's `__shared__` variables.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   void (*invoke)(const void*), const void* closure, char* static_begin,
                   char* static_end);

}  // namespace minidecode_shim
