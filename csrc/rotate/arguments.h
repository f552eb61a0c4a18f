// Checks of the arguments of rotate, on any device.
#pragma once

#include "common/check.h"

namespace megabert {

struct Turn {
  int64_t rows, heads, half;  // tokens, heads of queries, pairs of columns in a head
};

inline Turn check_rotate(const char* op, const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads) {
  check_compute_dtype(op, "qkv", qkv);
  STD_TORCH_CHECK(qkv.dim() >= 1, op, ": qkv has no dimension");
  const int64_t columns = qkv.size(qkv.dim() - 1);
  STD_TORCH_CHECK(heads > 0 && columns > 0 && columns % (6 * heads) == 0, op, ": qkv has ", columns,
                  " columns, not a multiple of 6 x ", heads, " heads");
  const Turn turn{qkv.numel() / columns, heads, columns / (6 * heads)};
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"cos", cos}, {"sin", sin}}) {
    check_device(op, name, t, qkv);
    check_dtype(op, name, t, ScalarType::Float);
    STD_TORCH_CHECK(t.numel() == turn.rows * turn.half, op, ": ", name, " has ", t.numel(), " elements, not ", turn.half,
                    " a token");
  }
  return turn;
}

}  // namespace megabert
