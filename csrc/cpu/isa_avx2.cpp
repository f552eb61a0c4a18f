#if defined(__x86_64__)
#define MEGABERT_AVX2 1
#define MEGABERT_ISA avx2
#define MEGABERT_TARGET "avx2,fma"
#include "cpu/isa.inl"
#endif
