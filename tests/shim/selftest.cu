// Kernels that use the shim's features one by one; `mode` picks a fault where there is one.
#include <cooperative_groups.h>

#include "minidecode/abi.cuh"
#include "minidecode/async.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/reduce.cuh"

namespace {

using minidecode::launch;
using minidecode::LaunchShape;
using minidecode::Pdl;

constexpr unsigned kAll = minidecode::kFullMask;

struct Arguments {
  float* out;       // [8]
  const float* in;  // [8]
  struct {
    int shift;
    const float* terms[2];  // [1] each, or null
  } nested;
};

__global__ void warp_operations(unsigned* out /* [8, 32] */) {
  const unsigned lane = threadIdx.x;
  const unsigned long long wide = static_cast<unsigned long long>(lane) << 40;
  out[lane] = __shfl_sync(kAll, lane, 9, 8);
  out[32 + lane] = __shfl_up_sync(kAll, lane, 3, 8);
  out[64 + lane] = __shfl_down_sync(kAll, lane, 3, 8);
  out[96 + lane] = static_cast<unsigned>(__shfl_xor_sync(kAll, wide, 4) >> 40);
  out[128 + lane] = __ballot_sync(kAll, lane % 3 == 0);
  out[160 + lane] = 2 * __any_sync(kAll, lane == 5) + __all_sync(kAll, lane < 31);
  out[192 + lane] = __syncthreads_count(lane < 7);
  if (lane < 16) {
    out[224 + lane] = __shfl_xor_sync(0x0000ffffu, lane, 1);
  } else {
    out[224 + lane] = __shfl_xor_sync(0xffff0000u, lane, 2);
  }
}

__global__ void divergence(float* out /* [64] */, int mode) {
  float v = threadIdx.x;
  const bool low = threadIdx.x < 16;
  if (mode == 1) v = low ? __shfl_xor_sync(kAll, v, 1) : __shfl_down_sync(kAll, v, 1);
  if (mode == 2 && low) __syncthreads();
  if (mode == 3) {
    if (low) {
      v = __shfl_xor_sync(kAll, v, 1);
    } else {
      __syncthreads();
    }
  }
  if (mode == 4) v = __shfl_xor_sync(1u, v, 1);
  while (mode == 5 && *static_cast<volatile float*>(out) != 1.0f) __nanosleep(10);
  while (mode == 6 && *static_cast<volatile float*>(out) != 1.0f) {
  }
  out[threadIdx.x] = v;
}

// Every block reads its neighbour's static and dynamic shared memory.
__global__ void neighbours(float* out /* [blocks, 64] */, int mode) {
  __shared__ alignas(16) float fixed[4];
  extern __shared__ float sized[];  // [64]
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = cluster.block_rank(), next = (rank + 1) % cluster.num_blocks();
  const int t = threadIdx.x;
  if (t < 4) fixed[t] = 1000 * rank + t;
  sized[t] = 100 * rank + t;
  if (mode != 1) cluster.sync();
  const float v =
      cluster.map_shared_rank(fixed, next)[t % 4] + cluster.map_shared_rank(sized, next)[t];
  if (mode != 2) cluster.sync();
  out[blockIdx.y * 64 + t] = v;
}

__global__ void whole_grid(float* out /* [blocks, 32] */) {
  const auto grid = cooperative_groups::this_grid();
  out[blockIdx.x * 32 + threadIdx.x] = blockIdx.x;
  grid.sync();
  const float v = out[(blockIdx.x + 1) % gridDim.x * 32 + threadIdx.x];
  grid.sync();
  out[blockIdx.x * 32 + threadIdx.x] = v;
}

// out[0] = w . x, with w copied to shared memory before the wait for x.
__global__ void staged_dot(float* out, const float* w, const float* x, int k, int mode) {
  extern __shared__ __align__(128) unsigned char bytes[];
  __shared__ uint64_t arrived;
  __shared__ float scratch[2];
  const float* staged = reinterpret_cast<const float*>(bytes);  // [k]
  if (threadIdx.x == 0) minidecode::mbarrier_init(&arrived, 1);
  if (mode != 1) __syncthreads();
  if (threadIdx.x == 0) {
    minidecode::mbarrier_expect_bytes(&arrived, k * sizeof(float));
    minidecode::bulk_copy(bytes, w, k * sizeof(float), &arrived);
  }
  if (mode != 2) minidecode::pdl_wait();
  if (mode != 3) minidecode::mbarrier_wait(&arrived, 0);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < k; i += 64) sum += staged[i] * x[i];
  sum = minidecode::block_sum<64>(sum, scratch);
  if (threadIdx.x == 0) out[0] = sum;
}

__global__ void structure(const __grid_constant__ Arguments a) {
  const float term = a.nested.terms[0] == nullptr ? *a.nested.terms[1] : 0.0f;
  a.out[threadIdx.x] = a.in[threadIdx.x] + a.nested.shift + term;
}

__global__ void stores(float* out /* [8] */, int at, int at_shared) {
  __shared__ float array[8];
  array[at_shared] = 1.0f;
  out[at] = array[at_shared];
}

// out[b] = what block b finds in shared memory.
__global__ void leftovers(float* out) {
  __shared__ float fixed[8];
  extern __shared__ float sized[];  // [1]
  out[blockIdx.x] = fixed[3] + sized[0];
  out[gridDim.x + blockIdx.x] = fixed[3];
  fixed[3] = sized[0] = 1.0f;
}

}  // namespace

MINIDECODE_EXPORT int run_warp_operations(unsigned* out, cudaStream_t stream) {
  return launch(warp_operations, {dim3(1), dim3(32)}, Pdl::kOff, stream, out);
}

MINIDECODE_EXPORT int run_divergence(float* out, int mode, cudaStream_t stream) {
  return launch(divergence, {dim3(1), dim3(64)}, Pdl::kOff, stream, out, mode);
}

MINIDECODE_EXPORT int run_neighbours(float* out, int blocks, int mode, cudaStream_t stream) {
  const LaunchShape shape = {dim3(1, blocks), dim3(64), 64 * sizeof(float), blocks};
  return launch(neighbours, shape, Pdl::kOff, stream, out, mode);
}

MINIDECODE_EXPORT int run_whole_grid(float* out, int blocks, int cooperative, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(32);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, whole_grid, out);
}

MINIDECODE_EXPORT int run_staged_dot(float* out, const float* w, const float* x, int k, int mode,
                                     cudaStream_t stream) {
  const LaunchShape shape = {dim3(1), dim3(64), k * static_cast<int>(sizeof(float))};
  return launch(staged_dot, shape, Pdl::kOn, stream, out, w, x, k, mode);
}

MINIDECODE_EXPORT int run_structure(const Arguments* a, cudaStream_t stream) {
  return launch(structure, {dim3(1), dim3(8)}, Pdl::kOff, stream, *a);
}

MINIDECODE_EXPORT int run_stores(float* out, int at, int at_shared, cudaStream_t stream) {
  return launch(stores, {dim3(1), dim3(1)}, Pdl::kOff, stream, out, at, at_shared);
}

MINIDECODE_EXPORT int run_shape(float* out, int blocks, int threads, int shared_bytes,
                                cudaStream_t stream) {
  const LaunchShape shape = {dim3(blocks), dim3(threads), shared_bytes};
  return launch(stores, shape, Pdl::kOff, stream, out, 0, 0);
}

MINIDECODE_EXPORT int run_leftovers(float* out /* [2, 3] */, cudaStream_t stream) {
  return launch(leftovers, {dim3(3), dim3(1), sizeof(float)}, Pdl::kOff, stream, out);
}
