#pragma once
#include "kernels/attention_decode_weights.cuh"

/// What a warp of the Hopper decode kernel gathers: its own columns of all the tile's values,
/// sums^T [columns, 8] += V^T weights^T, and the leaves of an item. Sums never pass through shared
/// memory: the end of an item costs no exchange of them.
namespace ridgeline::attention_decode {

template <class Tile>
struct WarpState : WeightWarp<Tile> {
  using Base = WeightWarp<Tile>;
  using typename Base::T;
  using Base::kTiles, Base::softmax, Base::sums, Base::units, Base::value_exponent;
  using Base::g, Base::lane, Base::live, Base::shared, Base::t, Base::warp;

  /// A part of the item's tree that waits for what follows it.
  struct Part {
    float base[kTiles][2], total[kTiles][2];
    float sums[Tile::kSums][kTiles][4];
  };
  // Of the first levels in registers; of the others, which end seldom, in local memory: it is more
  // than L1 has beside shared memory, and its loads stand in line with the tiles. H200, 128
  // sequences of 512 keys in leaves of 64: 76.3 us with all levels there, 69.5 so.
  static constexpr int kFarLevels = Tile::kLevels - Tile::kNearLevels;
  using Parts = Part[kFarLevels > 0 ? kFarLevels : 1];
  Part near[Tile::kNearLevels > 0 ? Tile::kNearLevels : 1];

  __device__ __forceinline__ WarpState(const Launch& launch, Shared<Tile>& shared)
      : Base{launch, shared} {}

  // ---- Leaves -----------------------------------------------------------------------------------

  /// The warps' totals of a leaf become one; all warps meet (quantised).
  __device__ __forceinline__ void join_totals(float (&totals)[Tile::kRows][kWarps]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float total = device::column_reduce<device::Sum>(softmax[j].sum[c]);
        if (g == 0) totals[8 * j + 2 * t + c][warp] = total;
      }
    ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // the warps' totals are there
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        softmax[j].sum[c] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) softmax[j].sum[c] += totals[8 * j + 2 * t + c][w];
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
                                           float (&totals)[Tile::kRows][kWarps]) {
    if constexpr (Tile::kQuantised) join_totals(totals);
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
    climb<0>(leaf, is_last, parts);
  }

  /// From level kLevel on.
  template <int kLevel>
  __device__ __forceinline__ void climb(int leaf, bool is_last, Parts& parts) {
    if constexpr (kLevel < Tile::kNearLevels) {
      if ((leaf >> kLevel & 1) != 0) {
        join(near[kLevel]);
      } else if (!is_last) {
        return keep(near[kLevel]);
      }
      climb<kLevel + 1>(leaf, is_last, parts);
    } else if constexpr (kFarLevels > 0) {
      int level = kLevel;
      for (; leaf >> level != 0 && (is_last || (leaf >> level & 1) != 0); ++level)
        if ((leaf >> level & 1) != 0) join(parts[level - kLevel]);
      if (!is_last) keep(parts[level - kLevel]);
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

  __device__ __forceinline__ static std::uint32_t times(std::uint32_t a, std::uint32_t b) {
    return device::as_bits(__hmul2(device::as_pair<T>(a), device::as_pair<T>(b)));
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
      for (int j = 0; j < kTiles; ++j) {
        ptx::ldmatrix(weights[j],
                      &shared.weights[buffer][8 * j + lane % 8][2 * kStep * pair + 8 * matrix]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weights[j][i] = times(weights[j][i], units[j][(2 * pair + i / 2) % kWarps]);
      }
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
