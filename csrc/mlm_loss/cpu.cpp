// Decoder and masked-LM loss together, chunk by chunk. The gradients are those of the loss sum; backward only scales them.

#include <cstring>

#include "cpu/kernels.h"
#include "mlm_loss/arguments.h"

namespace megabert {
namespace {

constexpr int64_t kChunk = 512;  // predictions, where that does not make too many chunks

void check_labels(const char* op, const int64_t* label, int64_t count, int64_t vocab) {
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(label[i] == kIgnore || (label[i] >= 0 && label[i] < vocab), op, ": labels[", i, "] is ", label[i],
                    ", neither -100 nor in [0, ", vocab, ")");
}

constexpr int64_t kShare = 32;  // rows that one thread takes at a time

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mlm_loss(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& labels, int64_t vocab,
    bool need_grad) {
  constexpr const char* op = "mlm_loss";
  check_cpu(op, "hidden", hidden);
  check_mlm_loss(op, hidden, weight, bias, labels, vocab);
  const int64_t count = hidden.size(0), width = hidden.size(1), entries = weight.size(0);
  const Tensor lc = dense(labels), bc = dense(bias);
  const int64_t* label = lc.const_data_ptr<int64_t>();
  check_labels(op, label, count, vocab);

  Tensor dhidden = torch::stable::new_empty(hidden, {need_grad ? count : 0, width});
  Tensor dweight = torch::stable::new_empty(weight, {need_grad ? entries : 0, width});
  Tensor dbias = torch::stable::new_empty(bias, {need_grad ? entries : 0});
  if (need_grad && count == 0) torch::stable::zero_(dweight), torch::stable::zero_(dbias);

  const int64_t chunk = chunk_rows(count, kChunk), shares = (chunk + kShare - 1) / kShare;
  // Column sums of the gradient: a line of what earlier chunks gave, then one for each share of this chunk.
  Tensor partial = torch::stable::new_empty(hidden, {need_grad ? 1 + shares : 0, entries}, ScalarType::Float);
  float* sums = out<float>(partial);
  if (need_grad) memset(sums, 0, sizeof(float) * entries);
  const Tensor losses = torch::stable::new_empty(hidden, {count}, ScalarType::Float),
               lse = torch::stable::new_empty(hidden, {count}, ScalarType::Float),
               hits = torch::stable::new_empty(hidden, {count}, ScalarType::Int);
  float *row_loss = out<float>(losses), *row_lse = out<float>(lse);
  int32_t* row_hit = out<int32_t>(hits);

  with_cpu_type(hidden, [&](auto type, const auto& kernel) {
    using T = decltype(type);
    for_each_chunk(dense(hidden), dense(weight), chunk, dhidden, dweight, need_grad, [&](const Tensor& logits, int64_t at) {
      const int64_t rows = logits.size(0), parts = (rows + kShare - 1) / kShare;
      torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          const int64_t last = (s + 1) * kShare < rows ? (s + 1) * kShare : rows;
          kernel.mlm_loss(out<T>(logits), data<T>(bc), label + at, row_loss + at, row_lse + at, row_hit + at,
                          need_grad ? sums + (1 + s) * entries : nullptr, need_grad, vocab, entries, s * kShare, last);
        }
      });
      if (!need_grad) return;
      torch::stable::parallel_for(0, (entries + 63) / 64, 16, [&](int64_t begin, int64_t end) {
        const int64_t last = end * 64 < entries ? end * 64 : entries;
        tables().of_float.reduce_blocks(sums, sums, 1 + parts, entries, begin * 64, last);
      });
    });
    if (need_grad && count) kernel.reduce_blocks(sums, out<T>(dbias), 1, entries, 0, entries);
  });
  Tensor loss = torch::stable::new_empty(losses, {}), correct = torch::stable::new_empty(losses, {}, ScalarType::Long),
         predictions = torch::stable::new_empty(losses, {}, ScalarType::Long);
  double sum = 0;
  int64_t hit_count = 0, predicted = 0;
  for (int64_t i = 0; i < count; ++i) sum += row_loss[i], hit_count += row_hit[i], predicted += label[i] != kIgnore;
  *out<float>(loss) = static_cast<float>(sum);
  *out<int64_t>(correct) = hit_count, *out<int64_t>(predictions) = predicted;
  return {loss, correct, predictions, lse, dhidden, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("mlm_loss", TORCH_BOX(&mlm_loss)); }

}  // namespace megabert
