// Attention inside packed rows on tensor cores, for heads of at most 64 columns in two-byte types; its gradient: backward.cuh.
//
// A token attends to the keys [start, end) of its row. Tiles of queries and keys without a pair that attends are skipped: with
// packed sequences the matrix is block-diagonal. The probabilities are never in memory; backward recomputes them from the
// log-sum-exp. The order of all sums depends only on the shapes, so results are reproducible bit for bit. A token without keys gets
// zeros, one whose range is not inside its row NaN. Non-finite values may spread to other sequences in the same 16 x 16 tiles.
#pragma once

#include "attention/arguments.h"
#include "common/mma.cuh"

namespace megabert {

// Sizes of tiles.
constexpr int kHeadSize = 64;  // columns in shared memory; zeros beyond a smaller head
constexpr int kAttentionWarps = 8, kAttentionThreads = 32 * kAttentionWarps;
constexpr int kBlockQueries = 16 * kAttentionWarps, kForwardKeys = 64;    // forward: of a block, at once
constexpr int kBlockKeys = 16 * kAttentionWarps, kGradientQueries = 32;  // backward

constexpr int64_t kForwardShared = 2 * 2 * kForwardKeys * (kHeadSize + 8) * 2;  // bytes: two stages of keys and values

// Between lines in shared memory, in elements: eight lines, 16 bytes each, then lie in 32 different banks.
constexpr int kStride = kHeadSize + 8;
constexpr int kSteps = kHeadSize / 16;  // of a product over a head's columns

// The keys of a query; count is 0 for none, and for an invalid range.
struct KeyRange {
  int first, count;
  bool wrong;

  __device__ static KeyRange of(int start, int end, int tokens) {
    const bool wrong = start < 0 || end > tokens;
    return {start, wrong || end <= start ? 0 : end - start, wrong};
  }
  __device__ bool has(int key) const { return static_cast<unsigned>(key - first) < static_cast<unsigned>(count); }
};

// The keys [first, last) that some query of a warp may attend to.
struct Touched {
  int first, last;

  __device__ static Touched of_warp(const KeyRange& a, const KeyRange& b) {
    const int none = 0x7FFFFFFF, first_a = a.count ? a.first : none, first_b = b.count ? b.first : none;
    const int last_a = a.count ? a.first + a.count : 0, last_b = b.count ? b.first + b.count : 0;
    return {smallest_of_warp(first_a < first_b ? first_a : first_b), largest_of_warp(last_a > last_b ? last_a : last_b)};
  }
  __device__ bool any(int begin, int end) const { return first < end && last > begin; }
};

// A thread's place in the lines of a tile: 16 bytes of every kLinesAtOnce-th line.
constexpr int kChunks = kHeadSize / kGroup, kLinesAtOnce = kAttentionThreads / kChunks;

// Starts copying lines [first, first + Lines) of a head, `ld` elements apart; zeros past the row's end and the head's
// columns.
template <int Lines, class T>
__device__ inline void copy_lines(T* shared, const T* from, unsigned ld, unsigned first, unsigned tokens, unsigned size) {
  const unsigned line = threadIdx.x / kChunks, column = threadIdx.x % kChunks * kGroup;
#pragma unroll
  for (unsigned i = 0; i < Lines; i += kLinesAtOnce) {
    const unsigned token = first + line + i;
    const bool inside = token < tokens && column < size;
    start_copy<16>(shared + (line + i) * kStride + column, from + (inside ? token * ld + column : 0u), inside);
  }
}

// Stores chunk i of the lines [first, ...) in shared memory.
template <class T>
__device__ inline void store_chunk(T* to, unsigned ld, const T* shared, unsigned i, unsigned first, unsigned tokens,
                                   unsigned size) {
  const unsigned line = i / kChunks, column = i % kChunks * kGroup, token = first + line;
  if (token >= tokens || column >= size) return;
  *reinterpret_cast<Chunk*>(to + (token * ld + column)) = *reinterpret_cast<const Chunk*>(shared + line * kStride + column);
}

// Stores a warp's 16 lines, each times its factor (of line g, of line g + 8), through 16 lines of shared memory of its own.
template <class T>
__device__ inline void store_lines(T* to, unsigned ld, T* shared, const float (&c)[2 * kSteps][4], float factor,
                                   float factor_8, int first, int tokens, int size) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < 2 * kSteps; ++n) {
    uint32_t* const at = reinterpret_cast<uint32_t*>(shared + g * kStride + n * 8 + t);
    at[0] = pack_pair(c[n][0] * factor, c[n][1] * factor, T{});
    at[8 * kStride / 2] = pack_pair(c[n][2] * factor_8, c[n][3] * factor_8, T{});
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += kWarp) store_chunk(to, ld, shared, i, first, tokens, size);
}

// c += A B for an A fragment and 16 columns of B.
template <class T>
__device__ inline void multiply(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                T type) {
  mma(left, a, b[0], b[1], type);
  mma(right, a, b[2], b[3], type);
}

// gridDim = (batch * heads, blocks of kBlockQueries queries). A warp has 16 queries in registers, the block shares the keys.
template <class T>
__global__ void __launch_bounds__(kAttentionThreads, 2)
attention_forward(AttentionRows<T> a, Dropout dropout, const int64_t* seed) {
  constexpr int kTile = kForwardKeys * kStride;
  T* const shared = reinterpret_cast<T*>(launched_shared());  // two stages of keys and values
  __shared__ int union_first[kAttentionWarps], union_last[kAttentionWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4 * 2;
  const int head = blockIdx.x % a.heads, width = a.heads * a.size;  // a row has less than 2^31 elements
  const int64_t row = blockIdx.x / a.heads;
  const int64_t line = static_cast<int64_t>(blockIdx.x) * a.tokens;  // of lse and of the dropout mask
  const T* const qkv = a.qkv + row * a.tokens * 3 * width + head * a.size;
  const int first_query = blockIdx.y * kBlockQueries + warp * 16, query = first_query + g;

  KeyRange range[2];  // of queries g and g + 8
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t at = row * a.tokens + query + 8 * r;
    range[r] = query + 8 * r < a.tokens ? KeyRange::of(a.start[at], a.end[at], a.tokens) : KeyRange{0, 0, false};
  }
  const Touched mine = Touched::of_warp(range[0], range[1]);
  if (lane == 0) union_first[warp] = mine.first, union_last[warp] = mine.last;
  __syncthreads();
  Touched block = mine;
#pragma unroll
  for (int w = 0; w < kAttentionWarps; ++w) {
    block.first = union_first[w] < block.first ? union_first[w] : block.first;
    block.last = union_last[w] > block.last ? union_last[w] : block.last;
  }
  block.first = block.first / kGroup * kGroup;  // a group of 8 keys is one draw of the dropout mask

  const auto copy_tile = [&](int key, int stage) {
    copy_lines<kForwardKeys>(shared + 2 * stage * kTile, qkv + width, 3 * width, key, a.tokens, a.size);
    copy_lines<kForwardKeys>(shared + (2 * stage + 1) * kTile, qkv + 2 * width, 3 * width, key, a.tokens, a.size);
  };
  if (block.first < block.last) copy_tile(block.first, 0);
  commit_copies();

  uint32_t q[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = query + i % 2 * 8, column = s * 16 + i / 2 * 8 + t;
      const bool inside = token < a.tokens && column < a.size;
      q[s][i] = inside ? *reinterpret_cast<const uint32_t*>(qkv + (token * 3 * width + column)) : 0;
    }

  const float scale = kLog2e * a.root;  // of products to scores in powers of two; `top` is the largest product
  float out[2 * kSteps][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  for (int key = block.first, stage = 0; key < block.last; key += kForwardKeys, stage ^= 1) {
    if (key + kForwardKeys < block.last) copy_tile(key + kForwardKeys, stage ^ 1);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    const T *keys = shared + 2 * stage * kTile, *values = keys + kTile;
    if (mine.any(key, key + kForwardKeys)) {
      float score[kForwardKeys / 8][4];
      float next[2] = {top[0], top[1]};
#pragma unroll
      for (int c = 0; c < kForwardKeys / 16; ++c) {
        if (!mine.any(key + c * 16, key + c * 16 + 16)) continue;
        float(&x)[4] = score[2 * c], (&y)[4] = score[2 * c + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = y[i] = 0.0f;
        const LaneAt at = LaneAt::along(lane);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          uint32_t b[4];
          load_matrices(b, keys + (c * 16 + at.line) * kStride + s * 16 + at.column);
          multiply(x, y, q[s], b, T{});
        }
#pragma unroll
        for (int n = 2 * c; n < 2 * c + 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            score[n][i] = range[i / 2].has(key + n * 8 + t + i % 2) ? score[n][i] : -INFINITY;
            next[i / 2] = fmaxf(next[i / 2], score[n][i]);  // NaN is passed over
          }
      }
      float base[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        next[r] = fmaxf(next[r], __shfl_xor_sync(kAllLanes, next[r], 1));
        next[r] = fmaxf(next[r], __shfl_xor_sync(kAllLanes, next[r], 2));
        base[r] = next[r] == -INFINITY ? 0.0f : next[r] * scale;
        const float change = fast_exp2(top[r] * scale - base[r]);
        top[r] = next[r], sum[r] *= change;
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) out[n][2 * r] *= change, out[n][2 * r + 1] *= change;
      }
#pragma unroll
      for (int c = 0; c < kForwardKeys / 16; ++c) {
        if (!mine.any(key + c * 16, key + c * 16 + 16)) continue;
        uint32_t keep = 0xFFFFFFFFu;  // bit 8 * (2 * r + n) + e: query g + 8 r, key 8 n + t + e of the 16
        if (dropout.threshold) {      // a lane draws 8 of the 32
          const Dropout seeded = with_seed(dropout, seed);  // read again each time: no register is left for it
          const uint64_t drawn = line + query + lane % 4 / 2 * 8;
          keep = seeded.keep8(drawn, static_cast<uint32_t>((key + c * 16) / kGroup + lane % 2)) << (8 * (lane % 4));
          keep |= __shfl_xor_sync(kAllLanes, keep, 1);
          keep |= __shfl_xor_sync(kAllLanes, keep, 2);
          keep >>= t;
        }
        uint32_t p[4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float kept[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float value = fast_exp2(score[2 * c + n][2 * r + e] * scale - base[r]);
              sum[r] += value;
              kept[e] = keep >> (8 * (2 * r + n) + e) & 1u ? value : 0.0f;
            }
            p[2 * n + r] = pack_pair(kept[0], kept[1], T{});
          }
        const LaneAt at = LaneAt::down(lane);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          uint32_t b[4];
          load_transposed(b, values + (c * 16 + at.line) * kStride + s * 16 + at.column);
          multiply(out[2 * s], out[2 * s + 1], p, b, T{});
        }
      }
    }
    __syncthreads();  // the stage has been read
  }

  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
    sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
    factor[r] = range[r].wrong ? NAN : range[r].count ? dropout.scale / sum[r] : 0.0f;
    const float lse = range[r].wrong ? NAN : range[r].count ? top[r] * a.root + logf(sum[r]) : -INFINITY;
    if (lane % 4 == 0 && query + 8 * r < a.tokens) a.lse[line + query + 8 * r] = lse;
  }
  store_lines(a.context + row * a.tokens * width + head * a.size, width, shared + warp * 16 * kStride, out, factor[0],
              factor[1], first_query, a.tokens, a.size);
}

}  // namespace megabert
