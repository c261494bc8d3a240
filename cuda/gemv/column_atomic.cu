// One thread a column: coalesced reads, but every column adds to the same outputs with atomicAdd.
#include "minidecode/abi.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"

namespace {

constexpr int kThreads = 256;

// FP32 outputs are their own accumulators, zeroed on the stream beforehand.
__global__ void __launch_bounds__(kThreads)
    gemv_column_atomic(float* __restrict__ y,        // [n], zeros
                       const float* __restrict__ w,  // [n, k]
                       const float* __restrict__ x,  // [k]
                       int n, int k) {
  const size_t col = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (col >= k) return;
  const float x_col = x[col];
  for (int row = 0; row < n; ++row) {
    atomicAdd(&y[row], w[static_cast<size_t>(row) * k + col] * x_col);
  }
}

// FP16 outputs cannot be: a sum of thousands of terms loses its low bits in half precision, and the
// ABI gives a kernel no scratch for n floats. So a block owns a few rows, whose FP32 accumulators
// fit its shared memory, and its threads walk all columns of them. The contended atomicAdd stays:
// 32 lanes of a warp still add to one address.
constexpr int kRows = 32;

__global__ void __launch_bounds__(kThreads)
    gemv_column_atomic(half* __restrict__ y,        // [n]
                       const half* __restrict__ w,  // [n, k]
                       const half* __restrict__ x,  // [k]
                       int n, int k) {
  __shared__ float sums[kRows];
  const size_t first_row = size_t{blockIdx.x} * kRows;
  const int rows = min(static_cast<size_t>(kRows), n - first_row);
  if (threadIdx.x < rows) sums[threadIdx.x] = 0.0f;
  __syncthreads();
  for (size_t col = threadIdx.x; col < k; col += kThreads) {
    const float x_col = __half2float(x[col]);
    for (int row = 0; row < rows; ++row) {
      atomicAdd(&sums[row], __half2float(w[(first_row + row) * k + col]) * x_col);
    }
  }
  __syncthreads();
  if (threadIdx.x < rows) y[first_row + threadIdx.x] = __float2half_rn(sums[threadIdx.x]);
}

}  // namespace

cudaError_t minidecode_gemv(half* y, const half* w, const half* x, int n, int k,
                            cudaStream_t stream) {
  const minidecode::LaunchShape shape = {dim3((n - 1) / kRows + 1), dim3(kThreads)};
  void (*kernel)(half*, const half*, const half*, int, int) = gemv_column_atomic;
  return minidecode::launch(kernel, shape, minidecode::Pdl::kOff, stream, y, w, x, n, k);
}

cudaError_t minidecode_gemv_f32(float* y, const float* w, const float* x, int n, int k,
                                cudaStream_t stream) {
  const cudaError_t status = cudaMemsetAsync(y, 0, sizeof(float) * n, stream);
  if (status != cudaSuccess) return status;
  const minidecode::LaunchShape shape = {dim3((k - 1) / kThreads + 1), dim3(kThreads)};
  void (*kernel)(float*, const float*, const float*, int, int) = gemv_column_atomic;
  return minidecode::launch(kernel, shape, minidecode::Pdl::kOff, stream, y, w, x, n, k);
}
