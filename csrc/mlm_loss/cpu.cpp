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

// What each row yields, and its sums.
struct RowResults {
  Tensor loss, lse, correct;
  int64_t count;

  RowResults(const Tensor& like, int64_t count)
      : loss(torch::stable::new_empty(like, {count}, ScalarType::Float)),
        lse(torch::stable::new_empty(like, {count}, ScalarType::Float)),
        correct(torch::stable::new_empty(like, {count}, ScalarType::Int)),
        count(count) {}

  float* losses() { return static_cast<float*>(loss.mutable_data_ptr()); }
  float* log_sums() { return static_cast<float*>(lse.mutable_data_ptr()); }
  int32_t* corrects() { return static_cast<int32_t*>(correct.mutable_data_ptr()); }

  std::tuple<Tensor, Tensor, Tensor> totals(const int64_t* label) {
    double sum = 0;
    int64_t hit_count = 0, predictions = 0;
    for (int64_t i = 0; i < count; ++i) {
      sum += losses()[i], hit_count += corrects()[i], predictions += label[i] != kIgnore;
    }
    Tensor total = torch::stable::new_empty(loss, {}), hits = torch::stable::new_empty(loss, {}, ScalarType::Long),
           all = torch::stable::new_empty(loss, {}, ScalarType::Long);
    *static_cast<float*>(total.mutable_data_ptr()) = static_cast<float>(sum);
    *static_cast<int64_t*>(hits.mutable_data_ptr()) = hit_count;
    *static_cast<int64_t*>(all.mutable_data_ptr()) = predictions;
    return {total, hits, all};
  }
};

constexpr int64_t kShare = 32;  // rows that one thread takes at a time

template <class F>
void for_each_share(int64_t rows, F f) {
  torch::stable::parallel_for(0, (rows + kShare - 1) / kShare, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) f(s, s * kShare, (s + 1) * kShare < rows ? (s + 1) * kShare : rows);
  });
}

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
  if (need_grad && count == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }

  const int64_t chunk = chunk_rows(count, kChunk), shares = (chunk + kShare - 1) / kShare;
  // Column sums of the gradient: a line of what earlier chunks gave, then one for each share of this chunk.
  Tensor partial = torch::stable::new_empty(hidden, {need_grad ? 1 + shares : 0, entries}, ScalarType::Float);
  float* sums = out<float>(partial);
  if (need_grad) memset(sums, 0, sizeof(float) * entries);
  RowResults results(hidden, count);

  with_cpu_type(hidden, [&](auto type) {
    using T = decltype(type);
    const Kernels<T>& kernel = kernels<T>();
    for_each_chunk(dense(hidden), dense(weight), chunk, dhidden, dweight, need_grad, [&](const Tensor& logits, int64_t at) {
      const int64_t rows = logits.size(0);
      for_each_share(rows, [&](int64_t s, int64_t first, int64_t last) {
        kernel.mlm_loss(out<T>(logits), data<T>(bc), label + at, results.losses() + at, results.log_sums() + at,
                        results.corrects() + at, need_grad ? sums + (1 + s) * entries : nullptr, need_grad, vocab, entries, first,
                        last);
      });
      if (!need_grad) return;
      const int64_t lines = 1 + (rows + kShare - 1) / kShare;
      torch::stable::parallel_for(0, (entries + 63) / 64, 16, [&](int64_t begin, int64_t end) {
        const int64_t last = end * 64 < entries ? end * 64 : entries;
        kernels<float>().reduce_blocks(sums, sums, lines, entries, begin * 64, last);
      });
    });
    if (need_grad && count) kernel.reduce_blocks(sums, out<T>(dbias), 1, entries, 0, entries);
  });
  const auto [loss, correct, predictions] = results.totals(label);
  return {loss, correct, predictions, results.lse, dhidden, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("mlm_loss", TORCH_BOX(&mlm_loss));
}

}  // namespace megabert
