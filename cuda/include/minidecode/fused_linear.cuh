// A linear layer with what stands before and after it: y = epilogue(W rmsnorm(x) + b).
//
// The normalisation needs no pass of its own: W (x * g) and sum(x^2) are accumulated together and
// the sum is scaled by 1 / rms at the end; x * g is rounded to FP16, for the tensor cores. A block
// owns a few rows. Part of them is loaded into registers, part by bulk copies into shared memory,
// both before the dependent-launch wait, since weights depend on nothing: how much a block holds
// then is how much of the predecessor's latency the memory system works through. What comes after
// the wait is on the way of the whole step, hence few instructions for it.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "minidecode/async.cuh"
#include "minidecode/best.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"
#include "minidecode/rows.cuh"

namespace minidecode {

enum class Epilogue {
  kStore,     // y[n] = v
  kResidual,  // y[n] += v
  kSwiglu,    // y[n / 2] = silu(v[:n / 2]) * v[n / 2:]
  kLogits,    // logits[n] = v in FP32, and the greatest of them
};

struct FusedLinear {
  half* y;           // [n], or [n / 2] for SwiGLU; null for the head
  const half* w;     // [n, k], 16-byte aligned, k a multiple of 8
  const half* x;     // [k]
  const half* norm;  // [k] weight of the RMSNorm, where the kernel has one, times norm_scale
  const half* bias;  // [n] or null
  float* logits;     // [n], head only
  Best* best;        // [1], head only
  int n;
  int k;
  float eps;
  float norm_scale;  // with which no x * norm leaves the range of FP16
};

// Threads of a block, rows in registers, 16-byte loads a thread keeps in flight for each of those
// rows, rows in shared memory, and blocks that must fit a multiprocessor (caps the registers).
template <int THREADS, int ROWS, int UNROLL, int STAGED, int RESIDENT = 1>
struct Tile {
  static constexpr int kThreads = THREADS, kRows = ROWS, kUnroll = UNROLL, kStaged = STAGED;
  static constexpr int kResident = RESIDENT;
  static constexpr int kAll = ROWS + STAGED;
};

// The weight row of slot `slot` in this block. For SwiGLU even slots are gate rows and odd slots
// the up rows that belong to them.
template <Epilogue E, int ROWS>
__device__ __forceinline__ int row_of(int n, int slot) {
  const int first = blockIdx.x * ROWS;
  if (E != Epilogue::kSwiglu) return first + slot;
  return first / 2 + slot / 2 + (slot % 2) * (n / 2);
}

template <Epilogue E, int ROWS>
__device__ __forceinline__ bool row_exists(int n, int slot) {
  const int first = blockIdx.x * ROWS;
  return E != Epilogue::kSwiglu ? first + slot < n : first / 2 + slot / 2 < n / 2;
}

template <Epilogue E, bool NORM, typename T>
__global__ void __launch_bounds__(T::kThreads, T::kResident) fused_linear(const FusedLinear a) {
  constexpr int kThreads = T::kThreads, kRows = T::kRows, kUnroll = T::kUnroll;
  constexpr int kStaged = T::kStaged, kAll = T::kAll;
  constexpr int kWarps = kThreads / kWarp;
  using Held = RowsOf<kRows>;
  using Staged = RowsOf<kStaged>;
  constexpr int kHeldGroups = kRows / Held::kCount, kStagedGroups = kStaged / Staged::kCount;
  static_assert(kAll < kWarp, "one lane of the first warp finishes each row, one knows the norm");
  static_assert(kRows % 2 == 0 && kStaged % 2 == 0, "rows are multiplied in pairs");

  extern __shared__ __align__(128) unsigned char staged_bytes[];
  __shared__ __align__(8) uint64_t arrived;
  __shared__ float partial[kWarps][kAll + 1];  // the last column is of the squares
  const uint4* staged = reinterpret_cast<const uint4*>(staged_bytes);  // [kStaged, k / 8]

  const int tid = threadIdx.x, lane = tid % kWarp, warp = __shfl_sync(kFullMask, tid / kWarp, 0);
  const int chunks = a.k / 8;
  const uint4* w = reinterpret_cast<const uint4*>(a.w);

  if (kStaged > 0 && tid == 0) {
    const uint32_t row_bytes = chunks * sizeof(uint4);
    mbarrier_init(&arrived, 1);
    mbarrier_expect_bytes(&arrived, kStaged * row_bytes);
#pragma unroll 1
    for (int s = 0; s < kStaged; ++s) {
      const int slot = kRows + s;
      const int row = row_exists<E, kAll>(a.n, slot) ? row_of<E, kAll>(a.n, slot) : 0;
      bulk_copy(staged_bytes + s * row_bytes, w + static_cast<size_t>(row) * chunks, row_bytes,
                &arrived);
    }
  }
  constexpr uint4 kNothing = {};
  // Where this lane's pieces are, and how many its warp has left of each row.
  const uint4* rows[kHeldGroups > 0 ? kHeldGroups : 1];
  const uint4* norm = reinterpret_cast<const uint4*>(a.norm) + tid;
  const uint4* x = reinterpret_cast<const uint4*>(a.x) + tid;
  int left = chunks - warp * kWarp;
  uint4 held[kUnroll][kHeldGroups > 0 ? kHeldGroups : 1][Held::kCount] = {};
  uint4 gain[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kHeldGroups; ++i) {
    const int slot = i * Held::kCount + Held::row();
    const int row = row_exists<E, kAll>(a.n, slot) ? row_of<E, kAll>(a.n, slot) : 0;
    rows[i] = w + static_cast<size_t>(row) * chunks + warp * kWarp + Held::piece(0);
  }
  // The pieces that are `ahead` of the next ones. All lanes take part in each product; where the
  // rows have ended x is zero, and the weights are zeros or still those before.
  auto load = [&](int u, int ahead) {
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) {
#pragma unroll
      for (int j = 0; j < Held::kCount; ++j) {
        if (ahead + Held::piece(j) < left) {
          held[u][i][j] = load_stream(rows[i] + ahead + j * Held::kLanes);
        }
      }
    }
    if (NORM && ahead + lane < left) gain[u] = __ldg(norm + ahead);
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, u * kThreads);
  // The first warp finishes, one row a lane; what it needs besides sums is loaded early.
  const bool finishes = tid < kAll && row_exists<E, kAll>(a.n, tid);
  const int row = finishes ? row_of<E, kAll>(a.n, tid) : 0;
  float extra = 0.0f;
  if (finishes && a.bias != nullptr) extra = __half2float(a.bias[row]);

  const half* residual = E == Epilogue::kResidual ? a.y + row : nullptr;
  computed_by_now(x);
  computed_by_now(residual);
  pdl_trigger();
  if (kStaged > 0) __syncthreads();  // shows the barrier's initialisation
  pdl_wait();

  // The input first: all that follows needs it.
  uint4 input[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    input[u] = lane + u * kThreads < left ? load_shared_by_blocks(x + u * kThreads) : kNothing;
  }
  if (E == Epilogue::kResidual && finishes) extra += __half2float(load_written(residual));
  Held of_held[kHeldGroups > 0 ? kHeldGroups : 1];
  Staged of_staged[kStagedGroups > 0 ? kStagedGroups : 1];
  float squares = 0.0f;
  bool waiting = kStaged > 0;
#pragma unroll 1
  for (const uint4* next = staged + warp * kWarp; left > 0; left -= kUnroll * kThreads) {
    if (waiting) {
      mbarrier_wait(&arrived, 0);
      waiting = false;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int here = u * kThreads;
      if (here >= left) break;
      uint4 piece = input[u];
      if (NORM) {
        float v[8];
        unpack8(piece, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares);
        piece = multiply8(piece, gain[u]);
      }
      const Columns columns = columns_of(piece);
#pragma unroll
      for (int i = 0; i < kHeldGroups; ++i) of_held[i].add(held[u][i], columns);
#pragma unroll
      for (int i = 0; i < kStagedGroups; ++i) {
        const uint4* row = next + (i * Staged::kCount + Staged::row()) * chunks + here;
        uint4 pieces[Staged::kCount];
#pragma unroll
        for (int j = 0; j < Staged::kCount; ++j) {
          const int p = Staged::piece(j);
          pieces[j] = here + p < left ? row[p] : kNothing;
        }
        of_staged[i].add(pieces, columns);
      }
      const int then = here + kUnroll * kThreads;
      if (then < left) {
        load(u, then);
        input[u] = then + lane < left ? load_shared_by_blocks(x + then) : kNothing;
      }
    }
    next += kUnroll * kThreads;
    norm += kUnroll * kThreads;
    x += kUnroll * kThreads;
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) rows[i] += kUnroll * kThreads;
  }

#pragma unroll
  for (int i = 0; i < kHeldGroups; ++i) {
    const float total = of_held[i].total();
    if (lane % Held::kLanes == 0) partial[warp][i * Held::kCount + Held::row()] = total;
  }
#pragma unroll
  for (int i = 0; i < kStagedGroups; ++i) {
    const float total = of_staged[i].total();
    const int slot = kRows + i * Staged::kCount + Staged::row();
    if (lane % Staged::kLanes == 0) partial[warp][slot] = total;
  }
  if (NORM) {
    squares = warp_sum(squares);
    if (lane == 0) partial[warp][kAll] = squares;
  }
  __syncthreads();
  if (warp != 0) return;

  // Every instruction from here on is waited for by the next kernel. Four sums at once.
  float sums[4] = {};
  if (lane < (NORM ? kAll + 1 : kAll)) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sums[i % 4] += partial[i][lane];
  }
  float v = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  if (NORM) {
    const float mean = __fdividef(__shfl_sync(kFullMask, v, kAll), a.k);
    v *= __fdividef(rsqrtf(mean + a.eps), a.norm_scale);
  }
  v += extra;
  if (E == Epilogue::kStore || E == Epilogue::kResidual) {
    if (finishes) a.y[row] = __float2half_rn(v);
  } else if (E == Epilogue::kSwiglu) {
    const float up = __shfl_down_sync(kFullMask, v, 1);
    // Bounded, since the quick division gives NaN for an infinite divisor.
    const float silu = __fdividef(v, fminf(1.0f + __expf(-v), 1e37f));
    if (finishes && lane % 2 == 0) a.y[row] = __float2half_rn(silu * up);
  } else {
    Best best = 0;
    if (finishes) {
      a.logits[row] = v;
      best = best_of(v, row);
    }
    best = warp_max(best);
    if (lane == 0) atomicMax(a.best, best);
  }
}

template <Epilogue E, bool NORM, typename T>
cudaError_t launch_fused_linear(const FusedLinear& a, cudaStream_t stream) {
  if (T::kStaged > 0 && !has_pdl()) return cudaErrorNotSupported;
  LaunchShape shape;
  shape.grid = dim3((a.n + T::kAll - 1) / T::kAll);
  shape.block = dim3(T::kThreads);
  shape.shared_bytes = T::kStaged * a.k * static_cast<int>(sizeof(half));
  return launch(fused_linear<E, NORM, T>, shape, Pdl::kOn, stream, a);
}

// Enqueues with tile number `tile` of the list that the file was compiled with.
template <Epilogue E, bool NORM, typename... Tiles>
cudaError_t run_fused_linear(const FusedLinear* a, int tile, cudaStream_t stream) {
  using Launch = cudaError_t (*)(const FusedLinear&, cudaStream_t);
  constexpr Launch kLaunches[] = {launch_fused_linear<E, NORM, Tiles>...};
  if (a->k % 8 != 0 || reinterpret_cast<uintptr_t>(a->w) % 16 != 0 || tile < 0 ||
      tile >= static_cast<int>(sizeof...(Tiles))) {
    return cudaErrorNotSupported;
  }
  return kLaunches[tile](*a, stream);
}

}  // namespace minidecode

// The tiles a file is compiled with: the one that Python asks for, or one of each form.
#ifdef MINIDECODE_THREADS
#define MINIDECODE_TILES                                                          \
  Tile<MINIDECODE_THREADS, MINIDECODE_ROWS, MINIDECODE_UNROLL, MINIDECODE_STAGED, \
       MINIDECODE_RESIDENT>
#else
#define MINIDECODE_TILES Tile<128, 4, 1, 0>, Tile<128, 0, 1, 4>, Tile<256, 2, 2, 6>
#endif
