// Dropout over the last dimension's rows.

#include "common/check.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

Tensor dropout(const Tensor& x, const Tensor& seed, int64_t stream, double p) {
  constexpr const char* op = "dropout";
  check_cpu(op, "x", x);
  check_compute_dtype(op, "x", x);
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has no dimension");
  const Dropout mask = make_dropout(op, seed, stream, p, lines_of(x));
  const Tensor xc = dense(x);
  const int64_t width = x.size(x.dim() - 1), rows = width ? x.numel() / width : 0;
  Tensor y = torch::stable::new_empty(xc, shape_of(xc));
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Kernels<T>& kernel = kernels<T>();
    const T* input = static_cast<const T*>(xc.const_data_ptr());
    T* output = static_cast<T*>(y.mutable_data_ptr());
    torch::stable::parallel_for(0, rows, 1 + 32768 / (width + 1), [&](int64_t begin, int64_t end) {
      kernel.dropout(input, output, width, mask, begin, end);
    });
  };
  if (x.scalar_type() == ScalarType::BFloat16) run(bf16{});
  else run(float{});
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("dropout", TORCH_BOX(&dropout)); }

}  // namespace megabert
