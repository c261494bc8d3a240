// The few CUDA runtime functions that the swap ABI allows, and what the runner calls. What is not
// defined here (allocation, synchronisation) stays an undefined symbol: a source that uses it does
// not link.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include <unistd.h>

#include "host.h"

namespace minidecode_shim {

Host& host() {
  static Host* h = new Host;
  return *h;
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "shim: ");
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (running != nullptr) {
    const uint3 t = running->index, b = running->block->index;
    fprintf(stderr, " [thread (%u, %u, %u) of block (%u, %u, %u)]", t.x, t.y, t.z, b.x, b.y, b.z);
  }
  fprintf(stderr, "\n");
  fflush(stderr);
  _exit(98);
}

cudaError_t remember(cudaError_t status) {
  if (status != cudaSuccess) host().last_error = status;
  return status;
}

void check_stream(cudaStream_t stream, const char* what) {
  if (stream != host().settings.stream) {
    fail("%s on stream %p, not on the caller's stream", what, static_cast<void*>(stream));
  }
}

}  // namespace minidecode_shim

using namespace minidecode_shim;

// ---- what the runner calls ----

extern "C" {

void minidecode_shim_configure(int order, long max_groups, void* stream, int major, int minor,
                               int multiprocessors) {
  auto& s = host().settings;
  s.order = order;
  s.max_groups = max_groups;
  s.stream = static_cast<cudaStream_t>(stream);
  s.major = major;
  s.minor = minor;
  s.multiprocessors = multiprocessors;
  s.late.clear();
  host().launches = 0;
}

void minidecode_shim_late(void* begin, size_t bytes) {
  host().settings.late.push_back({static_cast<char*>(begin), bytes});
}

long minidecode_shim_launches() { return host().launches; }

// ---- the CUDA runtime ----

cudaError_t cudaGetLastError() { return std::exchange(host().last_error, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return host().last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidClusterSize:
      return "cudaErrorInvalidClusterSize";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorCooperativeLaunchTooLarge:
      return "cudaErrorCooperativeLaunchTooLarge";
    default:
      return "an error the shim has no name for";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// Shared memory that a block may have, as the CUDA C++ Programming Guide lists it.
static size_t shared_limit() {
  const auto& s = host().settings;
  if (s.major >= 9) return s.major == 12 ? 99 * 1024 : kSharedLimit;
  if (s.major == 8) return (s.minor == 0 ? 163 : 99) * 1024;
  return 64 * 1024;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const auto& s = host().settings;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = s.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = s.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = s.multiprocessors;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 * 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(shared_limit());
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 50 * 1024 * 1024;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    case cudaDevAttrClusterLaunch:
      *value = s.major >= 9;
      break;
    default:
      fail("cudaDeviceGetAttribute(%d): not known to the shim", int(attribute));
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  auto& limits = host().limits[kernel];
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || size_t(value) > shared_limit()) {
      return remember(cudaErrorInvalidValue);
    }
    limits.dynamic_shared = value;
  } else if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    limits.large_cluster = value != 0;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  check_stream(stream, "cudaMemsetAsync");
  memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  check_stream(stream, "cudaMemcpyAsync");
  memmove(to, from, bytes);
  return cudaSuccess;
}

}  // extern "C"
