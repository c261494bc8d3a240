// A linear layer with what stands before and after it: y = epilogue(W rmsnorm(x) + b).
//
// The normalisation needs no pass of its own: W (x * g) and sum(x^2) are accumulated together and
// the sum is scaled by 1 / rms at the end. A block owns a few rows. Part of them is loaded into
// registers, part by bulk copies into shared memory, both before the dependent-launch wait, since
// weights depend on nothing: how much a block holds then is how much of the predecessor's latency
// the memory system works through.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "minidecode/async.cuh"
#include "minidecode/best.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

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
  const half* norm;  // [k] weight of the RMSNorm, where the kernel has one
  const half* bias;  // [n] or null
  float* logits;     // [n], head only
  Best* best;        // [1], head only
  int n;
  int k;
  float eps;
};

// Threads of a block, rows in registers, 16-byte loads a thread keeps in flight for each of those
// rows, rows in shared memory, and blocks that must fit a multiprocessor (caps the registers).
template <int THREADS, int ROWS, int UNROLL, int STAGED, int RESIDENT = 1>
struct Tile {
  static constexpr int kThreads = THREADS, kRows = ROWS, kUnroll = UNROLL, kStaged = STAGED;
  static constexpr int kResident = RESIDENT;
  static constexpr int kAll = ROWS + STAGED;
  // Rows rounded up to a power of two, for the reduction.
  static constexpr int kSlots = kAll <= 1 ? 1 : kAll <= 2 ? 2 : kAll <= 4 ? 4 : kAll <= 8 ? 8 : 16;
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
  constexpr int kStaged = T::kStaged, kAll = T::kAll, kSlots = T::kSlots;
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kAll <= 16, "one lane of the first warp finishes each row, one knows the norm");
  static_assert(E != Epilogue::kSwiglu || kAll % 2 == 0, "gate and up rows come in pairs");

  extern __shared__ __align__(128) unsigned char staged_bytes[];
  __shared__ __align__(8) uint64_t arrived;
  __shared__ float partial[kWarps][kSlots + 1];  // the last column is of the squares
  const uint4* staged = reinterpret_cast<const uint4*>(staged_bytes);  // [kStaged, k / 8]

  const int tid = threadIdx.x, lane = tid % kWarp, warp = tid / kWarp;
  const int chunks = a.k / 8;
  const uint4* w = reinterpret_cast<const uint4*>(a.w);
  const uint4* x = reinterpret_cast<const uint4*>(a.x);
  const uint4* norm = reinterpret_cast<const uint4*>(a.norm);

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
  unsigned offset[kRows > 0 ? kRows : 1];  // of each row, in 16-byte pieces
  uint4 held[kUnroll][kRows > 0 ? kRows : 1];
  uint4 gain[kUnroll];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row_exists<E, kAll>(a.n, r) ? row_of<E, kAll>(a.n, r) : 0;
    offset[r] = static_cast<unsigned>(row) * chunks;
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int c = tid + u * kThreads;
    if (c < chunks) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) held[u][r] = load_stream(w + offset[r] + c);
      if (NORM) gain[u] = __ldg(norm + c);
    }
  }
  // The first warp finishes, one row a lane; what it needs besides sums is loaded early.
  const bool finishes = tid < kAll && row_exists<E, kAll>(a.n, tid);
  const int row = finishes ? row_of<E, kAll>(a.n, tid) : 0;
  float extra = 0.0f;
  if (finishes && a.bias != nullptr) extra = __half2float(a.bias[row]);

  const uint4* from = x + tid;
  const half* residual = E == Epilogue::kResidual ? a.y + row : nullptr;
  computed_by_now(from);
  computed_by_now(residual);
  pdl_trigger();
  if (kStaged > 0) __syncthreads();  // shows the barrier's initialisation
  pdl_wait();

  // The input first: all that follows needs it.
  uint4 input[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (tid + u * kThreads < chunks) input[u] = load_shared_by_blocks(from + u * kThreads);
  }
  if (E == Epilogue::kResidual && finishes) extra += __half2float(load_written(residual));
  float sum[kSlots] = {};
  float squares = 0.0f;
  bool waiting = kStaged > 0;
  for (int c0 = tid; c0 < chunks; c0 += kUnroll * kThreads) {
    if (waiting) {
      mbarrier_wait(&arrived, 0);
      waiting = false;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int c = c0 + u * kThreads;
      if (c < chunks) {
        float v[8];
        unpack8(input[u], v);
        if (NORM) {
          float g[8];
          unpack8(gain[u], g);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            squares = fmaf(v[i], v[i], squares);
            v[i] *= g[i];
          }
        }
#pragma unroll
        for (int r = 0; r < kAll; ++r) {
          float f[8];
          unpack8(r < kRows ? held[u][r < kRows ? r : 0] : staged[(r - kRows) * chunks + c], f);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[r] = fmaf(f[i], v[i], sum[r]);
        }
      }
      const int next = c + kUnroll * kThreads;
      if (next < chunks) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) held[u][r] = load_stream(w + offset[r] + next);
        if (NORM) gain[u] = __ldg(norm + next);
        input[u] = load_shared_by_blocks(x + next);
      }
    }
  }

  float v = warp_sum_many<kSlots>(sum);
  if (NORM) squares = warp_sum(squares);
  if (kWarps > 1) {
    if (lane < kSlots) partial[warp][lane] = v;
    if (NORM && lane == 0) partial[warp][kSlots] = squares;
    __syncthreads();
    if (warp != 0) return;

    // Every instruction from here on is waited for by the next kernel. Four sums at once.
    float sums[4] = {};
    if (lane < (NORM ? kSlots + 1 : kSlots)) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sums[i % 4] += partial[i][lane];
    }
    v = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (NORM) squares = __shfl_sync(kFullMask, v, kSlots);
  }
  if (NORM) v *= rsqrtf(__fdividef(squares, a.k) + a.eps);
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
