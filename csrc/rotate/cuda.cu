// rotate on CUDA.

#include "common/cuda.h"
#include "common/rows.h"
#include "rotate/kernel.cuh"
#include "rotate/operation.h"

namespace megabert {

template <class T>
static void run(const Cuda& device, const T* x, const float* cos, const float* sin, float sign, T* y, int64_t rows,
                int64_t heads, int64_t half) {
  with_bool(whole_groups(half, x, y, cos, sin), [&](auto whole) {
    const auto kernel = rotate_heads<T, decltype(whole)::value>;
    const int64_t tasks = 3 * heads * ceil_div(half, kGroup);
    kernel<<<resident_column_grid(kernel, rows, tasks * kGroup), kColumnThreads, 0, device.stream>>>(
        x, cos, sin, sign, y, rows, heads, half);
    check_launch(device.op);
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) { m.impl("rotate", TORCH_BOX(&rotate<Cuda>)); }

}  // namespace megabert
