#pragma once
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "kernels/attention_decode_sm90.cuh"

/// The first product of a warp of the Hopper decode kernel. Keys are its rows, so that 8 query rows
/// fill an MMA: scores^T [16 keys, 8] = K Q^T. A warp scores its own keys of a tile.
namespace ridgeline::attention_decode {

__device__ __forceinline__ int exponent_of(float x) {
  return static_cast<int>(__float_as_uint(x) >> 23) & 0xff;
}

/// 2^(exponent - 127).
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<std::uint32_t>(exponent) << 23);
}

template <class Tile>
struct KeyWarp {
  using T = typename Tile::T;
  static constexpr int kTiles = Tile::kQueryTiles;
  static constexpr bool kBiased = Tile::kCache == DType::kInt8;  // keys, as operands
  static constexpr int kSteps = Tile::kKeys / (kStep * kWarps);  // of this warp's keys of a tile
  using Scores = float[kSteps][kTiles][4];

  const Launch& launch;
  Shared<Tile>& shared;
  const AttentionParams& p = launch.attention;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  const int g = lane / 4, t = lane % 4;  // a row and a pair of columns of an accumulator

  // Of the item.
  config::KeyRange live, whole;  // the keys that some row sees; those that all rows see
  std::uint32_t queries[Tile::kSize / 16][kTiles][2];
  float query_unit[kTiles][2];  // what products are multiplied with
  float key_bias[kTiles][2];  // what products begin with (kBiased)
  std::uint32_t key_scales, value_scales;  // number, as an element, of a scale of key 0 (quantised)

  // ---- Queries ----------------------------------------------------------------------------------

  /// This thread's row of query tile j; null past the last.
  __device__ __forceinline__ const std::uint16_t* query_row(const Work& work, int place,
                                                            int j) const {
    if constexpr (Tile::kSharesQueries) return shared.queries[place][g];
    const int row = work.first_row + 8 * j + g;
    return row < work.rows ? query_at(launch, work, row) : nullptr;
  }

  /// In the order in which words of the cache become operands: an MMA's columns 2t, 2t + 1 and 2t +
  /// 8, 2t + 9 are those of a 16-bit cache, and 4t to 4t + 3 of an 8-bit cache.
  __device__ __forceinline__ void load_queries(const Work& work, int place) {
    float unit = p.softcap > 0.0f ? p.scale : p.scale * device::kLog2E;
    if constexpr (kBiased) unit *= device::kBiasedUnit;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const std::uint16_t* row = query_row(work, place, j);
#pragma unroll
      for (int i = 0; i < Tile::kSize / 16; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = 16 * i + (Tile::kQuantised ? 4 * t + 2 * h : 8 * h + 2 * t);
          const bool valid = Tile::kSharesQueries || (row != nullptr && column < p.head_dim);
          queries[i][j][h] = valid ? *reinterpret_cast<const std::uint32_t*>(row + column) : 0u;
        }
      query_unit[j][0] = query_unit[j][1] = unit;
      if constexpr (Tile::kQuantised) normalise_queries(j);
      if constexpr (kBiased) load_bias(j);
    }
  }

  /// Products begin with what the bias of the keys adds to them.
  __device__ __forceinline__ void load_bias(int j) {
    constexpr std::uint32_t kMinus = device::kMinusInt8Bias;
    constexpr std::uint32_t kMinusBias[4] = {kMinus, kMinus, kMinus, kMinus};
    float products[4] = {};
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i)
      ptx::mma_m16n8k16<T>(products, kMinusBias, queries[i][j][0], queries[i][j][1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) key_bias[j][c] = products[c];
  }

  /// Divides each row of bf16 by a power of two: fp16 then holds all of it but what is 2^-24 of its
  /// largest.
  __device__ __forceinline__ void normalise_queries(int j) {
    if (p.dtype != DType::kBFloat16) return;
    std::uint32_t largest = 0;  // exponents of both halves of the words, in their places
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) largest = __vmaxu2(largest, queries[i][j][h] & 0x7f807f80u);
    largest = device::group_max(max(largest >> 23, largest >> 7 & 0xffu), device::kQuad);
    const int exponent = min(max(static_cast<int>(largest), 1), 253);
    const float factor = power_of_two(254 - exponent);
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint32_t pair = queries[i][j][h];
        queries[i][j][h] = attention_tile::pack<T>(__uint_as_float(pair << 16) * factor,
                                                   __uint_as_float(pair & 0xffff0000u) * factor);
      }
#pragma unroll
    for (int c = 0; c < 2; ++c)
      query_unit[j][c] *= device::from_lane(power_of_two(exponent), (2 * t + c) * 4);
  }

  /// What the item's rows see.
  __device__ __forceinline__ void see(const Item& item) {
    const config::Sequence& sequence = item.work.sequence;
    const config::KeyRange first = config::visible_keys(p, sequence, 0);
    const config::KeyRange last = config::visible_keys(p, sequence, sequence.q_len - 1);
    live = {.begin = first.begin, .end = item.keys.end};
    whole = {.begin = last.begin, .end = config::lesser(first.end, live.end)};
    if constexpr (Tile::kQuantised) {
      const auto first_of = [&](const void* scales, std::int64_t stride_head) {
        return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(scales) / 2) +
               item.work.kv_head * static_cast<std::uint32_t>(stride_head);
      };
      key_scales = first_of(p.k_scale, p.stride_ks_head);
      value_scales = first_of(p.v_scale, p.stride_vs_head);
    }
  }
  __device__ __forceinline__ void begin(const Item& item, int place) {
    see(item);
    load_queries(item.work, place);
  }

  // ---- Keys -------------------------------------------------------------------------------------

  /// Four elements of quantised keys. Those of int8 keep a bias, of which products are freed by
  /// what they begin with. H200, 128 sequences of 4k keys: 288 us if each element is, 282 so.
  __device__ __forceinline__ static void expand(std::uint32_t word, std::uint32_t (&out)[2]) {
    if constexpr (kBiased) {
      device::expand_biased(word, out);
    } else {
      device::expand_halves<Tile::kCache, false>(word, out);
    }
  }

  /// scores = 16 keys of the tile from row `row` on times the queries, by two chains of MMAs.
  __device__ __forceinline__ void multiply_keys(const char* tile, int row,
                                                float (&scores)[kTiles][4]) {
    float parts[2][kTiles][4] = {};
    if constexpr (kBiased)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) parts[0][j][c] = key_bias[j][c % 2];
    const char* from = tile + row * Tile::kPartBytes;
#pragma unroll
    for (int i = 0; i < Tile::kRowBytes / 32; ++i) {
      std::uint32_t m[4];
      ptx::ldmatrix(m, from + swizzled<Tile>(lane % 16, 2 * i + lane / 16));
      if constexpr (Tile::kQuantised) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          std::uint32_t low[2], high[2];
          expand(m[2 * h], low);
          expand(m[2 * h + 1], high);
          const std::uint32_t a[4] = {low[0], high[0], low[1], high[1]};
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
            ptx::mma_m16n8k16<T>(parts[h][j], a, queries[2 * i + h][j][0],
                                 queries[2 * i + h][j][1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          ptx::mma_m16n8k16<T>(parts[i % 2][j], m, queries[i][j][0], queries[i][j][1]);
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[j][c] = parts[0][j][c] + parts[1][j][c];
  }

  /// Products become scores in units of log2, -inf where hidden. n0: the first key.
  __device__ __forceinline__ void finish_scores(const Item& item, int n0,
                                                const float (&key_scale)[2],
                                                float (&scores)[kTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        scores[j][c] *= Tile::kQuantised ? key_scale[c / 2] * query_unit[j][c % 2]
                                         : query_unit[j][c % 2];
    if (p.softcap > 0.0f) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (float& score : scores[j]) score = device::capped(score, p.softcap) * device::kLog2E;
    }
    if (n0 >= whole.begin && n0 + kStep <= whole.end) return;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = min(item.work.first_row + 8 * j + 2 * t + c, item.work.rows - 1);
        const config::KeyRange sees =
            config::visible_keys(p, item.work.sequence, launch.group.divide(row));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = n0 + g + 8 * h;
          if (n < sees.begin || n >= min(sees.end, live.end))
            scores[j][2 * h + c] = device::kMinusInfinity;
        }
      }
  }

  /// The scale in the aligned word of key n, which its number tells the half of: rows of a block
  /// begin at an even element. 0 outside the live keys.
  __device__ __forceinline__ float scale_of(std::uint32_t word, std::uint32_t first,
                                            std::int64_t stride_row, int n) const {
    const std::uint32_t element = first + n * static_cast<std::uint32_t>(stride_row);
    const std::uint32_t bits = element % 2 == 0 ? word << 16 : word & 0xffff0000u;
    return n >= live.begin && n < live.end ? __uint_as_float(bits) : 0.0f;
  }

  /// Row of the tile at which this warp's step s begins: steps go round the warps.
  __device__ __forceinline__ int row_of_step(int s) const { return (s * kWarps + warp) * kStep; }

  /// This warp's keys of the tile whose first key is n.
  __device__ __forceinline__ void score_keys(const Item& item, int stage, int n, Scores& scores) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int row = row_of_step(s);
      float scale[2] = {};
      if constexpr (Tile::kQuantised) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = row + g + 8 * h;
          scale[h] = scale_of(shared.scales[stage][i], key_scales, p.stride_ks_row, n + i);
        }
      }
      multiply_keys(shared.stages[stage], row, scores[s]);
      finish_scores(item, n + row, scale, scores[s]);
    }
  }
};

}  // namespace ridgeline::attention_decode
