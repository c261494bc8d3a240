// Attention of one token on tensor cores: q/k norm, RoPE, append to the cache, softmax, values.
//
// A block has up to eight query heads of one KV head, a warp 16 cached positions at a time, which
// asynchronous copies bring into its own ring in shared memory: the first ones before the
// dependent-launch wait, and at the cost of no registers, so that the block finds room beside its
// predecessors. The order of the dims within a dot product is free, so a 16-byte piece of a row is
// an operand of the tensor cores as it is. Scores and softmax are FP32. Positions are dealt out to
// the warps of `splits` blocks; the last of them to finish joins what all have left in memory
// (flash-decoding: Dao et al., 2023).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "minidecode/async.cuh"
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
  float* parts;         // [heads, splits, head_dim] and [2, heads, splits], for several splits
  unsigned* arrived;    // [blocks of one split], 0 before and after, likewise
  int heads;
  int kv_heads;
  int head_dim;
  int capacity;
  int window;  // positions seen, its own included; 0 is all
  float eps;
  int splits;   // blocks that share a context
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

// What the splits leave for the one that joins them.
struct Parts {
  float* out;   // [heads, splits, head_dim], not yet divided by the sum
  float* tops;  // [heads, splits]
  float* sums;  // [heads, splits]
};

// From `head` on.
__device__ __forceinline__ Parts parts_of(const Attention& a, int head) {
  const size_t first = static_cast<size_t>(head) * a.splits;
  float* tops = a.parts + a.heads * a.splits * a.head_dim + first;
  return {a.parts + first * a.head_dim, tops, tops + a.heads * a.splits};
}

// Whether this block is the last of the `splits` blocks with this counter to come here; if so, it
// sees what all of them wrote. The barriers and one thread's fences order it all.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, int splits) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, splits - 1) == splits - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

constexpr int kHeads = 8;  // query heads of a block
constexpr int kKeys = 16;  // positions of a warp's tile
constexpr int kMaxStages = 4;
constexpr uint32_t kTwoOnes = 0x3c003c00;  // as halves
constexpr int kMaxSplits = kWarp;
constexpr int kPartsAtOnce = 8;  // that a lane loads

// What a lane has of a row of this step's q, k or v: the pairs (lane + 32 i, the same + head_dim /
// 2).
template <int PAIRS>
struct Row {
  half low[PAIRS], high[PAIRS];
};

// `source`: the row, from the lane's first element on.
template <int PAIRS>
__device__ __forceinline__ void load_row(Row<PAIRS>& row, const half* source, int head_dim) {
  const int lane = threadIdx.x % kWarp, half_dim = head_dim / 2;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const bool there = lane + kWarp * i < half_dim;
    row.low[i] = there ? load_written(source + kWarp * i) : half();
    row.high[i] = there ? load_written(source + kWarp * i + half_dim) : half();
  }
}

// q or k divided by its root mean square, to FP16 as the reference does; `gain` is the weight.
template <int PAIRS>
__device__ __forceinline__ void normalise(Row<PAIRS>& row, const float2 (&gain)[PAIRS],
                                          float per_dim, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const float x = __half2float(row.low[i]), y = __half2float(row.high[i]);
    squares += x * x + y * y;
  }
  const float rms = rsqrtf(warp_sum(squares) * per_dim + eps);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    row.low[i] = __float2half_rn(__half2float(row.low[i]) * rms * gain[i].x);
    row.high[i] = __float2half_rn(__half2float(row.high[i]) * rms * gain[i].y);
  }
}

template <int PAIRS>
__device__ __forceinline__ void rotate(Row<PAIRS>& row, const float2 (&cs)[PAIRS]) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const float x = __half2float(row.low[i]), y = __half2float(row.high[i]);
    row.low[i] = __float2half_rn(x * cs[i].x - y * cs[i].y);
    row.high[i] = __float2half_rn(y * cs[i].x + x * cs[i].y);
  }
}

template <int PAIRS>
__device__ __forceinline__ void store_row(half* to, const Row<PAIRS>& row, int head_dim) {
  const int lane = threadIdx.x % kWarp, half_dim = head_dim / 2;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const int pair = lane + kWarp * i;
    if (pair < half_dim) {
      to[pair] = row.low[i];
      to[pair + half_dim] = row.high[i];
    }
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

// Four halves, each by `scale`.
__device__ __forceinline__ void store_halves(half* to, const Floats<4>& from, float scale) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_half2(from.v[0] * scale, from.v[1] * scale),
                                             pack_half2(from.v[2] * scale, from.v[3] * scale));
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// HEAD_DIM: head_dim rounded up to 64, 128 or 256. `stages`: tiles of 16 positions a warp has in
// flight.
template <int HEAD_DIM, int WARPS, bool SPLIT>
__global__ void __launch_bounds__(WARPS* kWarp, 1) attend(const Attention a, const int stages) {
  constexpr int kPieces = HEAD_DIM / 32;       // 16-byte pieces of a K row for one lane
  constexpr int kSpans = HEAD_DIM / 64;        // 16-byte pieces of a V row for one lane
  constexpr int kPairs = HEAD_DIM / 64;        // rotated pairs of a row for one lane
  constexpr int kRowStride = HEAD_DIM + 8;     // keeps eight rows in different banks
  constexpr int kChunks = HEAD_DIM / 8;        // 16-byte pieces of a row
  constexpr int kTile = 2 * kKeys * HEAD_DIM;  // halves of K and V
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int per_kv = a.heads / a.kv_heads, groups = (per_kv + kHeads - 1) / kHeads;
  const int kv = blockIdx.x / groups, group = blockIdx.x % groups, split = SPLIT ? blockIdx.y : 0;
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
  const int splits = SPLIT ? a.splits : 1, stride = splits * WARPS * kKeys;

  // The piece `chunk` of row `row` of a tile, moved so that what eight lanes read together, four
  // pieces of two K rows or two pieces of four V rows, is in different banks.
  auto place = [](int row, int chunk) {
    return row * HEAD_DIM + (chunk ^ (row & 6) ^ (row & 1) << 2) * 8;
  };
  auto fetch = [&](int base, int stage) {
    constexpr int kAtOnce = kWarp / kChunks;  // rows that the warp copies together
    const int chunk = lane % kChunks, row = lane / kChunks;
    half* tile = ring + stage * kTile;
    if (base <= seen.last) {
      const size_t from = static_cast<size_t>(base + row) * head_dim + chunk * 8;
      const half* k_from = keys + from;
      const half* v_from = values + from;
#pragma unroll 2
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
  int base = seen.first + (warp * splits + split) * kKeys;
  for (int stage = 0; stage < stages; ++stage) fetch(base + stage * stride, stage);
  float2 cs[kPairs], q_gain[kPairs], k_gain[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int pair = lane + kWarp * i;
    cs[i] = pair < head_dim / 2 ? __ldg(rope + pair) : make_float2(1.0f, 0.0f);
  }
  load_gain(q_gain, a.q_norm, head_dim);
  load_gain(k_gain, a.k_norm, head_dim);
  float per_dim = 1.0f / head_dim;
  float scale = rsqrtf(static_cast<float>(head_dim)) * 1.4426950408889634f;  // for exp2
  computed_by_now(per_dim);
  computed_by_now(scale);
  // This step's rows: q of `heads` heads, then k, then v. A warp makes every WARPS-th.
  auto source_of = [&](int r) {
    const int from = r < heads ? first_head + r : a.heads + (r == heads ? 0 : a.kv_heads) + kv;
    return a.qkv + static_cast<size_t>(from) * head_dim + lane;
  };
  const half* source = source_of(warp);
  computed_by_now(source);
  // Where this lane's first pieces are in a tile: of K row g, of V row 2t.
  int k_at = place(g, t), v_at = place(2 * t, g);
  computed_by_now(k_at);
  computed_by_now(v_at);
  pdl_trigger();
  pdl_wait();

  __shared__ __align__(16) half rows[kHeads + 2][kRowStride];
  Row<kPairs> mine;
  if (warp < heads + 2) load_row(mine, source, head_dim);
#pragma unroll 1
  for (int r = warp; r < heads + 2; r += WARPS) {
    if (r != warp) load_row(mine, source_of(r), head_dim);
    if (r <= heads) {
      if ((r < heads ? a.q_norm : a.k_norm) != nullptr) {
        float2 gain[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) gain[i] = r < heads ? q_gain[i] : k_gain[i];
        normalise(mine, gain, per_dim, a.eps);
      }
      rotate(mine, cs);
    }
    store_row(rows[r], mine, head_dim);
    if (r >= heads && split == 0 && group == 0) {
      const size_t row = (static_cast<size_t>(kv) * a.capacity + seen.last) * head_dim;
      store_row((r == heads ? a.keys : a.values) + row, mine, head_dim);
    }
  }
  __syncthreads();
  auto piece = [&](int r, int dim) {
    return dim < head_dim ? *reinterpret_cast<const uint4*>(&rows[r][dim]) : make_uint4(0, 0, 0, 0);
  };
  uint4 q[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    q[j] = g < heads ? piece(g, 32 * j + 8 * t) : make_uint4(0, 0, 0, 0);
  }

  float greatest[2] = {-INFINITY, -INFINITY};  // of heads 2t and 2t + 1
  float total[4] = {};                         // of these heads, twice
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
      const half* from = k_tile + (k_at ^ j % 2 * 32) + j / 2 * 64;  // place(g, 4 j + t)
      const uint4 k0 = *reinterpret_cast<const uint4*>(from);
      const uint4 k1 = *reinterpret_cast<const uint4*>(from + 8 * HEAD_DIM);
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
    }
    p[0] = transpose_8x8(pack_half2(score[0], score[1]));
    p[1] = transpose_8x8(pack_half2(score[2], score[3]));
    // Their sum as a product with ones: as rounded as what it divides, and no shuffles.
#pragma unroll
    for (int c = 0; c < 4; ++c) total[c] *= shrink[c % 2];
    mma_16x8x16(total, kTwoOnes, kTwoOnes, kTwoOnes, kTwoOnes, p[0], p[1]);
#pragma unroll
    for (int m = 0; m < kSpans; ++m) {
      uint4 v[4];  // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i % 2 + i / 2 * 8;  // place(2 t + row, 8 m + g)
        const half* from = v_tile + (v_at ^ i % 2 * 32) + row * HEAD_DIM + m * 64;
        v[i] = *reinterpret_cast<const uint4*>(from);
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
  const Parts parts = parts_of(a, first_head);
  // A warp joins 64 dims of a head, each half of it one half of the parts.
  constexpr int kHalf = WARPS / 2;
  for (int item = warp; item < heads * kSpans; item += WARPS) {
    const int h = item / kSpans, dim = item % kSpans * 64 + lane % 16 * 4;
    const int first = lane / 16 * kHalf;
    const Floats<kHalf> own_tops = *reinterpret_cast<Floats<kHalf>*>(tops + h * WARPS + first);
    const Floats<kHalf> own_sums = *reinterpret_cast<Floats<kHalf>*>(sums + h * WARPS + first);
    float top = own_tops.v[0];
#pragma unroll
    for (int i = 1; i < kHalf; ++i) top = fmaxf(top, own_tops.v[i]);
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 16));
    float sum = 0.0f;
    Floats<4> joined = {};
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      // A warp with no position has -inf, and so has a block with none.
      const bool none = SPLIT && top == -INFINITY;
      const float share = none ? 0.0f : exp2_quick(own_tops.v[i] - top);
      sum = fmaf(own_sums.v[i], share, sum);
      const Floats<4> own = *reinterpret_cast<const Floats<4>*>(part(first + i, h, dim));
#pragma unroll
      for (int v = 0; v < 4; ++v) joined.v[v] = fmaf(own.v[v], share, joined.v[v]);
    }
    sum += __shfl_xor_sync(kFullMask, sum, 16);
#pragma unroll
    for (int v = 0; v < 4; ++v) joined.v[v] += __shfl_xor_sync(kFullMask, joined.v[v], 16);
    const bool writes = lane < 16 && dim < head_dim;
    if (!SPLIT) {
      half* to = a.out + static_cast<size_t>(first_head + h) * head_dim + dim;
      const float by = __fdividef(1.0f, sum);
      if (writes) store_halves(to, joined, by);
    } else {
      float* to = parts.out + static_cast<size_t>(h * a.splits + split) * head_dim + dim;
      if (writes) *reinterpret_cast<Floats<4>*>(to) = joined;
      if (item % kSpans == 0 && lane == 0) {
        parts.tops[h * a.splits + split] = top;
        parts.sums[h * a.splits + split] = sum;
      }
    }
  }
  if (!SPLIT) return;

  // The last block to come here joins the parts of all.
  if (!last_to_arrive(a.arrived + blockIdx.x, a.splits)) return;
  // A warp joins 64 dims of a head, each half of it every other split; lane l knows the weight of
  // split l. All loads of 16 splits are on their way at once.
  for (int item = warp; item < heads * kSpans; item += WARPS) {
    const int h = item / kSpans, dim = item % kSpans * 64 + lane % 16 * 4;
    const bool writes = dim < head_dim;
    const bool there = lane < a.splits;
    const float own_top = there ? __ldcg(parts.tops + h * a.splits + lane) : -INFINITY;
    float sum = there ? __ldcg(parts.sums + h * a.splits + lane) : 0.0f, share = 0.0f;
    Floats<4> joined = {};
    for (int begin = 0; begin < a.splits; begin += 2 * kPartsAtOnce) {
      float4 v[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const int s = begin + 2 * i + lane / 16;
        const float* from = parts.out + static_cast<size_t>(h * a.splits + s) * head_dim + dim;
        v[i] = writes && s < a.splits ? __ldcg(reinterpret_cast<const float4*>(from))
                                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      if (begin == 0) {
        share = exp2_quick(own_top - warp_max(own_top));
        sum = warp_sum(sum * share);
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float by = __shfl_sync(kFullMask, share, begin + 2 * i + lane / 16);
        joined.v[0] = fmaf(v[i].x, by, joined.v[0]);
        joined.v[1] = fmaf(v[i].y, by, joined.v[1]);
        joined.v[2] = fmaf(v[i].z, by, joined.v[2]);
        joined.v[3] = fmaf(v[i].w, by, joined.v[3]);
      }
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) joined.v[v] += __shfl_xor_sync(kFullMask, joined.v[v], 16);
    half* to = a.out + static_cast<size_t>(first_head + h) * head_dim + dim;
    if (writes && lane < 16) store_halves(to, joined, __fdividef(1.0f, sum));
  }
}

// Bytes of dynamic shared memory that `attend` needs with this many stages.
inline int attend_shared_bytes(const Attention& a, int dims, int warps, int stages) {
  const int per_kv = a.heads / a.kv_heads, heads = per_kv < kHeads ? per_kv : kHeads;
  const int floats = 2 * heads * warps;
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
