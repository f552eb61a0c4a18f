// The instruction set is chosen once, at first use.

#include <cstdlib>
#include <cstring>

#include "common/check.h"
#include "cpu/kernels.h"

namespace megabert {

namespace generic { extern const Tables kTables; }
#if defined(__x86_64__)
namespace avx2 { extern const Tables kTables; }
namespace avx512 { extern const Tables kTables; }
namespace avx512bf16 { extern const Tables kTables; }
#endif

namespace {

#define MEGABERT_OFFER(isa, runs)                                             \
  if (forced ? std::strcmp(forced, #isa) == 0 : (runs)) {                     \
    STD_TORCH_CHECK(runs, "MEGABERT_CPU_ISA=", #isa, ": this machine does not run it"); \
    return isa::kTables;                                                      \
  }

const Tables& choose() {
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

}  // namespace

const Tables& tables() {
  static const Tables& chosen = choose();
  return chosen;
}

}  // namespace megabert
