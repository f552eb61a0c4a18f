// attention and its gradient on the CPU.

#include "attention/operation.h"
#include "common/cpu.h"

namespace megabert {

// Bounds are data: on the CPU they are checked before use.
static void check_limits(const Cpu& device, const Tensor&, const Tensor& key_start, const Tensor& key_end,
                         const AttentionShape& shape) {
  const int32_t *start = data<int32_t>(key_start), *end = data<int32_t>(key_end);
  for (int64_t i = 0; i < shape.batch * shape.tokens; ++i) {
    STD_TORCH_CHECK(start[i] >= 0 && end[i] <= shape.tokens, device.op, ": key_start, key_end of token ", i, " are ",
                    start[i], ", ", end[i], ", outside [0, ", shape.tokens, "]");
  }
}

static Tensor aligned(const Cpu&, const char*, const Tensor& t) { return dense(t); }

// Heads are shared out first: then all shares hold all rows and are equally long. With more threads than a share of the
// heads suits, rows are shared out too.
template <class T>
static void run_forward(const Cpu&, const Attention<T>& a, const Dropout& dropout, const Tensor&, int64_t batch) {
  const int64_t threads = torch::stable::get_num_threads();
  int64_t groups = a.heads < threads ? a.heads : threads;
  while (a.heads % groups) --groups;
  const int64_t size = a.heads / groups, rows = groups == threads ? batch : 1;
  torch::stable::parallel_for(0, groups * (batch / rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / groups * rows, head = i % groups * size;
      kernels<T>().attention(a, dropout, {row, row + rows, head, head + size});
    }
  });
}

template <class T>
static void run_backward(const Cpu& device, const Attention<T>& a, const Dropout& dropout, const Tensor& seed,
                         int64_t batch, const Tensor& dbias) {
  run_forward(device, a, dropout, seed, batch);  // the kernel's backward, since there are sums
  const int64_t width = dbias.numel();
  kernels<T>().reduce_blocks(a.sums, out<T>(dbias), batch, width, 0, width);
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention<Cpu>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<Cpu>));
}

}  // namespace megabert
