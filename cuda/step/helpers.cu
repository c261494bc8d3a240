// The small kernels between the GEMVs of a composed step: RMSNorm, addition, SwiGLU, argmax.
#include "minidecode/abi.cuh"
#include "minidecode/best.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {
namespace {

constexpr int kNormThreads = 512;
constexpr int kThreads = 256;

int blocks_for(int n) { return (n + kThreads - 1) / kThreads; }

// x += delta if there is one; y = x / rms(x) * weight, statistics in FP32. One block.
// VECTOR: eight elements at a time, the first of them kept between the two passes.
template <bool VECTOR>
__global__ void __launch_bounds__(kNormThreads) rms_norm(half* y,             // [n]
                                                         half* x,             // [n]
                                                         const half* delta,   // [n] or null
                                                         const half* weight,  // [n]
                                                         int n, float eps) {
  constexpr int kWidth = VECTOR ? 8 : 1;
  __shared__ float scratch[kNormThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  auto load = [](const half* p, int i, float(&v)[kWidth]) {
    if constexpr (VECTOR) {
      unpack8(load_shared_by_blocks(p + i), v);
    } else {
      v[0] = __half2float(load_written(p + i));
    }
  };
  auto store = [](half* p, int i, const float(&v)[kWidth]) {
    half packed[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) packed[j] = __float2half_rn(v[j]);
    if constexpr (VECTOR) {
      uint4 words;
      memcpy(&words, packed, sizeof(words));
      *reinterpret_cast<uint4*>(p + i) = words;
    } else {
      p[i] = packed[0];
    }
  };
  const int stride = kNormThreads * kWidth, begin = threadIdx.x * kWidth;
  float squares = 0.0f;
  float first[kWidth] = {};
  for (int i = begin; i < n; i += stride) {
    float v[kWidth];
    load(x, i, v);
    if (delta != nullptr) {
      float d[kWidth];
      load(delta, i, d);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = __half2float(__float2half_rn(v[j] + d[j]));
      store(x, i, v);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      squares += v[j] * v[j];
      if (i == begin) first[j] = v[j];
    }
  }
  const float scale = rsqrtf(block_sum<kNormThreads>(squares, scratch) / n + eps);
  for (int i = begin; i < n; i += stride) {
    float v[kWidth], g[kWidth];
    load(weight, i, g);
    // Each thread reads back what it wrote itself.
    if (i != begin) load(x, i, v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v[j] = (i == begin ? first[j] : v[j]) * scale * g[j];
    store(y, i, v);
  }
}

__global__ void add(half* x,            // [n]
                    const half* delta,  // [n]
                    int n) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  const float sum = __half2float(load_written(x + i)) + __half2float(load_written(delta + i));
  x[i] = __float2half_rn(sum);
}

__global__ void swiglu(half* y,              // [n]
                       const half* gate_up,  // [2, n]
                       int n) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  const float gate = __half2float(load_written(gate_up + i));
  const float up = __half2float(load_written(gate_up + n + i));
  y[i] = __float2half_rn(gate / (1.0f + __expf(-gate)) * up);
}

__global__ void argmax(float* logits,   // [n]
                       Best* best,      // [1]
                       const half* in,  // [n]
                       int n) {
  pdl_trigger();
  pdl_wait();
  Best mine = 0;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < n; i += gridDim.x * kThreads) {
    const float v = __half2float(load_written(in + i));
    logits[i] = v;
    const Best one = best_of(v, i);
    mine = one > mine ? one : mine;
  }
  mine = warp_max(mine);
  if (threadIdx.x % kWarp == 0) atomicMax(best, mine);
}

}  // namespace
}  // namespace minidecode

MINIDECODE_EXPORT cudaError_t minidecode_rms_norm(half* y,             // [n]
                                                  half* x,             // [n]
                                                  const half* delta,   // [n] or null
                                                  const half* weight,  // [n]
                                                  int n, float eps, cudaStream_t stream) {
  using namespace minidecode;
  const bool vector = n % 8 == 0 && rows_aligned(y, 8, 16) && rows_aligned(x, 8, 16) &&
                      rows_aligned(weight, 8, 16) && rows_aligned(delta, 8, 16);
  return launch(vector ? rms_norm<true> : rms_norm<false>, {dim3(1), dim3(kNormThreads)}, Pdl::kOn,
                stream, y, x, delta, weight, n, eps);
}

MINIDECODE_EXPORT cudaError_t minidecode_add(half* x,            // [n]
                                             const half* delta,  // [n]
                                             int n, cudaStream_t stream) {
  using namespace minidecode;
  return launch(add, {dim3(blocks_for(n)), dim3(kThreads)}, Pdl::kOn, stream, x, delta, n);
}

MINIDECODE_EXPORT cudaError_t minidecode_swiglu(half* y,              // [n]
                                                const half* gate_up,  // [2, n]
                                                int n, cudaStream_t stream) {
  using namespace minidecode;
  return launch(swiglu, {dim3(blocks_for(n)), dim3(kThreads)}, Pdl::kOn, stream, y, gate_up, n);
}

MINIDECODE_EXPORT cudaError_t minidecode_argmax(float* logits,             // [n]
                                                unsigned long long* best,  // [1]
                                                const half* in,            // [n]
                                                int n, cudaStream_t stream) {
  using namespace minidecode;
  const int blocks = blocks_for(n) < 128 ? blocks_for(n) : 128;
  return launch(argmax, {dim3(blocks), dim3(kThreads)}, Pdl::kOn, stream, logits, best, in, n);
}
