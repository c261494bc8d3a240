// Tensor-core product of FP16 fragments with FP32 accumulation, one warp.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "minidecode/reduce.cuh"

namespace minidecode {

// d[8, 8] += a[8, 16] b[16, 8], as the upper half of m16n8k16 (the PTX manual has the layout).
// With g = lane / 4 and t = lane % 4: a0 holds a[g][2t], a[g][2t + 1], a1 holds a[g][2t + 8],
// a[g][2t + 9]; b0 holds b[2t][g], b[2t + 1][g], b1 holds b[2t + 8][g], b[2t + 9][g]; d0, d1 are
// d[g][2t], d[g][2t + 1]. One token has at most a few query heads for a KV head, so the lower
// eight rows of the instruction stay empty.
__device__ __forceinline__ void mma_8x8x16(float& d0, float& d1, uint32_t a0, uint32_t a1,
                                           uint32_t b0, uint32_t b1) {
#if defined(MINIDECODE_HOST_SHIM)
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float* const d[2] = {&d0, &d1};
  for (int column = 0; column < 2; ++column) {
    float sum = 0.0f;
    for (int source = 0; source < 4; ++source) {
      const uint32_t a_words[2] = {__shfl_sync(kFullMask, a0, 4 * g + source),
                                   __shfl_sync(kFullMask, a1, 4 * g + source)};
      const uint32_t b_words[2] = {__shfl_sync(kFullMask, b0, 4 * (2 * t + column) + source),
                                   __shfl_sync(kFullMask, b1, 4 * (2 * t + column) + source)};
      for (int i = 0; i < 2; ++i) {
        half2 x, y;
        memcpy(&x, &a_words[i], sizeof(x));
        memcpy(&y, &b_words[i], sizeof(y));
        const float2 fx = __half22float2(x), fy = __half22float2(y);
        sum += fx.x * fy.x + fx.y * fy.y;
      }
    }
    *d[column] += sum;
  }
#elif __CUDA_ARCH__ >= 800
  [[maybe_unused]] float lower0, lower1;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, "
      "{%0,%1,%9,%9};"
      : "+f"(d0), "+f"(d1), "=f"(lower0), "=f"(lower1)
      : "r"(a0), "r"(0u), "r"(a1), "r"(b0), "r"(b1), "f"(0.0f));
#else
  [[maybe_unused]] float lower0, lower1;
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%7,%7};"
      : "+f"(d0), "+f"(d1), "=f"(lower0), "=f"(lower1)
      : "r"(a0), "r"(0u), "r"(b0), "f"(0.0f));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%7,%7};"
      : "+f"(d0), "+f"(d1), "=f"(lower0), "=f"(lower1)
      : "r"(a1), "r"(0u), "r"(b1), "f"(0.0f));
#endif
}

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

}  // namespace minidecode
