#pragma once
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/attention_decode_sm90.cuh"

/// What one warp of the Hopper decode kernel multiplies. Keys are the rows of both products, so
/// that 8 query rows fill an MMA: scores^T [16 keys, 8] = K Q^T, sums^T [size, 8] += V^T weights^T.
namespace ridgeline::attention_decode {

/// Two consecutive elements of q, of type bf16 or fp16, as floats.
__device__ __forceinline__ float2 unpack(std::uint32_t pair, DType dtype) {
  if (dtype == DType::kBFloat16) return __bfloat1622float2(device::as_pair<__nv_bfloat16>(pair));
  return __half22float2(device::as_pair<__half>(pair));
}

template <class Tile>
struct WarpState {
  using T = typename Tile::T;
  const AttentionParams& p;
  Shared<Tile>& shared;

  // Of the item.
  int groups, group;             // of the rows, a warp's kRows each: how many, and this warp's
  int first_row;                 // of this warp
  int rows;                      // of the item's sequence and KV head
  config::KeyRange live, whole;  // the keys that some row sees; those that all rows see
  std::uint32_t queries[Tile::kSums][Tile::kQueryTiles][2];
  float query_unit[Tile::kQueryTiles][2];  // queries are kept divided by it (quantised)

  // Gathered so far.
  device::ColumnSoftmax softmax[Tile::kQueryTiles];
  float sums[Tile::kSums][Tile::kQueryTiles][4];
  int value_exponent;  // weights are kept divided by 2^(value_exponent - 127) (quantised)

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / device::kWarpSize; }

  /// The column of the head at which element i of MMA `sum`'s accumulator row lies: fp8 and int8
  /// values come from shared memory in pairs of columns.
  __device__ static int column(int sum, int g, int half) {
    return Tile::kQuantised ? 16 * sum + 2 * g + half : 16 * sum + g + 8 * half;
  }

  /// This thread's row of query tile j; null past the last.
  __device__ __forceinline__ const std::uint16_t* query_row(const Item& item, int place,
                                                            int j) const {
    if constexpr (Tile::kSharesQueries) return shared.queries[place][lane() / 4];
    const Work& work = item.work;
    const int row = first_row + 8 * j + lane() / 4;
    if (row >= work.rows) return nullptr;
    return static_cast<const std::uint16_t*>(p.q) + work.batch * p.stride_q_batch +
           (work.sequence.q_begin + work.query(row)) * p.stride_q_row +
           work.head(row) * p.stride_q_head;
  }

  /// In the order in which words of the cache become operands: an MMA's columns 2t, 2t + 1 and 2t +
  /// 8, 2t + 9 are those of a 16-bit cache, and 4t to 4t + 3 of an 8-bit cache.
  __device__ __forceinline__ void load_queries(const Item& item, int place) {
    const int t = lane() % 4;
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j) {
      const std::uint16_t* row = query_row(item, place, j);
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = 16 * i + (Tile::kQuantised ? 4 * t + 2 * h : 8 * h + 2 * t);
          const bool valid = Tile::kSharesQueries || (row != nullptr && column < p.head_dim);
          queries[i][j][h] = valid ? *reinterpret_cast<const std::uint32_t*>(row + column) : 0u;
        }
    }
    if constexpr (Tile::kQuantised) normalise_queries();
  }

  /// Divides each row by a power of two: fp16 then holds all of it but what is 2^-24 of its
  /// largest.
  __device__ __forceinline__ void normalise_queries() {
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = unpack(queries[i][j][h], p.dtype);
          largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
      largest = device::warp_reduce<device::MaxOrNaN, device::kQuad>(largest);
      const int exponent = min(max(exponent_of(largest), 1), 253);
      const float factor = __uint_as_float((254 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = unpack(queries[i][j][h], p.dtype);
          queries[i][j][h] = attention_tile::pack<T>(pair.x * factor, pair.y * factor);
        }
#pragma unroll
      for (int c = 0; c < 2; ++c)
        query_unit[j][c] =
            device::from_lane(__uint_as_float(exponent << 23), (lane() % 4 * 2 + c) * 4);
    }
  }

  __device__ __forceinline__ void begin(const Item& item, int place) {
    const Work& work = item.work;
    rows = work.rows;
    const int here = min(rows - work.first_row, kWarps * Tile::kRows);
    groups = here <= Tile::kRows ? 1 : here <= 2 * Tile::kRows ? 2 : 4;
    group = warp() % groups;
    first_row = work.first_row + group * Tile::kRows;
    const config::KeyRange first = config::visible_keys(p, work.sequence, 0);
    const config::KeyRange last = config::visible_keys(p, work.sequence, work.sequence.q_len - 1);
    live = {.begin = first.begin, .end = item.keys.end};
    whole = {.begin = last.begin, .end = config::lesser(first.end, live.end)};
    load_queries(item, place);
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j) {
      softmax[j] = {};
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] = 0.0f;
    }
    value_exponent = 0;
  }

  /// scores = 16 keys of the tile from row `row` on times this warp's queries, by two chains of
  /// MMAs.
  __device__ __forceinline__ void multiply_keys(const char* tile, int row,
                                                float (&scores)[Tile::kQueryTiles][4]) {
    float parts[2][Tile::kQueryTiles][4] = {};
    const char* from = tile + row * Tile::kPartBytes;
#pragma unroll
    for (int i = 0; i < Tile::kRowBytes / 32; ++i) {
      std::uint32_t m[4];
      ptx::ldmatrix(m, from + swizzled<Tile>(lane() % 16, 2 * i + lane() / 16));
      if constexpr (Tile::kQuantised) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          std::uint32_t low[2], high[2];
          device::expand_halves<Tile::kCache, false>(m[2 * h], low);
          device::expand_halves<Tile::kCache, false>(m[2 * h + 1], high);
          const std::uint32_t a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
          for (int j = 0; j < Tile::kQueryTiles; ++j)
            ptx::mma_m16n8k16<T>(parts[h][j], a, queries[2 * i + h][j][0],
                                 queries[2 * i + h][j][1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < Tile::kQueryTiles; ++j)
          ptx::mma_m16n8k16<T>(parts[i % 2][j], m, queries[i][j][0], queries[i][j][1]);
      }
    }
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[j][c] = parts[0][j][c] + parts[1][j][c];
  }

  /// sums += the same keys' values times weights.
  __device__ __forceinline__ void multiply_values(
      const char* tile, int row, const std::uint32_t (&weights)[Tile::kQueryTiles][2]) {
    const char* from = tile + row * Tile::kPartBytes;
    if constexpr (Tile::kQuantised) {
#pragma unroll
      for (int i = 0; i < Tile::kSums / 2; ++i) {
        std::uint32_t m[4];
        ptx::ldmatrix_transposed(m, from + swizzled<Tile>(lane() % 16, 2 * i + lane() / 16));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          std::uint32_t first[2], second[2];
          device::expand_halves<Tile::kCache, true>(m[2 * h], first);
          device::expand_halves<Tile::kCache, true>(m[2 * h + 1], second);
          const std::uint32_t a[4] = {first[0], first[1], second[0], second[1]};
#pragma unroll
          for (int j = 0; j < Tile::kQueryTiles; ++j)
            ptx::mma_m16n8k16<T>(sums[2 * i + h][j], a, weights[j][0], weights[j][1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i) {
        std::uint32_t m[4];
        ptx::ldmatrix_transposed(
            m, from + swizzled<Tile>(lane() / 16 * 8 + lane() % 8, 2 * i + lane() / 8 % 2));
#pragma unroll
        for (int j = 0; j < Tile::kQueryTiles; ++j)
          ptx::mma_m16n8k16<T>(sums[i][j], m, weights[j][0], weights[j][1]);
      }
    }
  }

  /// Products become scores in units of log2, -inf where hidden. n0: the first key.
  __device__ __forceinline__ void finish_scores(const Item& item, int n0,
                                                const float (&key_scale)[2],
                                                float (&scores)[Tile::kQueryTiles][4]) const {
    const bool caps = p.softcap > 0.0f;
    const float unit = caps ? p.scale : p.scale * device::kLog2E;
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (Tile::kQuantised) scores[j][c] *= key_scale[c / 2] * query_unit[j][c % 2];
        scores[j][c] *= unit;
      }
    if (caps) {
#pragma unroll
      for (int j = 0; j < Tile::kQueryTiles; ++j)
#pragma unroll
        for (float& score : scores[j]) score = device::capped(score, p.softcap) * device::kLog2E;
    }
    if (n0 >= whole.begin && n0 + kStep <= whole.end) return;
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = min(first_row + 8 * j + lane() % 4 * 2 + c, rows - 1);
        const config::KeyRange sees =
            config::visible_keys(p, item.work.sequence, item.work.query(row));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = n0 + lane() / 4 + 8 * h;
          if (n < sees.begin || n >= min(sees.end, live.end))
            scores[j][2 * h + c] = device::kMinusInfinity;
        }
      }
  }

  /// Values of slots outside the sequence may be NaN, and 0 * NaN must not reach the sums.
  __device__ __forceinline__ void clear_unused_values(char* tile, int row, int n0) const {
    if (n0 >= live.begin && n0 + kStep <= live.end) return;
    constexpr int kChunks = Tile::kRowBytes / 16;
    for (int i = lane(); i < kStep * kChunks; i += device::kWarpSize) {
      const int n = n0 + i / kChunks;
      if (n >= live.begin && n < live.end) continue;
      *reinterpret_cast<uint4*>(tile + swizzled<Tile>(row + i / kChunks, i % kChunks)) = uint4{};
    }
    ptx::fence_async_shared();
    __syncwarp();  // the zeros are there
  }

  /// The scales of this thread's two keys; 0 outside the live keys.
  __device__ __forceinline__ void load_scales(const std::uint32_t* words, const void* scales,
                                              std::int64_t stride_row, std::int64_t stride_head,
                                              const Item& item, int row, int n0,
                                              float (&scale)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = row + lane() / 4 + 8 * h, n = n0 + lane() / 4 + 8 * h;
      // Rows of a block begin at an even element, so the key's number tells the half of its word.
      const std::uint64_t element = reinterpret_cast<std::uintptr_t>(scales) / 2 + n * stride_row +
                                    item.work.kv_head * stride_head;
      const std::uint32_t bits = element % 2 == 0 ? words[i] << 16 : words[i] & 0xffff0000u;
      scale[h] = n >= live.begin && n < live.end ? __uint_as_float(bits) : 0.0f;
    }
  }

  /// Multiplies the sums with what the softmax and the values' unit ask for.
  __device__ __forceinline__ void raise(const float (&scores)[Tile::kQueryTiles][4],
                                        int exponent) {
    float shift = 1.0f;
    if constexpr (Tile::kQuantised) {
      const int raised = min(max(value_exponent, device::warp_max(exponent)), 253);
      shift = exp2f(static_cast<float>(value_exponent - raised));
      value_exponent = raised;
    }
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j) {
      float keep[2];
      softmax[j].raise(scores[j], keep);
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] *= keep[c % 2] * shift;
    }
  }

  /// One step: the 16 keys from n0 on, which are rows `row` and following of the stage.
  __device__ __forceinline__ void step(const Item& item, int stage, int row, int n0) {
    Stage& tiles = shared.stages[stage];
    float scores[Tile::kQueryTiles][4], key_scale[2] = {}, value_scale[2] = {};
    if constexpr (Tile::kQuantised) {
      const auto& scales = shared.scales[stage];
      load_scales(scales.k, p.k_scale, p.stride_ks_row, p.stride_ks_head, item, row, n0, key_scale);
      load_scales(scales.v, p.v_scale, p.stride_vs_row, p.stride_vs_head, item, row, n0,
                  value_scale);
    }
    multiply_keys(tiles.k, row, scores);
    finish_scores(item, n0, key_scale, scores);
    bool exceeded = false;
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j) exceeded |= softmax[j].is_exceeded(scores[j]);
    int exponent = 0;
    if constexpr (Tile::kQuantised) {
      exponent = max(exponent_of(value_scale[0]), exponent_of(value_scale[1]));
      exceeded |= exponent > value_exponent + 4;  // 2^(8 + 1 + 4) is still far from fp16's largest
    }
    if (device::any_lane(exceeded)) raise(scores, exponent);
    const float factor = __uint_as_float((254 - value_exponent) << 23);
    std::uint32_t weights[Tile::kQueryTiles][2];
#pragma unroll
    for (int j = 0; j < Tile::kQueryTiles; ++j) {
      softmax[j].weigh(scores[j]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float unit = Tile::kQuantised ? value_scale[h] * factor : 1.0f;
        weights[j][h] = ptx::transpose_matrix(
            attention_tile::pack<T>(scores[j][2 * h] * unit, scores[j][2 * h + 1] * unit));
      }
    }
    clear_unused_values(tiles.v, row, n0);
    multiply_values(tiles.v, row, weights);
  }

  __device__ static int exponent_of(float x) {
    return static_cast<int>(__float_as_uint(x) >> 23) & 0xff;
  }

  /// This warp's share of a stage whose first key is n; the steps go round the groups of keys.
  __device__ __forceinline__ void walk(const Item& item, int stage, int n) {
    const int end = min(n + Tile::kKeys, item.keys.end), turns = kWarps / groups;
    const int turn = (warp() / groups - (n - item.keys.begin) / kStep) & (turns - 1);
    for (int n0 = n + turn * kStep; n0 < end; n0 += turns * kStep) step(item, stage, n0 - n, n0);
  }
};

}  // namespace ridgeline::attention_decode
