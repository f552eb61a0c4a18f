// Checks of arguments before a kernel: a wrong argument is an error that names the operation and the argument.
#pragma once

#include "common/errors.h"

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

inline void check_compute_dtype(const char* op, const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(type), ", not BFloat16 or Float");
}

inline void check_cpu(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": ", name, " is not on the CPU");
}

inline void check_cuda(const char* op, const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cuda(), op, ": ", name, " is not on a CUDA device");
}

// On the device of `like`, which is known to be correct.
inline void check_device(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  if (like.is_cpu()) return check_cpu(op, name, t);
  check_cuda(op, name, t);
  STD_TORCH_CHECK(t.get_device_index() == like.get_device_index(), op, ": ", name, " is on CUDA device ",
                  t.get_device_index(), ", not on ", like.get_device_index());
}

// On the device of `like` and of this dtype.
inline void check_dtype(const char* op, const char* name, const Tensor& t, const Tensor& like, ScalarType want) {
  check_device(op, name, t, like);
  STD_TORCH_CHECK(t.scalar_type() == want, op, ": ", name, " has dtype ", torch::headeronly::toString(t.scalar_type()),
                  ", not ", torch::headeronly::toString(want));
}

inline void check_dimensions(const char* op, const char* name, const Tensor& t, int64_t want, const char* names = "") {
  STD_TORCH_CHECK(t.dim() == want, op, ": ", name, " has ", t.dim(), " dimensions, not ", want, names);
}

// On the device of `like` and of this dtype and shape.
inline void check_tensor(const char* op, const char* name, const Tensor& t, const Tensor& like, ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check_dtype(op, name, t, like, dtype);
  check_dimensions(op, name, t, static_cast<int64_t>(shape.size()));
  int64_t d = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(t.size(d) == size, op, ": ", name, " has size ", t.size(d), " in dimension ", d, ", not ", size);
    ++d;
  }
}

// Of the device, dtype and shape of `like`.
inline void check_like(const char* op, const char* name, const Tensor& t, const char* like_name, const Tensor& like) {
  check_dtype(op, name, t, like, like.scalar_type());
  bool same = t.dim() == like.dim();
  for (int64_t d = 0; same && d < t.dim(); ++d) same = t.size(d) == like.size(d);
  STD_TORCH_CHECK(same, op, ": ", name, " has another shape than ", like_name);
}

// One value for each column of x, of its device and dtype.
inline void check_columns(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  check_tensor(op, name, t, x, x.scalar_type(), {x.size(x.dim() - 1)});
}

// Dropout with its seed where that is on the CPU; on CUDA kernels read it. The seed has one element, or two, of which the second is the
// place of the batch in a larger one. `lines`: mask rows of a row of the batch.
inline Dropout check_dropout(const char* op, const Tensor& seed, int64_t stream, double p, int64_t lines,
                             const Tensor& like) {
  // a share that rounds to 65536 of 65536 would keep nothing
  STD_TORCH_CHECK(p >= 0 && p * 65536.0 + 0.5 < 65536.0, op, ": p is ", p, ", not in [0, 1)");
  check_dtype(op, "seed", seed, like, ScalarType::Long);
  STD_TORCH_CHECK(seed.numel() == 1 || seed.numel() == 2, op, ": seed has ", seed.numel(), " elements, not 1 or 2");
  STD_TORCH_CHECK(seed.is_contiguous(), op, ": seed is not contiguous");
  Dropout dropout = Dropout::make(0, stream, p);
  if (seed.numel() == 2) dropout.lines = lines;
  if (seed.is_cpu()) dropout.read(seed.const_data_ptr<int64_t>());
  return dropout;
}

// Lines of the last dimension in one entry of the first: of a batch [rows, ..., width].
inline int64_t lines_of(const Tensor& x) {
  int64_t lines = 1;
  for (int64_t d = 1; d + 1 < x.dim(); ++d) lines *= x.size(d);
  return lines;
}

inline std::vector<int64_t> shape_of(const Tensor& t) {
  std::vector<int64_t> shape(t.dim());
  for (int64_t d = 0; d < t.dim(); ++d) shape[d] = t.size(d);
  return shape;
}

// t itself, or a contiguous copy.
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// The elements of a contiguous tensor, to read and to write.
template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* out(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// The base of Cpu (common/cpu.h) and Cuda (common/cuda.h). OP/operation.h has an operation once, as a template of the device. What it
// calls with the device as the first argument is overloaded in OP/cpu.cpp and OP/cuda.cu: the kernels and checks of this device alone.
template <class BFloat16, class Size>
struct DeviceTypes {
  using Int = Size;  // of sizes in attention's kernels

  // Calls f with a value of the type of t's elements.
  template <class F>
  static void with_type(const Tensor& t, F f) {
    if (t.scalar_type() == ScalarType::BFloat16) f(BFloat16{});
    else f(float{});
  }
};

}  // namespace megabert
