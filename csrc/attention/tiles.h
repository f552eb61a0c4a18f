// The sizes of the CUDA kernels' tiles. Used by the launchers and by the tests that run the kernels on the CPU.
#pragma once

#include <cstdint>

namespace megabert {

constexpr int kHeadSize = 64;  // columns in shared memory; those past a smaller head are zeros
constexpr int kAttentionWarps = 8, kAttentionThreads = 32 * kAttentionWarps;
constexpr int kBlockQueries = 16 * kAttentionWarps, kForwardKeys = 64;    // forward: of a block, at once
constexpr int kBlockKeys = 16 * kAttentionWarps, kGradientQueries = 32;  // backward

constexpr int64_t kForwardShared = 2 * 2 * kForwardKeys * (kHeadSize + 8) * 2;  // bytes: two stages of keys and values

}  // namespace megabert
