#pragma once
#include "device/ptx/wgmma_few_bytes.cuh"
#include "kernels/gemm_grouped_sm90_int4.cuh"

/// How fp8 meets some rows of bfloat16, which gemm_split_x.cu has made two terms of.
namespace ridgeline::gemm_grouped {

/// Scales of the blocks that the thread's two weight rows are in, of one stage after the other.
struct ScalesOfStages {
  int at[2];

  template <class Tile>
  __device__ __forceinline__ static ScalesOfStages of(const Launch& launch, const Item& item,
                                                      const Consumer& me) {
    static_assert(Tile::kDepth == kScaleBlock);
    const GemmParams& p = launch.grouped.gemm;
    ScalesOfStages scales{};
    if constexpr (Tile::kBlocks) {
      int n[2];
      find_rows<Tile>(n, p, item, me);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        scales.at[r] = item.expert * static_cast<int>(launch.grouped.stride_scales) +
                       gemm_detail::first_block_scale(p, n[r]);
    }
    return scales;
  }

  /// From L2, as offsets are.
  __device__ __forceinline__ void load(float (&scale)[2], const GemmParams& p) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      scale[r] = __ldcg(static_cast<const float*>(p.weight.scales) + at[r]++);
  }
};

/// fp8 by some rows of x in two terms, a stage of 128 columns after the other: the tensor cores
/// keep 14 bits of a sum, so its products are added, and scaled where scales are of blocks, in
/// float32.
/// An item of fewer rows is multiplied as that of a smaller tile, for the tensor cores draw the
/// power that the clock lacks.
template <class Tile, int kN = Tile::kRows>
__device__ __forceinline__ void multiply_terms(const StageWalk<Tile>& walk, Sums<Tile>& all,
                                               const Item& item, const Consumer& me) {
  constexpr int kSmaller = kN > 64 ? 64 : kN > 48 ? 48 : 32;
  if constexpr (kSmaller < kN)
    if (item.rows <= kSmaller) return multiply_terms<Tile, kSmaller>(walk, all, item, me);
  auto& sums = reinterpret_cast<float(&)[kN / 8][4]>(all);
  auto scales = ScalesOfStages::of<Tile>(walk.launch, item, me);
#pragma unroll 1
  for (int k = 0; k < walk.launch.steps; ++k) {
    float scale[2];
    if constexpr (Tile::kBlocks) scales.load(scale, walk.launch.grouped.gemm);
    const Stage<Tile> stage = walk.wait();
    const std::uint64_t weight = ptx::swizzled_operand(
        stage.weight() + me.warpgroup * kWarpgroupRows * kRowBytes, 16, 8 * kRowBytes);
    float products[kN / 8][4];
    ptx::hold_registers(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int term = 0; term < 2; ++term) {
        const std::uint64_t x = ptx::swizzled_operand(stage.x(term), 16, 8 * kRowBytes);
        ptx::WgmmaFew<kN, std::uint8_t>::shared(products, weight + step * kStepBytes / 16,
                                                x + step * kStepBytes / 16, step + term != 0);
      }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(products);
    walk.release(walk.ring.stage);
    walk.ring.next();
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      float& sum = sums[i / 4][i % 4];
      if constexpr (Tile::kBlocks) {
        sum = fmaf(scale[i % 4 / 2], products[i / 4][i % 4], sum);
      } else {
        sum += products[i / 4][i % 4];
      }
    }
  }
}

}  // namespace ridgeline::gemm_grouped
