// Arguments of the kernels of attention: plain data, for the CPU and for CUDA.
#pragma once

#include <cstdint>

namespace megabert {

template <class T, class Int = int>
struct AttentionRows {
  const T* qkv;                // [batch, tokens, 3, heads, size], on CUDA 16-byte aligned as all of these
  const int32_t *start, *end;  // [batch, tokens]
  T* context;                  // [batch, tokens, heads, size]
  float* lse;                  // [batch, heads, tokens]
  Int tokens, heads, size;     // on CUDA size <= kHeadSize, a multiple of 8
  float root;                  // 1 / sqrt(size)
  const T* grad;               // backward only: gradient of context
  T* dqkv;
  float* sums;     // [batch, 3, heads, size]: those of dqkv over a row's tokens
  float* partial;  // CUDA's backward of more than kBlockKeys tokens: [batch * heads, tokens to whole kGradientQueries, kHeadSize]
};

}  // namespace megabert
