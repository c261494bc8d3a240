// Tensor-core product of FP16 fragments with FP32 accumulation, one warp.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "minidecode/reduce.cuh"

namespace minidecode {

// d[16, 8] += a[16, 16] b[16, 8]. With g = lane / 4 and t = lane % 4, as the PTX manual has it for
// m16n8k16: a0, a1 hold columns 2t, 2t + 1 of rows g and g + 8, a2, a3 columns 2t + 8, 2t + 9; b0
// holds rows 2t, 2t + 1 of column g, b1 rows 2t + 8, 2t + 9; d0, d1 are columns 2t, 2t + 1 of row
// g, d2, d3 of row g + 8.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1) {
#if defined(MINIDECODE_HOST_SHIM)
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  for (int source = 0; source < 4; ++source) {
    const uint32_t a[2][2] = {
        {__shfl_sync(kFullMask, a0, 4 * g + source), __shfl_sync(kFullMask, a2, 4 * g + source)},
        {__shfl_sync(kFullMask, a1, 4 * g + source), __shfl_sync(kFullMask, a3, 4 * g + source)}};
    for (int column = 0; column < 2; ++column) {
      const int from = 4 * (2 * t + column) + source;
      const uint32_t b[2] = {__shfl_sync(kFullMask, b0, from), __shfl_sync(kFullMask, b1, from)};
      for (int row = 0; row < 2; ++row) {
        for (int i = 0; i < 2; ++i) {
          half2 x, y;
          memcpy(&x, &a[row][i], sizeof(x));
          memcpy(&y, &b[i], sizeof(y));
          const float2 fx = __half22float2(x), fy = __half22float2(y);
          d[2 * row + column] += fx.x * fy.x + fx.y * fy.y;
        }
      }
    }
  }
#elif __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a2), "r"(a3), "r"(b1));
#endif
}

// An 8x8 matrix of halves transposed: lane 4g + t has elements 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
#if defined(MINIDECODE_HOST_SHIM)
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const uint32_t first = __shfl_sync(kFullMask, pair, 4 * (2 * t) + g / 2);
  const uint32_t second = __shfl_sync(kFullMask, pair, 4 * (2 * t + 1) + g / 2);
  return g % 2 == 0 ? (first & 0xffffu) | (second << 16) : (first >> 16) | (second & 0xffff0000u);
#else
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
#endif
}

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

}  // namespace minidecode
