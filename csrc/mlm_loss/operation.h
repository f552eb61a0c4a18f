// Decoder and masked-LM loss together, chunk by chunk. The gradients are those of the loss sum; backward only scales them.
//
// One product computes the logits of a chunk of predictions, `run_rows` computes their losses and, in place, their gradient, which the
// two products of backward use. The memory is that of one chunk.
#pragma once

#include "common/check.h"
#include "common/products.h"
#include "mlm_loss/arguments.h"

namespace megabert {

// Each chunk adds its part of the weight gradient to a sum in the tensors' type, with one rounding.
constexpr int64_t kMostChunks = 16;

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mlm_loss(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& labels, int64_t vocab,
    bool need_grad) {
  const Device device("mlm_loss", "hidden", hidden);
  const char* op = device.op;
  check_compute_dtype(op, "hidden", hidden);
  check_dimensions(op, "hidden", hidden, 2);
  check_dimensions(op, "weight", weight, 2);
  const int64_t count = hidden.size(0), width = hidden.size(1), entries = weight.size(0);
  check_tensor(op, "weight", weight, hidden, hidden.scalar_type(), {entries, width});
  check_tensor(op, "bias", bias, hidden, hidden.scalar_type(), {entries});
  check_tensor(op, "labels", labels, hidden, ScalarType::Long, {count});
  STD_TORCH_CHECK(0 < vocab && vocab <= entries, op, ": vocab_size is ", vocab, ", not in [1, ", entries, "]");
  const Tensor hc = dense(hidden), wc = dense(weight), bc = dense(bias), lc = dense(labels);
  check_labels(device, lc, vocab);

  const Tensor dhidden = torch::stable::new_empty(hc, {need_grad ? count : 0, width});
  Tensor dweight = torch::stable::new_empty(wc, {need_grad ? entries : 0, width});
  Tensor dbias = torch::stable::new_empty(bc, {need_grad ? entries : 0});
  if (need_grad && !count) torch::stable::zero_(dweight), torch::stable::zero_(dbias);
  const Tensor losses = torch::stable::new_empty(hc, {count}, ScalarType::Float),
               lse = torch::stable::new_empty(hc, {count}, ScalarType::Float),
               hits = torch::stable::new_empty(hc, {count}, ScalarType::Int);
  Device::with_type(hc, [&](auto type) {
    using T = decltype(type);
    // predictions of a chunk: not more than there are, and more if there would be too many chunks
    const int64_t size = chunk_size(device, entries * static_cast<int64_t>(sizeof(T)));
    const int64_t least = (count + kMostChunks - 1) / kMostChunks, most = size < least ? least : size;
    const int64_t chunk = most < count ? most : count;
    const Tensor buffer = torch::stable::new_empty(hc, {chunk, entries}), decoder = torch::stable::transpose(wc, 0, 1);
    // column sums of the gradient: a line of what earlier chunks gave, then those of this chunk
    const int64_t lines = need_grad ? 1 + lines_of_chunk(device, chunk) : 0;
    Tensor partial = torch::stable::new_empty(hc, {lines, entries}, ScalarType::Float);
    Tensor earlier = torch::stable::narrow(partial, 0, 0, need_grad);
    torch::stable::zero_(earlier);
    for (int64_t at = 0; at < count; at += chunk) {
      const int64_t rows = count - at < chunk ? count - at : chunk;
      const auto part = [&](Tensor t, int64_t first) { return torch::stable::narrow(t, 0, first, rows); };
      const Tensor logits = part(buffer, 0), input = part(hc, at), transposed = torch::stable::transpose(logits, 0, 1);
      product(logits, input, decoder);
      run_rows(device, LossRows<T>{out<T>(logits), data<T>(bc), data<int64_t>(lc) + at, out<float>(losses) + at,
                                   out<float>(lse) + at, out<int32_t>(hits) + at, vocab, entries, need_grad, false},
               rows, out<float>(partial));
      if (!need_grad) continue;
      product(part(dhidden, at), logits, wc);
      if (at == 0) product(dweight, transposed, input);
      else add_product(dweight, transposed, input);
    }
    if (need_grad && count) sum_lines(device, out<float>(partial), out<T>(dbias), 1, entries);
  });
  const Tensor loss = torch::stable::new_empty(hc, {}, ScalarType::Float),
               correct = torch::stable::new_empty(hc, {}, ScalarType::Long),
               predictions = torch::stable::new_empty(hc, {}, ScalarType::Long);
  run_totals(device, data<float>(losses), data<int32_t>(hits), data<int64_t>(lc), count, out<float>(loss),
             out<int64_t>(correct), out<int64_t>(predictions));
  return {loss, correct, predictions, lse, dhidden, dweight, dbias};
}

}  // namespace megabert
