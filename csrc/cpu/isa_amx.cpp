#if defined(__x86_64__)
#define MEGABERT_AVX512 1
#define MEGABERT_AVX512BF16 1
#define MEGABERT_AMX 1
#define MEGABERT_ISA amx
#define MEGABERT_TARGET "amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma"
#include "cpu/isa.inl"
#endif
