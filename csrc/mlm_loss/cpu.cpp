// Decoder and masked-LM loss together: a chunk of logits is made by one product, turned into loss and gradient in place,
// and used up by the two products of backward, so that one chunk is all the memory it takes. The gradients are those of
// the loss sum; backward only scales them.

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cmath>

#include "common/check.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

constexpr int64_t kChunk = 512;  // predictions
constexpr const char* kOp = "mlm_loss";

void product(const Tensor& out, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}
void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlm_loss(const Tensor& hidden, const Tensor& weight,
                                                            const Tensor& bias, const Tensor& labels, int64_t vocab,
                                                            bool need_grad) {
  check_cpu(kOp, "hidden", hidden);
  check_compute_dtype(kOp, "hidden", hidden);
  STD_TORCH_CHECK(hidden.dim() == 2, kOp, ": hidden has ", hidden.dim(), " dimensions, not 2");
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"weight", weight}, {"bias", bias}}) {
    check_cpu(kOp, name, t);
    check_dtype(kOp, name, t, hidden.scalar_type());
  }
  STD_TORCH_CHECK(weight.dim() == 2, kOp, ": weight has ", weight.dim(), " dimensions, not 2");
  const int64_t count = hidden.size(0), width = hidden.size(1), entries = weight.size(0);
  check_shape(kOp, "weight", weight, {entries, width});
  check_shape(kOp, "bias", bias, {entries});
  check_cpu(kOp, "labels", labels);
  check_dtype(kOp, "labels", labels, ScalarType::Long);
  check_shape(kOp, "labels", labels, {count});
  STD_TORCH_CHECK(0 < vocab && vocab <= entries, kOp, ": vocab_size is ", vocab, ", not in [1, ", entries, "]");
  const Tensor lc = dense(labels), bc = dense(bias);
  const int64_t* label = lc.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    STD_TORCH_CHECK(label[i] == -100 || (label[i] >= 0 && label[i] < vocab), kOp, ": labels[", i, "] is ", label[i],
                    ", neither -100 nor in [0, ", vocab, ")");

  Tensor loss = torch::stable::new_empty(hidden, {}, ScalarType::Float);
  Tensor correct = torch::stable::new_empty(hidden, {}, ScalarType::Long);
  Tensor dhidden = torch::stable::new_empty(hidden, {need_grad ? count : 0, width});
  Tensor dweight = torch::stable::new_empty(weight, {need_grad ? entries : 0, width});
  Tensor dbias = torch::stable::new_empty(bias, {need_grad ? entries : 0});
  if (need_grad && count == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }

  const int64_t chunk = count < kChunk ? count : kChunk;
  Tensor buffer = torch::stable::new_empty(hidden, {chunk, entries});
  Tensor losses = torch::stable::new_empty(hidden, {count}, ScalarType::Float);
  Tensor corrects = torch::stable::new_empty(hidden, {count}, ScalarType::Int);
  float* row_loss = static_cast<float*>(losses.mutable_data_ptr());
  int32_t* row_correct = static_cast<int32_t*>(corrects.mutable_data_ptr());
  const int64_t share = 32;       // rows that one thread takes of a chunk
  const int64_t shares = (count + share - 1) / share;
  Tensor partial = torch::stable::new_empty(hidden, {need_grad ? shares : 0, entries}, ScalarType::Float);
  float* sums = static_cast<float*>(partial.mutable_data_ptr());
  Tensor hc = dense(hidden), wc = dense(weight);
  Tensor decoder = torch::stable::transpose(wc, 0, 1);

  const auto run = [&](auto type) {
    using T = decltype(type);
    const Kernels<T>& kernel = kernels<T>();
    T* logits = static_cast<T*>(buffer.mutable_data_ptr());
    const T* pb = static_cast<const T*>(bc.const_data_ptr());
    for (int64_t at = 0; at < count; at += chunk) {
      const int64_t rows = count - at < chunk ? count - at : chunk;
      Tensor block = torch::stable::narrow(buffer, 0, 0, rows), input = torch::stable::narrow(hc, 0, at, rows);
      product(block, input, decoder);
      torch::stable::parallel_for(0, (rows + share - 1) / share, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          const int64_t first = s * share, last = first + share < rows ? first + share : rows;
          kernel.mlm_loss(logits, pb, label + at, row_loss + at, row_correct + at,
                                need_grad ? sums + (at / share + s) * entries : nullptr, vocab, entries, first, last);
        }
      });
      if (!need_grad) continue;
      product(torch::stable::narrow(dhidden, 0, at, rows), block, wc);
      Tensor transposed = torch::stable::transpose(block, 0, 1);
      if (at == 0) product(dweight, transposed, input);
      else add_product(dweight, transposed, input);
    }
    if (need_grad && count) {
      T* out = static_cast<T*>(dbias.mutable_data_ptr());
      torch::stable::parallel_for(0, entries / 64, 16, [&](int64_t begin, int64_t end) {
        kernel.reduce_blocks(sums, out, shares, entries, begin * 64, end * 64);
      });
      kernel.reduce_blocks(sums, out, shares, entries, entries / 64 * 64, entries);
    }
  };
  if (hidden.scalar_type() == ScalarType::BFloat16) run(bf16{});
  else run(float{});

  double sum = 0;
  int64_t right = 0;
  for (int64_t i = 0; i < count; ++i) sum += row_loss[i], right += row_correct[i];
  *static_cast<float*>(loss.mutable_data_ptr()) = static_cast<float>(sum);
  *static_cast<int64_t*>(correct.mutable_data_ptr()) = right;
  return {loss, correct, dhidden, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("mlm_loss", TORCH_BOX(&mlm_loss)); }

}  // namespace megabert
