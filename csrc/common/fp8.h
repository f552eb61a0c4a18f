// The 8-bit floating-point formats, shared by host and device (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
#pragma once

#include <cstdint>
#include <cstring>

#include "common/philox.h"  // MEGABERT_HOST_DEVICE

namespace megabert {

// Codes of a format with `Mantissa` explicit bits; `Largest` is the code of the largest finite value.
template <int Mantissa, int Bias, uint32_t Largest>
struct Fp8 {
  static constexpr bool e5m2 = Mantissa == 2;

  // To the nearest, ties to even; beyond the range the largest value, NaN stays NaN.
  MEGABERT_HOST_DEVICE static uint32_t code(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    constexpr int shift = 23 - Mantissa;
    constexpr uint32_t bias = 127 - Bias, unit = 127 + 1 - Bias - Mantissa;  // 2^(unit - 127): the smallest subnormal
    // A normal value: its mantissa rounded (a carry goes into the exponent as it should), its exponent rebased.
    uint32_t found = ((magnitude + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1u)) >> shift) - (bias << Mantissa);
    if (magnitude < (bias + 1) << 23) {  // a subnormal one: the sum with 2^23 smallest subnormals rounds to whole ones
      const uint32_t whole = (unit + 23) << 23;
      float value, sum;
      memcpy(&value, &magnitude, 4);
      memcpy(&sum, &whole, 4);
      sum += value;
      memcpy(&found, &sum, 4);
      found -= whole;
    }
    if (magnitude > 0x7F800000u) return sign | 0x7Fu;
    return sign | (found < Largest && magnitude < 0x7F800000u ? found : Largest);
  }
};

using E4M3 = Fp8<3, 7, 0x7Eu>;   // up to 448
using E5M2 = Fp8<2, 15, 0x7Bu>;  // up to 57,344

}  // namespace megabert
