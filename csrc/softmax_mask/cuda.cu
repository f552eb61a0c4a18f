// softmax_mask and its gradient on CUDA.

#include "common/cuda.h"
#include "common/rows.h"
#include "softmax_mask/kernel.cuh"
#include "softmax_mask/operation.h"

namespace megabert {

static void check_keys(const Cuda& device, const SoftmaxMask& a, int64_t) {
  STD_TORCH_CHECK(a.keys <= kMaxColumns, device.op, ": scores has ", a.keys, " keys; on CUDA at most ", kMaxColumns);
}

template <class T>
static void run_forward(const Cuda& device, const SoftmaxMask& a, const T* scores, T* result, T* probs,
                        const Dropout& dropout, const Tensor& seed, int64_t rows) {
  with_row_shape(a.keys, [&](auto shape) {
    using S = decltype(shape);
    softmax_mask_forward<T, S::threads, S::groups>
        <<<static_cast<unsigned>(ceil_div(rows, S::rows)), dim3(S::threads, S::rows), 0, device.stream>>>(
            a, scores, result, probs, dropout, data<int64_t>(seed), rows, whole_groups(a.keys, scores, result, probs));
    check_launch(device.op);
  });
}

template <class T>
static void run_backward(const Cuda& device, const SoftmaxMask& a, const T* grad, const T* probs, T* dscores,
                         const Dropout& dropout, const Tensor& seed, int64_t rows) {
  with_row_shape(a.keys, [&](auto shape) {
    using S = decltype(shape);
    softmax_mask_gradient<T, S::threads, S::groups>
        <<<static_cast<unsigned>(ceil_div(rows, S::rows)), dim3(S::threads, S::rows), 0, device.stream>>>(
            grad, probs, dscores, a.keys, a.scale, dropout, data<int64_t>(seed), rows,
            whole_groups(a.keys, grad, probs, dscores));
    check_launch(device.op);
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) {
  m.impl("softmax_mask", TORCH_BOX(&softmax_mask<Cuda>));
  m.impl("softmax_mask_backward", TORCH_BOX(&softmax_mask_backward<Cuda>));
}

}  // namespace megabert
