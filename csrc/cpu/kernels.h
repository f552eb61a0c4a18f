// The kernels are compiled several times from the same source, for different instruction sets; the best one of the machine is chosen
// at run time (the environment variable MEGABERT_CPU_ISA forces one, for tests). Kernels process a range of rows or tasks and allocate
// nothing shared, so any number of threads may run them.
#if !defined(MEGABERT_KERNELS_H)
#define MEGABERT_KERNELS_H

#include <cstdint>

#include "attention/arguments.h"
#include "common/philox.h"
#include "dropout_add_layer_norm/arguments.h"
#include "mlm_loss/arguments.h"
#include "softmax_mask/mask.h"

namespace megabert {

struct bf16 {
  uint16_t bits;
};

template <class T>
using Attention = AttentionRows<T, int64_t>;

// Rows [row, last_row) x heads [head, last_head) of one thread, processed row by row, so that a row's tokens, whose heads are adjacent,
// stay in cache and in the TLB.
struct Heads {
  int64_t row, last_row, head, last_head;
};

template <class T>
struct Kernels {
  // Of each two the first without a gate: y = gelu(x + bias) for rows [begin, end); the second with one: x has rows of 2 * width
  // columns (a, b), y = gelu(a) * b of x + bias
  void (*activate[2])(const T* x, const T* bias, T* y, int64_t width, int64_t begin, int64_t end);
  // dx, and dbias [columns of x] = column sums over the rows
  void (*activate_backward[2])(const T* grad, const T* x, const T* bias, T* dx, float* dbias, int64_t width,
                                int64_t begin, int64_t end);
  // rows of 3 * heads * 2 * half columns: queries and keys turned by sign x angle, values copied; cos, sin [rows, half]
  void (*rotate)(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t heads, int64_t half,
                 int64_t begin, int64_t end);
  // y = dropout(x); its own gradient
  void (*dropout)(const T* x, T* y, int64_t width, Dropout dropout, int64_t begin, int64_t end);
  // z = residual + dropout(x + bias); y = normalised z * weight + shift
  void (*dropout_add_layer_norm)(LayerNormRows<T> args, Dropout dropout, int64_t begin, int64_t end);
  // sums: 3 x width fp32 (dbias, dweight, dshift) over the rows
  void (*dropout_add_layer_norm_backward)(const LayerNormGradientRows<T>& args, const Dropout& dropout, float* sums,
                                          int64_t begin, int64_t end);
  // forward, and backward where args has sums
  void (*attention)(const Attention<T>& args, const Dropout& dropout, const Heads& part);
  // rows are those of scores [batch, heads, queries, keys]; probs may be null, and is exactly without dropout
  void (*softmax_mask)(const SoftmaxMask& args, const T* scores, T* out, T* probs, Dropout dropout, int64_t begin,
                       int64_t end);
  void (*softmax_mask_backward)(const T* grad, const T* probs, T* dscores, int64_t keys, float scale, Dropout dropout,
                                int64_t begin, int64_t end);
  // logits without bias -> loss, log-sum-exp and correct of each row; with a.gradient the logits become their gradient, and dbias
  // [stride] its column sums
  void (*mlm_loss)(LossRows<T> args, float* dbias, int64_t begin, int64_t end);
  // out = sum over blocks of partial[block * stride + column], columns [begin, end)
  void (*reduce_blocks)(const float* partial, T* out, int64_t blocks, int64_t stride, int64_t begin, int64_t end);
};

struct Tables {
  Kernels<bf16> of_bf16;
  Kernels<float> of_float;
};

// The kernels of the machine's best instruction set.
const Tables& tables();

template <class T>
const Kernels<T>& kernels() {
  if constexpr (sizeof(T) == 2) return tables().of_bf16;
  else return tables().of_float;
}

}  // namespace megabert

#endif

#if defined(MEGABERT_TABLE)  // the second time, in isa.inl: compiled for the instruction set that MEGABERT_ISA names

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross the library's border

namespace megabert {
namespace MEGABERT_ISA {

#include "cpu/simd.h"
#if defined(MEGABERT_AMX)
#include "cpu/tiles.h"
#endif
#include "cpu/gemm.h"
#include "attention/kernel.h"
#include "bias_gelu/kernel.h"
#include "dropout_add_layer_norm/kernel.h"
#include "mlm_loss/kernel.h"
#include "rotate/kernel.h"
#include "softmax_mask/kernel.h"

template <class T>
constexpr Kernels<T> make_table() {
  return {{activate<T, false>, activate<T, true>},
          {activate_backward<T, false>, activate_backward<T, true>},
          rotate<T>,
          dropout<T>,
          dropout_add_layer_norm<T>,
          dropout_add_layer_norm_backward<T>,
          attention<T>,
          softmax_mask<T>,
          softmax_mask_backward<T>,
          mlm_loss<T>,
          reduce_blocks<T>};
}

extern const Tables kTables;
const Tables kTables = {make_table<bf16>(), make_table<float>()};

}  // namespace MEGABERT_ISA
}  // namespace megabert

#endif
