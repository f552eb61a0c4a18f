// A matrix in FP8, row by row and column by column, on the GPU.

#include "cast_transpose/launch.h"

namespace megabert {
namespace {

std::tuple<Tensor, Tensor, Tensor> cast_transpose(const Tensor& given, const Tensor& scale, bool e5m2, bool straight,
                                                  bool turned) {
  constexpr const char* op = "cast_transpose";
  check_cuda(op, "x", given);
  const OnDevice device(given);
  Casts a(op, given, scale, e5m2, straight, turned);
  const dim3 grid = cast_grid(a);
  const Tensor amax = torch::stable::new_empty(a.x, {static_cast<int64_t>(grid.x) * grid.y}, ScalarType::Float);
  if (!a.x.numel()) return {a.values, a.transposed, amax};
  with_type(a.x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* x = data<T>(a.x);
    const auto launch = [&](auto format) {
      cast_transpose_tile<T, decltype(format)><<<grid, kCastThreads, 0, device.stream>>>(x, codes_of(a, scale, amax, x));
      check_launch(op);
    };
    if (e5m2) launch(E5M2{});
    else launch(E4M3{});
  });
  return {a.values, a.transposed, amax};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(megabert, CUDA, m) { m.impl("cast_transpose", TORCH_BOX(&cast_transpose)); }

}  // namespace megabert
