// dropout, dropout_add_layer_norm and its gradient on CUDA.

#include "common/cuda.h"
#include "common/rows.h"
#include "dropout_add_layer_norm/kernel.cuh"
#include "dropout_add_layer_norm/operation.h"

namespace megabert {

template <class T>
static void run_dropout(const Cuda& device, const T* x, T* y, const Dropout& dropout, const Tensor& seed, int64_t rows,
                        int64_t width) {
  with_bool(whole_groups(width, x, y), [&](auto whole) {
    const auto kernel = dropout_forward<T, decltype(whole)::value>;
    kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(
        x, y, dropout, data<int64_t>(seed), rows, width);
    check_launch(device.op);
  });
}

static void check_width(const Cuda& device, int64_t width) {
  STD_TORCH_CHECK(width <= kMaxColumns, device.op, ": the last dimension has size ", width, "; on CUDA at most ",
                  kMaxColumns);
}

template <class T>
static void run_forward(const Cuda& device, const LayerNormRows<T>& a, const Dropout& dropout, const Tensor& seed) {
  with_bool(whole_groups(a.width, a.x, a.bias, a.residual, a.weight, a.shift, a.y, a.z), [&](auto whole) {
    with_row_shape(a.width, [&](auto shape) {
      using S = decltype(shape);
      layer_norm_forward<T, S::threads, S::groups, decltype(whole)::value>
          <<<static_cast<unsigned>(ceil_div(a.rows, S::rows)), dim3(S::threads, S::rows), 0, device.stream>>>(
              a, dropout, data<int64_t>(seed));
      check_launch(device.op);
    });
  });
}

template <class T>
static void run_backward(const Cuda& device, LayerNormGradientRows<T> a, const Dropout& dropout, const Tensor& seed,
                         const std::array<T*, 3>& results) {
  with_bool(whole_groups(a.width, a.grad, a.second, a.z, a.weight, a.dx, a.dresidual), [&](auto whole) {
    with_block_shape(a.width, [&](auto shape) {
      constexpr int threads = decltype(shape)::threads;
      const auto kernel = layer_norm_gradient<T, threads, decltype(shape)::groups, decltype(whole)::value>;
      const int64_t resident = resident_blocks(kernel, threads), columns = 3 * a.width;
      const int64_t lines = a.rows < resident ? a.rows : resident;
      const Tensor partial = torch::stable::new_empty(seed, {lines, columns}, ScalarType::Float);
      a.partial = out<float>(partial);
      kernel<<<static_cast<unsigned>(lines), threads, 0, device.stream>>>(a, dropout, data<int64_t>(seed));
      check_launch(device.op);
      launch_reduce(device, a.partial, LineSums<T, 3>{{results[0], results[1], results[2]}}, lines, a.width);
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("dropout", TORCH_BOX(&dropout<Cuda>));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&layer_norm<Cuda>));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&layer_norm_backward<Cuda>));
}

}  // namespace megabert
