#pragma once
#include "device/ptx/stmatrix.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/attention_decode_keys.cuh"

/// What a warp of the Hopper decode kernel does with its scores: it weighs its own keys of a tile,
/// and sums its own columns of all the tile's values, sums^T [columns, 8] += V^T weights^T. Weights
/// pass through shared memory, sums never do: the end of an item costs no exchange of them.
namespace ridgeline::attention_decode {

constexpr int kConsumersMeet = 1;  // named barrier

template <class Tile>
struct WarpState : KeyWarp<Tile> {
  using Base = KeyWarp<Tile>;
  using typename Base::Scores, typename Base::T;
  using Base::kSteps, Base::kTiles, Base::row_of_step, Base::scale_of;
  using Base::g, Base::lane, Base::launch, Base::live, Base::p, Base::shared, Base::t, Base::warp;

  // Gathered so far.
  device::ColumnSoftmax softmax[kTiles];  // of rows 2 t and 2 t + 1 of each query tile
  float sums[Tile::kSums][kTiles][4];
  int value_exponent;  // weights are kept divided by 2^(value_exponent - 127) (quantised)

  /// A part of the item's tree that waits for what follows it.
  struct Part {
    float base[kTiles][2], total[kTiles][2];
    float sums[Tile::kSums][kTiles][4];
  };
  // In local memory, for leaves end seldom and registers are scarce.
  using Parts = Part[Tile::kLevels > 0 ? Tile::kLevels : 1];

  __device__ __forceinline__ WarpState(const Launch& launch, Shared<Tile>& shared)
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

  // ---- Weights ----------------------------------------------------------------------------------

  /// The scales of this thread's values (quantised).
  using ValueScales = float[kSteps][2];
  __device__ __forceinline__ void load_value_scales(const Item& item, int stage, int n,
                                                    ValueScales& scales) const {
    if constexpr (Tile::kQuantised) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = row_of_step(s) + g + 8 * h;
          scales[s][h] = scale_of(shared.scales[stage][i], p.v_scale, p.stride_vs_row,
                                  p.stride_vs_head, item, n + i);
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

  /// Stores the weights of this warp's keys; their sums so far are added to `totals`.
  __device__ __forceinline__ void store_weights(const Scores& scores, const ValueScales& scales,
                                                int buffer, float (&totals)[kTiles][2]) {
    const float factor = power_of_two(254 - value_exponent);
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
        softmax[j].weigh(scores[s][j], weights, totals[j]);
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

  /// Raises the bases to what the tile's scores ask for, together with the other warps.
  __device__ __forceinline__ void raise(const Scores& scores, const ValueScales& scales) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = scores[0][j][c];
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          largest = fmaxf(largest, fmaxf(scores[s][j][c], scores[s][j][c + 2]));
        largest = device::column_reduce<device::MaxOrNaN>(largest);
        if (g == 0) shared.largest[warp][8 * j + 2 * t + c] = largest;
      }
    if constexpr (Tile::kQuantised) {
      const int exponent = device::warp_max(largest_exponent(scales));
      if (lane == 0) shared.exponents[warp] = exponent;
    }
    ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // the warps' largest are there
    float shift = 1.0f;
    if constexpr (Tile::kQuantised) {
      int raised = value_exponent;
      for (int w = 0; w < kWarps; ++w) raised = max(raised, shared.exponents[w]);
      raised = min(raised, 253);
      shift = exp2f(static_cast<float>(value_exponent - raised));
      value_exponent = raised;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float largest[2], keep[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        largest[c] = device::kMinusInfinity;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          largest[c] = ptx::max_nan(largest[c], shared.largest[w][8 * j + 2 * t + c]);
      }
      softmax[j].raise(largest, keep);
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] *= keep[c % 2] * shift;
    }
  }

  /// Leaves the weights of the tile whose first key is n in shared memory; all warps meet.
  __device__ __forceinline__ void weigh(const Item& item, int stage, int n, int buffer,
                                        const Scores& scores, bool is_first) {
    ValueScales scales;
    load_value_scales(item, stage, n, scales);
    float totals[kTiles][2] = {};
    if (!is_first) {  // bases are there already, and mostly high enough
      store_weights(scores, scales, buffer, totals);
      // Weights are there, and clean values; what the tile before last left is read.
      if (!ptx::named_barrier_any(kConsumersMeet, kConsumerThreads, is_exceeded(scores, scales)))
        return add_totals(totals);
    }
    raise(scores, scales);
    for (auto& pair : totals) pair[0] = pair[1] = 0.0f;
    store_weights(scores, scales, buffer, totals);
    ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // weights are there
    add_totals(totals);
  }

  __device__ __forceinline__ void add_totals(const float (&totals)[kTiles][2]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) softmax[j].sum[c] += totals[j][c];
  }

  // ---- Leaves -----------------------------------------------------------------------------------

  /// The warps' totals of a leaf become one; all warps meet.
  __device__ __forceinline__ void join_totals(float (&totals)[kWarps][Tile::kRows]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      softmax[j].join_column();
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (g == 0) totals[warp][8 * j + 2 * t + c] = softmax[j].sum[c];
    }
    ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // the warps' totals are there
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        softmax[j].sum[c] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) softmax[j].sum[c] += totals[w][8 * j + 2 * t + c];
      }
  }

  /// What was gathered becomes that and the part before it.
  __device__ __forceinline__ void join(const Part& before) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const device::JoinedBase even(before.base[j][0], softmax[j].base[0]);
      const device::JoinedBase odd(before.base[j][1], softmax[j].base[1]);
      softmax[j].base[0] = even.base, softmax[j].base[1] = odd.base;
      softmax[j].sum[0] = even.join(before.total[j][0], softmax[j].sum[0]);
      softmax[j].sum[1] = odd.join(before.total[j][1], softmax[j].sum[1]);
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sums[i][j][c] = (c % 2 == 0 ? even : odd).join(before.sums[i][j][c], sums[i][j][c]);
    }
  }

  /// Leaf `leaf` of the item has been gathered: it joins the parts of its own size, or, if it is
  /// the last, all that wait.
  __device__ __forceinline__ void end_leaf(int leaf, bool is_last, Parts& parts,
                                           float (&totals)[kWarps][Tile::kRows]) {
    join_totals(totals);
    const float unit = Tile::kQuantised ? power_of_two(value_exponent) : 1.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float keep[2];
      softmax[j].round_bases(keep);
#pragma unroll
      for (int i = 0; i < Tile::kSums; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] *= keep[c % 2] * unit;
    }
    if constexpr (Tile::kLevels > 0) {
      int level = 0;
      for (; leaf >> level != 0 && (is_last || (leaf >> level & 1) != 0); ++level)
        if ((leaf >> level & 1) != 0) join(parts[level]);
      if (!is_last) keep(parts[level]);
    }
  }

  __device__ __forceinline__ void keep(Part& part) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        part.base[j][c % 2] = softmax[j].base[c % 2];
        part.total[j][c % 2] = softmax[j].sum[c % 2];
#pragma unroll
        for (int i = 0; i < Tile::kSums; ++i) part.sums[i][j][c] = sums[i][j][c];
      }
  }

  // ---- Values -----------------------------------------------------------------------------------

  __device__ __forceinline__ bool all_live(int n) const {
    return n >= live.begin && n + Tile::kKeys <= live.end;
  }

  /// Values of slots outside the sequence may be NaN, and 0 * NaN must not reach sums. Each warp
  /// clears its share of the tile whose first key is n.
  __device__ __forceinline__ void clear_unused_values(int stage, int n) {
    constexpr int kChunks = Tile::kRowBytes / 16, kTogether = kConsumerThreads / kChunks;
    const int first = static_cast<int>(threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int i = 0; i < Tile::kKeys; i += kTogether) {
      const int key = n + first + i;
      if (key < live.begin || key >= live.end)
        *reinterpret_cast<uint4*>(shared.stages[stage] + swizzled<Tile>(first + i, chunk)) =
            uint4{};
    }
    ptx::fence_async_shared();
  }

  /// sums += this warp's columns of the tile's values times their weights.
  __device__ __forceinline__ void add_values(int stage, int buffer) {
    const char* tile = shared.stages[stage];
    const int chunk = warp * (Tile::kRowBytes / kWarps / 16), matrix = lane / 8;
    // Four matrices of 8 keys of 8-bit values are two MMAs: of two runs of 16 columns, or of keys.
    constexpr bool kTwoKeys = Tile::kQuantised && Tile::kSums == 1;
#pragma unroll
    for (int pair = 0; pair < Tile::kKeys / (2 * kStep); ++pair) {  // of runs of 16 keys
      std::uint32_t weights[kTiles][4];
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        ptx::ldmatrix(weights[j],
                      &shared.weights[buffer][8 * j + lane % 8][2 * kStep * pair + 8 * matrix]);
#pragma unroll
      for (int s = 0; s < (kTwoKeys ? 1 : 2); ++s) {
        const char* from = tile + (2 * pair + s) * kStep * Tile::kPartBytes;
#pragma unroll
        for (int i = 0; i < Tile::kSums; i += Tile::kQuantised ? 2 : 1) {
          std::uint32_t m[4];
          if constexpr (Tile::kQuantised) {
            const int row = lane % 16 + (kTwoKeys ? matrix / 2 * kStep : 0);
            ptx::ldmatrix_transposed(
                m, from + swizzled<Tile>(row, chunk + i + (kTwoKeys ? 0 : matrix / 2)));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              std::uint32_t first[2], second[2];
              device::expand_halves<Tile::kCache, true>(m[2 * h], first);
              device::expand_halves<Tile::kCache, true>(m[2 * h + 1], second);
              const std::uint32_t a[4] = {first[0], first[1], second[0], second[1]};
              const int step = kTwoKeys ? h : s, sum = kTwoKeys ? 0 : i + h;
#pragma unroll
              for (int j = 0; j < kTiles; ++j)
                ptx::mma_m16n8k16<T>(sums[sum][j], a, weights[j][2 * step],
                                     weights[j][2 * step + 1]);
            }
          } else {
            ptx::ldmatrix_transposed(m, from + swizzled<Tile>(matrix / 2 * 8 + lane % 8,
                                                              chunk + 2 * i + matrix % 2));
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
              ptx::mma_m16n8k16<T>(sums[i][j], m, weights[j][2 * s], weights[j][2 * s + 1]);
          }
        }
      }
    }
  }
};

}  // namespace ridgeline::attention_decode
