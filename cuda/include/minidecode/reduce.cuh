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

// N sums at once, N a power of two up to 32: lane l ends with the total of v[l % N]. A step halves
// the values that a lane still carries, so it takes N - 1 + log2(32 / N) shuffles and not 5 N.
template <int N>
__device__ __forceinline__ float warp_sum_many(float (&v)[N]) {
  static_assert(N >= 1 && N <= kWarp && (N & (N - 1)) == 0, "a power of two up to 32");
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? v[i + half] : v[i];
      const float give = upper ? v[i] : v[i + half];
      v[i] = keep + __shfl_xor_sync(kFullMask, give, half);
    }
  }
  float total = v[0];
#pragma unroll
  for (int offset = N; offset < kWarp; offset *= 2) {
    total += __shfl_xor_sync(kFullMask, total, offset);
  }
  return total;
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
