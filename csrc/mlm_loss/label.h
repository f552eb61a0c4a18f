#pragma once

#include <cstdint>

namespace megabert {

constexpr int64_t kIgnore = -100;  // label of a row without prediction: IGNORE of megabert/data/masking.py

}  // namespace megabert
