// Thread-block clusters (sm_90): a barrier over the blocks of a cluster, and their shared memory.
// Before sm_90 a cluster is one block.
#pragma once

#include <cuda_runtime.h>

#if defined(MINIDECODE_HOST_SHIM) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>
#endif

namespace minidecode {

__device__ __forceinline__ void cluster_sync() {
#if defined(MINIDECODE_HOST_SHIM) || __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().sync();
#endif
}

// The variable of block `rank` of the cluster that `local` is in this block.
template <typename T>
__device__ __forceinline__ T* cluster_shared(T* local, int rank) {
#if defined(MINIDECODE_HOST_SHIM) || __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(local, rank);
#else
  return local;
#endif
}

}  // namespace minidecode
