// Dropout over the last dimension's rows on the GPU.

#include "common/cuda.h"
#include "common/rows.h"
#include "dropout/kernel.cuh"

namespace megabert {
namespace {

Tensor dropout(const Tensor& x, const Tensor& seed, int64_t stream, double p) {
  constexpr const char* op = "dropout";
  check_cuda(op, "x", x);
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  const Dropout mask = check_dropout(op, seed, stream, p, lines_of(x), x);
  const OnDevice device(x);
  const Tensor xc = dense(x);
  Tensor y = torch::stable::new_empty(xc, shape_of(xc));
  if (!xc.numel()) return y;
  const int64_t width = xc.size(xc.dim() - 1), rows = xc.numel() / width;
  with_type(xc.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* px = data<T>(xc);
    T* py = out<T>(y);
    with_bool(whole_groups(width, px, py), [&](auto whole) {
      const auto kernel = dropout_forward<T, decltype(whole)::value>;
      kernel<<<resident_column_grid(kernel, rows, width), kColumnThreads, 0, device.stream>>>(
          px, py, mask, seed.const_data_ptr<int64_t>(), rows, width);
      check_launch(op);
    });
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) { m.impl("dropout", TORCH_BOX(&dropout)); }

}  // namespace megabert
