#pragma once
#include <algorithm>

#include "device/ptx/wgmma_few.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_grouped_sm90_int4.cuh"
#include "kernels/gemm_grouped_sm90_work.cuh"

/// How many rows of e4m3 with a scale for each 128 columns meet weights with scales of blocks:
/// products of a stage, which are of 128 columns, are added in float32, times both scales.
namespace ridgeline::gemm_grouped {

constexpr int kFirstBringer = 1, kBringers = 2;  // warps of the producers: 1 and 3

/// Two warps bring the scales of a stage's rows of x, and of the tile's gates and ups, or of its
/// weight rows twice. Each lane has some rows, and of each kAhead stages at a time, which lie
/// together. H200, lab, us, stage by stage by one warp and so: 1024 and 4096 tokens of top 8 in 128
/// experts of 2048 x 1536 160 and 145, 690 and 381.
template <class Tile>
__device__ __forceinline__ void bring_scales(const Launch& launch, Shared<Tile>& shared,
                                              int bringer) {
  static_assert(Tile::kDepth == kScaleBlock && Tile::kCols == kScaleBlock);
  constexpr int kAhead = 4, kStep = kBringers * device::kWarpSize, kEach = Tile::kRows / kStep;
  const GroupedGemmParams& grouped = launch.grouped;
  const GemmParams& p = grouped.gemm;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const int first = bringer * device::kWarpSize + lane;
  Ring ring{.stages = launch.stages, .parity = 1};  // the first wait on a fresh barrier passes
  for_each_item<false>(launch, shared, Plan{}, [&](const Item& item) {
    // Scales of the weight are in lanes: those of gates in the first kAhead, of ups in the next.
    const bool gated = is_gated(p.activation);
    const int n = item.column * (gated ? Tile::kCols / 2 : Tile::kCols);
    const bool up = gated && lane / kAhead % 2 == 1;
    const float* of_weight = static_cast<const float*>(p.weight.scales) +
                             std::int64_t{item.expert} * grouped.stride_scales +
                             gemm_detail::first_block_scale(p, up ? p.N / 2 + n : n);
    std::int32_t rows[kEach];  // where their scales begin
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int r = min(first + i * kStep, item.rows - 1);
      rows[i] = static_cast<std::int32_t>(row_of_x(grouped, item.row0 + r)) * launch.steps;
    }
#pragma unroll 1
    for (int k = 0; k < launch.steps; k += kAhead) {
      float of_x[kEach][kAhead];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (i * kStep < item.rows)
#pragma unroll
          for (int j = 0; j < kAhead; ++j)
            of_x[i][j] = p.x.scale[rows[i] + min(k + j, launch.steps - 1)];
      const float by = of_weight[min(k + lane % kAhead, launch.steps - 1)];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (k + j >= launch.steps) break;
        ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
        const Stage<Tile> stage(launch, shared, ring.stage);
        if (bringer == 0 && lane % kAhead == j && lane < 2 * kAhead)
          stage.weight_scales()[lane / kAhead] = by;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (i * kStep < item.rows) stage.x_scales()[first + i * kStep] = of_x[i][j];
        __syncwarp();  // the warp's are there
        if (lane == 0) ptx::mbarrier_arrive(&shared.full[ring.stage]);
        ring.next();
      }
    }
  });
}

/// Products of a stage with kPart rows of x from row kFirst on, times their scales, added to their
/// sums. Warpgroups that multiply by turns, each while the other adds, were no faster.
template <int kFirst, int kPart, int kPieces, int kEights>
__device__ __forceinline__ void add_products(float (&sums)[kPieces][kEights][4],
                                             std::uint64_t weight, std::uint64_t x,
                                             const float2* x_scales, float2 weight_scales) {
  float products[kPart / 8][4];
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const std::uint64_t a = weight + i * kStepBytes / 16;
    const std::uint64_t b = x + (kFirst * kRowBytes + i * kStepBytes) / 16;
    if constexpr (kPart >= 128) {
      ptx::WgmmaFp8<kPart>::mma(products, a, b, i != 0);
    } else {
      ptx::WgmmaFew<kPart, std::uint8_t>::shared(products, a, b, i != 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold_registers(products);
#pragma unroll
  for (int i = 0; i < kPart / 8; ++i) {
    const float2 of_x = x_scales[(kFirst + i * 8) / 2];
    float(&sum)[4] = sums[(kFirst / 8 + i) / kEights][(kFirst / 8 + i) % kEights];
    sum[0] = fmaf(products[i][0], of_x.x * weight_scales.x, sum[0]);
    sum[1] = fmaf(products[i][1], of_x.y * weight_scales.x, sum[1]);
    sum[2] = fmaf(products[i][2], of_x.x * weight_scales.y, sum[2]);
    sum[3] = fmaf(products[i][3], of_x.y * weight_scales.y, sum[3]);
  }
}

/// kN rows of x, up to 128 at a time.
template <class Tile, int kN>
__device__ __forceinline__ void multiply_groups(const Launch& launch, Shared<Tile>& shared,
                                                Ring& ring, Sums<Tile>& sums, const Consumer& me) {
#pragma unroll 1
  for (int k = 0; k < launch.steps; ++k, ring.next()) {
    const Stage<Tile> stage(launch, shared, ring.stage);
    const std::uint64_t x = ptx::swizzled_operand(stage.x(), 16, 8 * kRowBytes);
    const std::uint64_t weight = ptx::swizzled_operand(
        stage.weight() + me.warpgroup * kWarpgroupRows * kRowBytes, 16, 8 * kRowBytes);
    const auto* x_scales = reinterpret_cast<const float2*>(stage.x_scales()) + me.in_quad;
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    const float2 by = *reinterpret_cast<const float2*>(stage.weight_scales());
    constexpr int kPart = std::min(kN, 128);
    add_products<0, kPart>(sums, weight, x, x_scales, by);
    if constexpr (kN > kPart) add_products<kPart, kN - kPart>(sums, weight, x, x_scales, by);
    __syncwarp();  // all lanes have read the scales
    if (me.lane == 0) ptx::mbarrier_arrive(&shared.free[ring.stage]);
  }
}

}  // namespace ridgeline::gemm_grouped
