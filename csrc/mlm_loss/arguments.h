// Checks of the arguments of mlm_loss, and its chunks, on any device. Labels are data, which only the CPU reads here.
//
// One product computes the logits of a chunk of predictions, `rows` computes their losses and, in place, their gradient, which the two
// products of backward use. The memory is that of one chunk.
#pragma once

#include "common/check.h"
#include "common/products.h"
#include "mlm_loss/label.h"

namespace megabert {

inline void check_mlm_loss(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& bias,
                           const Tensor& labels, int64_t vocab) {
  check_compute_dtype(op, "hidden", hidden);
  STD_TORCH_CHECK(hidden.dim() == 2, op, ": hidden has ", hidden.dim(), " dimensions, not 2");
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dimensions, not 2");
  const int64_t entries = weight.size(0);
  check_tensor(op, "weight", weight, hidden, hidden.scalar_type(), {entries, hidden.size(1)});
  check_tensor(op, "bias", bias, hidden, hidden.scalar_type(), {entries});
  check_tensor(op, "labels", labels, hidden, ScalarType::Long, {hidden.size(0)});
  STD_TORCH_CHECK(0 < vocab && vocab <= entries, op, ": vocab_size is ", vocab, ", not in [1, ", entries, "]");
}

// Each chunk adds its part of the weight gradient to a sum in the tensors' type, with one rounding.
constexpr int64_t kMostChunks = 16;

// Predictions of a chunk, `size` if possible: not more than there are, and more if there would be too many chunks.
inline int64_t chunk_rows(int64_t count, int64_t size) {
  const int64_t least = (count + kMostChunks - 1) / kMostChunks, rows = size < least ? least : size;
  return rows < count ? rows : count;
}

// hidden [N, D] and weight [V', D] are contiguous; dhidden and dweight, like them, are written where `gradient` is true.
// rows(logits, at) is called for each chunk [up to `chunk`, V'], which begins at prediction `at`.
template <class Rows>
void for_each_chunk(const Tensor& hidden, const Tensor& weight, int64_t chunk, const Tensor& dhidden,
                    const Tensor& dweight, bool gradient, Rows rows) {
  const int64_t count = hidden.size(0);
  const auto part = [](Tensor t, int64_t at, int64_t length) { return torch::stable::narrow(t, 0, at, length); };
  const Tensor buffer = torch::stable::new_empty(hidden, {chunk, weight.size(0)});
  const Tensor decoder = torch::stable::transpose(weight, 0, 1);
  for (int64_t at = 0; at < count; at += chunk) {
    const int64_t length = count - at < chunk ? count - at : chunk;
    const Tensor logits = part(buffer, 0, length), input = part(hidden, at, length);
    product(logits, input, decoder);
    rows(logits, at);
    if (!gradient) continue;
    product(part(dhidden, at, length), logits, weight);
    const Tensor transposed = torch::stable::transpose(logits, 0, 1);
    if (at == 0) product(dweight, transposed, input);
    else add_product(dweight, transposed, input);
  }
}

}  // namespace megabert
