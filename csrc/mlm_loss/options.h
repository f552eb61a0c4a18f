// loss = lse - (1 - smoothing) x[label] - smoothing mean(x) + z_loss lse^2, with lse the log-sum-exp of a row's logits x:
// label smoothing (Szegedy et al. 2016) and z-loss (de Brebisson & Vincent 2016; Chowdhery et al. 2022). So
// dx = softmax (1 + 2 z_loss lse) - (1 - smoothing) onehot - smoothing / entries.
#pragma once

#include <cstdint>

namespace megabert {

constexpr int64_t kIgnore = -100;  // label of a row without prediction: IGNORE of megabert/common/labels.py

struct LossOptions {
  float smoothing, z_loss;
};

}  // namespace megabert
