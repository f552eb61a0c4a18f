// rotate on the CPU.

#include "common/cpu.h"
#include "rotate/operation.h"

namespace megabert {

template <class T>
static void run(const Cpu&, const T* x, const float* cos, const float* sin, float sign, T* y, int64_t rows,
                int64_t heads, int64_t half) {
  torch::stable::parallel_for(0, rows, 1 + 8192 / (heads * half), [&](int64_t begin, int64_t end) {
    kernels<T>().rotate(x, cos, sin, sign, y, heads, half, begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("rotate", TORCH_BOX(&rotate<Cpu>)); }

}  // namespace megabert
