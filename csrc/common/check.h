// Nothing reaches a kernel unchecked: a wrong argument is an error that names the operation and the argument.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <vector>

#include "common/philox.h"

namespace megabert {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_shape(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(shape.size()), op, ": ", name, " has ", t.dim(),
                  " dimensions, not ", shape.size());
  int64_t d = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(t.size(d) == size, op, ": ", name, " has size ", t.size(d), " in dimension ", d, ", not ", size);
    ++d;
  }
}

inline void check_dtype(const char* op, const char* name, const Tensor& t, ScalarType want) {
  STD_TORCH_CHECK(t.scalar_type() == want, op, ": ", name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
                  ", not ", torch::headeronly::toString(want));
}

inline void check_compute_dtype(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16 || t.scalar_type() == ScalarType::Float, op, ": ", name,
                  " has dtype ", torch::headeronly::toString(t.scalar_type()), ", not BFloat16 or Float");
}

inline void check_cpu(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": ", name, " is not on the CPU");
}

inline Dropout make_dropout(const char* op, const Tensor& seed, int64_t stream, double p) {
  STD_TORCH_CHECK(p >= 0 && p < 1, op, ": p is ", p, ", not in [0, 1)");
  check_cpu(op, "seed", seed);
  check_dtype(op, "seed", seed, ScalarType::Long);
  STD_TORCH_CHECK(seed.numel() == 1, op, ": seed has ", seed.numel(), " elements, not 1");
  return Dropout::make(static_cast<uint64_t>(*seed.const_data_ptr<int64_t>()), stream, p);
}

inline std::vector<int64_t> shape_of(const Tensor& t) {
  std::vector<int64_t> shape(t.dim());
  for (int64_t d = 0; d < t.dim(); ++d) shape[d] = t.size(d);
  return shape;
}

// t itself, or a contiguous copy.
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

}  // namespace megabert
