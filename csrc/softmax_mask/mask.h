// The keys of a query, and the mask added to its scores. Both broadcast by strides of zero, so that no mask has the size of the
// scores. Plain data, for the CPU and for CUDA.
#pragma once

#include <cstdint>

namespace megabert {

enum class MaskKind : int32_t { none, allowed, added };  // bool; the scores' own type

struct SoftmaxMask {
  int64_t heads, queries, keys;
  float scale;
  const int32_t *start, *end;  // keys [start, end) of a query; null: all
  int64_t start_stride[2], end_stride[2];  // [batch, query]
  const void* mask;
  MaskKind kind;
  int64_t mask_stride[4];  // [batch, head, query, key]
};

}  // namespace megabert
