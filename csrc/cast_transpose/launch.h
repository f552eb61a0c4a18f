// What every launch of a kernel that writes FP8 tiles needs.
#pragma once

#include "cast_transpose/arguments.h"
#include "cast_transpose/kernel.cuh"
#include "common/cuda.h"

namespace megabert {

static_assert(kTile == kCastRows);

inline dim3 cast_grid(const Casts& a) {
  return dim3(static_cast<unsigned>(ceil_div(a.rows, kTile)), static_cast<unsigned>(ceil_div(a.width, kTile)));
}

// amax: as many as cast_grid has blocks; `pointers`: what the kernel reads in groups of 8 columns.
template <class... P>
Codes codes_of(Casts& a, const Tensor& scale, const Tensor& amax, const P*... pointers) {
  uint8_t *values = codes(a.values), *transposed = codes(a.transposed);
  return {data<float>(scale), values, transposed, out<float>(amax), a.rows, a.width,
          whole_groups(a.width, values, pointers...), a.rows % 4 == 0};
}

}  // namespace megabert
