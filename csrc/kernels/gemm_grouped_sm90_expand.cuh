#pragma once
#include <algorithm>

#include "device/dequant.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "kernels/gemm_grouped_sm90.cuh"

/// How weights of a stage become operands, and how int4 meets few rows of x.
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
    const auto& scales = Stage<Tile>(launch, shared, stage).scales();
    const bool gated = is_gated(launch.grouped.gemm.activation);
    const int row = me.warpgroup * kWarpgroupRows + me.warp * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int c = gated ? row / 2 + me.quad + r * (Tile::kCols / 2) : row + me.quad + r * 8;
      const T value = scales.of[group][c];
      scale[r] = device::Pair<T>{value, value};
      zero[r] = device::int4_zero<T>(launch.grouped.gemm.weight.zeros ? scales.zeros[group][c]
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
using Sums = float[ceil_div(Tile::kRows, kPieceRows)][std::min(Tile::kRows, kPieceRows) / 8][4];

// ---- Int4 by few rows ---------------------------------------------------------------------------

/// Int4 by few rows: kPiece steps of 16 columns, which lie in one group, are summed by themselves
/// and scaled in float32, so that what is expanded is the difference to the zero point alone. Up to
/// 16 rows of x by mma, for which no warp waits for three others: H200, one token of top 2 in 8
/// experts of 4096 x 28672 47.3 us, by wgmma 52.3. With more rows each warp would read too much of
/// x: 32 tokens 177 us, by wgmma 169.
template <class Tile, int kEights, int kPiece>
__device__ __forceinline__ void multiply_groups(const Launch& launch, Shared<Tile>& shared,
                                                Ring& ring, Sums<Tile>& sums,
                                                const Consumer& me) {
  using T = typename Tile::T;
  constexpr bool kByWarps = kEights <= 2;
  constexpr int kPieces = Tile::kBoxes * kSteps / kPiece;
  const bool gated = is_gated(launch.grouped.gemm.activation);
  const int strip = me.warpgroup * 4 + me.warp, in_strip = gated ? strip % 2 : 0;
  const int x_at = me.lane % 8 * kRowBytes + ((me.lane / 8) ^ (me.lane % 8)) * kVector;
  Weights<Tile> weights{.shared = shared, .launch = launch, .me = me};
#pragma unroll 1
  for (int k = 0; k < launch.steps; ++k, ring.next()) {
    const int s = ring.stage;
    const Stage<Tile> stage(launch, shared, s);
    ptx::mbarrier_wait(&shared.full[s], ring.parity);
    if (!kByWarps && !launch.in_order) ptx::fence_async_shared();  // x came by ordinary copies
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      weights.load_scales(s, piece);
      float part[kEights][4] = {};
      Fragment fragments[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; i += 2) {  // 32 columns
        const int step = piece * kPiece + i, box = step / kSteps, at = step % kSteps;
        uint2 words[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int of = gated ? strip / 2 * 2 + r : strip;
          words[r] = *reinterpret_cast<const uint2*>(
              stage.weight() +
              ((of * Tile::kBoxes + box) * device::kWarpSize + me.lane) * kVector + at * 4);
          const int shift = 4 * (gated ? in_strip : r);
          words[r].x >>= shift, words[r].y >>= shift;
        }
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          const auto& of = words[f % 2];
          fragments[i][f] = device::expand_int4<T>(of.x, f / 2 * 2, weights.zero[f % 2]);
          fragments[i + 1][f] = device::expand_int4<T>(of.y, f / 2 * 2, weights.zero[f % 2]);
        }
        const std::uint8_t* x = stage.x(box);
        if constexpr (kByWarps) {
#pragma unroll
          for (int e = 0; e < kEights; ++e) {
            std::uint32_t columns[4];
            ptx::ldmatrix(columns, x + e * 8 * kRowBytes + (x_at ^ (at * kStepBytes)));
            ptx::mma_m16n8k16<T>(part[e], fragments[i], columns[0], columns[1]);
            ptx::mma_m16n8k16<T>(part[e], fragments[i + 1], columns[2], columns[3]);
          }
        } else {
          const std::uint64_t columns =
              ptx::swizzled_operand(x, 16, 8 * kRowBytes) + at * kStepBytes / 16;
          ptx::hold_registers(part);
          ptx::wgmma_fence();
          ptx::WgmmaFew<kEights * 8, T>::registers(part, fragments[i], columns, true);
          ptx::WgmmaFew<kEights * 8, T>::registers(part, fragments[i + 1],
                                                   columns + kStepBytes / 16, true);
          ptx::wgmma_commit();
        }
      }
      if constexpr (!kByWarps) {
        ptx::wgmma_wait<0>();
        ptx::hold_registers(part);
      }
      const float scale[2] = {device::to_float(weights.scale[0].x),
                              device::to_float(weights.scale[1].x)};
#pragma unroll
      for (int i = 0; i < kEights * 4; ++i) {
        float& sum = sums[0][i / 4][i % 4];
        sum = fmaf(scale[i % 4 / 2], part[i / 4][i % 4], sum);
      }
    }
    __syncwarp();  // every lane has read the stage
    if (me.lane == 0) ptx::mbarrier_arrive(&shared.free[s]);
  }
}

template <class Tile, int kEights>
__device__ __forceinline__ void multiply_int4(const Launch& launch, Shared<Tile>& shared,
                                              Ring& ring, Sums<Tile>& sums,
                                              const Consumer& me) {
  constexpr int kAll = Tile::kBoxes * kSteps;
  if (launch.groups == 1) {
    multiply_groups<Tile, kEights, kAll>(launch, shared, ring, sums, me);
  } else {
    multiply_groups<Tile, kEights, kAll / Tile::kScaleSets>(launch, shared, ring, sums, me);
  }
}

}  // namespace ridgeline::gemm_grouped
