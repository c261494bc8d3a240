// The part of cooperative groups that the kernels use: block, cluster and grid.
#ifndef MINIDECODE_SHIM_COOPERATIVE_GROUPS_H_
#define MINIDECODE_SHIM_COOPERATIVE_GROUPS_H_

#include <cuda_runtime.h>

namespace cooperative_groups {

class thread_block {
 public:
  static void sync() { __syncthreads(); }
  static unsigned thread_rank() {
    return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  }
  static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned size() { return num_threads(); }
  static dim3 group_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
  static dim3 thread_index() { return dim3(threadIdx.x, threadIdx.y, threadIdx.z); }
};

class cluster_group {
 public:
  static void sync() {
    barrier_arrive();
    barrier_wait();
  }
  static void barrier_arrive() { minidecode_shim::cluster_arrive(); }
  static void barrier_wait() { minidecode_shim::cluster_wait(); }
  static unsigned block_rank() { return minidecode_shim::running->block->rank; }
  static unsigned num_blocks() {
    const dim3 d = dim_blocks();
    return d.x * d.y * d.z;
  }
  static dim3 dim_blocks() { return minidecode_shim::running->block->cluster_dim; }
  static dim3 block_index() {
    const dim3 d = dim_blocks();
    return dim3(blockIdx.x % d.x, blockIdx.y % d.y, blockIdx.z % d.z);
  }
  static unsigned thread_rank() {
    return block_rank() * thread_block::num_threads() + thread_block::thread_rank();
  }
  static unsigned num_threads() { return num_blocks() * thread_block::num_threads(); }
  template <typename T>
  static T* map_shared_rank(T* address, int rank) {
    return static_cast<T*>(minidecode_shim::shared_of_rank(address, unsigned(rank)));
  }
};

class grid_group {
 public:
  static void sync() { minidecode_shim::grid_barrier(); }
};

inline thread_block this_thread_block() { return {}; }
inline cluster_group this_cluster() { return {}; }
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups

#endif  // MINIDECODE_SHIM_COOPERATIVE_GROUPS_H_
