// softmax_mask and its gradient on the CPU.

#include "common/cpu.h"
#include "softmax_mask/operation.h"

namespace megabert {

// Bounds are data: on the CPU they are checked before use.
static void check_bound(const Cpu& device, const char* name, const int32_t* bound, const int64_t (&stride)[2],
                        const SoftmaxMask& a, int64_t batch) {
  if (!bound) return;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t q = 0; q < a.queries; ++q) {
      const int32_t value = bound[b * stride[0] + q * stride[1]];
      STD_TORCH_CHECK(value >= 0 && value <= a.keys, device.op, ": ", name, "[", b, ", ", q, "] is ", value,
                      ", outside [0, ", a.keys, "]");
      if (!stride[1]) break;
    }
}

static void check_keys(const Cpu& device, const SoftmaxMask& a, int64_t batch) {
  check_bound(device, "key_start", a.start, a.start_stride, a, batch);
  check_bound(device, "key_end", a.end, a.end_stride, a, batch);
}

template <class T>
static void run_forward(const Cpu&, const SoftmaxMask& a, const T* scores, T* result, T* probs, const Dropout& dropout,
                        const Tensor&, int64_t rows) {
  torch::stable::parallel_for(0, rows, 1 + 65536 / (a.keys + 1), [&](int64_t begin, int64_t end) {
    kernels<T>().softmax_mask(a, scores, result, probs, dropout, begin, end);
  });
}

template <class T>
static void run_backward(const Cpu&, const SoftmaxMask& a, const T* grad, const T* probs, T* dscores,
                         const Dropout& dropout, const Tensor&, int64_t rows) {
  torch::stable::parallel_for(0, rows, 1 + 65536 / (a.keys + 1), [&](int64_t begin, int64_t end) {
    kernels<T>().softmax_mask_backward(grad, probs, dscores, a.keys, a.scale, dropout, begin, end);
  });
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("softmax_mask", TORCH_BOX(&softmax_mask<Cpu>));
  m.impl("softmax_mask_backward", TORCH_BOX(&softmax_mask_backward<Cpu>));
}

}  // namespace megabert
