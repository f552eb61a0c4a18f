// The arguments of attention, checked, on whichever device they are.
#pragma once

#include <optional>

#include "common/check.h"

namespace megabert {

struct AttentionShape {
  int64_t batch, tokens, heads, size;
};

inline AttentionShape check_attention(const char* op, const Tensor& qkv, const std::optional<Tensor>& bias,
                                      const Tensor& start, const Tensor& end, int64_t heads) {
  check_compute_dtype(op, "qkv", qkv);
  STD_TORCH_CHECK(qkv.dim() == 3, op, ": qkv has ", qkv.dim(), " dimensions, not 3");
  STD_TORCH_CHECK(heads > 0 && qkv.size(2) > 0 && qkv.size(2) % (3 * heads) == 0, op, ": qkv has size ", qkv.size(2),
                  " in dimension 2, not a multiple of 3 x ", heads, " heads");
  if (bias) check_columns(op, "bias", *bias, qkv);
  const AttentionShape shape{qkv.size(0), qkv.size(1), heads, qkv.size(2) / (3 * heads)};
  check_device(op, "key_start", start, qkv);
  check_device(op, "key_end", end, qkv);
  check_dtype(op, "key_start", start, ScalarType::Int);
  check_dtype(op, "key_end", end, ScalarType::Int);
  check_shape(op, "key_start", start, {shape.batch, shape.tokens});
  check_shape(op, "key_end", end, {shape.batch, shape.tokens});
  return shape;
}

inline void check_attention_backward(const char* op, const AttentionShape& shape, const Tensor& grad, const Tensor& qkv,
                                     const Tensor& context, const Tensor& lse) {
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"grad", grad}, {"context", context}}) {
    check_device(op, name, t, qkv);
    check_dtype(op, name, t, qkv.scalar_type());
    check_shape(op, name, t, {shape.batch, shape.tokens, shape.heads * shape.size});
  }
  check_device(op, "lse", lse, qkv);
  check_dtype(op, "lse", lse, ScalarType::Float);
  check_shape(op, "lse", lse, {shape.batch, shape.heads, shape.tokens});
}

}  // namespace megabert
