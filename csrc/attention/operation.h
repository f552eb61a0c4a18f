// Multi-head attention over packed rows, and its gradient.
#pragma once

#include <cmath>
#include <optional>

#include "attention/arguments.h"
#include "common/check.h"

namespace megabert {

struct AttentionShape {
  int64_t batch, tokens, heads, size;
};

inline AttentionShape check_attention(const char* op, const Tensor& qkv, const Tensor& start, const Tensor& end,
                                      int64_t heads) {
  check_compute_dtype(op, "qkv", qkv);
  check_dimensions(op, "qkv", qkv, 3);
  STD_TORCH_CHECK(heads > 0 && qkv.size(2) > 0 && qkv.size(2) % (3 * heads) == 0, op, ": qkv has size ", qkv.size(2),
                  " in dimension 2, not a multiple of 3 x ", heads, " heads");
  const AttentionShape shape{qkv.size(0), qkv.size(1), heads, qkv.size(2) / (3 * heads)};
  check_tensor(op, "key_start", start, qkv, ScalarType::Int, {shape.batch, shape.tokens});
  check_tensor(op, "key_end", end, qkv, ScalarType::Int, {shape.batch, shape.tokens});
  return shape;
}

template <class Device, class T, class Int = typename Device::Int>
AttentionRows<T, Int> attention_rows(const AttentionShape& shape, const Tensor& qkv, const Tensor& start,
                                     const Tensor& end, const Tensor& context, const Tensor& lse) {
  AttentionRows<T, Int> a{};
  a.qkv = data<T>(qkv), a.start = data<int32_t>(start), a.end = data<int32_t>(end);
  a.context = const_cast<T*>(data<T>(context)), a.lse = const_cast<float*>(data<float>(lse));
  a.tokens = static_cast<Int>(shape.tokens), a.heads = static_cast<Int>(shape.heads);
  a.size = static_cast<Int>(shape.size);
  a.root = 1.0f / std::sqrt(static_cast<float>(shape.size));
  return a;
}

template <class Device>
std::tuple<Tensor, Tensor> attention(const Tensor& qkv, const std::optional<Tensor>& bias, const Tensor& key_start,
                                     const Tensor& key_end, const Tensor& seed, int64_t stream, int64_t heads,
                                     double p) {
  const Device device("attention", "qkv", qkv);
  const AttentionShape shape = check_attention(device.op, qkv, key_start, key_end, heads);
  if (bias) check_columns(device.op, "bias", *bias, qkv);
  const Dropout dropout = check_dropout(device.op, seed, stream, p, shape.heads * shape.tokens, qkv);
  const Tensor qc = aligned(device, "qkv", qkv), start = dense(key_start), end = dense(key_end);
  check_limits(device, qc, start, end, shape);
  const Tensor context = torch::stable::new_empty(qc, {shape.batch, shape.tokens, shape.heads * shape.size}),
               lse = torch::stable::new_empty(qc, {shape.batch, shape.heads, shape.tokens}, ScalarType::Float);
  if (!lse.numel()) return {context, lse};
  Device::with_type(qc, [&](auto type) {
    const auto a = attention_rows<Device, decltype(type)>(shape, qc, start, end, context, lse);
    run_forward(device, a, dropout, seed, shape.batch);
  });
  return {context, lse};
}

// -> dqkv, and its sums over all tokens
template <class Device>
std::tuple<Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& qkv, const Tensor& context,
                                              const Tensor& lse, const Tensor& key_start, const Tensor& key_end,
                                              const Tensor& seed, int64_t stream, int64_t heads, double p) {
  const Device device("attention_backward", "qkv", qkv);
  const char* op = device.op;
  const AttentionShape shape = check_attention(op, qkv, key_start, key_end, heads);
  const int64_t width = 3 * shape.heads * shape.size;
  check_tensor(op, "grad", grad, qkv, qkv.scalar_type(), {shape.batch, shape.tokens, width / 3});
  check_tensor(op, "context", context, qkv, qkv.scalar_type(), {shape.batch, shape.tokens, width / 3});
  check_tensor(op, "lse", lse, qkv, ScalarType::Float, {shape.batch, shape.heads, shape.tokens});
  const Dropout dropout = check_dropout(op, seed, stream, p, shape.heads * shape.tokens, qkv);
  const Tensor gc = aligned(device, "grad", grad), qc = aligned(device, "qkv", qkv), lc = dense(lse),
               cc = aligned(device, "context", context), start = dense(key_start), end = dense(key_end);
  check_limits(device, qc, start, end, shape);
  Tensor dqkv = torch::stable::empty_like(qc), dbias = torch::stable::new_empty(qc, {width});
  if (!lc.numel()) {
    torch::stable::zero_(dbias);
    return {dqkv, dbias};
  }
  const Tensor sums = torch::stable::new_empty(qc, {shape.batch, width}, ScalarType::Float);
  Device::with_type(qc, [&](auto type) {
    using T = decltype(type);
    auto a = attention_rows<Device, T>(shape, qc, start, end, cc, lc);
    a.grad = data<T>(gc), a.dqkv = out<T>(dqkv), a.sums = out<float>(sums);
    run_backward(device, a, dropout, seed, shape.batch, dbias);
  });
  return {dqkv, dbias};
}

}  // namespace megabert
