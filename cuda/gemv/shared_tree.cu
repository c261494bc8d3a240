// One block a row: partial sums meet in shared memory, halved by a tree with a barrier a level.
#include <cstddef>

#include "minidecode/abi.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/load.cuh"

namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) gemv_shared_tree(T* __restrict__ y,        // [n]
                                                             const T* __restrict__ w,  // [n, k]
                                                             const T* __restrict__ x,  // [k]
                                                             int k) {
  __shared__ float sums[kThreads];
  const int thread = threadIdx.x;
  const T* w_row = w + size_t{blockIdx.x} * k;  // [k]
  float sum = 0.0f;
  // Signed and 64 bits wide: any k fits, and the compiler may unroll.
#pragma unroll 4
  for (ptrdiff_t col = thread; col < k; col += kThreads) {
    sum += minidecode::to_float(w_row[col]) * minidecode::to_float(x[col]);
  }
  sums[thread] = sum;
  __syncthreads();
  for (int half_width = kThreads / 2; half_width > 0; half_width /= 2) {
    if (thread < half_width) sums[thread] += sums[thread + half_width];
    __syncthreads();
  }
  if (thread == 0) y[blockIdx.x] = minidecode::from_float<T>(sums[0]);
}

template <typename T>
cudaError_t run(T* y, const T* w, const T* x, int n, int k, cudaStream_t stream) {
  const minidecode::LaunchShape shape = {dim3(n), dim3(kThreads)};
  return minidecode::launch(gemv_shared_tree<T>, shape, minidecode::Pdl::kOff, stream, y, w, x, k);
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
