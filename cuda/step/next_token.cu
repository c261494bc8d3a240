// The end of a step: the picked token, its embedding as the next input, the next position.
#include "minidecode/abi.cuh"
#include "minidecode/best.cuh"
#include "minidecode/launch.cuh"

namespace minidecode {

struct NextToken {
  half* x;                // [hidden]
  const half* embedding;  // [vocab, hidden]
  Best* best;             // [1], reset to 0
  int* position;          // [1]
  int* token;             // [1]
  int* stopped;           // [1]
  const int* eos;         // [eos_count], negative where unused
  unsigned char* seen;    // [vocab]
  int* out;               // [capacity], in host memory
  int hidden;
  int eos_count;
};

namespace {

constexpr int kThreads = 512;
constexpr int kNonFiniteToken = -2;

// Triggers only once the position is written: later kernels read it before their own wait. The
// embedding is on its way by then, and the host's copy of the token leaves right after.
__global__ void __launch_bounds__(kThreads, 1) next_token(const NextToken a) {
  const int tid = threadIdx.x;
  pdl_wait();
  const Best best = __ldcg(a.best);
  const int position = __ldcg(a.position);
  const bool stopped = __ldcg(a.stopped) != 0;
  const bool bad = best == kNonFinite;
  const int token = token_of(best);
  const half* row = a.embedding + (bad || stopped ? 0 : static_cast<size_t>(token) * a.hidden);
  const int pieces = a.hidden % 8 == 0 ? a.hidden / 8 : 0;  // of 16 bytes, where rows are aligned
  const uint4* from = reinterpret_cast<const uint4*>(row);
  uint4 first = {};
  if (tid < pieces) first = __ldg(from + tid);
  __syncthreads();  // all have read what thread 0 now changes
  if (tid == 0) {
    if (!bad && !stopped) *a.position = position + 1;
    __threadfence();
  }
  __syncthreads();
  pdl_trigger();
  if (stopped) return;
  if (tid == 0) *static_cast<volatile int*>(a.out + position) = bad ? kNonFiniteToken : token;
  if (!bad) {
    uint4* to = reinterpret_cast<uint4*>(a.x);
    if (tid < pieces) to[tid] = first;
    for (int i = tid + kThreads; i < pieces; i += kThreads) to[i] = __ldg(from + i);
    for (int i = tid + 8 * pieces; i < a.hidden; i += kThreads) a.x[i] = row[i];
  }
  if (tid != kThreads - 1) return;
  *a.best = 0;
  bool stop = bad;
  if (!bad) {
    *a.token = token;
    a.seen[token] = 1;
    for (int i = 0; i < a.eos_count; ++i) stop = stop || a.eos[i] == token;
  }
  if (stop) *a.stopped = 1;
}

}  // namespace
}  // namespace minidecode

MINIDECODE_EXPORT cudaError_t minidecode_next_token(const minidecode::NextToken* args,
                                                    cudaStream_t stream) {
  using namespace minidecode;
  return launch(next_token, {dim3(1), dim3(kThreads)}, Pdl::kOn, stream, *args);
}
