// Torch's message of a failed call, in the error of an operation.
//
// Torch's headers check each call by TORCH_ERROR_CODE_CHECK, which names the call and its line and drops torch's own message
// ("CUDA out of memory. Tried to allocate ..."). Torch keeps that message from 2.13 on; older ones only print it. Included
// before any other header of torch, and by every source, since the linker merges the headers' inline functions.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>

// Weak, so that the same binary loads with a torch that lacks it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace megabert {

[[noreturn]] inline void throw_torch_error(const char* call, const char* file, int64_t line) {
  std::ostringstream text;
  if (torch_exception_get_what_without_backtrace) text << torch_exception_get_what_without_backtrace() << "; ";
  text << call << " failed at " << file << ", line " << line;
  throw std::runtime_error(text.str());
}

}  // namespace megabert

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                          \
  if ((call) != TORCH_SUCCESS) {                              \
    ::megabert::throw_torch_error(#call, __FILE__, __LINE__); \
  }
