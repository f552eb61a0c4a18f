// Checks of the arguments of softmax_mask, on any device.
#pragma once

#include <optional>

#include "common/check.h"
#include "softmax_mask/mask.h"

namespace megabert {

// Stride of a dimension of t with `size` elements, 0 if t broadcasts in it.
inline int64_t broadcast_stride(const char* op, const char* name, const Tensor& t, int64_t d, int64_t size) {
  STD_TORCH_CHECK(t.size(d) == size || t.size(d) == 1, op, ": ", name, " has size ", t.size(d), " in dimension ", d,
                  ", neither ", size, " nor 1");
  return t.size(d) == 1 ? 0 : t.stride(d);
}

inline void check_bound(const char* op, const char* name, const Tensor& t, const Tensor& scores, int64_t (&stride)[2]) {
  check_device(op, name, t, scores);
  check_dtype(op, name, t, ScalarType::Int);
  STD_TORCH_CHECK(t.dim() == 2, op, ": ", name, " has ", t.dim(), " dimensions, not 2 (batch, query)");
  for (int d = 0; d < 2; ++d) stride[d] = broadcast_stride(op, name, t, d, scores.size(2 * d));
}

inline SoftmaxMask softmax_mask_arguments(const char* op, const Tensor& scores, const std::optional<Tensor>& start,
                                          const std::optional<Tensor>& end, const std::optional<Tensor>& mask,
                                          double scale) {
  check_compute_dtype(op, "scores", scores);
  STD_TORCH_CHECK(scores.dim() == 4, op, ": scores has ", scores.dim(), " dimensions, not 4 (batch, head, query, key)");
  SoftmaxMask a{};
  a.heads = scores.size(1), a.queries = scores.size(2), a.keys = scores.size(3);
  a.scale = static_cast<float>(scale);
  if (start) {
    check_bound(op, "key_start", *start, scores, a.start_stride);
    a.start = start->const_data_ptr<int32_t>();
  }
  if (end) {
    check_bound(op, "key_end", *end, scores, a.end_stride);
    a.end = end->const_data_ptr<int32_t>();
  }
  if (mask) {
    check_device(op, "mask", *mask, scores);
    const ScalarType type = mask->scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Bool || type == scores.scalar_type(), op, ": mask has dtype ",
                    torch::headeronly::toString(type), ", not Bool or that of scores");
    a.kind = type == ScalarType::Bool ? MaskKind::allowed : MaskKind::added;
    STD_TORCH_CHECK(mask->dim() == 4, op, ": mask has ", mask->dim(), " dimensions, not 4 (batch, head, query, key)");
    for (int64_t d = 0; d < 4; ++d) a.mask_stride[d] = broadcast_stride(op, "mask", *mask, d, scores.size(d));
    a.mask = mask->const_data_ptr();
  }
  return a;
}

inline void check_softmax_mask_backward(const char* op, const Tensor& grad, const Tensor& probs) {
  check_compute_dtype(op, "probs", probs);
  STD_TORCH_CHECK(probs.dim() == 4, op, ": probs has ", probs.dim(), " dimensions, not 4 (batch, head, query, key)");
  check_like(op, "grad", grad, "probs", probs);
}

}  // namespace megabert
