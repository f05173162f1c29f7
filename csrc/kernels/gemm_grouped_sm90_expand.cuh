#pragma once
#include <algorithm>

#include "device/dequant.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "kernels/gemm_grouped_sm90_work.cuh"

/// How weights of a stage become operands.
namespace ridgeline::gemm_grouped {

// ---- Weights ------------------------------------------------------------------------------------

using Fragment = std::uint32_t[4];  // 16 weight rows a warp, 16 columns of K, as wgmma's A

/// What a warp holds of a stage while it expands it. Its rows lane / 4 and lane / 4 + 8 are two
/// weight rows, or a gate and its up row.
template <class Tile>
struct Weights {
  using T = typename Tile::T;

  Shared<Tile>& shared;
  const Launch& launch;
  Consumer me;
  std::uint32_t words[2][kSteps];          // int4
  device::Pair<T> scale[2], zero[2];       // int4

  __device__ __forceinline__ const std::uint8_t* weight_of(int stage) const {
    return Stage<Tile>(launch, shared, stage).weight();
  }

  __device__ __forceinline__ void load_scales(int stage, int group) {
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
    if constexpr (Tile::kInt4) {
      const bool gated = is_gated(launch.grouped.gemm.activation);
      const int strip = me.warpgroup * 4 + me.warp;
      const auto* strips = reinterpret_cast<const uint4*>(weight_of(stage)) + me.lane;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = strips[(gated ? strip / 2 * 2 + r : strip) * device::kWarpSize];
        const int shift = 4 * (gated ? strip % 2 : r);
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
    if constexpr (Tile::kInt4) {
      if (step == kSteps / 2 && launch.groups == 2) load_scales(stage, 1);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[i] = device::expand_int4<T>(words[i % 2][step], i / 2 * 2, zero[i % 2], scale[i % 2]);
    } else {
      // Rows of 64 bytes with the swizzle of their size: chunks of 16 move by row / 2.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint8_t* at = weight_of(stage) + (first + me.quad + 8 * r) * Tile::kDepth +
                                 (step ^ (me.quad / 2)) * kVector + me.in_quad * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          to[2 * h + r] = device::convert_e4m3_pair<T>(
              *reinterpret_cast<const std::uint16_t*>(at + h * 8));
      }
    }
  }
};

template <class Tile>
using Sums = float[ceil_div(Tile::kRows, Tile::kPiece)][Tile::kPiece / 8][4];

}  // namespace ridgeline::gemm_grouped
