// Decoder and masked-LM loss together on the GPU: a chunk of logits is made by one product, turned into loss and gradient in
// place, and used up by the two products of backward. The gradients are those of the loss sum; backward only scales them.

#include <array>

#include "common/cuda.h"
#include "mlm_loss/arguments.h"
#include "mlm_loss/kernel.cuh"

namespace megabert {
namespace {

constexpr int64_t kChunk = 2048;  // predictions
constexpr int64_t kLines = 16;    // of partial column sums in a chunk
constexpr int kThreads = 512;

// out = a b, and out = out + a b, in the tensors' type with fp32 inside, by the library torch uses on this device.
void product(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(b),
                                    torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);  // takes back the reference
}
void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 6> stack{torch::stable::detail::from(out), torch::stable::detail::from(a),
                                    torch::stable::detail::from(b),   torch::stable::detail::from(1.0),
                                    torch::stable::detail::from(1.0), torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::addmm", "out", stack.data(), TORCH_ABI_VERSION));
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
}

struct RowResults {
  Tensor loss, lse, correct, total, right, predictions;

  RowResults(const Tensor& like, int64_t count)
      : loss(torch::stable::new_empty(like, {count}, ScalarType::Float)),
        lse(torch::stable::new_empty(like, {count}, ScalarType::Float)),
        correct(torch::stable::new_empty(like, {count}, ScalarType::Int)),
        total(torch::stable::new_empty(like, {}, ScalarType::Float)),
        right(torch::stable::new_empty(like, {}, ScalarType::Long)),
        predictions(torch::stable::new_empty(like, {}, ScalarType::Long)) {}

  void add_up(const OnDevice& device, const Tensor& labels, const char* op) {
    loss_totals<<<1, kTotalThreads, 0, device.stream>>>(data<float>(loss), data<int32_t>(correct), data<int64_t>(labels),
                                                        labels.numel(), out<float>(total), out<int64_t>(right),
                                                        out<int64_t>(predictions));
    check_launch(op);
  }
};

template <class T>
void rows_pass(const OnDevice& device, const Tensor& logits, const Tensor& bias, const Tensor& labels, RowResults& results,
               int64_t at, int64_t rows, LossOptions options, int64_t vocab, bool gradient, const char* op) {
  LossRows<T> a{out<T>(logits), data<T>(bias), data<int64_t>(labels) + at, out<float>(results.loss) + at,
                out<float>(results.lse) + at, out<int32_t>(results.correct) + at, options, vocab, logits.size(1),
                gradient, false};
  a.whole = whole_groups(a.stride, a.logits, a.bias);
  mlm_loss_rows<T, kThreads><<<static_cast<unsigned>(rows), kThreads, 0, device.stream>>>(a);
  check_launch(op);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mlm_loss(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& labels, int64_t vocab,
    double smoothing, double z_loss, bool need_grad) {
  constexpr const char* op = "mlm_loss";
  check_cuda(op, "hidden", hidden);
  check_mlm_loss(op, hidden, weight, bias, labels, vocab);
  const LossOptions options = check_options(op, smoothing, z_loss);
  const OnDevice device(hidden);
  const int64_t count = hidden.size(0), width = hidden.size(1), entries = weight.size(0);
  const Tensor hc = dense(hidden), wc = dense(weight), bc = dense(bias), lc = dense(labels);
  const Tensor decoder = torch::stable::transpose(wc, 0, 1);
  Tensor dhidden = torch::stable::new_empty(hidden, {need_grad ? count : 0, width});
  Tensor dweight = torch::stable::new_empty(weight, {need_grad ? entries : 0, width});
  Tensor dbias = torch::stable::new_empty(bias, {need_grad ? entries : 0});
  if (need_grad && !count) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }
  RowResults results(hc, count);
  const int64_t chunk = count < kChunk ? count : kChunk, chunks = chunk ? ceil_div(count, chunk) : 0;
  const Tensor buffer = torch::stable::new_empty(hc, {chunk, entries});
  // Column sums of the gradient: a line of what earlier chunks gave, then those of this chunk.
  const Tensor partial = torch::stable::new_zeros(hc, {need_grad ? 1 + kLines : 0, entries}, ScalarType::Float);
  with_type(hc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t at = c * chunk, rows = count - at < chunk ? count - at : chunk;
      Tensor logits = torch::stable::narrow(const_cast<Tensor&>(buffer), 0, 0, rows);
      Tensor input = torch::stable::narrow(const_cast<Tensor&>(hc), 0, at, rows);
      product(logits, input, decoder);
      rows_pass<T>(device, logits, bc, lc, results, at, rows, options, vocab, need_grad, op);
      if (!need_grad) continue;
      column_sums<T><<<column_grid(kLines, entries), kColumnThreads, 0, device.stream>>>(
          data<T>(logits), out<float>(partial) + entries, rows, entries, whole_groups(entries, data<T>(logits)));
      check_launch(op);
      reduce_lines_on(device.stream, data<float>(partial), out<float>(partial), 1 + kLines, entries, entries, op);
      product(torch::stable::narrow(dhidden, 0, at, rows), logits, wc);
      const Tensor transposed = torch::stable::transpose(logits, 0, 1);
      if (c == 0) product(dweight, transposed, input);
      else add_product(dweight, transposed, input);
    }
    if (need_grad && count)
      reduce_lines_on(device.stream, data<float>(partial), out<T>(dbias), 1, entries, entries, op);
  });
  results.add_up(device, lc, op);
  return {results.total, results.right, results.predictions, results.lse, dhidden, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlm_loss_of_logits(const Tensor& logits, const Tensor& labels,
                                                                      double smoothing, double z_loss, bool need_grad) {
  constexpr const char* op = "mlm_loss_of_logits";
  check_cuda(op, "logits", logits);
  check_loss_of_logits(op, logits, labels);
  const LossOptions options = check_options(op, smoothing, z_loss);
  const OnDevice device(logits);
  Tensor lc = dense(labels), work = need_grad ? torch::stable::clone(dense(logits)) : dense(logits);
  const int64_t rows = work.size(0), vocab = work.size(1);
  const Tensor bias = torch::stable::new_zeros(work, {vocab});
  RowResults results(work, rows);
  if (rows)
    with_type(work.scalar_type(), [&](auto type) {
      rows_pass<decltype(type)>(device, work, bias, lc, results, 0, rows, options, vocab, need_grad, op);
    });
  results.add_up(device, lc, op);
  return {results.total, results.right, results.predictions, results.lse,
          need_grad ? work : torch::stable::new_empty(work, {0, vocab})};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("mlm_loss", TORCH_BOX(&mlm_loss));
  m.impl("mlm_loss_of_logits", TORCH_BOX(&mlm_loss_of_logits));
}

}  // namespace megabert
