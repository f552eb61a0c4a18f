// Checks of the arguments of attention, on any device.
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
  check_tensor(op, "key_start", start, qkv, ScalarType::Int, {shape.batch, shape.tokens});
  check_tensor(op, "key_end", end, qkv, ScalarType::Int, {shape.batch, shape.tokens});
  return shape;
}

inline void check_attention_backward(const char* op, const AttentionShape& shape, const Tensor& grad, const Tensor& qkv,
                                     const Tensor& context, const Tensor& lse) {
  const int64_t width = shape.heads * shape.size;
  check_tensor(op, "grad", grad, qkv, qkv.scalar_type(), {shape.batch, shape.tokens, width});
  check_tensor(op, "context", context, qkv, qkv.scalar_type(), {shape.batch, shape.tokens, width});
  check_tensor(op, "lse", lse, qkv, ScalarType::Float, {shape.batch, shape.heads, shape.tokens});
}

}  // namespace megabert
