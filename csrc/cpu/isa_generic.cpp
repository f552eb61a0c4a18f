// Any machine: four floats at a time, as the compiler's baseline allows.
#define MEGABERT_ISA generic
#include "cpu/isa.inl"
