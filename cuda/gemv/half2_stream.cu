// Ours: 16-byte streaming loads of several rows a block, tile by shape, under way before the wait.
//
// It is the fused linear layer of the decode step with nothing before or after the product. Weights
// are read before the dependent-launch wait, so the kernel right before it must not write them.
#include <climits>
#include <cstddef>

#include "minidecode/abi.cuh"
#include "minidecode/fused_linear.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace {

using minidecode::FusedLinear;
using minidecode::kWarp;
using minidecode::Tile;

using Launch = cudaError_t (*)(const FusedLinear&, cudaStream_t);

// A tile for matrices of at least `least_n` rows and at most `most_k` columns.
struct Rule {
  int least_n;
  int most_k;
  bool staged;  // by bulk copies, which takes sm_90
  Launch launch;
};

template <typename T>
constexpr Rule rule(int least_n, int most_k) {
  using minidecode::Epilogue;
  return {least_n, most_k, T::kStaged > 0,
          minidecode::launch_fused_linear<Epilogue::kStore, false, T>};
}

// The first rule that a shape meets is its tile: threads, rows in registers, loads of each that a
// thread has in flight, rows staged by bulk copies. Many rows want small blocks, of which a
// multiprocessor holds more, and long rows large ones; few rows are split finer, or there is no
// block for every multiprocessor.
constexpr Rule kRules[] = {
    rule<Tile<96, 8, 1, 0>>(32768, 1024),      // head of a 135M
    rule<Tile<128, 12, 1, 0>>(1, 1024),        // its other layers
    rule<Tile<128, 16, 1, 0>>(8192, 3584),     // head, gate and up of a 1B to 7B
    rule<Tile<256, 4, 1, 4>>(16384, 4096),     // of an 8B
    rule<Tile<128, 8, 1, 4>>(4608, 4096),      // qkv of a 3B to 8B
    rule<Tile<256, 16, 1, 0>>(2048, 4096),     // qkv and o of a 1B, o of a 3B to 8B
    rule<Tile<256, 16, 1, 0>>(3072, 16384),    // down of a 3B and 8B
    rule<Tile<512, 16, 1, 0>>(2048, INT_MAX),  // of a 1B and 7B
    rule<Tile<256, 4, 1, 0>>(1, INT_MAX),      // few and long rows
};

Launch tile_for(int n, int k) {
  const bool bulk_copies = minidecode::has_pdl();
  for (const Rule& one : kRules) {
    if (n >= one.least_n && k <= one.most_k && (bulk_copies || !one.staged)) return one.launch;
  }
  return nullptr;  // not reached: the last rule holds
}

// Where 16-byte loads would be misaligned: a warp a row, in pieces of two elements or one.
constexpr int kThreads = 256;
constexpr int kRows = kThreads / kWarp;

__device__ __forceinline__ float product(half w, half x) {
  return __half2float(w) * __half2float(x);
}

__device__ __forceinline__ float product(half2 w, half2 x) {
  const float2 wv = __half22float2(w), xv = __half22float2(x);
  return wv.x * xv.x + wv.y * xv.y;
}

template <typename Piece>
__global__ void __launch_bounds__(kThreads) gemv_pieces(half* __restrict__ y,         // [n]
                                                        const Piece* __restrict__ w,  // [n, pieces]
                                                        const Piece* __restrict__ x,  // [pieces]
                                                        int n, int pieces) {
  const int lane = threadIdx.x % kWarp;
  const size_t row = size_t{blockIdx.x} * kRows + threadIdx.x / kWarp;
  if (row >= n) return;
  const Piece* w_row = w + row * pieces;
  float sum = 0.0f;
  // Signed and 64 bits wide: any k fits, and the compiler may unroll.
#pragma unroll 8
  for (ptrdiff_t i = lane; i < pieces; i += kWarp) sum += product(w_row[i], x[i]);
  sum = minidecode::warp_sum(sum);
  if (lane == 0) y[row] = __float2half_rn(sum);
}

template <typename Piece>
cudaError_t run_pieces(half* y, const half* w, const half* x, int n, int k, cudaStream_t stream) {
  constexpr int kElements = sizeof(Piece) / sizeof(half);
  const minidecode::LaunchShape shape = {dim3((n - 1) / kRows + 1), dim3(kThreads)};
  return minidecode::launch(gemv_pieces<Piece>, shape, minidecode::Pdl::kOff, stream, y,
                            reinterpret_cast<const Piece*>(w), reinterpret_cast<const Piece*>(x), n,
                            k / kElements);
}

}  // namespace

cudaError_t minidecode_gemv(half* y, const half* w, const half* x, int n, int k,
                            cudaStream_t stream) {
  const auto aligned = [=](int bytes) {
    return minidecode::rows_aligned(w, k, bytes) && minidecode::rows_aligned(x, k, bytes);
  };
  if (aligned(sizeof(uint4))) {
    FusedLinear a = {};
    a.y = y;
    a.w = w;
    a.x = x;
    a.n = n;
    a.k = k;
    a.norm_scale = 1.0f;
    return tile_for(n, k)(a, stream);
  }
  return (aligned(sizeof(half2)) ? run_pieces<half2> : run_pieces<half>)(y, w, x, n, k, stream);
}
