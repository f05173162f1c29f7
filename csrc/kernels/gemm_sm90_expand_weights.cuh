#pragma once
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_sm90_expand.cuh"

/// How a weight of 4 or 8 bits becomes an operand of the expanding kernel.
namespace ridgeline::gemm_expand {

/// The weights of 16 rows a warp of each band, 16 columns of K, as wgmma's A.
template <class Tile>
struct Fragments {
  std::uint32_t a[Tile::kBands][4];
};

/// What a warp holds of a stage while it expands it. kGeneral: int4 has zero points or, where it is
/// read ahead, may have them, or two groups a stage.
template <class Tile, bool kGeneral>
struct Weights {
  using T = typename Tile::T;

  const Shared<Tile>& shared;
  const Launch& launch;
  Consumer me;
  std::uint32_t words[Tile::kBands][kSteps];                      // int4
  device::Int4Rows<T, kGeneral> rows[Tile::kBands];               // int4
  int scale_bits[Tile::kBands][2], zero_points[Tile::kBands][2];  // int4, as they come
  const float* blocks[Tile::kBands];                              // fp8: scales of 128 columns each
  float block_scale[Tile::kBands];
  // int4: where the lane's words, scales and zero points lie in a stage. Instructions beside
  // products slow those down: with places made anew each stage, 128 and 256 rows of 14336 x 4096
  // took 35.7 and 51.5 us, so 34.7 and 49.5 (H200).
  int words_at[Tile::kBands], scales_at[Tile::kBands], zeros_at[Tile::kBands];

  __device__ __forceinline__ int row() const {
    return first_in_half<Tile>(me.warpgroup) + me.warp * 16 + me.quad;
  }

  __device__ __forceinline__ void load_scales(int stage, int group) {
    const auto& scales = shared.scales[stage];
    const bool has_zeros = kGeneral && (!Tile::kReadsAhead || launch.gemm.weight.zeros);
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      const auto* of = reinterpret_cast<const std::uint16_t*>(scales.of[group][0]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale_bits[band][r] = of[scales_at[band] + 8 * r];
        zero_points[band][r] = has_zeros ? scales.zeros[group][0][zeros_at[band] + 8 * r]
                                         : Int4Layout::kSymmetricZero;
      }
    }
  }

  /// Factors of the scales that were loaded. Not before: a warp waits for them here.
  __device__ __forceinline__ void take_scales() {
    if constexpr (!Tile::kInt4) return;
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int of = scale_bits[band][r];
        const auto bits = static_cast<std::uint16_t>(Tile::kReadsAhead ? ptx::opaque(of) : of);
        rows[band].set(r, *reinterpret_cast<const T*>(&bits), zero_points[band][r]);
      }
  }

  __device__ __forceinline__ void start(const Work& work) {
    const GemmParams& p = launch.gemm;
    if constexpr (Tile::kInt4) {
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        const int half = half_of<Tile>(me.warpgroup, band), block = row() / Int4Layout::kRows;
        words_at[band] = ptx::opaque(half * Tile::kBoxBytes +
                                     block * Int4Layout::kWords * 4 + me.lane * 16);
        scales_at[band] = ptx::opaque(half * Tile::kBoxCols + row());
        zeros_at[band] = ptx::opaque(half * round_up(Tile::kBoxCols, 128) + row());
      }
    }
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      if (!Tile::kBlocks) continue;
      // The warp's 16 rows are in one block: tiles, and the up rows, start at multiples of 16.
      const int n =
          weight_row<Tile>(launch, work.place.n, half_of<Tile>(me.warpgroup, band)) + row();
      blocks[band] = static_cast<const float*>(p.weight.scales) +
                     gemm_detail::first_block_scale(p, n);
    }
  }

  /// Stage `stage`, which holds columns [64 k, 64 k + 64); behind the last it is the first again.
  __device__ __forceinline__ void load(int stage, int k) {
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      if (Tile::kBlocks)
        block_scale[band] = blocks[band][(Tile::kTails && k >= launch.steps ? k - launch.steps : k) /
                                         (kScaleBlock / Tile::kDepth)];
      if constexpr (Tile::kInt4) {
        const uint4 v = *reinterpret_cast<const uint4*>(&shared.weight[stage][0][words_at[band]]);
        words[band][0] = v.x;
        words[band][1] = v.y;
        words[band][2] = v.z;
        words[band][3] = v.w;
      }
    }
    if constexpr (Tile::kInt4) load_scales(stage, 0);
  }

  /// Columns [16 step, 16 step + 16) of the stage.
  __device__ __forceinline__ void expand(Fragments<Tile>& to, int stage, int step) {
    const bool may_have_two = Tile::kInt4 && (kGeneral || !Tile::kReadsAhead);
    if (may_have_two && step == kSteps / 2 && launch.groups == 2) {
      load_scales(stage, 1);
      take_scales();
    }
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Tile::kInt4) {
          to.a[band][i] = rows[band].expand(words[band][step], i);
        } else {
          // Rows of 64 bytes with the swizzle of their size: chunks of 16 move by row / 2.
          const std::uint8_t* rows = shared.weight[stage][half_of<Tile>(me.warpgroup, band)];
          const int r = row() + 8 * (i % 2), chunk = step ^ (me.quad / 2);
          const auto raw = *reinterpret_cast<const std::uint16_t*>(
              rows + r * Tile::kDepth + chunk * 16 + i / 2 * 8 + me.in_quad * 2);
          to.a[band][i] = Tile::kBlocks ? device::scale_e4m3_pair<T>(raw, block_scale[band])
                                        : device::convert_e4m3_pair<T>(raw);
        }
      }
  }
};

}  // namespace ridgeline::gemm_expand
