// RMSNorm, QKV projection and attention of one token in one kernel, for models whose projection
// fits the shared memory of the clusters.
//
// The cluster of a KV head computes the rows of its query heads, k and v: each block a share of
// them, from weights that bulk copies brought into shared memory before the dependent-launch wait.
// The blocks send each other the results, and every block goes on with its part of the context as
// attention.cuh has it. This saves the latency of a kernel boundary in every layer.
#include "minidecode/abi.cuh"
#include "minidecode/async.cuh"
#include "minidecode/attention.cuh"

namespace minidecode {

struct Projection {
  const half* w;     // [(heads + 2 kv_heads) * head_dim, k]
  const half* x;     // [k]
  const half* norm;  // [k]
  const half* bias;  // [(heads + 2 kv_heads) * head_dim] or null
  int k;
  float eps;
};

namespace {

constexpr int kRowsAtOnce = 4;  // rows that a warp computes together

// A block's share of the cluster's rows, in the order q heads, k, v.
struct FromCluster {
  static constexpr bool kComputes = true;
  Projection p;
  int heads;     // of the model
  int kv_heads;  // of the model
  int head_dim;
  int share;  // rows of a block
  int bytes;  // shared memory for them and for the input

  __device__ int shared_bytes() const { return bytes; }

  __device__ int weight_row(int kv, int i) const {
    const int queries = heads / kv_heads * head_dim;
    if (i < queries) return kv * queries + i;
    const int which = (i - queries) / head_dim;  // 0: k, 1: v
    return (heads + which * kv_heads + kv) * head_dim + (i - queries) % head_dim;
  }

  // Shared memory: the weights [share, k], then the norm's weight, later x times it, in FP32: the
  // lower and the upper half of each eight elements apart, [2, k / 8], against bank conflicts.
  __device__ uint4* weights(unsigned char* shared) const {
    return reinterpret_cast<uint4*>(shared);
  }
  __device__ float4* inputs(unsigned char* shared) const {
    return reinterpret_cast<float4*>(weights(shared) + share * (p.k / 8));
  }
  __device__ static uint64_t* arrived() {
    __shared__ __align__(8) uint64_t barrier;
    return &barrier;
  }

  // Before the wait: weights and norm.
  __device__ void prefetch(int kv, int split, unsigned char* shared) const {
    const int chunks = p.k / 8;
    if (threadIdx.x < kWarp) {
      // A lane a row: one thread would take a quarter of a microsecond for each.
      const uint32_t row_bytes = chunks * sizeof(uint4);
      if (threadIdx.x == 0) {
        mbarrier_init(arrived(), 1);
        mbarrier_expect_bytes(arrived(), share * row_bytes);
      }
      __syncwarp();
      for (int i = threadIdx.x; i < share; i += kWarp) {
        const half* row = p.w + static_cast<size_t>(weight_row(kv, split * share + i)) * p.k;
        bulk_copy(weights(shared) + i * chunks, row, row_bytes, arrived());
      }
    }
    for (int c = threadIdx.x; c < chunks; c += blockDim.x) {
      float g[8];
      unpack8(__ldg(reinterpret_cast<const uint4*>(p.norm) + c), g);
      inputs(shared)[c] = make_float4(g[0], g[1], g[2], g[3]);
      inputs(shared)[chunks + c] = make_float4(g[4], g[5], g[6], g[7]);
    }
  }

  // After it: this block's rows, sent to every block's `raw` [rows of the cluster].
  template <int WARPS>
  __device__ void compute(int kv, int split, int splits, unsigned char* shared, half* raw) const {
    __shared__ float warp_squares[WARPS];
    const int chunks = p.k / 8, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float4* in = inputs(shared);
    float squares = 0.0f;
    for (int c = threadIdx.x; c < chunks; c += WARPS * kWarp) {
      float x[8];
      unpack8(load_shared_by_blocks(p.x + 8 * c), x);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
      // The thread that put the norm's weight there.
      const float4 low = in[c], high = in[chunks + c];
      in[c] = make_float4(x[0] * low.x, x[1] * low.y, x[2] * low.z, x[3] * low.w);
      in[chunks + c] = make_float4(x[4] * high.x, x[5] * high.y, x[6] * high.z, x[7] * high.w);
    }
    squares = warp_sum(squares);
    if (lane == 0) warp_squares[warp] = squares;
    __syncthreads();
    mbarrier_wait(arrived(), 0);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += warp_squares[w];
    const float scale = rsqrtf(total / p.k + p.eps);

    for (int first = warp * kRowsAtOnce; first < share; first += WARPS * kRowsAtOnce) {
      // Lane l ends with row first + l % kRowsAtOnce.
      const int mine = first + lane % kRowsAtOnce, i = split * share + mine;
      const bool there = mine < share;
      float bias = 0.0f;
      if (there && p.bias != nullptr) bias = __half2float(p.bias[weight_row(kv, i)]);
      float sum[kRowsAtOnce] = {};
      for (int c = lane; c < chunks; c += kWarp) {
        const float4 low = in[c], high = in[chunks + c];
        const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (first + r >= share) continue;
          float w[8];
          unpack8(weights(shared)[(first + r) * chunks + c], w);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[r] = fmaf(w[j], x[j], sum[r]);
        }
      }
      const float value = warp_sum_many<kRowsAtOnce>(sum) * scale + bias;
      for (int rank = lane / kRowsAtOnce; rank < splits; rank += kWarp / kRowsAtOnce) {
        if (there) cluster_shared(raw, rank)[i] = __float2half_rn(value);
      }
    }
  }
};

template <int HEAD_DIM, int WARPS>
cudaError_t launch_joined(const Attention& a, const Projection& p, cudaStream_t stream) {
  const int rows = (a.heads / a.kv_heads + 2) * a.head_dim, share = rows / a.splits;
  // Rounded up, so that what follows in shared memory is aligned.
  const int bytes = (p.k * (share * 2 + 4) + 127) / 128 * 128;
  const FromCluster source{p, a.heads, a.kv_heads, a.head_dim, share, bytes};
  const int stages = attend_stages(a, HEAD_DIM, WARPS, bytes);
  LaunchShape shape;
  shape.grid = dim3(a.kv_heads, a.splits);
  shape.block = dim3(WARPS * kWarp);
  shape.cluster = a.splits;
  shape.shared_bytes = bytes + attend_shared_bytes(a, HEAD_DIM, WARPS, stages);
  return launch(attend<HEAD_DIM, WARPS, true, FromCluster>, shape, Pdl::kOn, stream, a, source,
                stages);
}

}  // namespace
}  // namespace minidecode

// At most eight query heads a KV head, head_dim a multiple of 16 up to 128, k a multiple of 8, and
// 2, 4, 8 or 16 splits that divide the cluster's rows. sm_90 only.
MINIDECODE_EXPORT cudaError_t minidecode_qkv_attention(const minidecode::Attention* args,
                                                       const minidecode::Projection* projection,
                                                       int warps, cudaStream_t stream) {
  using namespace minidecode;
  const Attention& a = *args;
  const Projection& p = *projection;
  if (!has_pdl() || a.head_dim % 16 != 0 || a.head_dim < 16 || a.head_dim > 128 ||
      a.heads % a.kv_heads != 0 || a.heads / a.kv_heads > kHeads || p.k % 8 != 0 || a.splits < 2 ||
      a.splits > 16 || (a.splits & (a.splits - 1)) != 0 ||
      (a.heads / a.kv_heads + 2) * a.head_dim % a.splits != 0) {
    return cudaErrorNotSupported;
  }
  const bool wide = a.head_dim > 64;
  switch (warps) {
    case 4:
      return wide ? launch_joined<128, 4>(a, p, stream) : launch_joined<64, 4>(a, p, stream);
    case 8:
      return wide ? launch_joined<128, 8>(a, p, stream) : launch_joined<64, 8>(a, p, stream);
    default:
      return cudaErrorNotSupported;
  }
}
