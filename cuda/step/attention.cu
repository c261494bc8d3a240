// Attention of one token after a QKV projection of its own; the work is in attention.cuh.
#include "minidecode/abi.cuh"
#include "minidecode/attention.cuh"

namespace minidecode {
namespace {

// Without clusters: one block a head joins what the splits left in `scratch`.
__global__ void combine(const Attention a) {
  pdl_trigger();
  pdl_wait();
  const int h = blockIdx.x, width = a.head_dim + 2;
  const float* parts = a.scratch + static_cast<size_t>(h) * a.splits * width;  // [splits, width]
  float top = -INFINITY;
  for (int s = 0; s < a.splits; ++s) top = fmaxf(top, __ldcg(parts + s * width));
  for (int dim = threadIdx.x; dim < a.head_dim; dim += blockDim.x) {
    float sum = 0.0f, weighted = 0.0f;
    for (int s = 0; s < a.splits; ++s) {
      const float share = exp2f(__ldcg(parts + s * width) - top);
      sum += __ldcg(parts + s * width + 1) * share;
      weighted += __ldcg(parts + s * width + 2 + dim) * share;
    }
    a.out[static_cast<size_t>(h) * a.head_dim + dim] = __float2half_rn(weighted / sum);
  }
}

template <int HEAD_DIM, int WARPS>
cudaError_t launch_attention(const Attention& a, bool cluster, cudaStream_t stream) {
  const int per_kv = a.heads / a.kv_heads, groups = (per_kv + kHeads - 1) / kHeads;
  const int stages = attend_stages(a, HEAD_DIM, WARPS);
  LaunchShape shape;
  shape.grid = dim3(a.kv_heads * groups, a.splits);
  shape.block = dim3(WARPS * kWarp);
  shape.shared_bytes = attend_shared_bytes(a, HEAD_DIM, WARPS, stages);
  if (cluster) {
    shape.cluster = a.splits;
    return launch(attend<HEAD_DIM, WARPS, true>, shape, Pdl::kOn, stream, a, stages);
  }
  const cudaError_t status =
      launch(attend<HEAD_DIM, WARPS, false>, shape, Pdl::kOn, stream, a, stages);
  if (status != cudaSuccess || a.splits == 1) return status;
  return launch(combine, {dim3(a.heads), dim3(HEAD_DIM)}, Pdl::kOn, stream, a);
}

}  // namespace
}  // namespace minidecode

// head_dim: a multiple of 16 up to 128. `warps` is 4, 8 or 16. With `cluster` the splits, a power
// of two up to 16, are one cluster (sm_90); without it they meet in `scratch`.
MINIDECODE_EXPORT cudaError_t minidecode_attention(const minidecode::Attention* args, int warps,
                                                   int cluster, cudaStream_t stream) {
  using namespace minidecode;
  const Attention& a = *args;
  if (a.head_dim % 16 != 0 || a.head_dim < 16 || a.head_dim > 128 || a.heads % a.kv_heads != 0) {
    return cudaErrorNotSupported;
  }
  const bool power_of_two = (a.splits & (a.splits - 1)) == 0;  // equal slices for the blocks
  if (cluster != 0 && (a.splits > 16 || !power_of_two || !has_pdl())) return cudaErrorNotSupported;
  const bool wide = a.head_dim > 64, clustered = cluster != 0;
  switch (warps) {
    case 4:
      return wide ? launch_attention<128, 4>(a, clustered, stream)
                  : launch_attention<64, 4>(a, clustered, stream);
    case 8:
      return wide ? launch_attention<128, 8>(a, clustered, stream)
                  : launch_attention<64, 8>(a, clustered, stream);
    case 16:
      return wide ? launch_attention<128, 16>(a, clustered, stream)
                  : launch_attention<64, 16>(a, clustered, stream);
    default:
      return cudaErrorNotSupported;
  }
}
