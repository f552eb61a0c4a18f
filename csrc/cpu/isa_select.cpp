// The instruction set is chosen once, at first use.

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/check.h"
#include "cpu/kernels.h"

namespace megabert {

namespace generic { extern const Tables kTables; }
#if defined(__x86_64__)
namespace avx2 { extern const Tables kTables; }
namespace avx512 { extern const Tables kTables; }
namespace avx512bf16 { extern const Tables kTables; }
namespace amx { extern const Tables kTables; }
#endif

namespace {

#define MEGABERT_OFFER(isa, runs)                                             \
  if (forced ? std::strcmp(forced, #isa) == 0 : (runs)) {                     \
    STD_TORCH_CHECK(runs, "MEGABERT_CPU_ISA=", #isa, ": this machine does not run it"); \
    return isa::kTables;                                                      \
  }

#if defined(__x86_64__)
// Whether the system lets this process use tiles, whose registers it has to save: Linux 5.16 and newer, unless a container forbids it.
bool tiles_permitted() {
#if defined(SYS_arch_prctl)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA of asm/prctl.h
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

const Tables& choose() {
  const char* forced = std::getenv("MEGABERT_CPU_ISA");
  if (forced && !*forced) forced = nullptr;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  const bool has_tiles = has_bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
  MEGABERT_OFFER(amx, has_tiles && tiles_permitted())
  MEGABERT_OFFER(avx512bf16, has_bf16)
  MEGABERT_OFFER(avx512, has_avx512)
  MEGABERT_OFFER(avx2, has_avx2)
#endif
  MEGABERT_OFFER(generic, true)
  STD_TORCH_CHECK(false, "MEGABERT_CPU_ISA=", forced, ": choose generic, avx2, avx512, avx512bf16 or amx");
}

}  // namespace

const Tables& tables() {
  static const Tables& chosen = choose();
  return chosen;
}

}  // namespace megabert
