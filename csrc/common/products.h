// Matrix products by torch's library for the tensors' device, in their type with fp32 accumulation.
//
// addmm takes Scalars, which torch_call_dispatcher cannot pass (2.11 to 2.13: "Not yet supported conversion from
// StableIValue"). The C shim that torch generates for its ahead-of-time compiler passes them as doubles; it has the same
// functions for each device, so the CPU's tests run the same code as the GPU except for a name.
#pragma once

#include "common/errors.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include <type_traits>

#include "common/check.h"

// In torch's CUDA library only. Weak, so that the same binary loads where torch has no CUDA.
extern "C" __attribute__((weak)) decltype(aoti_torch_cuda_mm_out) aoti_torch_cuda_mm_out;
extern "C" __attribute__((weak)) decltype(aoti_torch_cuda_addmm_out) aoti_torch_cuda_addmm_out;
static_assert(std::is_same_v<decltype(aoti_torch_cuda_mm_out), decltype(aoti_torch_cpu_mm_out)>);
static_assert(std::is_same_v<decltype(aoti_torch_cuda_addmm_out), decltype(aoti_torch_cpu_addmm_out)>);

namespace megabert {

// out = a b
inline void product(const Tensor& out, const Tensor& a, const Tensor& b) {
  const auto mm = out.is_cuda() ? aoti_torch_cuda_mm_out : aoti_torch_cpu_mm_out;
  STD_TORCH_CHECK(mm, "this torch has no aoti_torch_cuda_mm_out");
  TORCH_ERROR_CODE_CHECK(mm(out.get(), a.get(), b.get()));
}

// out = out + a b
inline void add_product(const Tensor& out, const Tensor& a, const Tensor& b) {
  const auto addmm = out.is_cuda() ? aoti_torch_cuda_addmm_out : aoti_torch_cpu_addmm_out;
  STD_TORCH_CHECK(addmm, "this torch has no aoti_torch_cuda_addmm_out");
  TORCH_ERROR_CODE_CHECK(addmm(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

}  // namespace megabert
