// The gradient of attention inside packed rows on tensor cores.
//
// With P the probabilities, M the scaled dropout mask, C the context, as in kernel.h:
//   dV = (P M)^T dC; dP = (dC V^T) M; dS = P (dP - rowsum(dC C)) / sqrt(size); dQ = dS K; dK = dS^T Q.
// Factors common to a whole result are applied at its end: those of dropout and of the scores.
// A block has a (row, head). It iterates over groups of kBlockKeys keys, 16 for each warp, with dK and dV in registers, and over
// the tiles of queries that attend to them. Scores are computed transposed, [keys, queries], so that P^T and dS^T are left operands
// without a transposition; dS goes through shared memory, since dQ sums over the keys of all warps. For queries with keys in several
// groups the partial dQ is in `partial`, which is read by the thread that wrote it.
// The sums over the row's tokens, for the bias that was added to qkv: a thread accumulates its elements of dQ separately; the lines
// of dK and dV are summed while they are stored, by a product with ones.
#pragma once

#include "attention/kernel.cuh"

namespace megabert {

struct alignas(8) Two {
  float x, y;
};

constexpr int kScoreStride = kGradientQueries + 8;  // as kStride

// Shared memory of a block.
template <class T>
struct GradientShared {
  alignas(16) T keys[kBlockKeys * kStride];
  T values[kBlockKeys * kStride];
  struct Queries {
    T query[kGradientQueries * kStride], grad[kGradientQueries * kStride], context[kGradientQueries * kStride];
    struct alignas(16) {
      int first, count;   // at first start and end as they are in memory
      float norm, delta;  // log-sum-exp in powers of two; rowsum(dC C) over the share kept
    } line[kGradientQueries];
  } stage[2];
  union {
    T dscore[kBlockKeys * kScoreStride];           // [key][query]
    float key_sums[2][kAttentionWarps][kHeadSize];  // after the queries: of dK and dV over a warp's keys
  };
  float query_sums[kAttentionThreads][4];  // of dQ over a thread's lines: two columns, and those 8 further
  // followed by the first and last key of each tile of queries

  // One of the kSumsOfColumn partial sums of a column.
  static constexpr int kSumsOfColumn = 16;
  __device__ float& query_sum(int column, int i) {
    return query_sums[(column / 16 * 2 + i / 8) * kWarp + i % 8 * 4 + column % 8 / 2][column % 16 / 8 * 2 + column % 2];
  }
  static constexpr int64_t bytes(int64_t tiles) { return sizeof(GradientShared) + 8 * tiles; }
};

// A thread's 16 bytes of a tile of queries, readable after its own copies: rowsum(dC C) by the eight threads of a line, of which the
// first prepares bounds and log-sum-exp for the line's scores.
template <class T>
__device__ inline void prepare_lines(typename GradientShared<T>::Queries& own, int tokens, float kept) {
  const int query = threadIdx.x / kChunks, at = query * kStride + threadIdx.x % kChunks * kGroup;
  const Chunk grad = *reinterpret_cast<const Chunk*>(own.grad + at);
  const Chunk context = *reinterpret_cast<const Chunk*>(own.context + at);
  float delta = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i)
    delta += to_float(reinterpret_cast<const T*>(&grad)[i]) * to_float(reinterpret_cast<const T*>(&context)[i]);
#pragma unroll
  for (int distance = kChunks / 2; distance; distance /= 2) delta += __shfl_xor_sync(kAllLanes, delta, distance);
  if (threadIdx.x % kChunks) return;
  auto& line = own.line[query];
  const KeyRange range = KeyRange::of(line.first, line.count, tokens);
  line = {range.first, range.count, range.wrong ? NAN : line.norm * kLog2e, delta / kept};
}

// A warp's 16 keys and a tile of queries: dV += (P M)^T dC, dK += dS^T Q, dS^T to shared memory. `mask_row` is the row of
// the dropout mask of the tile's first query, `key0` the first of the warp's keys.
template <class T>
__device__ inline void add_to_keys(float (&dkey)[2 * kSteps][4], float (&dvalue)[2 * kSteps][4], GradientShared<T>& shared,
                                   const typename GradientShared<T>::Queries& own, float scale, const Dropout& dropout,
                                   const int64_t* seed, int64_t mask_row, int key0) {
  constexpr int kParts = kGradientQueries / 8;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4 * 2;
  const LaneAt down = LaneAt::down(lane), along = LaneAt::along(lane);
  float score[kParts][4] = {}, dp[kParts][4] = {};  // K Q^T and V dC^T
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t left[4], b[4];
    load_matrices(left, shared.keys + (warp * 16 + down.line) * kStride + s * 16 + down.column);
#pragma unroll
    for (int j = 0; j < kParts / 2; ++j) {
      load_matrices(b, own.query + (j * 16 + along.line) * kStride + s * 16 + along.column);
      multiply(score[2 * j], score[2 * j + 1], left, b, T{});
    }
    load_matrices(left, shared.values + (warp * 16 + down.line) * kStride + s * 16 + down.column);
#pragma unroll
    for (int j = 0; j < kParts / 2; ++j) {
      load_matrices(b, own.grad + (j * 16 + along.line) * kStride + s * 16 + along.column);
      multiply(dp[2 * j], dp[2 * j + 1], left, b, T{});
    }
  }
  uint32_t keep = 0xFFFFFFFFu;  // of queries 2 i and 2 i + 1, i = lane / 2: 16 bits each, one for each key
  if (dropout.threshold) {      // a lane draws those of its query
    const Dropout seeded = with_seed(dropout, seed);  // read again each time: no register is left for it
    const uint32_t group = static_cast<uint32_t>(key0 / kGroup);
    const uint32_t bits = seeded.keep8(mask_row + lane, group) | seeded.keep8(mask_row + lane, group + 1) << 8;
    const uint32_t other = __shfl_xor_sync(kAllLanes, bits, 1);
    keep = lane % 2 ? other | bits << 16 : bits | other << 16;
  }
#pragma unroll
  for (int j = 0; j < kParts / 2; ++j) {
    uint32_t p[4], ds[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int query = (2 * j + n) * 8 + t;  // and the one after it
      const uint32_t bits = __shfl_sync(kAllLanes, keep, query) >> g;
      float weight[4], change[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // key g + 8 * (i / 2), query + i % 2
        const auto line = own.line[query + i % 2];
        const bool inside = KeyRange{line.first, line.count, false}.has(key0 + g + i / 2 * 8);
        const bool stays = bits >> (16 * (i % 2) + 8 * (i / 2)) & 1u;
        const float probability = fast_exp2(score[2 * j + n][i] * scale - line.norm);
        weight[i] = inside && stays ? probability : 0.0f;
        change[i] = inside ? ((stays ? dp[2 * j + n][i] : 0.0f) - line.delta) * probability : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[2 * n + r] = pack_pair(weight[2 * r], weight[2 * r + 1], T{});
        ds[2 * n + r] = pack_pair(change[2 * r], change[2 * r + 1], T{});
        *reinterpret_cast<uint32_t*>(shared.dscore + (warp * 16 + g + 8 * r) * kScoreStride + query) = ds[2 * n + r];
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t b[4];
      load_transposed(b, own.grad + (j * 16 + down.line) * kStride + s * 16 + down.column);
      multiply(dvalue[2 * s], dvalue[2 * s + 1], p, b, T{});
      load_transposed(b, own.query + (j * 16 + down.line) * kStride + s * 16 + down.column);
      multiply(dkey[2 * s], dkey[2 * s + 1], ds, b, T{});
    }
  }
}

// dQ of a tile of queries over the block's keys from `key0` on, 16 queries and 16 columns a warp: added to `partial`
// (of the tile's first query) of earlier keys; stored in own.query when complete, else in `partial`.
template <class T>
__device__ inline void sum_over_keys(GradientShared<T>& shared, typename GradientShared<T>::Queries& own, Touched keys,
                                     int key0, float* partial, float factor) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4 * 2;
  const int query = warp % 2 * 16, column = warp / 2 * 16;
  const bool first = keys.first >= key0, last = keys.last <= key0 + kBlockKeys;
  Two* const part = reinterpret_cast<Two*>(partial + (query + g) * kHeadSize + column + t);
  constexpr int kEightLines = 8 * kHeadSize / 2, kEightColumns = 4;  // in units of Two
  float dquery[2][4] = {};
  if (!first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Two two = part[i % 2 * kEightLines + i / 2 * kEightColumns];
      dquery[i / 2][i % 2 * 2] = two.x, dquery[i / 2][i % 2 * 2 + 1] = two.y;
    }
  }
  const int begin = first ? (keys.first - key0) / 16 : 0;
  const int end = last ? (keys.last - key0 + 15) / 16 : kBlockKeys / 16;
  const LaneAt down = LaneAt::down(lane), along = LaneAt::along(lane);
  for (int c = begin; c < end; ++c) {  // the keys of warp c, which wrote its part of dS^T just if c is in this range
    uint32_t left[4], b[4];
    load_transposed(left, shared.dscore + (c * 16 + along.line) * kScoreStride + query + along.column);
    load_transposed(b, shared.keys + (c * 16 + down.line) * kStride + column + down.column);
    multiply(dquery[0], dquery[1], left, b, T{});
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = dquery[i / 2][i % 2 * 2], y = dquery[i / 2][i % 2 * 2 + 1];
    if (last) {
      const int at = query + g + i % 2 * 8;
      const float norm = own.line[at].norm, times = norm != norm ? NAN : factor;
      *reinterpret_cast<uint32_t*>(own.query + at * kStride + column + i / 2 * 8 + t) = pack_pair(x * times, y * times, T{});
      float* const sum = shared.query_sums[threadIdx.x] + i / 2 * 2;
      sum[0] += x * times, sum[1] += y * times;
    } else {
      part[i % 2 * kEightLines + i / 2 * kEightColumns] = {x, y};
    }
  }
}

// The block's number, opaque to the compiler, so that derived values are recomputed instead of kept in registers.
__device__ inline unsigned block_again() {
  unsigned block = blockIdx.x;
  asm("" : "+r"(block));
  return block;
}

// The sums of a warp's 16 lines in shared memory by columns.
template <class T>
__device__ inline void sum_lines(float* to, const T* lines) {
  const int lane = threadIdx.x % kWarp, t = lane % 4 * 2;
  const LaneAt down = LaneAt::down(lane);
  const uint32_t two = pack_pair(1.0f, 1.0f, T{}), ones[4] = {two, two, two, two};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    float sum[2][4] = {};
    uint32_t b[4];
    load_transposed(b, lines + down.line * kStride + s * 16 + down.column);
    multiply(sum[0], sum[1], ones, b, T{});
    if (lane < 4) {
#pragma unroll
      for (int n = 0; n < 2; ++n) *reinterpret_cast<Two*>(to + s * 16 + n * 8 + t) = {sum[n][0], sum[n][1]};
    }
    __syncwarp();
  }
}

template <class T>
__global__ void __launch_bounds__(kAttentionThreads, 2)
attention_gradient(AttentionRows<T> a, Dropout dropout, const int64_t* seed) {
  GradientShared<T>& shared = *reinterpret_cast<GradientShared<T>*>(launched_shared());
  Touched* const touched = reinterpret_cast<Touched*>(&shared + 1);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int head = blockIdx.x % a.heads, width = a.heads * a.size;  // a row has less than 2^31 elements
  const int64_t row = blockIdx.x / a.heads, token0 = row * a.tokens;
  const int64_t line0 = static_cast<int64_t>(blockIdx.x) * a.tokens;  // of lse and of the dropout mask
  const int64_t qkv0 = token0 * 3 * width + head * a.size, context0 = token0 * width + head * a.size;
  const int tiles = (a.tokens + kGradientQueries - 1) / kGradientQueries;
  // A thread's place in a tile of queries.
  const int chunk_query = threadIdx.x / kChunks, chunk_column = threadIdx.x % kChunks * kGroup;
  const auto keys_of = [&](int query) {
    if (query >= a.tokens) return KeyRange{0, 0, false};
    return KeyRange::of(a.start[token0 + query], a.end[token0 + query], a.tokens);
  };

  for (int tile = warp; tile < tiles; tile += kAttentionWarps) {
    const KeyRange range = keys_of(tile * kGradientQueries + lane);
    const Touched keys = Touched::of_warp(range, range);
    if (lane == 0) touched[tile] = keys;
  }
  for (int i = 0; i < 4; ++i) shared.query_sums[threadIdx.x][i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {  // nothing to attend to: zeros
    const int query = tile * kGradientQueries + chunk_query;
    if (touched[tile].first < touched[tile].last || query >= a.tokens || chunk_column >= a.size) continue;
    const bool wrong = keys_of(query).wrong;
    const float value = wrong ? NAN : 0.0f;
    for (int i = 0; wrong && i < kGroup; ++i) shared.query_sum(chunk_column + i, 0) = NAN;
    const uint32_t pair = pack_pair(value, value, T{});
    *reinterpret_cast<Chunk*>(a.dqkv + qkv0 + (query * 3 * width + chunk_column)) = {pair, pair, pair, pair};
  }

  for (int key0 = 0; key0 < a.tokens; key0 += kBlockKeys) {
    const auto next_tile = [&](int tile) {
      while (tile < tiles && !touched[tile].any(key0, key0 + kBlockKeys)) ++tile;
      return tile;
    };
    const auto copy_tile = [&](int tile, typename GradientShared<T>::Queries& to) {
      const int first = tile * kGradientQueries, query = first + chunk_query;
      copy_lines<kGradientQueries>(to.query, a.qkv + qkv0, 3 * width, first, a.tokens, a.size);
      copy_lines<kGradientQueries>(to.grad, a.grad + context0, width, first, a.tokens, a.size);
      copy_lines<kGradientQueries>(to.context, a.context + context0, width, first, a.tokens, a.size);
      if (chunk_column) return;
      const bool inside = query < a.tokens;
      const int at = inside ? query : 0;
      start_copy<4>(&to.line[chunk_query].first, a.start + token0 + at, inside);
      start_copy<4>(&to.line[chunk_query].count, a.end + token0 + at, inside);
      start_copy<4>(&to.line[chunk_query].norm, a.lse + line0 + at, inside);
    };
    float dkey[2 * kSteps][4] = {}, dvalue[2 * kSteps][4] = {};
    const int warp_key0 = key0 + warp * 16;
    int tile = next_tile(0);
    if (tile < tiles) {
      copy_lines<kBlockKeys>(shared.keys, a.qkv + qkv0 + width, 3 * width, key0, a.tokens, a.size);
      copy_lines<kBlockKeys>(shared.values, a.qkv + qkv0 + 2 * width, 3 * width, key0, a.tokens, a.size);
      copy_tile(tile, shared.stage[0]);
    }
    commit_copies();
    for (int stage = 0; tile < tiles; stage ^= 1) {
      typename GradientShared<T>::Queries& own = shared.stage[stage];
      const int next = next_tile(tile + 1), query0 = tile * kGradientQueries;
      if (next < tiles) copy_tile(next, shared.stage[stage ^ 1]);
      commit_copies();
      wait_copies<1>();
      prepare_lines<T>(own, a.tokens, dropout.scale);
      __syncthreads();
      const Touched keys = touched[tile];
      if (keys.any(warp_key0, warp_key0 + 16))
        add_to_keys(dkey, dvalue, shared, own, kLog2e * a.root, dropout, seed, line0 + query0, warp_key0);
      __syncthreads();  // dS is whole; the queries have been read
      float* const partial = a.partial + (static_cast<int64_t>(blockIdx.x) * tiles * kGradientQueries + query0) * kHeadSize;
      sum_over_keys(shared, own, keys, key0, partial, a.root * dropout.scale);
      __syncthreads();  // dS and the keys have been read; dQ is whole
      if (keys.last <= key0 + kBlockKeys)
        store_chunk(a.dqkv + qkv0, 3 * width, own.query, threadIdx.x, query0, a.tokens, a.size);
      tile = next;
    }
    T *const keys = shared.keys + warp * 16 * kStride, *const values = shared.values + warp * 16 * kStride;
    const float factor = a.root * dropout.scale;
    store_lines(a.dqkv + qkv0 + width, 3 * width, keys, dkey, factor, factor, warp_key0, a.tokens, a.size);
    sum_lines(shared.key_sums[0][warp], keys);
    store_lines(a.dqkv + qkv0 + 2 * width, 3 * width, values, dvalue, dropout.scale, dropout.scale, warp_key0, a.tokens,
                a.size);
    sum_lines(shared.key_sums[1][warp], values);
    __syncthreads();  // keys and values have been read; the sums are whole
    const int part = threadIdx.x / kHeadSize, column = threadIdx.x % kHeadSize;
    const unsigned block = block_again();
    float* const sums = a.sums + static_cast<int64_t>(block / a.heads) * 3 * width + (block % a.heads * a.size + column);
    if (part < 2 && column < a.size) {
      float sum = key0 ? sums[(part + 1) * width] : 0.0f;
#pragma unroll 1
      for (int w = 0; w < kAttentionWarps; ++w) sum += shared.key_sums[part][w][column];
      sums[(part + 1) * width] = sum;
    } else if (part == 2 && column < a.size && key0 + kBlockKeys >= a.tokens) {
      float sum = 0;
#pragma unroll 1
      for (int i = 0; i < shared.kSumsOfColumn; ++i) sum += shared.query_sum(column, i);
      sums[0] = sum;
    }
    __syncthreads();  // the sums have been read
  }
}

}  // namespace megabert
