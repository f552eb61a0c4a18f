// Compiled once for each instruction set: MEGABERT_ISA names its namespace and table.

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross the library's border

namespace megabert {
namespace MEGABERT_ISA {

#include "cpu/simd.h"
#include "cpu/gemm.h"
#include "attention/kernel.h"
#include "bias_geglu/kernel.h"
#include "bias_gelu/kernel.h"
#include "dropout/kernel.h"
#include "dropout_add_layer_norm/kernel.h"
#include "mlm_loss/kernel.h"
#include "rotate/kernel.h"
#include "softmax_mask/kernel.h"

template <class T>
constexpr Kernels<T> make_table() {
  return {bias_gelu<T>,
          bias_gelu_backward<T>,
          bias_geglu<T>,
          bias_geglu_backward<T>,
          rotate<T>,
          dropout<T>,
          dropout_add_layer_norm<T>,
          dropout_add_layer_norm_backward<T>,
          attention<T>,
          attention_backward<T>,
          softmax_mask<T>,
          softmax_mask_backward<T>,
          mlm_loss<T>,
          reduce_blocks<T>};
}

extern const Kernels<bf16> table_bf16;
extern const Kernels<float> table_float;
const Kernels<bf16> table_bf16 = make_table<bf16>();
const Kernels<float> table_float = make_table<float>();

}  // namespace MEGABERT_ISA
}  // namespace megabert
