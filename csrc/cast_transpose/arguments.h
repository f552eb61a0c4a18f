// The arguments of cast_transpose, checked, on whichever device they are, and its results.
#pragma once

#include <tuple>

#include "common/check.h"

namespace megabert {

constexpr int64_t kCastRows = 128;  // of a tile: what a block of the GPU, or a task of the CPU, takes at once

struct Casts {
  int64_t rows, width;
  Tensor x, values, transposed;

  Casts(const char* op, const Tensor& given, const Tensor& scale, bool e5m2, bool straight, bool turned)
      : rows(given.dim() == 2 ? given.size(0) : 0), width(given.dim() == 2 ? given.size(1) : 0), x(dense(given)) {
    check_compute_dtype(op, "x", given);
    STD_TORCH_CHECK(given.dim() == 2, op, ": x has ", given.dim(), " dimensions, not 2");
    check_device(op, "scale", scale, given);
    check_dtype(op, "scale", scale, ScalarType::Float);
    STD_TORCH_CHECK(scale.numel() == 1, op, ": scale has ", scale.numel(), " elements, not 1");
    const ScalarType type = e5m2 ? ScalarType::Float8_e5m2 : ScalarType::Float8_e4m3fn;
    values = torch::stable::new_empty(x, straight ? std::vector<int64_t>{rows, width} : std::vector<int64_t>{0}, type);
    transposed = torch::stable::new_empty(x, turned ? std::vector<int64_t>{width, rows} : std::vector<int64_t>{0}, type);
  }
};

std::tuple<Tensor, Tensor, Tensor> cast_transpose_on_cpu(const Tensor& x, const Tensor& scale, bool e5m2, bool straight,
                                                         bool turned);

// The bytes of a result, null where it was not wanted.
inline uint8_t* codes(Tensor& t) { return t.numel() ? static_cast<uint8_t*>(t.mutable_data_ptr()) : nullptr; }

}  // namespace megabert
