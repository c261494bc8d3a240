// What the attention kernels share: their arguments, and normalisation and rotation of q and k.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace minidecode {

struct Attention {
  half* out;            // [heads, head_dim]
  half* keys;           // [kv_heads, capacity, head_dim], row `position` is written
  half* values;         // [kv_heads, capacity, head_dim], row `position` is written
  const half* qkv;      // [heads + 2 kv_heads, head_dim], before normalisation and rotation
  const half* q_norm;   // [head_dim] or null
  const half* k_norm;   // [head_dim] or null
  const float2* rope;   // [capacity, head_dim / 2] cos, sin
  const int* position;  // [1]
  float* scratch;       // [heads, splits, head_dim + 2], only without clusters
  int heads;
  int kv_heads;
  int head_dim;
  int capacity;
  int window;  // positions seen, its own included; 0 is all
  float eps;
  int splits;  // blocks that share one KV head's context
};

// The token sees positions first, first + 1, …, last.
struct Seen {
  int first;
  int last;
};

__device__ __forceinline__ Seen seen_by(const Attention& a) {
  // Read before the dependent-launch wait, since it changes only at the end of a step; from L2, as
  // this multiprocessor's L1 may still hold the step before.
  const int last = __ldcg(a.position);
  const int first = a.window > 0 && last >= a.window ? last + 1 - a.window : 0;
  return {first, last};
}

}  // namespace minidecode
