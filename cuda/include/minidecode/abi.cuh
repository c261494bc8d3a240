// The swap ABI: what a GEMV kernel file exports, built in or yours.
//
//   y[n] = w[n, k] @ x[k]     w is row-major; every element of y is written
//
// Output first, six arguments, a status returned. The function
//   - only enqueues work on `stream`: it is captured into a CUDA graph, so it does not allocate,
//     synchronise or touch another stream;
//   - takes any n, k >= 1 and any alignment that the element type allows. For what it does not
//     handle it returns cudaErrorNotSupported and has enqueued nothing;
//   - returns the status of its launch (minidecode::launch does);
//   - may read w before the kernels ahead of it have finished: nothing in a step writes weights.
//
// A file exports the half version, the float version, or both.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define MINIDECODE_EXPORT extern "C" __attribute__((visibility("default")))

MINIDECODE_EXPORT cudaError_t minidecode_gemv(half* y,        // [n]
                                              const half* w,  // [n, k]
                                              const half* x,  // [k]
                                              int n, int k, cudaStream_t stream);

MINIDECODE_EXPORT cudaError_t minidecode_gemv_f32(float* y,        // [n]
                                                  const float* w,  // [n, k]
                                                  const float* x,  // [k]
                                                  int n, int k, cudaStream_t stream);
