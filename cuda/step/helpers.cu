// The small kernels between the GEMVs of a composed step: RMSNorm, addition, SwiGLU, argmax.
#include "minidecode/abi.cuh"
#include "minidecode/best.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {
namespace {

constexpr int kNormThreads = 1024;
constexpr int kThreads = 256;

int blocks_for(int n) { return (n + kThreads - 1) / kThreads; }

// x += delta if there is one; y = x / rms(x) * weight, statistics in FP32. One block.
__global__ void __launch_bounds__(kNormThreads) rms_norm(half* y,             // [n]
                                                         half* x,             // [n]
                                                         const half* delta,   // [n] or null
                                                         const half* weight,  // [n]
                                                         int n, float eps) {
  __shared__ float scratch[kNormThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  float squares = 0.0f;
  for (int i = threadIdx.x; i < n; i += kNormThreads) {
    float v = __half2float(__ldcg(x + i));
    if (delta != nullptr) {
      const half sum = __float2half_rn(v + __half2float(__ldcg(delta + i)));
      x[i] = sum;
      v = __half2float(sum);
    }
    squares += v * v;
  }
  const float scale = rsqrtf(block_sum<kNormThreads>(squares, scratch) / n + eps);
  // Each thread reads back what it wrote itself.
  for (int i = threadIdx.x; i < n; i += kNormThreads) {
    y[i] = __float2half_rn(__half2float(x[i]) * scale * __half2float(weight[i]));
  }
}

__global__ void add(half* x,            // [n]
                    const half* delta,  // [n]
                    int n) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) x[i] = __float2half_rn(__half2float(__ldcg(x + i)) + __half2float(__ldcg(delta + i)));
}

__global__ void swiglu(half* y,              // [n]
                       const half* gate_up,  // [2, n]
                       int n) {
  pdl_trigger();
  pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  const float gate = __half2float(__ldcg(gate_up + i));
  const float up = __half2float(__ldcg(gate_up + n + i));
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
    const float v = __half2float(__ldcg(in + i));
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
  return launch(rms_norm, {dim3(1), dim3(kNormThreads)}, Pdl::kOn, stream, y, x, delta, weight, n,
                eps);
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
