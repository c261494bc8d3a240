// Attention of one token on tensor cores: q/k norm, RoPE, append to the cache, softmax, values.
//
// A block has up to eight query heads of one KV head, a warp 16 cached positions at a time, which
// asynchronous copies bring into its own ring in shared memory: the first ones before the
// dependent-launch wait, and at the cost of no registers, so that the block finds room beside its
// predecessors. The order of the dims within a dot product is free, so a 16-byte piece of a row is
// an operand of the tensor cores as it is. Scores and softmax are FP32. Positions are dealt out to
// the warps of `splits` blocks, which form a cluster and combine through distributed shared memory
// (flash-decoding: Dao et al., 2023).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "minidecode/async.cuh"
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
  int splits;   // blocks that share one KV head's context
  int context;  // the most positions that will be seen: sets how many tiles are in flight
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
constexpr int kMaxStages = 4;

// Blocks a multiprocessor that the compiler has to leave registers for. It spills where it chooses
// for itself (0) on some architectures, and the widest block spills where it is told 1.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int attend_blocks(int, int) { return 0; }
#else
constexpr int attend_blocks(int dims, int warps) { return dims > 64 && warps == 16 ? 0 : 1; }
#endif

// One row of this step's q or k, normalised and rotated by a warp, or of v as it is. A lane has the
// pairs (lane + 32 i, the same + head_dim / 2); cs and gain are theirs.
template <int PAIRS>
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
      low[i] = __half2float(load_written(source + pair));
      high[i] = __half2float(load_written(source + pair + half_dim));
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

// 2^v to 2 ulp, and 0 below the normal numbers: no branch, unlike exp2f.
__device__ __forceinline__ float exp2_quick(float v) {
#if defined(MINIDECODE_HOST_SHIM)
  return exp2f(v);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
#endif
}

// N floats that are loaded and stored together.
template <int N>
struct alignas(N * sizeof(float)) Floats {
  float v[N];
};

// N halves to an address that is a multiple of their size: each by `scale`.
template <int N>
__device__ __forceinline__ void store_halves(half* to, const Floats<N>& from, float scale) {
  if (N == 1) {
    *to = __float2half_rn(from.v[0] * scale);
  } else if (N == 2) {
    *reinterpret_cast<uint32_t*>(to) = pack_half2(from.v[0] * scale, from.v[1 % N] * scale);
  } else {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_half2(from.v[0] * scale, from.v[1 % N] * scale),
                   pack_half2(from.v[2 % N] * scale, from.v[3 % N] * scale));
  }
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// HEAD_DIM: head_dim rounded up to 64 or 128. `stages`: tiles of 16 positions a warp has in flight.
template <int HEAD_DIM, int WARPS, bool CLUSTER>
__global__ void __launch_bounds__(WARPS* kWarp, attend_blocks(HEAD_DIM, WARPS))
    attend(const Attention a, const int stages) {
  constexpr int kPieces = HEAD_DIM / 32;       // 16-byte pieces of a K row for one lane
  constexpr int kSpans = HEAD_DIM / 64;        // 16-byte pieces of a V row for one lane
  constexpr int kPairs = HEAD_DIM / 64;        // rotated pairs of a row for one lane
  constexpr int kRowStride = HEAD_DIM + 8;     // keeps eight rows in different banks
  constexpr int kChunks = HEAD_DIM / 8;        // 16-byte pieces of a row
  constexpr int kTile = 2 * kKeys * HEAD_DIM;  // halves of K and V
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int per_kv = a.heads / a.kv_heads, groups = (per_kv + kHeads - 1) / kHeads;
  const int kv = blockIdx.x / groups, group = blockIdx.x % groups, split = blockIdx.y;
  const int first_head = kv * per_kv + group * kHeads;
  const int heads = min(kHeads, per_kv - group * kHeads);
  const int head_dim = a.head_dim;
  // Shared memory: the warps' rings, then what combining needs.
  half* ring = reinterpret_cast<half*>(shared) + warp * stages * kTile;  // [stages, 2, kKeys, dims]
  float* after = reinterpret_cast<float*>(shared) + WARPS * stages * kTile / 2;

  const Seen seen = seen_by(a);
  const half* keys = a.keys + static_cast<size_t>(kv) * a.capacity * head_dim;
  const half* values = a.values + static_cast<size_t>(kv) * a.capacity * head_dim;
  const float2* rope = a.rope + static_cast<size_t>(seen.last) * (head_dim / 2);
  const int stride = a.splits * WARPS * kKeys;

  // The piece `chunk` of row `row` of a tile, moved so that eight rows are in different banks.
  auto place = [](int row, int chunk) { return row * HEAD_DIM + (chunk ^ (row % 8)) * 8; };
  auto fetch = [&](int base, int stage) {
    constexpr int kAtOnce = kWarp / kChunks;                 // rows that the warp copies together
    constexpr int kAhead = HEAD_DIM * WARPS > 1024 ? 1 : 2;  // the widest block would spill
    const int chunk = lane % kChunks, row = lane / kChunks;
    half* tile = ring + stage * kTile;
    if (base <= seen.last) {
      const size_t from = static_cast<size_t>(base + row) * head_dim + chunk * 8;
      const half* k_from = keys + from;
      const half* v_from = values + from;
#pragma unroll kAhead
      for (int i = 0; i < kKeys; i += kAtOnce) {
        // The newest position is not in the cache yet.
        const bool there = base + row + i < seen.last && chunk * 8 < head_dim;
        half* to = tile + place(row + i, chunk);
        async_copy(to, k_from + i * head_dim, there);
        async_copy(to + kKeys * HEAD_DIM, v_from + i * head_dim, there);
      }
    }
    async_commit();
  };

  // Old positions depend on nothing in this step: they are on their way before the wait. So are
  // the angles of this position and the norms' weights.
  int base = seen.first + (warp * a.splits + split) * kKeys;
  for (int stage = 0; stage < stages; ++stage) fetch(base + stage * stride, stage);
  float2 cs[kPairs], q_gain[kPairs], k_gain[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = lane + kWarp * i;
    cs[i] = pair < head_dim / 2 ? __ldg(rope + pair) : make_float2(1.0f, 0.0f);
  }
  load_gain(q_gain, a.q_norm, head_dim);
  load_gain(k_gain, a.k_norm, head_dim);
  float scale = rsqrtf(static_cast<float>(head_dim)) * 1.4426950408889634f;  // for exp2
  computed_by_now(scale);
  pdl_trigger();
  // Its blocks write to each other's shared memory, so all of them must have started.
  if (CLUSTER) cluster_sync();
  pdl_wait();

  // This step's rows: q of `heads` heads, then k, then v.
  __shared__ __align__(16) half rows[kHeads + 2][kRowStride];
#pragma unroll 1
  for (int r = warp; r < heads + 2; r += WARPS) {
    const int from = r < heads ? first_head + r : a.heads + (r == heads ? 0 : a.kv_heads) + kv;
    const half* norm = r < heads ? a.q_norm : r == heads ? a.k_norm : nullptr;
    float2 gain[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) gain[i] = r < heads ? q_gain[i] : k_gain[i];
    make_row(rows[r], a.qkv + static_cast<size_t>(from) * head_dim, cs, gain, norm != nullptr,
             r <= heads, head_dim, a.eps);
  }
  __syncthreads();
  auto piece = [&](int r, int dim) {
    return dim < head_dim ? *reinterpret_cast<const uint4*>(&rows[r][dim]) : make_uint4(0, 0, 0, 0);
  };
  // The last warp is the first to have no positions of its own.
  if (split == 0 && group == 0 && warp == WARPS - 1) {
    const size_t row = (static_cast<size_t>(kv) * a.capacity + seen.last) * head_dim;
    for (int c = lane; c < 2 * kChunks; c += kWarp) {
      const int dim = c % kChunks * 8;
      half* to = (c < kChunks ? a.keys : a.values) + row + dim;
      if (dim < head_dim) *reinterpret_cast<uint4*>(to) = piece(heads + c / kChunks, dim);
    }
  }
  uint4 q[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    q[j] = g < heads ? piece(g, 32 * j + 8 * t) : make_uint4(0, 0, 0, 0);
  }

  float greatest[2] = {-INFINITY, -INFINITY};  // of heads 2t and 2t + 1
  float total[2] = {};                         // of these heads, over this lane's positions
  // [span][i]: dims 64 span + 8 g + 2 i and the next, each of heads 2t and 2t + 1.
  float out[kSpans][4][4] = {};
  for (int stage = 0; base <= seen.last; base += stride) {
    // All but the newest stages - 1 groups have arrived. (A switch would be an indirect branch.)
    if (stages & 2) {
      if (stages & 1) {
        async_wait<2>();
      } else {
        async_wait<1>();
      }
    } else if (stages == 1) {
      async_wait<0>();
    } else {
      async_wait<kMaxStages - 1>();
    }
    __syncwarp();
    half* k_tile = ring + stage * kTile;
    half* v_tile = k_tile + kKeys * HEAD_DIM;
    if (base + kKeys > seen.last) {
      // This warp has the newest position.
      for (int c = lane; c < 2 * kChunks; c += kWarp) {
        const int chunk = c % kChunks;
        half* to = (c < kChunks ? k_tile : v_tile) + place(seen.last - base, chunk);
        *reinterpret_cast<uint4*>(to) = piece(heads + c / kChunks, 8 * chunk);
      }
      __syncwarp();
    }

    float score[4] = {};  // position g of heads 2t and 2t + 1, then position g + 8
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const uint4 k0 = *reinterpret_cast<const uint4*>(k_tile + place(g, 4 * j + t));
      const uint4 k1 = *reinterpret_cast<const uint4*>(k_tile + place(g + 8, 4 * j + t));
      mma_16x8x16(score, k0.x, k1.x, k0.y, k1.y, q[j].x, q[j].y);
      mma_16x8x16(score, k0.z, k1.z, k0.w, k1.w, q[j].z, q[j].w);
    }
    float shrink[2];
    uint32_t p[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] = base + g + i / 2 * 8 <= seen.last ? score[i] * scale : -INFINITY;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = fmaxf(greatest[c], fmaxf(score[c], score[c + 2]));
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
      }
      shrink[c] = exp2_quick(greatest[c] - top);
      greatest[c] = top;
      score[c] = exp2_quick(score[c] - top);
      score[c + 2] = exp2_quick(score[c + 2] - top);
      total[c] = total[c] * shrink[c] + score[c] + score[c + 2];
    }
    p[0] = transpose_8x8(pack_half2(score[0], score[1]));
    p[1] = transpose_8x8(pack_half2(score[2], score[3]));
#pragma unroll
    for (int m = 0; m < kSpans; ++m) {
      uint4 v[4];  // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * t + i % 2 + i / 2 * 8;
        v[i] = *reinterpret_cast<const uint4*>(v_tile + place(row, 8 * m + g));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&d)[4] = out[m][i];
#pragma unroll
        for (int c = 0; c < 4; ++c) d[c] *= shrink[c % 2];
        // The low halves of two words are one dim of two positions, the high halves the next dim.
        const uint32_t a0 = __byte_perm(word(v[0], i), word(v[1], i), 0x5410);
        const uint32_t a1 = __byte_perm(word(v[0], i), word(v[1], i), 0x7632);
        const uint32_t a2 = __byte_perm(word(v[2], i), word(v[3], i), 0x5410);
        const uint32_t a3 = __byte_perm(word(v[2], i), word(v[3], i), 0x7632);
        mma_16x8x16(d, a0, a1, a2, a3, p[0], p[1]);
      }
    }
    __syncwarp();
    fetch(base + stages * stride, stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
#pragma unroll
  for (int offset = 4; offset < kWarp; offset *= 2) {
    total[0] += __shfl_xor_sync(kFullMask, total[0], offset);
    total[1] += __shfl_xor_sync(kFullMask, total[1], offset);
  }

  // Warps of the block first, each weighted by exp2(its greatest score - the block's).
  // A warp's part, [heads, kPartStride], takes the place of its ring.
  constexpr int kPartStride = HEAD_DIM + 8;  // keeps the heads in different banks
  auto part = [&](int w, int h, int dim) {
    return reinterpret_cast<float*>(shared) + w * stages * kTile / 2 + h * kPartStride + dim;
  };
  float* tops = after;                 // [heads, WARPS]
  float* sums = tops + heads * WARPS;  // [heads, WARPS]
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int h = 2 * t + c;
    if (h >= heads) continue;
    if (g == 0) {
      tops[h * WARPS + warp] = greatest[c];
      sums[h * WARPS + warp] = total[c];
    }
    float4* target = reinterpret_cast<float4*>(part(warp, h, 8 * g));
#pragma unroll
    for (int m = 0; m < kSpans; ++m) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        target[16 * m + i / 2] =
            make_float4(out[m][i][c], out[m][i][c + 2], out[m][i + 1][c], out[m][i + 1][c + 2]);
      }
    }
  }
  __syncthreads();
  // Then the blocks of a cluster: each owns a slice of the result and is sent the others' parts.
  float* inbox = sums + heads * WARPS;                // [splits, slice]
  float* inbox_tops = inbox + heads * HEAD_DIM;       // [splits, heads]
  float* inbox_sums = inbox_tops + a.splits * heads;  // [splits, heads]
  const int slice = heads * HEAD_DIM / a.splits;
  // A warp joins 16 kVec dims of a head, each half of it one half of the parts. Lane l knows the
  // weight of part l % WARPS.
  constexpr int kVec = HEAD_DIM / 4 / WARPS > 4 ? 4 : HEAD_DIM / 4 / WARPS;
  constexpr int kItems = HEAD_DIM / (16 * kVec);  // of a head
  for (int item = warp; item < heads * kItems; item += WARPS) {
    const int h = item / kItems, dim = item % kItems * 16 * kVec + lane % 16 * kVec;
    const float own_top = tops[h * WARPS + lane % WARPS];
    float sum = sums[h * WARPS + lane % WARPS];
    float top = own_top;
#pragma unroll
    for (int offset = WARPS / 2; offset > 0; offset /= 2) {
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
    }
    // A warp with no position has -inf, and so has a block with none.
    const float share = top == -INFINITY ? 0.0f : exp2_quick(own_top - top);
    sum *= share;
#pragma unroll
    for (int offset = WARPS / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    }
    Floats<kVec> joined = {};
#pragma unroll
    for (int i = 0; i < WARPS / 2; ++i) {
      const int w = lane / 16 * (WARPS / 2) + i;
      const float by = __shfl_sync(kFullMask, share, w);
      const Floats<kVec> own = *reinterpret_cast<const Floats<kVec>*>(part(w, h, dim));
#pragma unroll
      for (int v = 0; v < kVec; ++v) joined.v[v] = fmaf(own.v[v], by, joined.v[v]);
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) joined.v[v] += __shfl_xor_sync(kFullMask, joined.v[v], 16);
    const bool writes = lane < 16 && dim < head_dim;
    if (a.splits == 1) {
      half* to = a.out + static_cast<size_t>(first_head + h) * head_dim + dim;
      const float by = __fdividef(1.0f, sum);
      if (writes) store_halves(to, joined, by);
    } else if (CLUSTER) {
      const int e = h * HEAD_DIM + dim;
      float* to = cluster_shared(inbox, e / slice) + split * slice + e % slice;
      if (lane < 16) *reinterpret_cast<Floats<kVec>*>(to) = joined;
      if (item % kItems == 0 && lane < a.splits) {
        cluster_shared(inbox_tops, lane)[split * heads + h] = top;
        cluster_shared(inbox_sums, lane)[split * heads + h] = sum;
      }
    } else {
      float* parts =
          a.scratch + static_cast<size_t>((first_head + h) * a.splits + split) * (head_dim + 2);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        if (writes) parts[2 + dim + v] = joined.v[v];
      }
      if (item % kItems == 0 && lane == 0) {
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
#pragma unroll 4
    for (int s = 0; s < a.splits; ++s) top = fmaxf(top, inbox_tops[s * heads + h]);
#pragma unroll 4
    for (int s = 0; s < a.splits; ++s) {
      const float share = exp2_quick(inbox_tops[s * heads + h] - top);
      sum += inbox_sums[s * heads + h] * share;
      weighted += inbox[s * slice + e] * share;
    }
    if (dim < head_dim) {
      a.out[static_cast<size_t>(first_head + h) * head_dim + dim] = __float2half_rn(weighted / sum);
    }
  }
}

// Bytes of dynamic shared memory that `attend` needs with this many stages.
inline int attend_shared_bytes(const Attention& a, int dims, int warps, int stages) {
  const int per_kv = a.heads / a.kv_heads, heads = per_kv < kHeads ? per_kv : kHeads;
  const int floats = heads * (dims + 2 * warps + 2 * a.splits);
  return warps * stages * 4 * kKeys * dims + floats * static_cast<int>(sizeof(float));
}

// How many tiles a warp keeps in flight: what the context can use and the shared memory holds.
inline int attend_stages(const Attention& a, int dims, int warps) {
  constexpr int kStatic = 6 * 1024;  // more than `attend` has of its own
  const int needed = (a.context + a.splits * warps * kKeys - 1) / (a.splits * warps * kKeys);
  const int limit = block_shared_limit() - kStatic - attend_shared_bytes(a, dims, warps, 0);
  const int room = (limit < 176 * 1024 ? limit : 176 * 1024) / (warps * 4 * kKeys * dims);
  const int most = room < kMaxStages ? room : kMaxStages;
  return needed < 1 || most < 1 ? 1 : needed < most ? needed : most;
}

}  // namespace minidecode
