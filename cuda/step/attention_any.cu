// Attention of one token for head sizes that the tensor-core kernel does not take: plain FP32 code.
//
// A query head is a block, or `splits` of them, whose warps take turns at the positions, four at
// once; a warp's lanes have the dims.
#include "minidecode/abi.cuh"
#include "minidecode/attention.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kAtOnce = 4;  // positions of a warp that are on their way together

// PAIRS: pairs of dims that a lane has.
template <int PAIRS>
__global__ void __launch_bounds__(kThreads, 1) attend_any(const Attention a) {
  extern __shared__ __align__(8) float shared[];
  __shared__ float scratch[kWarps], warp_top[kWarps], warp_total[kWarps];
  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp, d = a.head_dim;
  const int head = blockIdx.x, per_kv = a.heads / a.kv_heads, kv = head / per_kv;
  const int split = blockIdx.y, splits = a.splits;
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
  if (head % per_kv == 0 && split == 0) {
    for (int i = tid; i < d; i += kThreads) {
      a.keys[kv_row + i] = __float2half_rn(k[i]);
      a.values[kv_row + i] = load_written(value_row + i);
    }
  }

  const float scale = rsqrtf(static_cast<float>(d));
  float top = -INFINITY, total = 0.0f;
  float2 own_q[PAIRS], out[PAIRS] = {};
  const bool has_newest = warp == 0 && split == 0;  // which is not in the cache yet
  float score = 0.0f;
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = 2 * (lane + j * kWarp);
    own_q[j] = i < d ? make_float2(q[i], q[i + 1]) : make_float2(0.0f, 0.0f);
    if (has_newest && i < d) {
      score += own_q[j].x * k[i] + own_q[j].y * k[i + 1];
      out[j] = make_float2(__half2float(load_written(value_row + i)),
                           __half2float(load_written(value_row + i + 1)));
    }
  }
  if (has_newest) {
    top = warp_sum(score) * scale;
    total = 1.0f;
  }
  const size_t cache = static_cast<size_t>(kv) * a.capacity * d;
  const int stride = splits * kWarps;
  for (int p = seen.first + warp * splits + split; p < seen.last; p += kAtOnce * stride) {
    float scores[kAtOnce] = {};
    half2 v[kAtOnce][PAIRS];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const bool cached = p + n * stride < seen.last;
      const size_t row = cache + static_cast<size_t>(p + n * stride) * d;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const int i = 2 * (lane + j * kWarp);
        const bool there = cached && i < d;
        const half2 none = __half2half2(half());
        const half2 stored = there ? *reinterpret_cast<const half2*>(a.keys + row + i) : none;
        v[n][j] = there ? *reinterpret_cast<const half2*>(a.values + row + i) : none;
        const float2 key = __half22float2(stored);
        scores[n] += own_q[j].x * key.x + own_q[j].y * key.y;
      }
    }
    float greater = top;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const float sum = warp_sum(scores[n]) * scale;
      scores[n] = p + n * stride < seen.last ? sum : -INFINITY;
      greater = fmaxf(greater, scores[n]);
    }
    const float shrink = __expf(top - greater);
    top = greater;
    total *= shrink;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      scores[n] = __expf(scores[n] - greater);
      total += scores[n];
    }
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      out[j] = make_float2(out[j].x * shrink, out[j].y * shrink);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float2 value = __half22float2(v[n][j]);
        out[j] =
            make_float2(fmaf(scores[n], value.x, out[j].x), fmaf(scores[n], value.y, out[j].y));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = 2 * (lane + j * kWarp);
    if (i < d) *reinterpret_cast<float2*>(warp_out + warp * d + i) = out[j];
  }
  if (lane == 0) {
    warp_top[warp] = top;
    warp_total[warp] = total;
  }
  __syncthreads();
  half* out_row = a.out + static_cast<size_t>(head) * d;
  float most = -INFINITY, sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, warp_top[w]);
  // A warp with no position has -inf, and so has a block with none.
  auto share_of = [&](float greatest) {
    return most == -INFINITY ? 0.0f : __expf(greatest - most);
  };
  for (int w = 0; w < kWarps; ++w) sum += warp_total[w] * share_of(warp_top[w]);
  const Parts parts = parts_of(a, head);
  for (int i = tid; i < d; i += kThreads) {
    float weighted = 0.0f;
    for (int w = 0; w < kWarps; ++w) weighted += warp_out[w * d + i] * share_of(warp_top[w]);
    if (splits == 1) {
      out_row[i] = __float2half_rn(weighted / sum);
    } else {
      parts.out[split * d + i] = weighted;
    }
  }
  if (splits == 1) return;
  if (tid == 0) {
    parts.tops[split] = most;
    parts.sums[split] = sum;
  }

  // The last block to come here joins the parts of all, a warp's lane l knowing split l.
  if (!last_to_arrive(a.arrived + head, splits)) return;
  const float own_top = lane < splits ? __ldcg(parts.tops + lane) : -INFINITY;
  const float share = __expf(own_top - warp_max(own_top));
  sum = warp_sum(lane < splits ? __ldcg(parts.sums + lane) * share : 0.0f);
  for (int begin = warp * kWarp; begin < d; begin += kThreads) {
    const int i = begin + lane;
    float weighted = 0.0f;
    for (int s = 0; s < splits; ++s) {
      const float by = __shfl_sync(kFullMask, share, s);
      if (i < d) weighted += __ldcg(parts.out + s * d + i) * by;
    }
    if (i < d) out_row[i] = __float2half_rn(weighted / sum);
  }
}

}  // namespace
}  // namespace minidecode

// head_dim: even, at most 512. splits: up to kMaxSplits.
MINIDECODE_EXPORT cudaError_t minidecode_attention_any(const minidecode::Attention* args,
                                                       cudaStream_t stream) {
  using namespace minidecode;
  const int d = args->head_dim;
  if (d % 2 != 0 || d > 512 || args->heads % args->kv_heads != 0 || args->splits < 1 ||
      args->splits > kMaxSplits) {
    return cudaErrorNotSupported;
  }
  LaunchShape shape;
  shape.grid = dim3(args->heads, args->splits);
  shape.block = dim3(kThreads);
  shape.shared_bytes = (2 + kWarps) * d * static_cast<int>(sizeof(float));
  const auto kernel = d <= 128 ? attend_any<2> : d <= 256 ? attend_any<4> : attend_any<8>;
  return launch(kernel, shape, Pdl::kOn, stream, *args);
}
