// The chunks of mlm_loss, on either device: one product makes the logits of some predictions, `rows` turns them into losses
// and, in place, into their gradient, and the two products of backward use that up. One chunk is all the memory it takes.
#pragma once

#include "common/products.h"

namespace megabert {

// Each chunk adds its part of the weight gradient to a sum in the tensors' type, and so rounds it once.
constexpr int64_t kMostChunks = 16;

// Predictions of a chunk where `size` are wanted: never more than there are, and more where there would be too many chunks.
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
