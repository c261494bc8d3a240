// Bulk asynchronous copies from global to shared memory (the copy engine of sm_90) that complete on
// an mbarrier. On the host shim a copy happens at once and waiting returns at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace minidecode {

#if defined(MINIDECODE_HOST_SHIM)

__device__ inline void mbarrier_init(uint64_t* barrier, int) { *barrier = 0; }
__device__ inline void mbarrier_expect_bytes(uint64_t*, uint32_t) {}
__device__ inline void mbarrier_wait(uint64_t*, uint32_t) {}
__device__ inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t*) {
  memcpy(shared, global, bytes);
}

#else

// The L2 policy of data that is read once a token: the first to leave, so that it displaces nothing
// that is still to be read.
__device__ __forceinline__ uint64_t leaves_first() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// One thread makes the barrier ready for `arrivals` arrivals a phase, before a block barrier shows
// it to the others.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and makes the phase wait for `bytes` more from bulk copies.
__device__ __forceinline__ void mbarrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(leaves_first())
      : "memory");
#endif
}

#endif

// Copies 16 bytes, or clears them if not `there`. Whoever reads them waits, then synchronises.
__device__ __forceinline__ void async_copy(void* shared, const void* global, bool there) {
#if !defined(MINIDECODE_HOST_SHIM) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(there ? 16 : 0), "l"(leaves_first())
               : "memory");
#else
  *static_cast<uint4*>(shared) =
      there ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
#endif
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void async_commit() {
#if !defined(MINIDECODE_HOST_SHIM) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void async_wait() {
#if !defined(MINIDECODE_HOST_SHIM) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

}  // namespace minidecode
