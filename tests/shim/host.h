// What a call was configured with and what it left behind: shared by the scheduler and the CUDA
// runtime functions.
#pragma once

#include <map>
#include <vector>

#include "runtime.h"

namespace minidecode_shim {

constexpr size_t kStaticLimit = 48 * 1024;
constexpr size_t kSharedLimit = 227 * 1024;

struct Region {
  char* begin = nullptr;
  size_t bytes = 0;
  bool holds(const void* p) const {
    const char* c = static_cast<const char*>(p);
    return c >= begin && c < begin + bytes;
  }
};

struct Settings {
  int order = 0;
  long max_groups = 0;  // 0: all; else that many from both ends of the grid
  cudaStream_t stream = nullptr;
  int major = 9, minor = 0, multiprocessors = 4;
  std::vector<Region> late;  // written by the previous kernel
};

struct KernelLimits {
  int dynamic_shared = int(kStaticLimit);
  bool large_cluster = false;
};

struct Host {
  Settings settings;
  std::map<const void*, KernelLimits> limits;
  cudaError_t last_error = cudaSuccess;
  long launches = 0;
};

Host& host();

// Keeps a status for cudaGetLastError.
cudaError_t remember(cudaError_t status);

// Fails unless `stream` is the caller's.
void check_stream(cudaStream_t stream, const char* what);

}  // namespace minidecode_shim
