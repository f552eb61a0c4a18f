// A block takes one row of logits: a first pass finds the largest, where it is, and the sum of exponentials; a second, with
// the row still in cache, overwrites the logits with their gradient. Ignored rows get zeros. Entries from `vocab` to `stride`
// are padding: no part of the distribution, zero gradients. A label outside the vocabulary makes its row NaN.
#pragma once

#include "common/device.cuh"
#include "mlm_loss/arguments.h"

namespace megabert {

struct Smallest {
  __device__ static float of(float a, float b) { return a < b ? a : b; }
};

// Column j of the row with its bias, in fp32; -inf past the vocabulary.
template <class T>
__device__ inline void load_logits(const LossRows<T>& a, const T* logits, int64_t column, float (&x)[kGroup]) {
  float bias[kGroup];
  load_group(logits, column, a.stride, a.whole, x);
  load_group(a.bias, column, a.stride, a.whole, bias);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = column + i < a.vocab ? x[i] + bias[i] : -INFINITY;
}

template <class T, int Threads>
__global__ void __launch_bounds__(Threads) mlm_loss_rows(LossRows<T> a) {
  __shared__ float shared[Threads / kWarp];
  const int64_t row = blockIdx.x, label = a.labels[row];
  T* logits = a.logits + row * a.stride;
  if (label == kIgnore) {
    if (threadIdx.x == 0) a.loss[row] = 0.0f, a.lse[row] = 0.0f, a.correct[row] = 0;
    const float zeros[kGroup] = {};
    if (a.gradient)
      for (int64_t column = threadIdx.x * kGroup; column < a.stride; column += Threads * kGroup)
        store_group(logits, column, a.stride, a.whole, zeros);
    return;
  }
  const bool wrong = label < 0 || label >= a.vocab;
  const float at_label = wrong ? NAN : to_float(logits[label]) + to_float(a.bias[label]);
  float top = -INFINITY, sum = 0, where = INFINITY;
  for (int64_t column = threadIdx.x * kGroup; column < a.vocab; column += Threads * kGroup) {
    float x[kGroup];
    load_logits(a, logits, column, x);
    float most = top;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (x[i] > most) most = x[i], where = static_cast<float>(column + i);  // exact: fewer than 2^24 entries
    if (most > top) sum *= exp2f((top - most) * kLog2e), top = most;
    const float base = top == -INFINITY ? 0.0f : top;  // a NaN is not above it, and still makes the sum NaN
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += exp2f((x[i] - base) * kLog2e);
  }
  const float largest = reduce_row<Largest, Threads>(top, shared);
  if (top > -INFINITY) sum *= exp2f((top - largest) * kLog2e);
  sum = reduce_row<Sum, Threads>(sum, shared);
  const float first = reduce_row<Smallest, Threads>(top == largest ? where : INFINITY, shared);
  const float lse = largest + log2f(sum) / kLog2e;
  if (threadIdx.x == 0) {
    a.loss[row] = lse - at_label;
    a.lse[row] = lse;
    a.correct[row] = first == static_cast<float>(label);
  }
  if (!a.gradient) return;
  const float factor = wrong ? NAN : 1.0f;
  for (int64_t column = threadIdx.x * kGroup; column < a.stride; column += Threads * kGroup) {
    float x[kGroup];
    load_logits(a, logits, column, x);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int64_t entry = column + i;
      x[i] = exp2f((x[i] - lse) * kLog2e) * factor - (entry == label ? 1.0f : 0.0f);
      if (entry >= a.vocab) x[i] = 0.0f;
    }
    store_group(logits, column, a.stride, a.whole, x);
  }
}

// Sums over each column: blockIdx.y has kColumnThreads x 8 columns, a block takes every gridDim.x-th row into its own line of
// partial [gridDim.x, width].
template <class T>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums(const T* x, float* partial, int64_t rows, int64_t width, bool whole) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kColumnThreads + threadIdx.x) * kGroup;
  if (column >= width) return;
  float sum[kGroup] = {};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float value[kGroup];
    load_group(x + row * width, column, width, whole, value);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum[i] += value[i];
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    if (column + i < width) partial[blockIdx.x * width + column + i] = sum[i];
}

// One block of kTotalThreads: the sum of the losses (in fp64), of the correct ones, and the number of labels.
constexpr int kTotalThreads = 256;

static __global__ void __launch_bounds__(kTotalThreads)
    loss_totals(const float* loss, const int32_t* correct, const int64_t* labels, int64_t rows, float* total,
                int64_t* total_hits, int64_t* predictions) {
  __shared__ double losses[kTotalThreads];
  __shared__ int64_t hit_counts[kTotalThreads], counts[kTotalThreads];
  double sum = 0;
  int64_t hits = 0, count = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kTotalThreads)
    sum += loss[row], hits += correct[row], count += labels[row] != kIgnore;
  losses[threadIdx.x] = sum, hit_counts[threadIdx.x] = hits, counts[threadIdx.x] = count;
  for (int half = kTotalThreads / 2; half; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= half) continue;
    losses[threadIdx.x] += losses[threadIdx.x + half];
    hit_counts[threadIdx.x] += hit_counts[threadIdx.x + half];
    counts[threadIdx.x] += counts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total = static_cast<float>(losses[0]), *total_hits = hit_counts[0], *predictions = counts[0];
}

}  // namespace megabert
