// bias_gelu, bias_geglu and their gradients on the CPU.

#include "bias_gelu/operation.h"
#include "common/cpu.h"

namespace megabert {

template <class T, bool Gate>
static void run_forward(const Cpu&, std::bool_constant<Gate>, const T* x, const T* bias, T* y, int64_t rows,
                        int64_t width) {
  torch::stable::parallel_for(0, rows, 1 + 32768 / (kInputs<Gate> * width + 1), [&](int64_t begin, int64_t end) {
    kernels<T>().activate[Gate](x, bias, y, width, begin, end);
  });
}

template <class T, bool Gate>
static void run_backward(const Cpu&, std::bool_constant<Gate>, const T* grad, const T* x, const T* bias, T* dx,
                         const Tensor& dbias, int64_t rows, int64_t width) {
  const std::array<T*, 1> results{out<T>(dbias)};
  sum_blocks(results, dbias, rows, kInputs<Gate> * width, [&](float* sums, int64_t begin, int64_t end) {
    kernels<T>().activate_backward[Gate](grad, x, bias, dx, sums, width, begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX((&activate<Cpu, false>)));
  m.impl("bias_gelu_backward", TORCH_BOX((&gradient<Cpu, false>)));
  m.impl("bias_geglu", TORCH_BOX((&activate<Cpu, true>)));
  m.impl("bias_geglu_backward", TORCH_BOX((&gradient<Cpu, true>)));
}

}  // namespace megabert
