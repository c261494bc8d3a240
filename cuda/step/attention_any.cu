// Attention of one token for head sizes that the tensor-core kernel does not take: plain FP32 code.
//
// One block a query head; a warp takes every fourth position, its lanes the dims.
#include "minidecode/abi.cuh"
#include "minidecode/attention.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxDims = 16;  // dims of a lane, so head_dim is at most 512

__global__ void __launch_bounds__(kThreads, 1) attend_any(const Attention a) {
  extern __shared__ float shared[];
  __shared__ float scratch[kWarps], warp_top[kWarps], warp_total[kWarps];
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp, d = a.head_dim;
  const int head = blockIdx.x, per_kv = a.heads / a.kv_heads, kv = head / per_kv;
  float* q = shared;        // [head_dim]
  float* k = q + d;         // [head_dim]
  float* warp_out = k + d;  // [kWarps, head_dim]
  pdl_trigger();
  pdl_wait();

  const Seen seen = seen_by(a);
  const size_t kv_row = (static_cast<size_t>(kv) * a.capacity + seen.last) * d;
  const float2* rope = a.rope + static_cast<size_t>(seen.last) * (d / 2);
  const half* value_row = a.qkv + static_cast<size_t>(a.heads + a.kv_heads + kv) * d;
  for (int which = 0; which < 2; ++which) {
    const half* source = a.qkv + static_cast<size_t>(which == 0 ? head : a.heads + kv) * d;
    const half* norm = which == 0 ? a.q_norm : a.k_norm;
    float* target = which == 0 ? q : k;
    float squares = 0.0f;
    for (int i = tid; i < d; i += kThreads) {
      const float v = __half2float(load_written(source + i));
      squares += v * v;
    }
    const float mean = block_sum<kThreads>(squares, scratch) / d;
    const float rms = norm != nullptr ? rsqrtf(mean + a.eps) : 1.0f;
    for (int i = tid; i < d / 2; i += kThreads) {
      float x = __half2float(load_written(source + i)),
            y = __half2float(load_written(source + i + d / 2));
      if (norm != nullptr) {
        x = __half2float(__float2half_rn(x * rms * __half2float(norm[i])));
        y = __half2float(__float2half_rn(y * rms * __half2float(norm[i + d / 2])));
      }
      const float2 cs = rope[i];
      target[i] = __half2float(__float2half_rn(x * cs.x - y * cs.y));
      target[i + d / 2] = __half2float(__float2half_rn(y * cs.x + x * cs.y));
    }
    __syncthreads();
  }
  if (head % per_kv == 0) {
    for (int i = tid; i < d; i += kThreads) {
      a.keys[kv_row + i] = __float2half_rn(k[i]);
      a.values[kv_row + i] = load_written(value_row + i);
    }
  }

  const float scale = rsqrtf(static_cast<float>(d));
  float top = -INFINITY, total = 0.0f;
  float out[kMaxDims] = {};
  for (int p = seen.first + warp; p <= seen.last; p += kWarps) {
    const bool newest = p == seen.last;
    const size_t row = (static_cast<size_t>(kv) * a.capacity + p) * d;
    float score = 0.0f;
    for (int i = lane; i < d; i += kWarp) {
      score += q[i] * (newest ? k[i] : __half2float(a.keys[row + i]));
    }
    score = warp_sum(score) * scale;
    const float greater = fmaxf(top, score);
    const float shrink = __expf(top - greater), weight = __expf(score - greater);
    top = greater;
    total = total * shrink + weight;
#pragma unroll
    for (int j = 0; j < kMaxDims; ++j) {
      const int i = lane + j * kWarp;
      if (i < d) {
        const half v = newest ? load_written(value_row + i) : a.values[row + i];
        out[j] = out[j] * shrink + weight * __half2float(v);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxDims; ++j) {
    const int i = lane + j * kWarp;
    if (i < d) warp_out[warp * d + i] = out[j];
  }
  if (lane == 0) {
    warp_top[warp] = top;
    warp_total[warp] = total;
  }
  __syncthreads();
  for (int i = tid; i < d; i += kThreads) {
    float most = -INFINITY, sum = 0.0f, weighted = 0.0f;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, warp_top[w]);
    for (int w = 0; w < kWarps; ++w) {
      const float share = __expf(warp_top[w] - most);
      sum += warp_total[w] * share;
      weighted += warp_out[w * d + i] * share;
    }
    a.out[static_cast<size_t>(head) * d + i] = __float2half_rn(weighted / sum);
  }
}

}  // namespace
}  // namespace minidecode

// head_dim: even, at most 512. `splits`, `parts` and `arrived` are not used.
MINIDECODE_EXPORT cudaError_t minidecode_attention_any(const minidecode::Attention* args,
                                                       cudaStream_t stream) {
  using namespace minidecode;
  if (args->head_dim % 2 != 0 || args->head_dim > kMaxDims * kWarp) return cudaErrorNotSupported;
  LaunchShape shape;
  shape.grid = dim3(args->heads);
  shape.block = dim3(kThreads);
  shape.shared_bytes = (2 + kWarps) * args->head_dim * static_cast<int>(sizeof(float));
  return launch(attend_any, shape, Pdl::kOn, stream, *args);
}
