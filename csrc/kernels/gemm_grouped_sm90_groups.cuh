#pragma once
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_grouped_sm90_groups_store.cuh"
#include "kernels/gemm_quad_scales.cuh"

/// Rows of e4m3 with a scale for each 128 columns by weights with scales of blocks: products of a
/// stage, which are of 128 columns, are added in float32, times both scales. Sums lie with rows of
/// x as rows, so that a thread has two of them, whose scales are in registers. With weight rows as
/// rows, as other tiles have them, warps read the scales of all rows of x from shared memory, which
/// took half as long as the products.
namespace ridgeline::gemm_grouped {

// ---- Products -----------------------------------------------------------------------------------

/// Those of this thread's two rows of x, and of the tile's gates and ups, or of both halves of its
/// weight rows.
template <class Tile>
struct GroupScales : gemm_detail::QuadScales {
  const float* from;

  __device__ __forceinline__ void start(const Launch& launch, const std::int32_t* x_rows,
                                        const Item& item, const Consumer& me) {
    const GroupedGemmParams& grouped = launch.grouped;
    const GemmParams& p = grouped.gemm;
    if (me.in_quad < 2) {
      const int row = Share(item, me).row + me.warp * 16 + me.quad + 8 * me.in_quad;
      from = p.x.scale + std::int64_t{x_rows[row]} * launch.steps;
    } else {
      constexpr int kHalf = Tile::kCols / 2;
      const int second = me.in_quad - 2;
      const int n = Tile::kWay.gated ? item.column * kHalf + second * (p.N / 2)
                                     : item.column * Tile::kCols + second * kHalf;
      from = static_cast<const float*>(p.weight.scales) +
             std::int64_t{item.expert} * grouped.stride_scales +
             gemm_detail::first_block_scale(p, n);
    }
    next = *from;
  }

  /// Factors of the stage that was requested; requests stage k.
  __device__ __forceinline__ void advance(int k) {
    take();
    next = from[k];
  }

  /// Of a part's eight i of weight rows and row r of x: every other eight of gated ones are gates.
  __device__ __forceinline__ float of(int part, int i, int r) const {
    const int second = Tile::kWay.gated ? i % 2 : part;
    return second ? factor[1][r] : factor[0][r];
  }
};

/// Products of the warpgroup's share, stage by stage. What there is to do beside adding has its
/// time while a part's products are made, as in the dense kernel: beside those of the first stage
/// the sums before, which are replaced, go to y: store(part). Without a branch, for which the
/// compiler would wait for them.
template <class Tile, bool kWhole, class Store>
__device__ __forceinline__ void multiply_groups(const Launch& launch, Shared<Tile>& shared,
                                                Ring& ring, Sums<Tile>& sums,
                                                GroupScales<Tile>& scales, const Share& share,
                                                const Consumer& me, Store&& store) {
  constexpr int kParts = kWhole ? Tile::kParts : 1, kPartCols = Tile::kCols / Tile::kParts;
  constexpr std::uint32_t kStep = kStepBytes / 16, kPart = kPartCols * kRowBytes / 16;
  // Of operands the high halves are the same.
  const Stage<Tile> start(launch, shared, 0);
  const int row = device::from_lane(share.row, 0);  // in registers that a warp shares
  const int first_part = kWhole ? 0 : device::from_lane(share.part, 0);
  const std::uint64_t first =
      ptx::swizzled_operand(start.x() + row * kRowBytes, 16, 8 * kRowBytes);
  const auto operand = [&](std::uint32_t low) { return first >> 32 << 32 | low; };
  const std::uint32_t first_x = static_cast<std::uint32_t>(first);
  const std::uint32_t to_weight =
      static_cast<std::uint32_t>(ptx::swizzled_operand(start.weight(), 16, 8 * kRowBytes)) +
      first_part * kPart - first_x;
  const std::uint32_t stage_step = launch.stage_bytes / 16;
  std::uint32_t x = first_x + ring.stage * stage_step;
  const int last = launch.steps - 1;
  const bool leads = me.thread == 0;
  const auto multiply = [&](int k, auto is_first) {
    const int stage = ring.stage;
    std::uint32_t next_x;
    bool here;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float products[kPartCols / 8][4];
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ptx::WgmmaFp8<kPartCols>::mma(products, operand(x + i * kStep),
                                      operand(x + to_weight + part * kPart + i * kStep), i != 0);
      ptx::wgmma_commit();
      if constexpr (is_first) {
        store(part);
        if (!kWhole) store(1);
      }
      if (part == 0) scales.advance(min(k + 1, last));
      if (part == kParts - 1) {
        ring.next();
        next_x = ring.stage == 0 ? first_x : x + stage_step;
        here = ptx::mbarrier_test(&shared.full[ring.stage], ring.parity);
      }
      ptx::wgmma_wait<0>();
      ptx::hold_registers(products);
      if (part == kParts - 1 && leads) ptx::mbarrier_arrive(&shared.free[stage]);
#pragma unroll
      for (int i = 0; i < kPartCols / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float factor = scales.of(first_part + part, i, j / 2);
          float& sum = sums[part][i][j];
          sum = is_first ? products[i][j] * factor : fmaf(products[i][j], factor, sum);
        }
    }
    x = next_x;
    return here;
  };
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  bool here = multiply(0, std::true_type{});
  for (int k = 1; k <= last; ++k) {
    if (!here) ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    here = multiply(k, std::false_type{});
  }
}

// ---- Items --------------------------------------------------------------------------------------

/// The warpgroups that multiply: items that a warp has ready, whose sums go to y beside the first
/// products of the next.
template <class Tile>
__device__ __forceinline__ void consume_groups(const Launch& launch, Shared<Tile>& shared) {
  const GemmParams& p = launch.grouped.gemm;
  // The epilogue's addresses are not kept in registers beside products.
  const auto here = [] { return Consumer(ptx::thread_index() + kWarpgroup); };
  const Consumer me = here();
  Ring ring{.stages = launch.stages};
  auto& planned = shared.planned;
  GroupScales<Tile> scales;
  Item before{};
  Sums<Tile> sums;
  clear<Tile>(sums);
  int turn = 0;  // of items whose rows both warpgroups have half of
  const auto store = [&](int part) {
    if constexpr (Tile::kWay.codes) {
      if (part == 0) store_codes<Tile>(launch, shared, before, sums, turn, here());
    } else {
      store_part<Tile>(launch, shared, before, sums, part, here());
    }
  };
  for (int i = 0;; ++i) {
    ptx::mbarrier_wait(&planned.full[i % 2], i / 2 % 2);
    const Item item = planned.items[i % 2];
    if (item.rows == 0) break;
    scales.start(launch, planned.x_rows[i % 2], item, here());
    if (const Share share(item, me); share.whole) {
      multiply_groups<Tile, true>(launch, shared, ring, sums, scales, share, me, store);
    } else {
      multiply_groups<Tile, false>(launch, shared, ring, sums, scales, share, me, store);
    }
    ptx::mbarrier_arrive(&planned.free[i % 2]);  // every lane, for what it read
    if (p.bias) add_bias<Tile>(p, item, sums, here());
    if (Tile::kWay.codes && !Share(before, me).whole) turn ^= 1;
    before = item;
  }
  store(0);
  store(1);
}

}  // namespace ridgeline::gemm_grouped
