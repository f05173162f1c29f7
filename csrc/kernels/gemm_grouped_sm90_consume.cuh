#pragma once
#include "kernels/gemm_grouped_sm90_bands.cuh"
#include "kernels/gemm_grouped_sm90_store_some.cuh"

/// The warpgroups that multiply: tile after tile.
namespace ridgeline::gemm_grouped {

/// Products of the block's tiles of few rows.
template <class Tile>
__device__ __forceinline__ void consume(const Launch& launch, Shared<Tile>& shared) {
  const Consumer me(static_cast<int>(threadIdx.x) + kWarpgroup);
  const GemmParams& p = launch.grouped.gemm;
  Ring ring{.stages = launch.stages};
  for_each_item<false>(launch, shared, Plan{}, [&](const Item& item) {
    RowFactors<typename Tile::T> factors;
    load_factors<Tile>(factors, p, item, me);
    Sums<Tile> sums;
    float x_scale = 1.0f;  // of the thread's row of the tile
    if constexpr (Tile::kFp8X) {
      const int r = min(me.thread, item.rows - 1);
      x_scale = p.x.scale[p.x.scale_per_row ? row_of_x(launch.grouped, item.row0 + r) : 0];
    }
    multiply_rows<Tile>(launch, shared, ring, sums, item, me);
    if (Tile::kFp8X && me.thread < Tile::kRows) shared.x_scale[0][me.thread] = x_scale;
    const Consumer here(ptx::opaque(static_cast<int>(threadIdx.x)) + kWarpgroup);
    store_tile<Tile>(launch, shared, item, sums, shared.x_scale[0], factors, here);
  });
}

/// The same of some and of many rows, whose items a warp has ready.
template <class Tile>
__device__ __forceinline__ void consume_planned(const Launch& launch, Shared<Tile>& shared) {
  const Consumer me(static_cast<int>(threadIdx.x) + kWarpgroup);
  Ring ring{.stages = launch.stages};
  auto& planned = shared.planned;
  int turn = 0;  // of the boxes
  for (int i = 0;; ++i) {
    const int at = i % 2;
    ptx::mbarrier_wait(&planned.full[at], i / 2 % 2);
    const Item item = planned.items[at];
    if (item.rows == 0) break;
    Sums<Tile> sums[Tile::kBands];
    if constexpr (Tile::kBands > 1) {
      multiply_sixteens<Tile>(launch, shared, ring, sums, item, me);
    } else {
      multiply_rows<Tile>(launch, shared, ring, sums[0], item, me);
    }
    const Consumer here(ptx::opaque(static_cast<int>(threadIdx.x)) + kWarpgroup);
    const float* x_scale = shared.x_scale[Tile::kScalesRows ? at : 0];
#pragma unroll
    for (int band = 0; band < Tile::kBands; ++band) {
      const int group = band * Tile::kConsumers + here.warpgroup;
      const int row = group * kWarpgroupRows + here.warp * 16 + here.quad;
      RowFactors<typename Tile::T> factors;
      factors.take(planned.columns[at][row], planned.columns[at][row + 8]);
      if constexpr (Tile::kSome) {
        store_some<Tile>(launch, shared, item, sums[band], x_scale, factors, here);
      } else if (is_gated(launch.grouped.gemm.activation)) {
        store_boxes<Tile, true>(launch, shared, item, sums[band], x_scale, factors, here, band,
                                turn);
      } else {
        store_boxes<Tile, false>(launch, shared, item, sums[band], x_scale, factors, here, band,
                                 turn);
      }
    }
    ptx::mbarrier_arrive(&planned.free[at]);  // every lane, for what it read
  }
}

}  // namespace ridgeline::gemm_grouped
