// dropout, dropout_add_layer_norm and its gradient on the CPU.

#include "common/cpu.h"
#include "dropout_add_layer_norm/operation.h"

namespace megabert {

template <class T>
static void run_dropout(const Cpu&, const T* x, T* y, const Dropout& dropout, const Tensor&, int64_t rows,
                        int64_t width) {
  torch::stable::parallel_for(0, rows, 1 + 32768 / (width + 1), [&](int64_t begin, int64_t end) {
    kernels<T>().dropout(x, y, width, dropout, begin, end);
  });
}

static void check_width(const Cpu&, int64_t) {}

template <class T>
static void run_forward(const Cpu&, const LayerNormRows<T>& a, const Dropout& dropout, const Tensor&) {
  torch::stable::parallel_for(0, a.rows, 1 + 32768 / a.width, [&](int64_t begin, int64_t end) {
    kernels<T>().dropout_add_layer_norm(a, dropout, begin, end);
  });
}

template <class T>
static void run_backward(const Cpu&, const LayerNormGradientRows<T>& a, const Dropout& dropout, const Tensor& seed,
                         const std::array<T*, 3>& results) {
  sum_blocks(results, seed, a.rows, a.width, [&](float* sums, int64_t begin, int64_t end) {
    kernels<T>().dropout_add_layer_norm_backward(a, dropout, sums, begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("dropout", TORCH_BOX(&dropout<Cpu>));
  m.impl("dropout_add_layer_norm", TORCH_BOX(&layer_norm<Cpu>));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&layer_norm_backward<Cpu>));
}

}  // namespace megabert
