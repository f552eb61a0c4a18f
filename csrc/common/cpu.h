// Operations on the CPU: kernels for the tensor's type, sums over rows.
#pragma once

#include <array>

#include "common/check.h"
#include "cpu/kernels.h"

namespace megabert {

struct Cpu : DeviceTypes<bf16, int64_t> {
  const char* op;

  Cpu(const char* op, const char* name, const Tensor& t) : op(op) { check_cpu(op, name, t); }
};

// f(sums, begin, end) writes the column sums of a block of rows, results.size() vectors of `width`. The blocks' are added in order, so
// that the results do not depend on the number of threads.
template <class T, size_t Vectors, class F>
void sum_blocks(const std::array<T*, Vectors>& results, const Tensor& like, int64_t rows, int64_t width, F f) {
  const int64_t size = rows > 64 * 64 ? (rows + 63) / 64 : 64, blocks = (rows + size - 1) / size;
  const int64_t columns = Vectors * width;
  const Tensor partial = torch::stable::new_empty(like, {blocks, columns}, ScalarType::Float);
  float* sums = out<float>(partial);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      f(sums + b * columns, b * size, (b + 1) * size < rows ? (b + 1) * size : rows);
  });
  for (T* result : results) {
    kernels<T>().reduce_blocks(sums, result, blocks, columns, 0, width);
    sums += width;
  }
}

}  // namespace megabert
