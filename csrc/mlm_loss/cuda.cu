// mlm_loss on CUDA.

#include "common/cuda.h"
#include "mlm_loss/kernel.cuh"
#include "mlm_loss/operation.h"

namespace megabert {

static void check_labels(const Cuda&, const Tensor&, int64_t) {}  // data, which only the CPU reads

constexpr int64_t kChunkBytes = 512 << 20;  // of logits: few launches and roundings, and little beside the activations
static int64_t chunk_size(const Cuda&, int64_t bytes_of_row) { return kChunkBytes / bytes_of_row; }

constexpr int64_t kLines = 64;  // of partial column sums in a chunk: enough blocks to fill a GPU
static int64_t lines_of_chunk(const Cuda&, int64_t) { return kLines; }

template <class T>
static void sum_lines(const Cuda& device, const float* lines, T* sums, int64_t count, int64_t width) {
  launch_reduce(device, lines, LineSums<T, 1>{{sums}}, count, width);
}

template <class T>
static void run_rows(const Cuda& device, LossRows<T> a, int64_t rows, float* sums) {
  constexpr int kThreads = 512;
  a.whole = whole_groups(a.stride, a.logits, a.bias);
  mlm_loss_rows<T, kThreads><<<static_cast<unsigned>(rows), kThreads, 0, device.stream>>>(a);
  check_launch(device.op);
  if (!a.gradient) return;
  column_sums<T><<<column_grid(kLines, a.stride), kColumnThreads, 0, device.stream>>>(
      a.logits, sums + a.stride, rows, a.stride, whole_groups(a.stride, a.logits));
  check_launch(device.op);
  sum_lines(device, sums, sums, 1 + kLines, a.stride);
}

static void run_totals(const Cuda& device, const float* losses, const int32_t* hits, const int64_t* labels,
                       int64_t count, float* loss, int64_t* correct, int64_t* predictions) {
  loss_totals<<<1, kTotalThreads, 0, device.stream>>>(losses, hits, labels, count, loss, correct, predictions);
  check_launch(device.op);
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) { m.impl("mlm_loss", TORCH_BOX(&mlm_loss<Cuda>)); }

}  // namespace megabert
