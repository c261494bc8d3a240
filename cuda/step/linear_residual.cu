// A linear layer added to the residual stream: the output and the down projection.
#include "minidecode/abi.cuh"
#include "minidecode/fused_linear.cuh"

MINIDECODE_EXPORT cudaError_t minidecode_fused_linear(const minidecode::FusedLinear* args, int tile,
                                                      cudaStream_t stream) {
  using namespace minidecode;
  return run_fused_linear<Epilogue::kResidual, false, MINIDECODE_TILES>(args, tile, stream);
}
