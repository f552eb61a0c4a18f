// Arguments of the kernels of mlm_loss: plain data, for the CPU and for CUDA.
#pragma once

#include <cstdint>

namespace megabert {

constexpr int64_t kIgnore = -100;  // label of a row without prediction: IGNORE of megabert/data/masking.py

template <class T>
struct LossRows {
  T* logits;  // [rows, stride], without bias
  const T* bias;
  const int64_t* labels;
  float *loss, *lse;  // [rows]
  int32_t* correct;
  int64_t vocab, stride;
  bool gradient, whole;
};

}  // namespace megabert
