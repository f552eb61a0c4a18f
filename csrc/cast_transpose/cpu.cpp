// A matrix in FP8, row by row and column by column: the CPU's twin of the GPU's kernel, by the same rounding.

#include <cmath>

#include "cast_transpose/arguments.h"
#include "common/fp8.h"
#include "cpu/kernels.h"

namespace megabert {
namespace {

constexpr int64_t kColumns = 64;  // a tile of codes fits the first cache

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Rows [begin, end), at most kCastRows of them; the largest magnitude among them, NaN where there is one.
template <class T, class Format>
float cast_rows(const T* x, float scale, uint8_t* values, uint8_t* transposed, int64_t rows, int64_t width,
                int64_t begin, int64_t end) {
  uint8_t tile[kColumns][kCastRows];
  uint32_t largest = 0;  // magnitudes compare as their bits do, NaN above all
  for (int64_t first = 0; first < width; first += kColumns) {
    const int64_t columns = width - first < kColumns ? width - first : kColumns;
    for (int64_t r = begin; r < end; ++r) {
      uint8_t line[kColumns];
      for (int64_t j = 0; j < columns; ++j) {
        const float value = to_float(x[r * width + first + j]);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        bits &= 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
        line[j] = static_cast<uint8_t>(Format::code(value * scale));
      }
      if (values) memcpy(values + r * width + first, line, columns);
      if (transposed)
        for (int64_t j = 0; j < columns; ++j) tile[j][r - begin] = line[j];
    }
    if (transposed)
      for (int64_t j = 0; j < columns; ++j) memcpy(transposed + (first + j) * rows + begin, tile[j], end - begin);
  }
  float found;
  memcpy(&found, &largest, 4);
  return found;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cast_transpose_on_cpu(const Tensor& given, const Tensor& scale, bool e5m2,
                                                         bool straight, bool turned) {
  constexpr const char* op = "cast_transpose";
  check_cpu(op, "x", given);
  Casts a(op, given, scale, e5m2, straight, turned);
  const int64_t tasks = a.width ? (a.rows + kCastRows - 1) / kCastRows : 0;
  Tensor amax = torch::stable::new_empty(a.x, {tasks}, ScalarType::Float);
  uint8_t *values = codes(a.values), *transposed = codes(a.transposed);
  const float factor = *data<float>(scale);
  float* largest = out<float>(amax);
  const auto run = [&](auto type, auto format) {
    using T = decltype(type);
    const T* x = data<T>(a.x);
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task * kCastRows, last = first + kCastRows < a.rows ? first + kCastRows : a.rows;
        largest[task] = cast_rows<T, decltype(format)>(x, factor, values, transposed, a.rows, a.width, first, last);
      }
    });
  };
  const auto with_format = [&](auto type) {
    if (e5m2) run(type, E5M2{});
    else run(type, E4M3{});
  };
  if (a.x.scalar_type() == ScalarType::BFloat16) with_format(bf16{});
  else with_format(float{});
  return {a.values, a.transposed, amax};
}

STABLE_TORCH_LIBRARY_IMPL(megabert, CPU, m) { m.impl("cast_transpose", TORCH_BOX(&cast_transpose_on_cpu)); }

}  // namespace megabert
