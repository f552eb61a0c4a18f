// Decoder and masked-LM loss together on the GPU, chunk by chunk. The gradients are those of the loss sum; backward only
// scales them.

#include "common/cuda.h"
#include "mlm_loss/arguments.h"
#include "mlm_loss/kernel.cuh"

namespace megabert {
namespace {

constexpr int64_t kChunkBytes = 512 << 20;  // of logits: few launches and roundings, and little beside the activations
constexpr int64_t kLines = 64;              // of partial column sums in a chunk: enough blocks to fill a GPU
constexpr int kThreads = 512;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mlm_loss(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& labels, int64_t vocab,
    bool need_grad) {
  constexpr const char* op = "mlm_loss";
  check_cuda(op, "hidden", hidden);
  check_mlm_loss(op, hidden, weight, bias, labels, vocab);
  const OnDevice device(hidden);
  const int64_t count = hidden.size(0), width = hidden.size(1), entries = weight.size(0);
  const Tensor hc = dense(hidden), wc = dense(weight), bc = dense(bias), lc = dense(labels);
  Tensor dhidden = torch::stable::new_empty(hidden, {need_grad ? count : 0, width});
  Tensor dweight = torch::stable::new_empty(weight, {need_grad ? entries : 0, width});
  Tensor dbias = torch::stable::new_empty(bias, {need_grad ? entries : 0});
  if (need_grad && !count) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }
  const Tensor losses = torch::stable::new_empty(hc, {count}, ScalarType::Float),
               lse = torch::stable::new_empty(hc, {count}, ScalarType::Float),
               correct = torch::stable::new_empty(hc, {count}, ScalarType::Int);
  // Column sums of the gradient: a line of what earlier chunks gave, then those of this chunk.
  Tensor partial = torch::stable::new_empty(hc, {need_grad ? 1 + kLines : 0, entries}, ScalarType::Float);
  torch::stable::zero_(partial);
  with_type(hc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const int64_t chunk = chunk_rows(count, kChunkBytes / (entries * static_cast<int64_t>(sizeof(T))));
    for_each_chunk(hc, wc, chunk, dhidden, dweight, need_grad, [&](const Tensor& logits, int64_t at) {
      LossRows<T> a{out<T>(logits), data<T>(bc), data<int64_t>(lc) + at, out<float>(losses) + at, out<float>(lse) + at,
                    out<int32_t>(correct) + at, vocab, entries, need_grad, false};
      a.whole = whole_groups(entries, a.logits, a.bias);
      mlm_loss_rows<T, kThreads><<<static_cast<unsigned>(logits.size(0)), kThreads, 0, device.stream>>>(a);
      check_launch(op);
      if (!need_grad) return;
      column_sums<T><<<column_grid(kLines, entries), kColumnThreads, 0, device.stream>>>(
          data<T>(logits), out<float>(partial) + entries, logits.size(0), entries, whole_groups(entries, data<T>(logits)));
      check_launch(op);
      reduce_lines_on(device.stream, data<float>(partial), out<float>(partial), 1 + kLines, entries, entries, op);
    });
    if (need_grad && count)
      reduce_lines_on(device.stream, data<float>(partial), out<T>(dbias), 1, entries, entries, op);
  });
  const Tensor total = torch::stable::new_empty(hc, {}, ScalarType::Float),
               hits = torch::stable::new_empty(hc, {}, ScalarType::Long),
               predictions = torch::stable::new_empty(hc, {}, ScalarType::Long);
  loss_totals<<<1, kTotalThreads, 0, device.stream>>>(data<float>(losses), data<int32_t>(correct), data<int64_t>(lc), count,
                                                      out<float>(total), out<int64_t>(hits), out<int64_t>(predictions));
  check_launch(op);
  return {total, hits, predictions, lse, dhidden, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) { m.impl("mlm_loss", TORCH_BOX(&mlm_loss)); }

}  // namespace megabert
