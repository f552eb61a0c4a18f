// Common code of the CUDA kernels. They use few features of CUDA (threads, warps, shuffles, barriers, shared memory), so that tests
// can compile the same source for the CPU, with a fibre for each thread.
//
// A row belongs to `Threads` threads: a warp, or a block of several warps. A thread holds groups of 8 neighbouring columns:
// 16 bytes of a two-byte type, and one call of Philox.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/philox.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#endif

namespace megabert {

constexpr int kGroup = 8;
constexpr int kWarp = 32;
constexpr int kColumnThreads = 128;  // of kernels whose block has 8 columns a thread (blockIdx.y) and takes many rows
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr float kLog2e = 1.44269504f;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float x, float* to) { *to = x; }
__device__ inline void from_float(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

// Rounded like by a store to T and a load.
template <class T>
__device__ inline float rounded(float x) {
  T t;
  from_float(x, &t);
  return to_float(t);
}

#if defined(__CUDACC__)
// One instruction of the special function unit each. ex2: relative error at most 2^-22, results below 2^-126 are 0; rcp: at
// most one unit in the last place (PTX ISA).
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Explicit, since the compiler splits an assignment into stores of 2 or 4 bytes if it cannot prove the alignment.
__device__ inline void store_16_bytes(void* to, const uint32_t* word) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}
#endif

template <class To, class From>
__device__ inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a copy of all bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Two adjacent values in a 32-bit register: conversions and stores of pairs, since otherwise the compiler stores 2 bytes at a time.
__device__ inline void unpack_pair(uint32_t word, __nv_bfloat16, float* x) {
  const float2 pair = __bfloat1622float2(bits_as<__nv_bfloat162>(word));
  x[0] = pair.x, x[1] = pair.y;
}
__device__ inline uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
}

// 8 columns of a row as they lie in memory. Columns past the row's end are zero.
template <class T>
struct Group {
  static constexpr int words = kGroup * sizeof(T) / 4;
  uint32_t word[words] = {};
};

// Columns [column, column + 8) of a row of `width` columns. Whole: every group of every row is complete and 16-byte aligned.
template <bool Whole, class T>
__device__ inline Group<T> fetch(const T* row, int64_t column, int64_t width) {
  Group<T> group;
  if constexpr (Whole) {
    if (column < width) {
#pragma unroll
      for (int part = 0; part < Group<T>::words; part += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(row + column)[part / 4];
        group.word[part] = four.x, group.word[part + 1] = four.y, group.word[part + 2] = four.z, group.word[part + 3] = four.w;
      }
    }
  } else {
    T value[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      from_float(0.0f, value + i);
      if (column + i < width) value[i] = row[column + i];
    }
    memcpy(group.word, value, sizeof group.word);
  }
  return group;
}

template <class T>
__device__ inline void unpack(const Group<T>& group, float (&x)[kGroup]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] = bits_as<float>(group.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i += 2) unpack_pair(group.word[i / 2], T{}, x + i);
  }
}

template <bool Whole, class T>
__device__ inline void load(const T* row, int64_t column, int64_t width, float (&x)[kGroup]) {
  unpack(fetch<Whole>(row, column, width), x);
}

template <bool Whole, class T>
__device__ inline void store(T* row, int64_t column, int64_t width, const float (&x)[kGroup]) {
  if constexpr (Whole) {
    if (column >= width) return;
    uint32_t word[Group<T>::words];
#pragma unroll
    for (int i = 0; i < Group<T>::words; ++i) {
      if constexpr (sizeof(T) == 4) word[i] = bits_as<uint32_t>(x[i]);
      else word[i] = pack_pair(x[2 * i], x[2 * i + 1], T{});
    }
#pragma unroll
    for (int part = 0; part < Group<T>::words; part += 4)
      store_16_bytes(row + column + part * 4 / sizeof(T), word + part);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (column + i < width) from_float(x[i], row + column + i);
  }
}

// The same where `whole` is known at run time only.
template <class T>
__device__ inline void load_group(const T* row, int64_t column, int64_t width, bool whole, float (&x)[kGroup]) {
  if (whole) load<true>(row, column, width, x);
  else load<false>(row, column, width, x);
}
template <class T>
__device__ inline void store_group(T* row, int64_t column, int64_t width, bool whole, const float (&x)[kGroup]) {
  if (whole) store<true>(row, column, width, x);
  else store<false>(row, column, width, x);
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

// Dropout of 8 columns in place; dropped values are zero, also NaN.
__device__ inline void drop(const Dropout& dropout, uint64_t row, int64_t group, float (&x)[kGroup]) {
  const Philox random = dropout.draw(row, static_cast<uint32_t>(group));
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = dropout.keeps(random, i) ? x[i] * dropout.scale : 0.0f;
}

__device__ inline Dropout with_seed(Dropout dropout, const int64_t* seed) {
  if (dropout.threshold) dropout.read(seed);
  return dropout;
}

// Column sums in two steps: each block sums its rows into a separate line, then the lines are summed, in an order that does not
// depend on timing. A line may have several vectors of `width` sums, with a result each.
// blockDim = (32 columns of the line, kLineThreads).
constexpr int kLineThreads = 32;

template <class T, int Vectors>
struct LineSums {
  T* out[Vectors];  // [width] each
};

template <class T, int Vectors>
__global__ void __launch_bounds__(kWarp* kLineThreads)
    reduce_lines(const float* partial, LineSums<T, Vectors> sums, int64_t lines, int64_t width) {
  __shared__ float shared[kLineThreads][kWarp + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (column < Vectors * width) {
#pragma unroll 8
    for (int64_t line = threadIdx.y; line < lines; line += kLineThreads)
      sum += partial[line * Vectors * width + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= Vectors * width) return;
#pragma unroll
  for (int i = 1; i < kLineThreads; ++i) sum += shared[i][threadIdx.x];
#pragma unroll
  for (int v = 0; v < Vectors; ++v)
    if (column >= v * width && column < (v + 1) * width) from_float(sum, sums.out[v] + column - v * width);
}

}  // namespace megabert
