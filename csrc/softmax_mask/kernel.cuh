// softmax(scale * scores + mask) and dropout of a row of scores, and its gradient. A row's scores stay in registers, so each
// is read once. Keys outside the row's range get zeros; so does a row without any key. A range that is not inside [0, keys]
// makes its row NaN.
#pragma once

#include "common/device.cuh"
#include "common/rows.h"
#include "softmax_mask/mask.h"

namespace megabert {

template <class T>
__device__ inline float mask_value(const SoftmaxMask& a, int64_t at, int64_t key) {
  const int64_t index = at + key * a.mask_stride[3];
  if (a.kind == MaskKind::allowed) return static_cast<const uint8_t*>(a.mask)[index] ? 0.0f : -INFINITY;
  return to_float(static_cast<const T*>(a.mask)[index]) * kLog2e;
}

// Threads x 8 * Groups >= keys. blockDim = (Threads, rows of a block); more than a warp: one row.
template <class T, int Threads, int Groups>
__global__ void __launch_bounds__(RowShape<Threads, Groups>::block, 512 / RowShape<Threads, Groups>::block)
    softmax_mask_forward(SoftmaxMask a, const T* scores, T* out, T* probs, Dropout dropout, const int64_t* seed,
                         int64_t rows, bool whole) {
  __shared__ float shared[Threads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  dropout = with_seed(dropout, seed);
  const int64_t query = row % a.queries, head = row / a.queries % a.heads, batch = row / a.queries / a.heads;
  const int64_t first = a.start ? a.start[batch * a.start_stride[0] + query * a.start_stride[1]] : 0;
  const int64_t last = a.end ? a.end[batch * a.end_stride[0] + query * a.end_stride[1]] : a.keys;
  const bool wrong = first < 0 || first > a.keys || last < 0 || last > a.keys;
  const int64_t at = batch * a.mask_stride[0] + head * a.mask_stride[1] + query * a.mask_stride[2];
  const float scale = a.scale * kLog2e;  // powers of two from here on
  float x[Groups][kGroup];
  float top = -INFINITY;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column < last && column + kGroup > first && column < a.keys)
      load_group(scores + row * a.keys, column, a.keys, whole, x[g]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int64_t key = column + i;
      float value = -INFINITY;
      if (key >= first && key < last && key < a.keys) {
        value = x[g][i] * scale;
        if (a.kind != MaskKind::none) value += mask_value<T>(a, at, key);
      }
      x[g][i] = value;
      top = Largest::of(value, top);
    }
  }
  top = reduce_row<Largest, Threads>(top, shared);
  if (top == -INFINITY) top = 0.0f;
  float sum = 0;
#pragma unroll
  for (int g = 0; g < Groups; ++g)
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      x[g][i] = exp2f(x[g][i] - top);
      sum += x[g][i];
    }
  sum = reduce_row<Sum, Threads>(sum, shared);
  const float inverse = wrong ? NAN : sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= a.keys) continue;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[g][i] *= inverse;
    if (dropout.threshold) {
      store_group(probs + row * a.keys, column, a.keys, whole, x[g]);
      drop(dropout, row, column / kGroup, x[g]);
    }
    store_group(out + row * a.keys, column, a.keys, whole, x[g]);
  }
}

// With P the probabilities and M the dropout factors: dP = grad M, dscores = scale P (dP - rowsum(dP P)).
template <class T, int Threads, int Groups>
__global__ void __launch_bounds__(RowShape<Threads, Groups>::block, 512 / RowShape<Threads, Groups>::block)
    softmax_mask_gradient(const T* grad, const T* probs, T* dscores, int64_t keys, float scale, Dropout dropout,
                          const int64_t* seed, int64_t rows, bool whole) {
  __shared__ float shared[Threads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  dropout = with_seed(dropout, seed);
  float p[Groups][kGroup], d[Groups][kGroup];
  float dot = 0;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= keys) continue;
    load_group(grad + row * keys, column, keys, whole, d[g]);
    load_group(probs + row * keys, column, keys, whole, p[g]);
    if (dropout.threshold) drop(dropout, row, column / kGroup, d[g]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) dot += d[g][i] * p[g][i];
  }
  dot = reduce_row<Sum, Threads>(dot, shared);
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int64_t column = (threadIdx.x + static_cast<int64_t>(g) * Threads) * kGroup;
    if (column >= keys) continue;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) d[g][i] = (d[g][i] - dot) * p[g][i] * scale;
    store_group(dscores + row * keys, column, keys, whole, d[g]);
  }
}

}  // namespace megabert
