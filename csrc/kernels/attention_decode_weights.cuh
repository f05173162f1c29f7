#pragma once
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/attention_decode_keys.cuh"

/// How a warp of the Hopper decode kernel weighs its own keys of a tile. Weights pass through
/// shared memory, those of a leaf's first tile relative to the warp's own bases, so that all four
/// warps meet once a tile: they read the others' bases with their weights.
namespace ridgeline::attention_decode {

constexpr int kConsumersMeet = 1;  // named barrier

template <class Tile>
struct WeightWarp : KeyWarp<Tile> {
  using Base = KeyWarp<Tile>;
  using typename Base::Scores, typename Base::T;
  using Base::kSteps, Base::kTiles, Base::row_of_step, Base::scale_of;
  using Base::g, Base::lane, Base::live, Base::p, Base::shared, Base::t, Base::warp;

  // Gathered so far.
  device::ColumnSoftmax softmax[kTiles];  // of rows 2 t and 2 t + 1 of each query tile
  float sums[Tile::kSums][kTiles][4];
  int value_exponent;  // weights are kept divided by 2^(value_exponent - 127) (quantised)
  std::uint32_t units[kTiles][kWarps];  // pairs: what each warp's weights are multiplied with

  __device__ __forceinline__ WeightWarp(const Launch& launch, Shared<Tile>& shared)
      : Base{launch, shared} {}

  __device__ __forceinline__ void begin_leaf() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      softmax[j] = {};
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] = 0.0f;
    }
    value_exponent = 0;
  }

  /// The scales of this thread's values (quantised).
  using ValueScales = float[kSteps][2];
  __device__ __forceinline__ void load_value_scales(int stage, int n, ValueScales& scales) const {
    if constexpr (Tile::kQuantised) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = row_of_step(s) + g + 8 * h;
          scales[s][h] =
              scale_of(shared.scales[stage][i], Base::value_scales, p.stride_vs_row, n + i);
        }
    }
  }

  __device__ __forceinline__ static int largest_exponent(const ValueScales& scales) {
    float largest = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) largest = fmaxf(largest, fmaxf(scales[s][0], scales[s][1]));
    return exponent_of(largest);
  }

  /// Whether some weight would leave the range of its type.
  __device__ __forceinline__ bool is_exceeded(const Scores& scores,
                                              const ValueScales& scales) const {
    bool exceeded = false;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int j = 0; j < kTiles; ++j) exceeded |= softmax[j].is_exceeded(scores[s][j]);
    // 2^(8 + 1 + 4) is still far from fp16's largest.
    if constexpr (Tile::kQuantised) exceeded |= largest_exponent(scales) > value_exponent + 4;
    return exceeded;
  }

  /// What this warp's weights of a tile are relative to.
  struct Bases {
    float rows[kTiles][2];
    int exponent;  // of values
  };
  __device__ __forceinline__ Bases bases() const {
    Bases bases{.exponent = value_exponent};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) bases.rows[j][c] = softmax[j].base[c];
    return bases;
  }

  /// What they would be after scores of this warp alone.
  __device__ __forceinline__ Bases raised_bases(const Scores& scores,
                                                const ValueScales& scales) const {
    Bases bases{.exponent = value_exponent};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = fmaxf(scores[0][j][c], scores[0][j][c + 2]);
#pragma unroll
        for (int s = 1; s < kSteps; ++s)
          largest = fmaxf(largest, fmaxf(scores[s][j][c], scores[s][j][c + 2]));
        bases.rows[j][c] = softmax[j].raised(c, device::column_reduce<device::MaxOrNaN>(largest));
      }
    if constexpr (Tile::kQuantised)
      bases.exponent = min(max(value_exponent, device::warp_max(largest_exponent(scales))), 253);
    return bases;
  }

  using Totals = float[kTiles][2];

  /// Stores the weights of this warp's keys; totals: their sums.
  __device__ __forceinline__ void store_weights(const Scores& scores, const ValueScales& scales,
                                                int buffer, const Bases& bases, Totals& totals) {
    const float factor = power_of_two(254 - bases.exponent);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) totals[j][0] = totals[j][1] = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float unit[2] = {1.0f, 1.0f};
      if constexpr (Tile::kQuantised) {
        unit[0] = scales[s][0] * factor;
        unit[1] = scales[s][1] * factor;
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        float weights[4];
        device::ColumnSoftmax::weigh(scores[s][j], bases.rows[j], weights, totals[j]);
        std::uint32_t pairs[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          pairs[h] =
              attention_tile::pack<T>(weights[2 * h] * unit[h], weights[2 * h + 1] * unit[h]);
        ptx::stmatrix_transposed(
            &shared.weights[buffer][8 * j + lane % 8][row_of_step(s) + lane / 8 % 2 * 8], pairs);
      }
    }
  }

  /// Stores this warp's totals of a leaf, of whose last tile these are.
  __device__ __forceinline__ void store_totals(int buffer, const Bases& mine,
                                               const Totals& totals) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float keep = factor_to(mine.rows[j][c], softmax[j].base[c]);
        const float total =
            device::column_reduce<device::Sum>(fmaf(softmax[j].sum[c], keep, totals[j][c]));
        if (g == 0) shared.totals[buffer][8 * j + 2 * t + c][warp] = total;
      }
  }

  /// What sums relative to `from` are multiplied with to be relative to `to`.
  __device__ __forceinline__ static float factor_to(float to, float from) {
    return ptx::exp2_approx(from - device::exponent_base(to));
  }

  /// Adds the totals of a tile whose weights are relative to the rows' bases; of a leaf's last
  /// tile those of all warps join.
  __device__ __forceinline__ void add_totals(int buffer, const Totals& totals, bool ends_leaf) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& sum = softmax[j].sum[c];
        if (!ends_leaf) {
          sum += totals[j][c];
          continue;
        }
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared.totals[buffer][8 * j + 2 * t + c][w];
      }
  }

  /// The warps' bases become one, and so each row's: what the warps stored relative to their own is
  /// brought to it as it is read.
  __device__ __forceinline__ void join_bases(int buffer, const Bases& mine, const Totals& totals,
                                             bool ends_leaf) {
    float shift = 1.0f, shifts[kWarps] = {};
    if constexpr (Tile::kQuantised) {
      int raised = value_exponent;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) raised = max(raised, shared.exponents[buffer][w]);
      shift = exp2f(static_cast<float>(value_exponent - raised));
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        shifts[w] = static_cast<float>(shared.exponents[buffer][w] - raised);
      value_exponent = raised;
    }
    const auto base_of = [&](int row, float (&of_warp)[kWarps]) {
      float base = device::kMinusInfinity;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        of_warp[w] = shared.bases[buffer][row][w];
        base = ptx::max_nan(base, of_warp[w]);
      }
      return base;
    };
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float keep[2], of_warp[kWarps];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * j + 2 * t + c;
        const float base = base_of(row, of_warp);
        float& sum = softmax[j].sum[c];
        keep[c] = factor_to(base, softmax[j].base[c]);
        softmax[j].base[c] = base;
        if (ends_leaf) {
          sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w)
            sum = fmaf(shared.totals[buffer][row][w], factor_to(base, of_warp[w]), sum);
        } else {
          sum = fmaf(totals[j][c], factor_to(base, mine.rows[j][c]), sum * keep[c]);
        }
      }
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] *= keep[c % 2] * shift;
      const float base = base_of(8 * j + g, of_warp);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float unit = factor_to(base, of_warp[w] + shifts[w]);
        units[j][w] = attention_tile::pack<T>(unit, unit);
      }
    }
  }

  /// Leaves the weights of the tile whose first key is n in shared memory; all warps meet.
  __device__ __forceinline__ void weigh(int stage, int n, int buffer, const Scores& scores,
                                        bool begins_leaf, bool ends_leaf) {
    ValueScales scales;
    load_value_scales(stage, n, scales);
    Totals totals;
    if (!begins_leaf) {  // bases are there already, and mostly high enough
      const Bases mine = bases();
      store_weights(scores, scales, buffer, mine, totals);
      if (ends_leaf) store_totals(buffer, mine, totals);
      // Weights and totals are there, and clean values; what the tile before last left is read.
      if (!ptx::named_barrier_any(kConsumersMeet, kConsumerThreads, is_exceeded(scores, scales))) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (std::uint32_t& unit : units[j]) unit = attention_tile::pack<T>(1.0f, 1.0f);
        return add_totals(buffer, totals, ends_leaf);
      }
    }
    const Bases mine = raised_bases(scores, scales);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (g == 0) shared.bases[buffer][8 * j + 2 * t + c][warp] = mine.rows[j][c];
    if (Tile::kQuantised && lane == 0) shared.exponents[buffer][warp] = mine.exponent;
    store_weights(scores, scales, buffer, mine, totals);
    if (ends_leaf) store_totals(buffer, mine, totals);
    // The same, and the warps' bases are there.
    ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);
    join_bases(buffer, mine, totals, ends_leaf);
  }
};

}  // namespace ridgeline::attention_decode
