#pragma once
#include <algorithm>

#include "device/dequant.cuh"
#include "device/fp4.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_grouped_sm90_work.cuh"

/// How weights of a stage become operands.
namespace ridgeline::gemm_grouped {

// ---- Weights ------------------------------------------------------------------------------------

using Fragment = std::uint32_t[4];  // 16 weight rows a warp, 16 columns of K, as wgmma's A

/// Scales of the blocks that the thread's two weight rows are in. Those of the next columns are
/// asked for, of L2, as offsets are, while others are multiplied.
struct ScalesAhead {
  static constexpr int kStages = 2;  // that a block's columns are
  int ends[2];  // where scales of the rows end
  int left;     // stages
  float now[2], next[2];

  /// n: the two rows, of the weight of `expert`; past its last one that one's.
  __device__ __forceinline__ ScalesAhead(const GroupedGemmParams& params, int expert,
                                         const int (&n)[2]) {
    const GemmParams& p = params.gemm;
    const int blocks = ceil_div(p.K, kScaleBlock);
    left = blocks * kStages;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      ends[r] = expert * static_cast<int>(params.stride_scales) +
                gemm_detail::first_block_scale(p, n[r]) + blocks;
    load(p);
  }

  __device__ __forceinline__ void load(const GemmParams& p) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      next[r] = __ldcg(static_cast<const float*>(p.weight.scales) + ends[r] - left / kStages);
  }

  /// One stage further.
  __device__ __forceinline__ void advance(const GemmParams& p) {
    if (left-- % kStages != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) now[r] = next[r];
    if (left > kStages) load(p);
  }
};
struct NoScales {
  __device__ __forceinline__ NoScales(const GroupedGemmParams&, int, const int (&)[2]) {}
};

/// The thread's weight rows: neighbours, eight apart, or a gate and its up row.
template <class Tile>
__device__ __forceinline__ void find_rows(int (&n)[2], const GemmParams& p, const Item& item,
                                          const Consumer& me) {
  const int row = me.warpgroup * kWarpgroupRows + me.warp * 16;
  const int gate = (item.column * Tile::kCols + row) / 2 + me.quad;
  const int plain = item.column * Tile::kCols + row + me.quad;
  const bool gated = is_gated(p.activation);
  n[0] = gated ? gate : plain;
  n[1] = gated ? gate + p.N / 2 : plain + 8;
}

/// What a warp holds of a stage while it expands it. Its rows lane / 4 and lane / 4 + 8 are two
/// weight rows, or a gate and its up row.
template <class Tile>
struct Weights {
  using T = typename Tile::T;

  Shared<Tile>& shared;
  const Launch& launch;
  Consumer me;
  std::conditional_t<Tile::kBlocks, ScalesAhead, NoScales> blocks;
  std::uint32_t words[2][kSteps];     // of 4 bits
  device::Pair<T> scale[2], zero[2];  // of 4 bits

  __device__ __forceinline__ Weights(const Launch& launch, Shared<Tile>& shared, const Item& item,
                                     const Consumer& me)
      : shared(shared), launch(launch), me(me), blocks(blocks_of(launch, item, me)) {}

  __device__ __forceinline__ static auto blocks_of(const Launch& launch, const Item& item,
                                                   const Consumer& me) {
    int n[2] = {};
    if constexpr (Tile::kBlocks) find_rows<Tile>(n, launch.grouped.gemm, item, me);
    return decltype(blocks)(launch.grouped, item.expert, n);
  }

  __device__ __forceinline__ const std::uint8_t* weight_of(int stage) const {
    return Stage<Tile>(launch, shared, stage).weight();
  }

  /// Of columns [32 group, 32 group + 32) of the stage.
  __device__ __forceinline__ void load_exponents(int stage, int group) {
    const bool gated = is_gated(launch.grouped.gemm.activation);
    const int strip = me.warpgroup * 4 + me.warp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of = gated ? strip / 2 * 2 + r : strip, row = 8 * (gated ? strip % 2 : r);
      scale[r] = device::fp4_factor(weight_of(stage)[of * Tile::kStripBytes +
                                                     Fp4Layout::kCodeBytes +
                                                     group * Int4Layout::kRows + row + me.quad]);
    }
  }

  __device__ __forceinline__ void load_scales(int stage, int group) {
    if constexpr (Tile::kFp4) return load_exponents(stage, group);
    const auto& scales = Stage<Tile>(launch, shared, stage).scales(group);
    const bool gated = is_gated(launch.grouped.gemm.activation);
    const int row = me.warpgroup * kWarpgroupRows + me.warp * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int c = gated ? row / 2 + me.quad + r * (Tile::kCols / 2) : row + me.quad + r * 8;
      const T value = scales.of[c];
      scale[r] = device::Pair<T>{value, value};
      zero[r] = device::int4_zero<T>(launch.grouped.gemm.weight.zeros ? scales.zeros[c]
                                                    : Int4Layout::kSymmetricZero);
    }
  }

  /// Stage `stage` is in.
  __device__ __forceinline__ void load(int stage) {
    if constexpr (Tile::kBlocks) {
      static_assert(ScalesAhead::kStages * Tile::kDepth == kScaleBlock);
      blocks.advance(launch.grouped.gemm);
    }
    if constexpr (Tile::kNibbles) {
      const bool gated = is_gated(launch.grouped.gemm.activation);
      const int strip = me.warpgroup * 4 + me.warp;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int of = gated ? strip / 2 * 2 + r : strip;
        const uint4 v = *reinterpret_cast<const uint4*>(
            weight_of(stage) + of * Tile::kStripBytes + me.lane * 16);
        const int shift = Tile::kFp4 ? 0 : 4 * (gated ? strip % 2 : r);
        words[r][0] = v.x >> shift;
        words[r][1] = v.y >> shift;
        words[r][2] = v.z >> shift;
        words[r][3] = v.w >> shift;
      }
      load_scales(stage, 0);
    }
  }

  /// Columns [16 step, 16 step + 16) of the stage.
  __device__ __forceinline__ void expand(Fragment& to, int stage, int step) {
    const int first = me.warpgroup * kWarpgroupRows + me.warp * 16;
    if constexpr (Tile::kNibbles) {
      if (step == kSteps / 2 && (Tile::kFp4 || launch.groups == 2)) load_scales(stage, 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t word = words[i % 2][step];
        if constexpr (Tile::kFp4) {
          const bool gated = is_gated(launch.grouped.gemm.activation);
          const device::Fp4Turns turns((gated ? me.warp : i) % 2 == 1);
          to[i] = turns.expand(word, i / 2 == 1, scale[i % 2]);
        } else {
          to[i] = device::expand_int4<T>(word, i / 2 * 2, zero[i % 2], scale[i % 2]);
        }
      }
    } else {
      // Rows of 64 bytes with the swizzle of their size: chunks of 16 move by row / 2.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint8_t* at = weight_of(stage) + (first + me.quad + 8 * r) * Tile::kDepth +
                                 (step ^ (me.quad / 2)) * kVector + me.in_quad * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto pair = *reinterpret_cast<const std::uint16_t*>(at + h * 8);
          if constexpr (Tile::kBlocks) {
            to[2 * h + r] = device::scale_e4m3_pair<T>(pair, blocks.now[r]);
          } else {
            to[2 * h + r] = device::convert_e4m3_pair<T>(pair);
          }
        }
      }
    }
  }
};

template <class Tile>
using Sums = std::conditional_t<
    Tile::kGroups, float[Tile::kParts][Tile::kCols / Tile::kParts / 8][4],
    float[ceil_div(Tile::kRows, Tile::kPiece)][Tile::kPiece / 8][4]>;

template <class Tile>
__device__ __forceinline__ void clear(Sums<Tile>& sums) {
#pragma unroll
  for (auto& piece : sums)
#pragma unroll
    for (auto& eight : piece)
#pragma unroll
      for (float& sum : eight) sum = 0.0f;
}

}  // namespace ridgeline::gemm_grouped
