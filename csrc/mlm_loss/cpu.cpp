// mlm_loss on the CPU.

#include "common/cpu.h"
#include "mlm_loss/operation.h"

namespace megabert {

static void check_labels(const Cpu& device, const Tensor& labels, int64_t vocab) {
  const int64_t* label = data<int64_t>(labels);
  for (int64_t i = 0; i < labels.numel(); ++i)
    STD_TORCH_CHECK(label[i] == kIgnore || (label[i] >= 0 && label[i] < vocab), device.op, ": labels[", i, "] is ",
                    label[i], ", neither -100 nor in [0, ", vocab, ")");
}

static int64_t chunk_size(const Cpu&, int64_t) { return 512; }  // predictions

constexpr int64_t kShare = 32;  // rows that one thread takes at a time, with column sums of their own
static int64_t lines_of_chunk(const Cpu&, int64_t rows) { return (rows + kShare - 1) / kShare; }

template <class T>
static void sum_lines(const Cpu&, const float* lines, T* sums, int64_t count, int64_t width) {
  torch::stable::parallel_for(0, (width + 63) / 64, 16, [&](int64_t begin, int64_t end) {
    kernels<T>().reduce_blocks(lines, sums, count, width, begin * 64, end * 64 < width ? end * 64 : width);
  });
}

template <class T>
static void run_rows(const Cpu& device, const LossRows<T>& a, int64_t rows, float* sums) {
  const int64_t shares = lines_of_chunk(device, rows);
  torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      float* dbias = a.gradient ? sums + (1 + s) * a.stride : nullptr;
      kernels<T>().mlm_loss(a, dbias, s * kShare, (s + 1) * kShare < rows ? (s + 1) * kShare : rows);
    }
  });
  if (a.gradient) sum_lines(device, sums, sums, 1 + shares, a.stride);
}

static void run_totals(const Cpu&, const float* losses, const int32_t* hits, const int64_t* labels, int64_t count,
                       float* loss, int64_t* correct, int64_t* predictions) {
  double sum = 0;
  int64_t hit_count = 0, predicted = 0;
  for (int64_t i = 0; i < count; ++i) sum += losses[i], hit_count += hits[i], predicted += labels[i] != kIgnore;
  *loss = static_cast<float>(sum), *correct = hit_count, *predictions = predicted;
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("mlm_loss", TORCH_BOX(&mlm_loss<Cpu>)); }

}  // namespace megabert
