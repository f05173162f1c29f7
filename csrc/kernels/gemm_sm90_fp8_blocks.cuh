#pragma once
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/gemm_quad_scales.cuh"
#include "kernels/gemm_sm90_fp8_store.cuh"

/// Products of the fp8 by fp8 kernel where columns of K have scales: of x's rows, of the weight's
/// blocks, or of both.
namespace ridgeline::gemm_fp8 {

/// Those of this thread's two rows of x, and of both halves of the tile.
struct BlockScales : gemm_detail::QuadScales {
  const float* from = nullptr;  // null: 1

  template <class Tile>
  __device__ __forceinline__ void start(const Launch& launch, const Work& work,
                                        const Consumer& me) {
    const GemmParams& p = launch.gemm;
    const bool of_x = me.in_quad < 2;
    std::int64_t row;
    if (of_x) {
      const std::int64_t m = std::int64_t{work.place.m} * kRows + me.warpgroup * kWarpgroupRows +
                             me.warp * 16 + me.quad + 8 * me.in_quad;
      row = min(m, p.M - 1);
      if (p.x.scale_per_group) from = p.x.scale;
    } else {
      row = min(weight_row<Tile>(p, work.place.n, me.in_quad - 2), p.N - 1) / kScaleBlock;
      if (p.weight.scale_layout == ScaleLayout::kBlock)
        from = static_cast<const float*>(p.weight.scales);
    }
    if (from) from += row * launch.steps + work.first_step;
    request(0);
  }

  __device__ __forceinline__ void request(int k) {
    if (from) next = from[k];
  }

  __device__ __forceinline__ void advance(int k) {
    take();
    request(k);
  }
};

/// Products of 128 columns of K times their scales. Between a part's products and those of the next
/// the tensor cores may wait for all that a warpgroup does, which is no more than to add: what else
/// there is has its time beside a part's products. H200, 4096 x 16384 x 7168, all power drawn, us,
/// and clocks a stage, 1024 of which are products: the next stage looked up behind the additions
/// 875, 1256; so 786, 1178; with the ring's stages unrolled 813, 1187. Requires: work.steps > 0.
template <class Tile>
__device__ __forceinline__ void multiply_blocks(const Launch& launch, Shared<Tile>& shared,
                                                Ring<Tile::kStages>& ring, Sums<Tile>& sums,
                                                const Work& work) {
  const Consumer me(ptx::thread_index());
  BlockScales scales;
  scales.start<Tile>(launch, work, me);
  const int warpgroup = device::from_lane(me.warpgroup, 0);  // in a register that a warp shares
  // Of operands that follow each other the high halves are the same.
  constexpr std::uint32_t kX = sizeof(shared.x[0]) / 16, kWeight = sizeof(shared.weight[0]) / 16;
  const std::uint64_t first =
      ptx::swizzled_operand(shared.x[0][warpgroup * kWarpgroupRows], 16, 8 * kRowBytes);
  const auto operand = [&](std::uint32_t low) { return first >> 32 << 32 | low; };
  const std::uint32_t first_x = static_cast<std::uint32_t>(first);
  const std::uint32_t first_weight = static_cast<std::uint32_t>(
      ptx::swizzled_operand(shared.weight[0], 16, 8 * kRowBytes));
  std::uint32_t x = first_x + ring.stage * kX, weight = first_weight + ring.stage * kWeight;
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  for (int k = 0;; ++k) {
    const int stage = ring.stage;
    std::uint32_t next_x, next_weight;
    bool here;
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      constexpr int kPartBytes = Tile::kPartCols * kRowBytes;
      float products[Tile::kPartCols / 8][4];
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ptx::WgmmaFp8<Tile::kPartCols>::mma(
            products, operand(x + i * kStepBytes / 16),
            operand(weight + (part * kPartBytes + i * kStepBytes) / 16), i != 0);
      ptx::wgmma_commit();
      if (part == 0) scales.advance(min(k + 1, work.steps - 1));
      if (part == Tile::kParts - 1) {
        ring.next();
        next_x = ring.stage == 0 ? first_x : x + kX;
        next_weight = ring.stage == 0 ? first_weight : weight + kWeight;
        here = ptx::mbarrier_test(&shared.full[ring.stage], ring.parity);
      }
      ptx::wgmma_wait<0>();
      ptx::hold_registers(products);
      if (part == Tile::kParts - 1 && ptx::thread_index() % kWarpgroup == 0)
        ptx::mbarrier_arrive(&shared.free[stage]);
#pragma unroll
      for (int i = 0; i < Tile::kPartCols / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int half = (part * Tile::kPartCols + i * 8) / (Tile::kCols / 2);
          sums[part][i][j] += products[i][j] * scales.factor[half][j / 2];
        }
    }
    if (k == work.steps - 1) return;
    x = next_x;
    weight = next_weight;
    if (!here) ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  }
}

}  // namespace ridgeline::gemm_fp8
