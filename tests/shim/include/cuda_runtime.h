// Stands in for the CUDA runtime header when kernels are compiled by g++: types and host functions
// come from the toolkit's own cuda_runtime_api.h, device functions are defined here.
#ifndef MINIDECODE_SHIM_CUDA_RUNTIME_H_
#define MINIDECODE_SHIM_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../runtime.h"
#include "vector_functions.h"

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#define __global__
#define __device__
#define __host__
#define __constant__
// One copy for the whole library; the scheduler swaps its contents when it changes blocks.
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int warpSize = 32;

// Where the linker puts zero-initialised variables: in a kernel library that is shared memory.
extern "C" __attribute__((visibility("hidden"))) char __bss_start[];
extern "C" __attribute__((visibility("hidden"))) char _end[];

namespace minidecode_shim {

template <typename T>
T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory());
}

template <typename T>
uint64_t to_bits(T v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "not a shuffled type");
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T v;
  memcpy(&v, &bits, sizeof(T));
  return v;
}

template <typename T>
T shuffle(WarpOp op, unsigned mask, T v, int operand, int width) {
  return from_bits<T>(warp_collective(op, mask, to_bits(v), operand, width, sizeof(T)));
}

template <typename... Params>
struct Call {
  void (*kernel)(Params...);
  std::tuple<Params...> arguments;

  static void invoke(const void* self) {
    const Call& call = *static_cast<const Call*>(self);
    std::apply(call.kernel, call.arguments);
  }
};

}  // namespace minidecode_shim

// ---- launching ----

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  using Call = minidecode_shim::Call<Params...>;
  const Call call{kernel, std::tuple<Params...>(std::forward<Args>(args)...)};
  return minidecode_shim::launch(*config, reinterpret_cast<const void*>(kernel), &Call::invoke,
                                 &call, __bss_start, _end);
}

template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// ---- synchronisation ----

inline void __syncthreads() { minidecode_shim::block_barrier(minidecode_shim::Fold::kNone, false); }
inline int __syncthreads_count(int p) {
  return minidecode_shim::block_barrier(minidecode_shim::Fold::kCount, p != 0);
}
inline int __syncthreads_and(int p) {
  return minidecode_shim::block_barrier(minidecode_shim::Fold::kAnd, p != 0);
}
inline int __syncthreads_or(int p) {
  return minidecode_shim::block_barrier(minidecode_shim::Fold::kOr, p != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  minidecode_shim::warp_collective(minidecode_shim::WarpOp::kSync, mask, 0, 0, 32, 0);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { minidecode_shim::yield(); }
inline void cudaGridDependencySynchronize() { minidecode_shim::dependency_wait(); }
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void __trap() { minidecode_shim::fail("__trap()"); }

// ---- warp operations ----

template <typename T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
  return minidecode_shim::shuffle(minidecode_shim::WarpOp::kIndex, mask, v, lane, width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  return minidecode_shim::shuffle(minidecode_shim::WarpOp::kUp, mask, v, int(delta), width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  return minidecode_shim::shuffle(minidecode_shim::WarpOp::kDown, mask, v, int(delta), width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32) {
  return minidecode_shim::shuffle(minidecode_shim::WarpOp::kXor, mask, v, lane_mask, width);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return unsigned(
      minidecode_shim::warp_collective(minidecode_shim::WarpOp::kBallot, mask, p != 0, 0, 32, 0));
}
inline int __any_sync(unsigned mask, int p) {
  return int(
      minidecode_shim::warp_collective(minidecode_shim::WarpOp::kAny, mask, p != 0, 0, 32, 0));
}
inline int __all_sync(unsigned mask, int p) {
  return int(
      minidecode_shim::warp_collective(minidecode_shim::WarpOp::kAll, mask, p != 0, 0, 32, 0));
}
inline unsigned __activemask() { return minidecode_shim::active_mask(); }

// ---- atomics: one OS thread, and a fiber is never interrupted between two of its own lines ----

#define MINIDECODE_SHIM_ATOMIC(name, expression) \
  template <typename T>                          \
  T name(T* p, std::common_type_t<T> v) {        \
    const T old = *p;                            \
    *p = (expression);                           \
    return old;                                  \
  }
MINIDECODE_SHIM_ATOMIC(atomicAdd, old + v)
MINIDECODE_SHIM_ATOMIC(atomicSub, old - v)
MINIDECODE_SHIM_ATOMIC(atomicMax, old < v ? v : old)
MINIDECODE_SHIM_ATOMIC(atomicMin, v < old ? v : old)
MINIDECODE_SHIM_ATOMIC(atomicAnd, old& v)
MINIDECODE_SHIM_ATOMIC(atomicOr, old | v)
MINIDECODE_SHIM_ATOMIC(atomicXor, old ^ v)
MINIDECODE_SHIM_ATOMIC(atomicExch, v)
MINIDECODE_SHIM_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef MINIDECODE_SHIM_ATOMIC

template <typename T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
  const T old = *p;
  if (old == expected) *p = v;
  return old;
}

// ---- memory with a cache policy ----

#define MINIDECODE_SHIM_LOAD(name) \
  template <typename T>            \
  T name(const T* p) {             \
    return *p;                     \
  }
MINIDECODE_SHIM_LOAD(__ldg)
MINIDECODE_SHIM_LOAD(__ldcg)
MINIDECODE_SHIM_LOAD(__ldca)
MINIDECODE_SHIM_LOAD(__ldcs)
MINIDECODE_SHIM_LOAD(__ldlu)
MINIDECODE_SHIM_LOAD(__ldcv)
#undef MINIDECODE_SHIM_LOAD

#define MINIDECODE_SHIM_STORE(name)          \
  template <typename T>                      \
  void name(T* p, std::common_type_t<T> v) { \
    *p = v;                                  \
  }
MINIDECODE_SHIM_STORE(__stcg)
MINIDECODE_SHIM_STORE(__stcs)
MINIDECODE_SHIM_STORE(__stwb)
MINIDECODE_SHIM_STORE(__stwt)
#undef MINIDECODE_SHIM_STORE

// ---- arithmetic ----

template <typename A, typename B>
constexpr std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                           std::common_type_t<A, B>>
min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<T>::value) {
    return std::fmin(T(a), T(b));
  } else {
    return T(b) < T(a) ? T(b) : T(a);
  }
}
template <typename A, typename B>
constexpr std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                           std::common_type_t<A, B>>
max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<T>::value) {
    return std::fmax(T(a), T(b));
  } else {
    return T(a) < T(b) ? T(b) : T(a);
  }
}

inline float __expf(float v) { return expf(v); }
inline float __exp10f(float v) { return powf(10.0f, v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline void __sincosf(float v, float* s, float* c) { *s = sinf(v), *c = cosf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frsqrt_rn(float v) { return 1.0f / sqrtf(v); }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / std::sqrt(v); }
inline float __saturatef(float v) { return std::fmin(std::fmax(v, 0.0f), 1.0f); }

inline unsigned __float_as_uint(float v) { return unsigned(minidecode_shim::to_bits(v)); }
inline int __float_as_int(float v) { return int(__float_as_uint(v)); }
inline float __uint_as_float(unsigned v) { return minidecode_shim::from_bits<float>(v); }
inline float __int_as_float(int v) { return __uint_as_float(unsigned(v)); }
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return int(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll((unsigned long long)v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i);
    unsigned byte = unsigned(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }

#endif  // MINIDECODE_SHIM_CUDA_RUNTIME_H_
