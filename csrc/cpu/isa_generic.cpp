// The kernels for any machine: four floats at a time, as the compiler's baseline allows.

#define MEGABERT_ISA generic

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/kernels.h"

#include "cpu/kernels.inl"
