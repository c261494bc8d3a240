// Sampling inside the step: repetition penalty, temperature, top-k, top-p, min-p, one draw.
//
// The order is that of sampling.py. Top-k and top-p are thresholds on the score, found digit by
// digit: three histograms of 11 bits of the sortable score, of counts for top-k and of
// fixed-point probability mass for top-p (integers, so that the order of the additions does not
// matter and a seed gives the same tokens every time). Equal scores at a threshold stay together.
// The draw is the greatest score + Gumbel noise among what is left, which has exactly the softmax
// distribution. The noise is a function of seed, position and token (SplitMix64: Steele, Lea and
// Flood, 2014), so there is no generator state.
#include "minidecode/abi.cuh"
#include "minidecode/best.cuh"
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

struct Sample {
  Best* best;                            // [1], overwritten with the drawn token
  const float* logits;                   // [vocab]
  const unsigned char* seen;             // [vocab]
  const int* position;                   // [1]
  const SamplingParameters* parameters;  // [1], on the device: a captured graph serves them all
  int vocab;
};

namespace {

constexpr int kThreads = 1024;
constexpr int kBits = 11;
constexpr int kBins = 1 << kBits;

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

__device__ Best block_max(Best v, Best* scratch) {
  v = warp_max(v);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = warp_max(scratch[threadIdx.x % kWarp]);
  __syncthreads();
  return v;
}

// The greatest sortable score such that the weights of all scores at or above it reach `target`.
// `weight(i, score)` is the integer weight of token i, 0 for tokens that are out already.
template <typename Score, typename Weight>
__device__ unsigned threshold(int vocab, unsigned long long target, Score score, Weight weight,
                              unsigned long long* bins) {
  __shared__ unsigned chosen;
  __shared__ unsigned long long left;
  unsigned prefix = 0;
  unsigned long long remaining = target;
  for (int shift = 32 - kBits; shift > -kBits; shift -= kBits) {
    const int low = shift > 0 ? shift : 0, bits = shift > 0 ? kBits : kBits + shift;
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const float s = score(i);
      const unsigned key = orderable(s);
      const bool in = low + bits == 32 || (key >> (low + bits)) == (prefix >> (low + bits));
      if (!in) continue;
      const unsigned long long w = weight(i, s);
      if (w != 0) atomicAdd(&bins[(key >> low) & ((1u << bits) - 1u)], w);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = (1 << bits) - 1;
      while (bin > 0 && bins[bin] < remaining) remaining -= bins[bin--];
      chosen = static_cast<unsigned>(bin);
      left = remaining;
    }
    __syncthreads();
    prefix |= chosen << low;
    remaining = left;
    __syncthreads();
  }
  return prefix;
}

__global__ void __launch_bounds__(kThreads, 1) sample(const Sample a) {
  __shared__ unsigned long long bins[kBins];
  __shared__ Best scratch[kThreads / kWarp];
  pdl_trigger();
  pdl_wait();
  const SamplingParameters p = *a.parameters;
  const int position = __ldcg(a.position);
  auto penalised = [&](int i) {
    const float logit = __ldcg(a.logits + i);
    if (p.repetition_penalty == 1.0f || __ldcg(a.seen + i) == 0) return logit;
    return logit > 0.0f ? logit / p.repetition_penalty : logit * p.repetition_penalty;
  };
  Best greatest = 0;
  for (int i = threadIdx.x; i < a.vocab; i += kThreads) {
    const Best one = best_of(penalised(i), i);
    greatest = one > greatest ? one : greatest;
  }
  greatest = block_max(greatest, scratch);
  if (p.temperature == 0.0f || greatest == kNonFinite) {
    if (threadIdx.x == 0) *a.best = greatest;
    return;
  }

  // The greatest becomes 0, so that a tiny temperature cannot overflow.
  const float top = penalised(token_of(greatest));
  const float inverse = 1.0f / fmaxf(p.temperature, 1e-30f);
  auto score = [&](int i) { return (penalised(i) - top) * inverse; };
  unsigned least = 0;
  if (p.top_k > 0 && p.top_k < a.vocab) {
    least = threshold(
        a.vocab, static_cast<unsigned long long>(p.top_k), score, [](int, float) { return 1ull; },
        bins);
  }
  if (p.top_p < 1.0f) {
    auto mass = [&](int, float s) {
      return orderable(s) >= least ? static_cast<unsigned long long>(__expf(s) * 0x1p40f) : 0ull;
    };
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    unsigned long long mine = 0;
    for (int i = threadIdx.x; i < a.vocab; i += kThreads) mine += mass(i, score(i));
    atomicAdd(&total, mine);
    __syncthreads();
    const double wanted = static_cast<double>(p.top_p) * static_cast<double>(total);
    const unsigned long long target = static_cast<unsigned long long>(ceil(wanted));
    const unsigned nucleus = threshold(a.vocab, target > 0 ? target : 1, score, mass, bins);
    least = nucleus > least ? nucleus : least;
  }
  if (p.min_p > 0.0f) {
    const unsigned floor = orderable(logf(p.min_p));
    least = floor > least ? floor : least;
  }
  Best drawn = 0;
  for (int i = threadIdx.x; i < a.vocab; i += kThreads) {
    const float s = score(i);
    if (orderable(s) < least && i != token_of(greatest)) continue;
    const Best one = best_of(fmaxf(s, -3e38f) + gumbel(p.seed, position, i), i);
    drawn = one > drawn ? one : drawn;
  }
  drawn = block_max(drawn, scratch);
  if (threadIdx.x == 0) *a.best = drawn;
}

}  // namespace
}  // namespace minidecode

MINIDECODE_EXPORT cudaError_t minidecode_sample(const minidecode::Sample* args,
                                                cudaStream_t stream) {
  using namespace minidecode;
  return launch(sample, {dim3(1), dim3(kThreads)}, Pdl::kOn, stream, *args);
}
