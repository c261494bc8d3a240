// One warp a row, eight rows a block: partial sums meet in registers through shuffles.
#include <cstddef>

#include "minidecode/abi.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"
#include "minidecode/reduce.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / minidecode::kWarp;

template <typename T>
__global__ void __launch_bounds__(kThreads) gemv_warp_row(T* __restrict__ y,        // [n]
                                                          const T* __restrict__ w,  // [n, k]
                                                          const T* __restrict__ x,  // [k]
                                                          int n, int k) {
  const int lane = threadIdx.x % minidecode::kWarp;
  const size_t row = size_t{blockIdx.x} * kRows + threadIdx.x / minidecode::kWarp;
  if (row >= n) return;
  const T* w_row = w + row * k;  // [k]
  float sum = 0.0f;
  // Signed and 64 bits wide: any k fits, and the compiler may unroll.
#pragma unroll 4
  for (ptrdiff_t col = lane; col < k; col += minidecode::kWarp) {
    sum += minidecode::to_float(w_row[col]) * minidecode::to_float(x[col]);
  }
  sum = minidecode::warp_sum(sum);
  if (lane == 0) y[row] = minidecode::from_float<T>(sum);
}

template <typename T>
cudaError_t run(T* y, const T* w, const T* x, int n, int k, cudaStream_t stream) {
  const minidecode::LaunchShape shape = {dim3((n - 1) / kRows + 1), dim3(kThreads)};
  return minidecode::launch(gemv_warp_row<T>, shape, minidecode::Pdl::kOff, stream, y, w, x, n, k);
}

}  // namespace

cudaError_t minidecode_gemv(half* y, const half* w, const half* x, int n, int k,
                            cudaStream_t stream) {
  return run(y, w, x, n, k, stream);
}

cudaError_t minidecode_gemv_f32(float* y, const float* w, const float* x, int n, int k,
                                cudaStream_t stream) {
  return run(y, w, x, n, k, stream);
}
