// Loads for data that is read once (weights, old KV entries), and what packed halves need:
// products, conversions.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace minidecode {

// 16 bytes that no other block reads again: past L1. Without L2::256B, which costs a step of 1B
// and 8B models 1 % on an H200.
__device__ __forceinline__ uint4 load_stream(const void* p) {
#if defined(MINIDECODE_HOST_SHIM)
  return *static_cast<const uint4*>(p);
#elif __CUDA_ARCH__ >= 800
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else
  return __ldg(static_cast<const uint4*>(p));
#endif
}

// 16 bytes that an earlier kernel of the same step wrote, seen by many blocks: from L2.
__device__ __forceinline__ uint4 load_shared_by_blocks(const void* p) {
  return __ldcg(static_cast<const uint4*>(p));
}

// A half that an earlier kernel of the same step wrote. The toolkit's __ldcg of a half is no
// volatile access: the compiler may move it before the dependent-launch wait, or before a bounds
// check.
__device__ __forceinline__ half load_written(const half* p) {
  return __ushort_as_half(__ldcg(reinterpret_cast<const unsigned short*>(p)));
}

// Products of eight packed halves, each rounded once.
__device__ __forceinline__ uint4 multiply8(uint4 a, uint4 b) {
  uint32_t v[4] = {a.x, a.y, a.z, a.w};
  const uint32_t by[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    half2 x, y;
    memcpy(&x, &v[i], sizeof(x));
    memcpy(&y, &by[i], sizeof(y));
    x = __hmul2(x, y);
    memcpy(&v[i], &x, sizeof(x));
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// Eight packed halves to FP32.
__device__ __forceinline__ void unpack8(uint4 packed, float (&f)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    half2 h;
    memcpy(&h, &words[i], sizeof(h));
    const float2 pair = __half22float2(h);
    f[2 * i] = pair.x;
    f[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(half v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ half from_float<half>(float v) {
  return __float2half_rn(v);
}

// True when rows of k elements starting at p can be read in pieces of `bytes` each.
template <typename T>
inline bool rows_aligned(const T* p, int k, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 &&
         static_cast<size_t>(k) * sizeof(T) % bytes == 0;
}

}  // namespace minidecode
