// The kernels for one instruction set: MEGABERT_ISA names their namespace, MEGABERT_TARGET the compiler's options.
//
// Headers shared with other sources (standard headers, inline functions) are included before the options apply: the linker keeps one
// copy of an inline function, which has to run on any machine.

#if defined(MEGABERT_TARGET)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside the intrinsics of GCC 12
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/kernels.h"

#define MEGABERT_PRAGMA(...) MEGABERT_PRAGMA_TEXT(__VA_ARGS__)
#define MEGABERT_PRAGMA_TEXT(...) _Pragma(#__VA_ARGS__)
#if defined(MEGABERT_TARGET) && defined(__clang__)
MEGABERT_PRAGMA(clang attribute push(__attribute__((target(MEGABERT_TARGET))), apply_to = function))
#elif defined(MEGABERT_TARGET)
#pragma GCC push_options
MEGABERT_PRAGMA(GCC target(MEGABERT_TARGET))
#endif

#define MEGABERT_TABLE
#include "cpu/kernels.h"

#if defined(MEGABERT_TARGET) && defined(__clang__)
#pragma clang attribute pop
#elif defined(MEGABERT_TARGET)
#pragma GCC pop_options
#endif
