// Queries and keys rotated by their tokens' angles; `back`: by the negative angles, as in the gradient.
#pragma once

#include "common/check.h"

namespace megabert {

template <class Device>
Tensor rotate(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads, bool back) {
  const Device device("rotate", "qkv", qkv);
  const char* op = device.op;
  check_compute_dtype(op, "qkv", qkv);
  STD_TORCH_CHECK(qkv.dim() >= 1, op, ": qkv has no dimension");
  const int64_t columns = qkv.size(qkv.dim() - 1);
  STD_TORCH_CHECK(heads > 0 && columns > 0 && columns % (6 * heads) == 0, op, ": qkv has ", columns,
                  " columns, not a multiple of 6 x ", heads, " heads");
  const int64_t rows = qkv.numel() / columns, half = columns / (6 * heads);  // tokens, pairs of columns in a head
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"cos", cos}, {"sin", sin}}) {
    check_dtype(op, name, t, qkv, ScalarType::Float);
    STD_TORCH_CHECK(t.numel() == rows * half, op, ": ", name, " has ", t.numel(), " elements, not ", half, " a token");
  }
  const Tensor xc = dense(qkv), cc = dense(cos), sc = dense(sin), y = torch::stable::empty_like(xc);
  if (!rows) return y;
  Device::with_type(xc, [&](auto type) {
    using T = decltype(type);
    run(device, data<T>(xc), data<float>(cc), data<float>(sc), back ? -1.0f : 1.0f, out<T>(y), rows, heads, half);
  });
  return y;
}

}  // namespace megabert
