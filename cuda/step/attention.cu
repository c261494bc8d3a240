// Attention of one token after a QKV projection of its own; the work is in attention.cuh.
#include "minidecode/abi.cuh"
#include "minidecode/attention.cuh"

namespace minidecode {
namespace {

template <int HEAD_DIM, int WARPS>
cudaError_t launch_attention(const Attention& a, cudaStream_t stream) {
  const int per_kv = a.heads / a.kv_heads, groups = (per_kv + kHeads - 1) / kHeads;
  const int stages = attend_stages(a, HEAD_DIM, WARPS);
  LaunchShape shape;
  shape.grid = dim3(a.kv_heads * groups, a.splits);
  shape.block = dim3(WARPS * kWarp);
  shape.shared_bytes = attend_shared_bytes(a, HEAD_DIM, WARPS, stages);
  return launch(a.splits == 1 ? attend<HEAD_DIM, WARPS, false> : attend<HEAD_DIM, WARPS, true>,
                shape, Pdl::kOn, stream, a, stages);
}

template <int WARPS>
cudaError_t attention_of_warps(const Attention& a, cudaStream_t stream) {
  if (a.head_dim <= 64) return launch_attention<64, WARPS>(a, stream);
  if (a.head_dim <= 128) return launch_attention<128, WARPS>(a, stream);
  return launch_attention<256, WARPS>(a, stream);
}

}  // namespace
}  // namespace minidecode

// head_dim: a multiple of 8 up to 256. warps: 4 or 8, or 16 up to a head_dim of 64, or 2 above
// 128. splits: up to kMaxSplits.
MINIDECODE_EXPORT cudaError_t minidecode_attention(const minidecode::Attention* args, int warps,
                                                   cudaStream_t stream) {
  using namespace minidecode;
  const Attention& a = *args;
  if (a.head_dim % 8 != 0 || a.head_dim < 8 || a.head_dim > 256 || a.heads % a.kv_heads != 0 ||
      a.splits < 1 || a.splits > kMaxSplits) {
    return cudaErrorNotSupported;
  }
  if (warps == 4) return attention_of_warps<4>(a, stream);
  if (warps == 8) return attention_of_warps<8>(a, stream);
  if (warps == 16 && a.head_dim <= 64) return launch_attention<64, 16>(a, stream);
  if (warps == 2 && a.head_dim > 128) return launch_attention<256, 2>(a, stream);
  return cudaErrorNotSupported;
}
