// The arguments of mlm_loss, checked, on whichever device they are. Labels are data: only the CPU reads them here.
#pragma once

#include "common/check.h"
#include "mlm_loss/options.h"

namespace megabert {

inline void check_mlm_loss(const char* op, const Tensor& hidden, const Tensor& weight, const Tensor& bias,
                           const Tensor& labels, int64_t vocab) {
  check_compute_dtype(op, "hidden", hidden);
  STD_TORCH_CHECK(hidden.dim() == 2, op, ": hidden has ", hidden.dim(), " dimensions, not 2");
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"weight", weight}, {"bias", bias}}) {
    check_device(op, name, t, hidden);
    check_dtype(op, name, t, hidden.scalar_type());
  }
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight has ", weight.dim(), " dimensions, not 2");
  const int64_t entries = weight.size(0);
  check_shape(op, "weight", weight, {entries, hidden.size(1)});
  check_shape(op, "bias", bias, {entries});
  check_device(op, "labels", labels, hidden);
  check_dtype(op, "labels", labels, ScalarType::Long);
  check_shape(op, "labels", labels, {hidden.size(0)});
  STD_TORCH_CHECK(0 < vocab && vocab <= entries, op, ": vocab_size is ", vocab, ", not in [1, ", entries, "]");
}

inline void check_loss_of_logits(const char* op, const Tensor& logits, const Tensor& labels) {
  check_compute_dtype(op, "logits", logits);
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, op, ": logits are not [predictions, entries]");
  check_device(op, "labels", labels, logits);
  check_dtype(op, "labels", labels, ScalarType::Long);
  check_shape(op, "labels", labels, {logits.size(0)});
}

inline LossOptions check_options(const char* op, double smoothing, double z_loss) {
  STD_TORCH_CHECK(smoothing >= 0 && smoothing < 1, op, ": label_smoothing is ", smoothing, ", not in [0, 1)");
  STD_TORCH_CHECK(z_loss >= 0, op, ": z_loss is ", z_loss, ", not 0 or more");
  return {static_cast<float>(smoothing), static_cast<float>(z_loss)};
}

}  // namespace megabert
