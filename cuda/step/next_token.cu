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

constexpr int kThreads = 256;
constexpr int kNonFiniteToken = -2;

// Triggers only once the position is written: later kernels read it before their own wait.
__global__ void __launch_bounds__(kThreads, 1) next_token(const NextToken a) {
  pdl_wait();
  const Best best = __ldcg(a.best);
  const int position = __ldcg(a.position);
  const bool bad = best == kNonFinite;
  const bool stopped = __ldcg(a.stopped) != 0;
  const int token = token_of(best);
  __syncthreads();  // all have read what thread 0 now changes
  if (threadIdx.x == 0) {
    if (!bad && !stopped) *a.position = position + 1;
    __threadfence();
  }
  __syncthreads();
  pdl_trigger();
  if (stopped) return;
  if (!bad) {
    const half* row = a.embedding + static_cast<size_t>(token) * a.hidden;
    if (a.hidden % 8 == 0) {
      const uint4* from = reinterpret_cast<const uint4*>(row);
      uint4* to = reinterpret_cast<uint4*>(a.x);
      for (int i = threadIdx.x; i < a.hidden / 8; i += kThreads) to[i] = __ldg(from + i);
    } else {
      for (int i = threadIdx.x; i < a.hidden; i += kThreads) a.x[i] = row[i];
    }
  }
  if (threadIdx.x != 0) return;
  *a.best = 0;
  bool stop = bad;
  if (!bad) {
    *a.token = token;
    a.seen[token] = 1;
    for (int i = 0; i < a.eos_count; ++i) stop = stop || a.eos[i] == token;
  }
  if (stop) *a.stopped = 1;
  *static_cast<volatile int*>(a.out + position) = bad ? kNonFiniteToken : token;
}

}  // namespace
}  // namespace minidecode

MINIDECODE_EXPORT cudaError_t minidecode_next_token(const minidecode::NextToken* args,
                                                    cudaStream_t stream) {
  using namespace minidecode;
  return launch(next_token, {dim3(1), dim3(kThreads)}, Pdl::kOn, stream, *args);
}
