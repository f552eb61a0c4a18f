// bias_gelu, bias_geglu and their gradients on CUDA.

#include "common/cuda.h"

#include "bias_gelu/kernel.cuh"
#include "bias_gelu/operation.h"
#include "common/rows.h"

namespace megabert {

template <class T, bool Gate>
static void run_forward(const Cuda& device, std::bool_constant<Gate>, const T* x, const T* bias, T* y, int64_t rows,
                        int64_t width) {
  with_bool(whole_groups(width, x, bias, y), [&](auto whole) {
    const auto kernel = activation_forward<T, Gate, decltype(whole)::value>;
    kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(x, bias, y, rows, width);
    check_launch(device.op);
  });
}

template <class T, bool Gate>
static void run_backward(const Cuda& device, std::bool_constant<Gate>, const T* grad, const T* x, const T* bias, T* dx,
                         const Tensor& dbias, int64_t rows, int64_t width) {
  with_bool(whole_groups(width, grad, x, bias, dx), [&](auto whole) {
    const auto kernel = activation_gradient<T, Gate, decltype(whole)::value>;
    const dim3 grid = resident_column_grid(kernel, rows, width);
    const Tensor partial = torch::stable::new_empty(dbias, {grid.x, dbias.numel()}, ScalarType::Float);
    kernel<<<grid, kColumnThreads, 0, device.stream>>>(grad, x, bias, dx, out<float>(partial), rows, width);
    check_launch(device.op);
    launch_reduce(device, data<float>(partial), LineSums<T, 1>{{out<T>(dbias)}}, grid.x, dbias.numel());
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("bias_gelu", TORCH_BOX((&activate<Cuda, false>)));
  m.impl("bias_gelu_backward", TORCH_BOX((&gradient<Cuda, false>)));
  m.impl("bias_geglu", TORCH_BOX((&activate<Cuda, true>)));
  m.impl("bias_geglu_backward", TORCH_BOX((&gradient<Cuda, true>)));
}

}  // namespace megabert
