#pragma once
#include "device/ptx/wgmma_shared_between.cuh"
#include "device/ptx/wgmma_shared_wide.cuh"
#include "kernels/gemm_grouped_sm90_expand.cuh"

/// How wide tiles' stages become sums: a warpgroup has two bands of 64 dense weight rows.
namespace ridgeline::gemm_grouped {

/// Two bands of dense weight rows by kN rows of x.
template <class Tile, int kN>
__device__ __forceinline__ void multiply_bands(const Launch& launch, Shared<Tile>& shared,
                                               Ring& ring, Sums<Tile> (&sums)[Tile::kBands],
                                               const Consumer& me) {
  using T = typename Tile::T;
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  int before = -1;
  for (int k = 0; k < launch.steps; ++k, ring.next()) {
    const int s = ring.stage;
    const Stage<Tile> stage(launch, shared, s);
    const std::uint64_t x = ptx::swizzled_operand(stage.x(), 16, 8 * kRowBytes);
    ptx::mbarrier_wait(&shared.full[s], ring.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int band = 0; band < Tile::kBands; ++band) {
        const int row = (band * Tile::kConsumers + me.warpgroup) * kWarpgroupRows;
        const std::uint64_t weight =
            ptx::swizzled_operand(stage.weight() + row * kRowBytes, 16, 8 * kRowBytes);
        ptx::WgmmaShared<kN, T>::mma(reinterpret_cast<float(&)[kN / 8][4]>(sums[band][0]),
                                     weight + step * kStepBytes / 16, x + step * kStepBytes / 16,
                                     k != 0 || step != 0);
      }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (before >= 0) release(before);
    before = s;
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (auto& band : sums)
#pragma unroll
    for (auto& piece : band) ptx::hold_registers(piece);
  release(before);
}

/// The same of an item's rows, to a whole sixteen.
template <class Tile, int kN = kPieceRows>
__device__ __forceinline__ void multiply_sixteens(const Launch& launch, Shared<Tile>& shared,
                                                  Ring& ring, Sums<Tile> (&sums)[Tile::kBands],
                                                  const Item& item, const Consumer& me) {
  if constexpr (kN < Tile::kRows)
    if (item.rows > kN)
      return multiply_sixteens<Tile, kN + 16>(launch, shared, ring, sums, item, me);
  multiply_bands<Tile, kN>(launch, shared, ring, sums, me);
}

}  // namespace ridgeline::gemm_grouped
