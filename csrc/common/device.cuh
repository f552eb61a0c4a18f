// What the CUDA kernels share. They use the little of CUDA named here (threads, warps, shuffles, barriers, shared memory), so
// that the tests can also compile the same source for the CPU, where a fibre stands for each thread.
//
// A row belongs to `Threads` threads: a warp, or a block of several warps. A thread holds groups of 8 neighbouring columns:
// 16 bytes of a two-byte type, and one call of Philox.
#pragma once

#include <cstdint>

#include "common/philox.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace megabert {

constexpr int kGroup = 8;
constexpr int kWarp = 32;
constexpr int kColumnThreads = 128;  // of kernels whose block has 8 columns a thread (blockIdx.y) and takes many rows
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr float kLog2e = 1.44269504f;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline void from_float(float x, float* to) { *to = x; }
__device__ inline void from_float(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half* to) { *to = __float2half_rn(x); }

// As a store to T and a load would give it back.
template <class T>
__device__ inline float rounded(float x) {
  T t;
  from_float(x, &t);
  return to_float(t);
}

template <class T>
struct alignas(16) Packed {
  static constexpr int size = 16 / sizeof(T);
  T value[size];
};

// Columns [column, column + 8) of a row of `width` columns; those past its end are zero. `whole`: every group of every row
// is complete and 16-byte aligned.
template <class T>
__device__ inline void load_group(const T* row, int64_t column, int64_t width, bool whole, float (&x)[kGroup]) {
  if (whole) {
#pragma unroll
    for (int part = 0; part < kGroup / Packed<T>::size; ++part) {
      const Packed<T> packed = *reinterpret_cast<const Packed<T>*>(row + column + part * Packed<T>::size);
#pragma unroll
      for (int i = 0; i < Packed<T>::size; ++i) x[part * Packed<T>::size + i] = to_float(packed.value[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] = column + i < width ? to_float(row[column + i]) : 0.0f;
  }
}

template <class T>
__device__ inline void store_group(T* row, int64_t column, int64_t width, bool whole, const float (&x)[kGroup]) {
  if (whole) {
#pragma unroll
    for (int part = 0; part < kGroup / Packed<T>::size; ++part) {
      Packed<T> packed;
#pragma unroll
      for (int i = 0; i < Packed<T>::size; ++i) from_float(x[part * Packed<T>::size + i], &packed.value[i]);
      *reinterpret_cast<Packed<T>*>(row + column + part * Packed<T>::size) = packed;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (column + i < width) from_float(x[i], row + column + i);
  }
}

struct Sum {
  __device__ static float of(float a, float b) { return a + b; }
};
struct Largest {
  __device__ static float of(float a, float b) { return a > b ? a : b; }  // NaN in a is passed over
};

// The reduction of x over the Threads threads of a row, in every one of them. More than a warp: `shared` has a float for
// each warp, and all threads of the block take part.
template <class Op, int Threads>
__device__ inline float reduce_row(float x, float* shared) {
#pragma unroll
  for (int distance = kWarp / 2; distance; distance /= 2) x = Op::of(x, __shfl_xor_sync(kAllLanes, x, distance));
  if constexpr (Threads > kWarp) {
    __syncthreads();  // the last reduction's values have been read
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int warp = 1; warp < Threads / kWarp; ++warp) x = Op::of(x, shared[warp]);
  }
  return x;
}

// The factors of 8 columns: 0 where dropped, else the inverse of the share kept.
__device__ inline void dropout_factors(const Dropout& dropout, uint64_t row, int64_t group, float (&factor)[kGroup]) {
  const uint32_t bits = dropout.keep8(row, static_cast<uint32_t>(group));
#pragma unroll
  for (int i = 0; i < kGroup; ++i) factor[i] = (bits >> i) & 1u ? dropout.scale : 0.0f;
}

__device__ inline Dropout with_seed(Dropout dropout, const int64_t* seed) {
  if (dropout.threshold) dropout.seed = static_cast<uint64_t>(*seed);
  return dropout;
}

// Column sums are taken in two steps: each block sums its rows into a line of its own, then the lines are summed, in an
// order that does not depend on timing. blockDim = (32 columns, kLineThreads).
constexpr int kLineThreads = 16;

template <class T>
__global__ void reduce_lines(const float* partial, T* out, int64_t lines, int64_t stride, int64_t width) {
  __shared__ float shared[kLineThreads][kWarp + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (column < width)
    for (int64_t line = threadIdx.y; line < lines; line += kLineThreads) sum += partial[line * stride + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= width) return;
#pragma unroll
  for (int i = 1; i < kLineThreads; ++i) sum += shared[i][threadIdx.x];
  from_float(sum, out + column);
}

}  // namespace megabert
