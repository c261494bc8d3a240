// One block of 256 a row, half2 loads, FP32 sums, shuffle then shared-memory reduce (llama.cpp's).
#include <cstddef>

#include "minidecode/abi.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace {

constexpr int kThreads = 256;

// This thread's share of a row's dot product, two elements a load.
template <bool VECTOR>
__device__ __forceinline__ float partial_dot(const half* __restrict__ w_row,  // [k]
                                             const half* __restrict__ x,      // [k]
                                             int k) {
  float sum = 0.0f;
  if constexpr (VECTOR) {
    const half2* w_pairs = reinterpret_cast<const half2*>(w_row);  // [k / 2]
    const half2* x_pairs = reinterpret_cast<const half2*>(x);      // [k / 2]
#pragma unroll 4
    for (int i = threadIdx.x; i < k / 2; i += kThreads) {
      const float2 wv = __half22float2(w_pairs[i]);
      const float2 xv = __half22float2(x_pairs[i]);
      sum += wv.x * xv.x + wv.y * xv.y;
    }
  } else {
#pragma unroll 4
    for (ptrdiff_t i = threadIdx.x; i < k; i += kThreads) {
      sum += __half2float(w_row[i]) * __half2float(x[i]);
    }
  }
  return sum;
}

template <bool VECTOR>
__global__ void __launch_bounds__(kThreads) gemv_half2_block(half* __restrict__ y,        // [n]
                                                             const half* __restrict__ w,  // [n, k]
                                                             const half* __restrict__ x,  // [k]
                                                             int k) {
  __shared__ float scratch[kThreads / minidecode::kWarp];
  const float sum = partial_dot<VECTOR>(w + size_t{blockIdx.x} * k, x, k);
  const float total = minidecode::block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) y[blockIdx.x] = __float2half_rn(total);
}

}  // namespace

cudaError_t minidecode_gemv(half* y, const half* w, const half* x, int n, int k,
                            cudaStream_t stream) {
  // An odd k leaves every second row off a half2's alignment.
  const bool pairs = minidecode::rows_aligned(w, k, sizeof(half2)) &&
                     minidecode::rows_aligned(x, k, sizeof(half2));
  return minidecode::launch(pairs ? gemv_half2_block<true> : gemv_half2_block<false>,
                            {dim3(n), dim3(kThreads)}, minidecode::Pdl::kOff, stream, y, w, x, k);
}
