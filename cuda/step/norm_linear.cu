// RMSNorm and a linear layer: the QKV projection.
#include "minidecode/abi.cuh"
#include "minidecode/fused_linear.cuh"

MINIDECODE_EXPORT cudaError_t minidecode_fused_linear(const minidecode::FusedLinear* args, int tile,
                                                      cudaStream_t stream) {
  using namespace minidecode;
  return run_fused_linear<Epilogue::kStore, true, MINIDECODE_TILES>(args, tile, stream);
}
