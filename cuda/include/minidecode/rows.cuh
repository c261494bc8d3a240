// Dot products of several weight rows with one vector on tensor cores, a warp at a time.
//
// A product of matrices has eight columns where there is one vector. Here each column of B is
// another piece of the vector, and A has pieces of the weight rows as they were loaded, so of D
// only those elements are wanted where both are of the same piece; the rest is left alone. That
// costs nothing, and no element changes lanes: a sixteenth of the instructions that FP32 takes.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "minidecode/mma.cuh"
#include "minidecode/reduce.cuh"

namespace minidecode {

// 32 pieces of a vector, of 16 bytes each, as columns of two matrices B. Lane 4g + t brings piece
// 4g + t. Columns 0 … 3 of the first matrix have words x and z of the pieces 0 … 15, a group of
// four in each column, and columns 4 … 7 words y and w; the second matrix has the pieces 16 … 31.
struct Columns {
  uint32_t first[2];
  uint32_t second[2];
};

__device__ __forceinline__ Columns columns_of(uint4 piece) {
  const bool low = threadIdx.x % kWarp < kWarp / 2;
  const uint32_t got0 = __shfl_xor_sync(kFullMask, low ? piece.y : piece.x, kWarp / 2);
  const uint32_t got1 = __shfl_xor_sync(kFullMask, low ? piece.w : piece.z, kWarp / 2);
  return {{low ? piece.x : got0, low ? piece.z : got1},
          {low ? got0 : piece.y, low ? got1 : piece.w}};
}

// R rows of 32 pieces. Lanes next to each other share a row, and in step j bring neighbouring
// pieces of it: `piece(j)` of `row()`. Words x and z of a piece are in the upper half of A, y and w
// in the lower one.
template <int R>
struct Rows {
  static_assert(R == 2 || R == 4, "half of the steps is for one matrix of the vector");
  static constexpr int kCount = R;
  static constexpr int kLanes = kWarp / R;  // of a row
  float sum[4] = {};

  static __device__ __forceinline__ int row() { return threadIdx.x % kWarp / kLanes; }

  static __device__ __forceinline__ int piece(int step) {
    return step * kLanes + threadIdx.x % kLanes;
  }

  // `w`: this lane's pieces of its row, zeros past the end; likewise `x`.
  __device__ __forceinline__ void add(const uint4 (&w)[R], const Columns& x) {
#pragma unroll
    for (int j = 0; j < R; ++j) {
      const uint32_t(&b)[2] = j < R / 2 ? x.first : x.second;
      // Of four rows a step has half the pieces of a matrix: the other columns are cleared.
      const bool here = R == 2 || row() % 2 == j % 2;
      mma_16x8x16(sum, w[j].x, w[j].y, w[j].z, w[j].w, here ? b[0] : 0, here ? b[1] : 0);
    }
  }

  // All lanes of a row end with its sum.
  __device__ __forceinline__ float total() const {
    constexpr int kGroups = kLanes / 4;  // of four lanes; group s has the columns s, s + kGroups, …
    const int t = threadIdx.x % 4, s = threadIdx.x / 4 % kGroups;
    const float even = t < 2 ? sum[0] : sum[2], odd = t < 2 ? sum[1] : sum[3];
    const bool wanted = R == 4 || t % 2 == s / 2;
    float v = wanted ? s % 2 == 0 ? even : odd : 0.0f;
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      v += __shfl_xor_sync(kFullMask, v, offset);
    }
    return v;
  }
};

// As many of N rows as go together.
template <int N>
using RowsOf = Rows<N % 4 == 0 ? 4 : 2>;

}  // namespace minidecode
