// The kernels for x86-64 with avx512f, avx512bw, avx512vl, avx512dq, avx2, fma.

#if defined(__x86_64__)
#define MEGABERT_AVX512 1
#define MEGABERT_ISA avx512

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside the intrinsics of GCC 12
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif
#include "cpu/kernels.inl"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
