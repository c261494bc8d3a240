// Sampling inside the step: repetition penalty, temperature, top-k, top-p, min-p, one draw.
//
// The order is that of sampling.py. A cluster of blocks shares the vocabulary; each keeps its
// part's scores in shared memory. Top-k and top-p are thresholds on the score, found digit by digit
// as in a radix select, by sums over all tokens: of ones for top-k, of fixed-point probability mass
// for top-p (integers, so that the order of the additions does not matter and a seed gives the same
// tokens every time). Equal scores at a threshold stay together. The draw is the greatest score +
// Gumbel noise among what is left, which has exactly the softmax distribution. The noise is a
// function of seed, position and token (SplitMix64: Steele, Lea and Flood, 2014), so there is no
// generator state.
#include "minidecode/abi.cuh"
#include "minidecode/best.cuh"
#include "minidecode/cluster.cuh"
#include "minidecode/launch.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {

struct SamplingParameters {
  unsigned long long seed;
  float temperature;  // 0: the greatest score
  float top_p;        // 1: off
  float min_p;        // 0: off
  float repetition_penalty;
  int top_k;  // 0: off
};

// A token: its score in an order of integers, and exp(score) in units of 2^-32.
struct Candidate {
  unsigned key;
  unsigned mass;
};

struct Sample {
  Best* best;                            // [1], overwritten with the drawn token
  const float* logits;                   // [vocab]
  const unsigned char* seen;             // [vocab]
  const int* position;                   // [1]
  const SamplingParameters* parameters;  // [1], on the device: a captured graph serves them all
  Candidate* scratch;                    // [vocab], for what shared memory does not hold
  int vocab;
};

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigit = 2;                  // bits of a threshold that one round finds
constexpr int kTries = (1 << kDigit) - 1;  // digits above 0

__device__ unsigned long long mix(unsigned long long z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Standard Gumbel noise of one token of one step.
__device__ float gumbel(unsigned long long seed, int position, int token) {
  const unsigned long long stream = mix(seed + 0x9e3779b97f4a7c15ull * (position + 1ull));
  const unsigned long long bits = mix(stream + 0x9e3779b97f4a7c15ull * (token + 1ull));
  // In (0, 1), and finest near 0, where the greatest noise comes from: it decides between tokens.
  const float uniform = fminf((static_cast<float>(bits) + 0.5f) * 0x1p-64f, 0x1.fffffep-1f);
  return -logf(-log1pf(-uniform));
}

// What the threads of a cluster tell each other. Who is late still reads the blocks' sums of one
// turn while others write those of the next.
struct Board {
  unsigned long long warps[kWarps][kTries];
  unsigned long long blocks[2][kPortableCluster][kTries];
};

// Combines v[i] over all threads of the cluster, for each i; every thread gets the results. 0 is
// neutral.
template <int N, typename Combine>
__device__ void across_cluster(unsigned long long (&v)[N], Combine combine, Board& board,
                               int& turn) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = blockIdx.y, blocks = gridDim.y;
  auto across_warp = [&](unsigned long long one) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      one = combine(one, __shfl_xor_sync(kFullMask, one, offset));
    }
    return one;
  };
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const unsigned long long one = across_warp(v[i]);
    if (lane == 0) board.warps[warp][i] = one;
  }
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const unsigned long long one = across_warp(board.warps[lane][i]);
      if (lane < blocks) *cluster_shared(&board.blocks[turn][rank][i], lane) = one;
    }
  }
  if (blocks > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] = across_warp(lane < blocks ? board.blocks[turn][lane][i] : 0ull);
  }
  turn ^= 1;
}

__device__ unsigned long long sum_of(unsigned long long a, unsigned long long b) { return a + b; }

__device__ Best greater_of(Best a, Best b) { return a > b ? a : b; }

// The greatest key such that the weights of all tokens with this key or a greater one reach
// `target`, as those of all tokens do. `own` has the `count` tokens of this block.
template <typename Weight>
__device__ unsigned threshold(const Candidate* own, int count, unsigned long long target,
                              Weight weight, Board& board, int& turn) {
  unsigned found = 0;
#pragma unroll 1
  for (int shift = 32 - kDigit; shift >= 0; shift -= kDigit) {
    unsigned long long reached[kTries] = {};  // with digit i + 1 in this place
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const Candidate one = own[i];
      const unsigned long long w = weight(one);
#pragma unroll
      for (int d = 0; d < kTries; ++d) {
        if (one.key >= found + ((d + 1u) << shift)) reached[d] += w;
      }
    }
    across_cluster(reached, sum_of, board, turn);
    unsigned digit = 0;
#pragma unroll
    for (int d = 0; d < kTries; ++d) digit += reached[d] >= target ? 1 : 0;
    found |= digit << shift;
  }
  return found;
}

// Block y has tokens y * part, …. Their candidates are in its shared memory, of which there is
// enough if `kept`, or else in `scratch`.
__global__ void __launch_bounds__(kThreads, 1) sample(const Sample a, int part, bool kept) {
  extern __shared__ Candidate candidates[];
  __shared__ Board board;
  int turn = 0;
  const int first = min(static_cast<int>(blockIdx.y) * part, a.vocab);
  const int count = min(part, a.vocab - first);
  Candidate* own = kept ? candidates : a.scratch + first;
  pdl_trigger();
  // The blocks write to each other's shared memory, so all of them must have started.
  if (gridDim.y > 1) cluster_sync();
  pdl_wait();
  const SamplingParameters p = *a.parameters;
  const int position = __ldcg(a.position);
  auto penalised = [&](int token) {
    const float logit = __ldcg(a.logits + token);
    if (p.repetition_penalty == 1.0f || __ldcg(a.seen + token) == 0) return logit;
    return logit > 0.0f ? logit / p.repetition_penalty : logit * p.repetition_penalty;
  };
  Best greatest[1] = {0};
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float logit = penalised(first + i);
    own[i].key = __float_as_uint(logit);
    greatest[0] = greater_of(greatest[0], best_of(logit, first + i));
  }
  across_cluster(greatest, greater_of, board, turn);
  const bool writes = blockIdx.y == 0 && threadIdx.x == 0;
  if (p.temperature == 0.0f || greatest[0] == kNonFinite) {
    if (writes) *a.best = greatest[0];
    return;
  }

  // The greatest becomes 0, so that a tiny temperature cannot overflow.
  const int favourite = token_of(greatest[0]);
  const float top = penalised(favourite);
  const float inverse = 1.0f / fmaxf(p.temperature, 1e-30f);
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float score = (__uint_as_float(own[i].key) - top) * inverse;
    const float mass = fminf(__expf(score) * 0x1p32f, 0x1.fffffep31f);
    own[i] = {orderable(score), static_cast<unsigned>(mass)};
  }
  unsigned least = 0;
  if (p.top_k > 0 && p.top_k < a.vocab) {
    auto one = [](const Candidate&) { return 1ull; };
    least = threshold(own, count, p.top_k, one, board, turn);
  }
  if (p.top_p < 1.0f) {
    auto mass = [&](const Candidate& c) { return c.key >= least ? c.mass : 0ull; };
    unsigned long long total[1] = {0};
    for (int i = threadIdx.x; i < count; i += kThreads) total[0] += mass(own[i]);
    across_cluster(total, sum_of, board, turn);
    const double wanted = ceil(static_cast<double>(p.top_p) * static_cast<double>(total[0]));
    const unsigned long long target = wanted < 1.0 ? 1 : static_cast<unsigned long long>(wanted);
    const unsigned nucleus = threshold(own, count, target, mass, board, turn);
    least = nucleus > least ? nucleus : least;
  }
  if (p.min_p > 0.0f) {
    const unsigned floor = orderable(logf(p.min_p));
    least = floor > least ? floor : least;
  }
  Best drawn[1] = {0};
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int token = first + i;
    if (own[i].key < least && token != favourite) continue;
    const float noisy = fmaxf(from_orderable(own[i].key), -3e38f) + gumbel(p.seed, position, token);
    drawn[0] = greater_of(drawn[0], best_of(noisy, token));
  }
  across_cluster(drawn, greater_of, board, turn);
  if (writes) *a.best = drawn[0];
}

}  // namespace
}  // namespace minidecode

MINIDECODE_EXPORT cudaError_t minidecode_sample(const minidecode::Sample* args,
                                                cudaStream_t stream) {
  using namespace minidecode;
  constexpr int kStatic = 4 * 1024;  // more than the kernel has of its own
  LaunchShape shape;
  shape.cluster = args->vocab > kThreads && has_pdl() ? kPortableCluster : 1;
  const int part = (args->vocab + shape.cluster - 1) / shape.cluster;
  const int bytes = part * static_cast<int>(sizeof(Candidate));
  const bool kept = bytes <= block_shared_limit() - kStatic;
  shape.grid = dim3(1, shape.cluster);
  shape.block = dim3(kThreads);
  shape.shared_bytes = kept ? bytes : 0;
  return launch(sample, shape, Pdl::kOn, stream, *args, part, kept);
}
