// Attention of one token on tensor cores: q/k norm, RoPE, append to the cache, softmax, values.
//
// A block has up to eight query heads of one KV head, a warp 16 cached positions at a time. Each
// thread loads K and V in 16-byte pieces straight into the layout that the tensor cores want: the
// order of the dims within a dot product is free, so a piece of eight dims serves as it came.
// Scores and softmax are FP32. Positions are dealt out to the warps of `splits` blocks, which form
// a cluster and combine through distributed shared memory (flash-decoding: Dao et al., 2023).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "minidecode/cluster.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/mma.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {

struct Attention {
  half* out;            // [heads, head_dim]
  half* keys;           // [kv_heads, capacity, head_dim], row `position` is written
  half* values;         // [kv_heads, capacity, head_dim], row `position` is written
  const half* qkv;      // [heads + 2 kv_heads, head_dim], before normalisation and rotation
  const half* q_norm;   // [head_dim] or null
  const half* k_norm;   // [head_dim] or null
  const float2* rope;   // [capacity, head_dim / 2] cos, sin
  const int* position;  // [1]
  float* scratch;       // [heads, splits, head_dim + 2], only without clusters
  int heads;
  int kv_heads;
  int head_dim;
  int capacity;
  int window;  // positions seen, its own included; 0 is all
  float eps;
  int splits;  // blocks that share one KV head's context
};

// The token sees positions first, first + 1, …, last.
struct Seen {
  int first;
  int last;
};

__device__ __forceinline__ Seen seen_by(const Attention& a) {
  // Read before the dependent-launch wait, since it changes only at the end of a step; from L2, as
  // this multiprocessor's L1 may still hold the step before.
  const int last = __ldcg(a.position);
  const int first = a.window > 0 && last >= a.window ? last + 1 - a.window : 0;
  return {first, last};
}

constexpr int kHeads = 8;  // query heads of a block
constexpr int kKeys = 16;  // positions of a warp's tile

// One row of this step's q or k, normalised and rotated by a warp, or of v as it is. A lane has the
// pairs (lane + 32 i, the same + head_dim / 2); cs and gain are theirs.
// GLOBAL: the source is in global memory, written by the kernel before.
template <bool GLOBAL, int PAIRS>
__device__ __forceinline__ void make_row(half* target, const half* source,
                                         const float2 (&cs)[PAIRS], const float2 (&gain)[PAIRS],
                                         bool normalise, bool rotate, int head_dim, float eps) {
  const int lane = threadIdx.x % kWarp, half_dim = head_dim / 2;
  float low[PAIRS] = {}, high[PAIRS] = {};
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + kWarp * i;
    if (pair < half_dim) {
      const half* first = source + pair;
      const half* second = first + half_dim;
      low[i] = __half2float(GLOBAL ? __ldcg(first) : *first);
      high[i] = __half2float(GLOBAL ? __ldcg(second) : *second);
    }
    squares += low[i] * low[i] + high[i] * high[i];
  }
  const float rms = normalise ? rsqrtf(warp_sum(squares) / head_dim + eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + kWarp * i;
    if (pair >= half_dim) continue;
    float x = low[i], y = high[i];
    if (normalise) {
      // As the reference does: rounded to FP16 before the rotation.
      x = __half2float(__float2half_rn(x * rms * gain[i].x));
      y = __half2float(__float2half_rn(y * rms * gain[i].y));
    }
    target[pair] = __float2half_rn(rotate ? x * cs[i].x - y * cs[i].y : x);
    target[pair + half_dim] = __float2half_rn(rotate ? y * cs[i].x + x * cs[i].y : y);
  }
}

template <int PAIRS>
__device__ __forceinline__ void load_gain(float2 (&gain)[PAIRS], const half* norm, int head_dim) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = threadIdx.x % kWarp + kWarp * i;
    const bool there = norm != nullptr && pair < head_dim / 2;
    gain[i].x = there ? __half2float(norm[pair]) : 1.0f;
    gain[i].y = there ? __half2float(norm[pair + head_dim / 2]) : 1.0f;
  }
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Where the rows of this step come from: qkv in memory, written by the kernel before.
struct FromMemory {
  static constexpr bool kComputes = false;
};

// HEAD_DIM: head_dim rounded up to 64 or 128. TILES: tiles of 16 positions a warp has in flight.
// Source: FromMemory, or what computes q, k and v within the cluster (qkv_attention.cu).
template <int HEAD_DIM, int WARPS, int TILES, bool CLUSTER, typename Source>
__global__ void __launch_bounds__(WARPS* kWarp) attend(const Attention a, const Source source) {
  constexpr int kPieces = HEAD_DIM / 32;    // 16-byte pieces of a K row for one lane
  constexpr int kSpans = HEAD_DIM / 64;     // 16-byte pieces of a V row for one lane
  constexpr int kPairs = HEAD_DIM / 64;     // rotated pairs of a row for one lane
  constexpr int kRowStride = HEAD_DIM + 8;  // keeps eight rows in different banks
  extern __shared__ __align__(16) float shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int per_kv = a.heads / a.kv_heads, groups = (per_kv + kHeads - 1) / kHeads;
  const int kv = blockIdx.x / groups, group = blockIdx.x % groups, split = blockIdx.y;
  const int first_head = kv * per_kv + group * kHeads;
  const int heads = min(kHeads, per_kv - group * kHeads);
  const int head_dim = a.head_dim;

  const Seen seen = seen_by(a);
  const half* keys = a.keys + static_cast<size_t>(kv) * a.capacity * head_dim;
  const half* values = a.values + static_cast<size_t>(kv) * a.capacity * head_dim;
  const float2* rope = a.rope + static_cast<size_t>(seen.last) * (head_dim / 2);
  const int stride = a.splits * WARPS * TILES * kKeys;

  uint4 k[TILES][2][kPieces];  // positions g and g + 8 of a tile
  uint4 v[TILES][4][kSpans];   // positions 2t, 2t + 1, 2t + 8, 2t + 9
  auto position_of_value = [&](int base, int i) { return base + 2 * t + (i & 1) + (i / 2) * 8; };
  auto load_keys = [&](int base) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int p = base + tile * kKeys + i * 8 + g;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          const int dim = 32 * j + 8 * t;
          const bool there = p < seen.last && dim < head_dim;
          k[tile][i][j] = there ? load_stream(keys + static_cast<size_t>(p) * head_dim + dim)
                                : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  auto load_values = [&](int base) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int p = position_of_value(base + tile * kKeys, i);
#pragma unroll
        for (int m = 0; m < kSpans; ++m) {
          const int dim = 64 * m + 8 * g;
          const bool there = p < seen.last && dim < head_dim;
          v[tile][i][m] = there ? load_stream(values + static_cast<size_t>(p) * head_dim + dim)
                                : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };

  // Old positions depend on nothing in this step: they are on their way before the wait. So are
  // the angles of this position and the norms' weights.
  int base = seen.first + (warp * a.splits + split) * TILES * kKeys;
  load_keys(base);
  load_values(base);
  float2 cs[kPairs], q_gain[kPairs], k_gain[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = lane + kWarp * i;
    cs[i] = pair < head_dim / 2 ? __ldg(rope + pair) : make_float2(1.0f, 0.0f);
  }
  load_gain(q_gain, a.q_norm, head_dim);
  load_gain(k_gain, a.k_norm, head_dim);
  auto finish_row = [&](half* target, int r, const half* from) {
    const half* norm = r < heads ? a.q_norm : r == heads ? a.k_norm : nullptr;
    float2 gain[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) gain[i] = r < heads ? q_gain[i] : k_gain[i];
    make_row<!Source::kComputes>(target, from, cs, gain, norm != nullptr, r <= heads, head_dim,
                                 a.eps);
  };
  if constexpr (Source::kComputes) source.prefetch(kv, split, shared);
  pdl_trigger();
  // Its blocks write to each other's shared memory, so all of them must have started.
  if (CLUSTER) cluster_sync();
  pdl_wait();

  // This step's rows: q of `heads` heads, then k, then v.
  __shared__ __align__(16) half rows[kHeads + 2][kRowStride];
  if constexpr (Source::kComputes) {
    __shared__ half raw[(kHeads + 2) * HEAD_DIM];
    source.template compute<WARPS>(kv, split, a.splits, shared, raw);
    cluster_sync();
#pragma unroll 1
    for (int r = warp; r < heads + 2; r += WARPS) {
      finish_row(rows[r], r, raw + r * head_dim);
    }
  } else {
#pragma unroll 1
    for (int r = warp; r < heads + 2; r += WARPS) {
      const int from = r < heads ? first_head + r : a.heads + (r == heads ? 0 : a.kv_heads) + kv;
      finish_row(rows[r], r, a.qkv + static_cast<size_t>(from) * head_dim);
    }
  }
  __syncthreads();
  if (split == 0 && group == 0) {
    const size_t row = (static_cast<size_t>(kv) * a.capacity + seen.last) * head_dim;
    for (int dim = threadIdx.x; dim < head_dim; dim += WARPS * kWarp) {
      a.keys[row + dim] = rows[heads][dim];
      a.values[row + dim] = rows[heads + 1][dim];
    }
  }
  auto piece = [&](int r, int dim) {
    return dim < head_dim ? *reinterpret_cast<const uint4*>(&rows[r][dim]) : make_uint4(0, 0, 0, 0);
  };
  uint4 q[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    q[j] = g < heads ? piece(g, 32 * j + 8 * t) : make_uint4(0, 0, 0, 0);
  }

  const float scale = rsqrtf(static_cast<float>(head_dim)) * 1.4426950408889634f;  // for exp2
  float greatest = -INFINITY, total = 0.0f;  // of head g, over this lane's positions
  float out[kSpans][8][2] = {};              // dims 64 m + 16 t + 8 c + i of head g: [m][i][c]
  for (; base <= seen.last; base += stride) {
    if (base + TILES * kKeys > seen.last) {
      // This warp has the newest position, which is not in the cache yet.
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int tile_base = base + tile * kKeys;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (tile_base + i * 8 + g != seen.last) continue;
#pragma unroll
          for (int j = 0; j < kPieces; ++j) k[tile][i][j] = piece(heads, 32 * j + 8 * t);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (position_of_value(tile_base, i) != seen.last) continue;
#pragma unroll
          for (int m = 0; m < kSpans; ++m) v[tile][i][m] = piece(heads + 1, 64 * m + 8 * g);
        }
      }
    }

    float score[TILES][2][2];  // positions 8 i + 2t + c of a tile: [tile][i][c]
    float top = greatest;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float s0 = 0.0f, s1 = 0.0f;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          mma_8x8x16(s0, s1, q[j].x, q[j].y, k[tile][i][j].x, k[tile][i][j].y);
          mma_8x8x16(s0, s1, q[j].z, q[j].w, k[tile][i][j].z, k[tile][i][j].w);
        }
        const int p = base + tile * kKeys + i * 8 + 2 * t;
        score[tile][i][0] = p <= seen.last ? s0 * scale : -INFINITY;
        score[tile][i][1] = p + 1 <= seen.last ? s1 * scale : -INFINITY;
        top = fmaxf(top, fmaxf(score[tile][i][0], score[tile][i][1]));
      }
    }
    load_keys(base + stride);
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
    const float shrink = exp2f(greatest - top);
    greatest = top;
    total *= shrink;
#pragma unroll
    for (int m = 0; m < kSpans; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[m][i][0] *= shrink;
        out[m][i][1] *= shrink;
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      uint32_t p[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float p0 = exp2f(score[tile][i][0] - top), p1 = exp2f(score[tile][i][1] - top);
        total += p0 + p1;
        p[i] = pack_half2(p0, p1);
      }
#pragma unroll
      for (int m = 0; m < kSpans; ++m) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned pick = i % 2 == 0 ? 0x5410u : 0x7632u;  // low or high halves of two words
          const uint32_t b0 =
              __byte_perm(word(v[tile][0][m], i / 2), word(v[tile][1][m], i / 2), pick);
          const uint32_t b1 =
              __byte_perm(word(v[tile][2][m], i / 2), word(v[tile][3][m], i / 2), pick);
          mma_8x8x16(out[m][i][0], out[m][i][1], p[0], p[1], b0, b1);
        }
      }
    }
    load_values(base + stride);
  }
  total += __shfl_xor_sync(kFullMask, total, 1);
  total += __shfl_xor_sync(kFullMask, total, 2);

  // Warps of the block first: each scales its own part to the block's greatest score.
  // What the source kept in shared memory is used up.
  float* part = shared;                           // [WARPS, heads, HEAD_DIM]
  float* tops = part + WARPS * heads * HEAD_DIM;  // [heads, WARPS]
  float* sums = tops + heads * WARPS;             // [heads, WARPS]
  if (t == 0 && g < heads) tops[g * WARPS + warp] = greatest;
  __syncthreads();
  if (g < heads) {
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[g * WARPS + w]);
    // A warp with no position has -inf, and so has a block with none.
    const float share = greatest == -INFINITY ? 0.0f : exp2f(greatest - top);
    if (t == 0) sums[g * WARPS + warp] = total * share;
    float* target = part + (warp * heads + g) * HEAD_DIM + 16 * t;
#pragma unroll
    for (int m = 0; m < kSpans; ++m) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          *reinterpret_cast<float4*>(target + 64 * m + 8 * c + i) =
              make_float4(out[m][i][c] * share, out[m][i + 1][c] * share, out[m][i + 2][c] * share,
                          out[m][i + 3][c] * share);
        }
      }
    }
  }
  __syncthreads();
  // Then the blocks of a cluster: each owns a slice of the result and is sent the others' parts.
  float* inbox = sums + heads * WARPS;                // [splits, slice]
  float* inbox_tops = inbox + heads * HEAD_DIM;       // [splits, heads]
  float* inbox_sums = inbox_tops + a.splits * heads;  // [splits, heads]
  const int slice = heads * HEAD_DIM / a.splits;
  for (int e = threadIdx.x; e < heads * HEAD_DIM; e += WARPS * kWarp) {
    const int h = e / HEAD_DIM, dim = e % HEAD_DIM;
    float top = -INFINITY, sum = 0.0f, weighted = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      top = fmaxf(top, tops[h * WARPS + w]);
      sum += sums[h * WARPS + w];
      weighted += part[(w * heads + h) * HEAD_DIM + dim];
    }
    if (a.splits == 1) {
      if (dim < head_dim) {
        a.out[static_cast<size_t>(first_head + h) * head_dim + dim] =
            __float2half_rn(weighted / sum);
      }
    } else if (CLUSTER) {
      cluster_shared(inbox, e / slice)[split * slice + e % slice] = weighted;
      if (dim < a.splits) {
        cluster_shared(inbox_tops, dim)[split * heads + h] = top;
        cluster_shared(inbox_sums, dim)[split * heads + h] = sum;
      }
    } else if (dim < head_dim) {
      float* parts =
          a.scratch + static_cast<size_t>((first_head + h) * a.splits + split) * (head_dim + 2);
      parts[2 + dim] = weighted;
      if (dim == 0) {
        parts[0] = top;
        parts[1] = sum;
      }
    }
  }
  if (!CLUSTER || a.splits == 1) return;

  cluster_sync();
  for (int e = threadIdx.x; e < slice; e += WARPS * kWarp) {
    const int h = (split * slice + e) / HEAD_DIM, dim = (split * slice + e) % HEAD_DIM;
    float top = -INFINITY, sum = 0.0f, weighted = 0.0f;
    for (int s = 0; s < a.splits; ++s) top = fmaxf(top, inbox_tops[s * heads + h]);
    for (int s = 0; s < a.splits; ++s) {
      const float share = exp2f(inbox_tops[s * heads + h] - top);
      sum += inbox_sums[s * heads + h] * share;
      weighted += inbox[s * slice + e] * share;
    }
    if (dim < head_dim) {
      a.out[static_cast<size_t>(first_head + h) * head_dim + dim] = __float2half_rn(weighted / sum);
    }
  }
}

// Bytes of dynamic shared memory that `attend` needs for combining.
inline int attend_shared_bytes(int heads, int dims, int warps, int splits) {
  return heads * ((warps + 1) * dims + 2 * warps + 2 * splits) * static_cast<int>(sizeof(float));
}

}  // namespace minidecode
