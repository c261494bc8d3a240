// The greatest logit and its token as one integer, so that atomicMax finds both.
#pragma once

#include <cuda_runtime.h>

#include "minidecode/reduce.cuh"

namespace minidecode {

using Best = unsigned long long;

// Says that a logit was NaN or infinite; greater than every other value.
constexpr Best kNonFinite = ~0ull;

// Orders like the float it comes from.
__device__ __forceinline__ unsigned orderable(float v) {
  const unsigned bits = __float_as_uint(v);
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

// The inverse.
__device__ __forceinline__ float from_orderable(unsigned key) {
  return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// Greater for a greater logit, and among equals for a smaller token.
__device__ __forceinline__ Best best_of(float logit, int token) {
  if (!(fabsf(logit) <= 3.402823466e38f)) return kNonFinite;
  return (static_cast<Best>(orderable(logit)) << 32) | ~static_cast<unsigned>(token);
}

__device__ __forceinline__ int token_of(Best best) { return ~static_cast<unsigned>(best); }

__device__ __forceinline__ Best warp_max(Best v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset >>= 1) {
    const Best other = __shfl_xor_sync(kFullMask, v, offset);
    v = other > v ? other : v;
  }
  return v;
}

}  // namespace minidecode
