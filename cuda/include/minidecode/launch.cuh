// Launching with a status, and programmatic dependent launch (PDL): a kernel may start while its
// predecessor still runs, does what does not depend on it (loads weights), and waits before it
// reads what the predecessor wrote. Before sm_90 the attribute is not set and both device calls
// compile to nothing.
#pragma once

#include <cuda_runtime.h>

namespace minidecode {

// Blocks until the kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if !defined(MINIDECODE_HOST_SHIM) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start its independent part.
__device__ __forceinline__ void pdl_trigger() {
#if !defined(MINIDECODE_HOST_SHIM) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Keeps the compiler from computing `value` later than here, such as behind the wait.
__device__ __forceinline__ void computed_by_now(float& value) {
#if !defined(MINIDECODE_HOST_SHIM)
  asm volatile("" : "+f"(value));
#endif
}

__device__ __forceinline__ void computed_by_now(int& value) {
#if !defined(MINIDECODE_HOST_SHIM)
  asm volatile("" : "+r"(value));
#endif
}

template <typename T>
__device__ __forceinline__ void computed_by_now(T*& value) {
#if !defined(MINIDECODE_HOST_SHIM)
  asm volatile("" : "+l"(value));
#endif
}

enum class Pdl { kOff, kOn };

// Blocks of a cluster that every GPU with clusters schedules.
constexpr int kPortableCluster = 8;

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;  // dynamic; the kernel's limit is raised where that is needed
  int cluster = 1;       // blocks of a cluster along y, up to kPortableCluster
};

// PDL and clusters need sm_90; asked once per call, a cached attribute in the driver (well under 1
// us).
inline bool has_pdl() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

// Bytes of shared memory that a block may have on the current GPU.
inline int block_shared_limit() {
  int device = 0, bytes = 48 * 1024;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return bytes;
}

// A failed call leaves its status behind for the next one to find; `status` is all that is
// reported.
inline cudaError_t cleared(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// Enqueues `kernel` and returns the launch status; never synchronises.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, Pdl pdl,
                   cudaStream_t stream, Args... args) {
  const void* function = reinterpret_cast<const void*>(kernel);
  // The limit of 48 KB counts static shared memory as well, of which there is less than 16 KB.
  if (shape.shared_bytes > 32 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(
        function, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (status != cudaSuccess) return cleared(status);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (pdl == Pdl::kOn && has_pdl()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = 1;
    attributes[count].val.clusterDim.y = shape.cluster;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cleared(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

}  // namespace minidecode
