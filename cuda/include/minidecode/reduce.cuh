// Sums and maxima over a warp, and sums over a block.
#pragma once

#include <cuda_runtime.h>

namespace minidecode {

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Butterfly sum: every lane ends with the total.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset >>= 1) {
    v += __shfl_xor_sync(kFullMask, v, offset);
  }
  return v;
}

// Butterfly maximum: every lane ends with the greatest.
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset >>= 1) {
    v = fmaxf(v, __shfl_xor_sync(kFullMask, v, offset));
  }
  return v;
}

// Sum over a block of THREADS threads, returned to every thread. `scratch` is shared memory of
// THREADS / 32 floats; the caller puts a barrier between two uses of the same scratch.
template <int THREADS>
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  constexpr int kWarps = THREADS / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  v = warp_sum(v);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  return warp_sum(lane < kWarps ? scratch[lane] : 0.0f);
}

}  // namespace minidecode
