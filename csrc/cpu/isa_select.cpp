// The instruction set is chosen once, at first use.

#include <cstdlib>
#include <cstring>

#include "common/check.h"
#include "cpu/kernels.h"

#define MEGABERT_DECLARE(isa)               \
  namespace isa {                           \
  extern const Kernels<bf16> table_bf16;    \
  extern const Kernels<float> table_float;  \
  }

namespace megabert {

MEGABERT_DECLARE(generic)
#if defined(__x86_64__)
MEGABERT_DECLARE(avx2)
MEGABERT_DECLARE(avx512)
MEGABERT_DECLARE(avx512bf16)
#endif

namespace {

struct Choice {
  const char* name;
  const Kernels<bf16>* of_bf16;
  const Kernels<float>* of_float;
};

#define MEGABERT_OFFER(isa, runs)                                             \
  if (forced ? std::strcmp(forced, #isa) == 0 : (runs)) {                     \
    STD_TORCH_CHECK(runs, "MEGABERT_CPU_ISA=", #isa, ": this machine does not run it"); \
    return {#isa, &isa::table_bf16, &isa::table_float};                       \
  }

Choice choose() {
  const char* forced = std::getenv("MEGABERT_CPU_ISA");
  if (forced && !*forced) forced = nullptr;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  MEGABERT_OFFER(avx512bf16, has_bf16)
  MEGABERT_OFFER(avx512, has_avx512)
  MEGABERT_OFFER(avx2, has_avx2)
#endif
  MEGABERT_OFFER(generic, true)
  STD_TORCH_CHECK(false, "MEGABERT_CPU_ISA=", forced, ": choose generic, avx2, avx512 or avx512bf16");
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

template <>
const Kernels<bf16>& kernels<bf16>() {
  return *chosen().of_bf16;
}
template <>
const Kernels<float>& kernels<float>() {
  return *chosen().of_float;
}

}  // namespace megabert
