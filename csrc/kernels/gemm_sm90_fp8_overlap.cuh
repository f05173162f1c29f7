#pragma once
#include "kernels/gemm_sm90_fp8_gates.cuh"

/// Products of the fp8 by fp8 kernel beside which the sums of the tile before go to y.
namespace ridgeline::gemm_fp8 {

/// The scales of 256 columns of x of this thread's two rows. Of the four lanes that share them two
/// request one each, a step ahead, and the others have theirs of them, as late as they can: beside
/// sums, products and the store of the tile before, registers are few.
template <class Tile>
struct GroupScales {
  // Each is met once by all products of 256 columns, whose sums then are of one unit: 4096 rows of
  // 14336 x 4096, H200, us, hot and cool, 369 and 320, so 378 and 328.
  static constexpr bool kHas = Tile::kGroups == Groups::kOfX;
  const float* scales;
  int at;  // of them, requested next
  float next, factor[2];

  __device__ __forceinline__ explicit GroupScales(const Launch& launch) {
    if constexpr (kHas) {
      scales = launch.gemm.x.scale;
      turn(launch, static_cast<int>(blockIdx.x));
      request();
    }
  }

  __device__ __forceinline__ void request() {
    if constexpr (kHas) next = scales[at++];
  }

  /// What is requested next is of tile `index`, or of the last.
  __device__ __forceinline__ void turn(const Launch& launch, int index) {
    if constexpr (kHas) {
      const Consumer me(ptx::thread_index());
      const int last = launch.tiles.along_m * launch.tiles.along_n - 1;
      const Place place = place_of(launch.tiles, min(index, last));
      const std::int64_t m = std::int64_t{place.m} * kRows +
                             me.warpgroup * kWarpgroupRows + me.warp * 16 + me.quad +
                             me.in_quad % 2 * 8;
      at = static_cast<int>(min(m, launch.gemm.M - 1)) * (launch.steps / Tile::kAddEvery);
    }
  }

  __device__ __forceinline__ void share() {
    if constexpr (kHas)
#pragma unroll
      for (int i = 0; i < 2; ++i) factor[i] = device::from_quad(next, i);
  }

  __device__ __forceinline__ void add(float& sum, float product, int row) const {
    if constexpr (kHas) {
      sum = fmaf(product, factor[row], sum);
    } else {
      sum += product;
    }
  }
};

/// kCount stages: each part's products of all of them, which are then added to its sums.
/// While they are made, the thread does what is to do meanwhile: without a branch, for which the
/// compiler would wait for them.
template <class Tile, int kCount, class Meanwhile, class Add>
__device__ __forceinline__ void multiply_stages(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                                Sums<Tile>& sums, const Consumer& me,
                                                Meanwhile&& meanwhile, Add&& add) {
  const int warpgroup = device::from_lane(me.warpgroup, 0);  // in a register that a warp shares
  std::uint64_t x[kCount], weight[kCount];
  int stages[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j, ring.next()) {
    stages[j] = ring.stage;
    x[j] = ptx::swizzled_operand(shared.x[ring.stage][warpgroup * kWarpgroupRows], 16,
                                 8 * kRowBytes);
    weight[j] = ptx::swizzled_operand(shared.weight[ring.stage], 16, 8 * kRowBytes);
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  }
#pragma unroll
  for (int part = 0; part < Tile::kParts; ++part) {
    float products[Tile::kPartCols / 8][4];
    constexpr int kPartBytes = Tile::kPartCols * kRowBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ptx::WgmmaFp8<Tile::kPartCols>::mma(products, x[j] + i * kStepBytes / 16,
                                            weight[j] + (part * kPartBytes + i * kStepBytes) / 16,
                                            j != 0 || i != 0);
    ptx::wgmma_commit();
    meanwhile(part);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(products);
    if (part == Tile::kParts - 1 && me.thread == 0)
#pragma unroll
      for (int stage : stages) ptx::mbarrier_arrive(&shared.free[stage]);
#pragma unroll
    for (int i = 0; i < Tile::kPartCols / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) add(sums[part][i][j], products[i][j], j / 2);
  }
}

template <class Tile>
__device__ __forceinline__ void clear_part(Sums<Tile>& sums, int part) {
#pragma unroll
  for (auto& piece : sums[part])
#pragma unroll
    for (float& sum : piece) sum = 0.0f;
}

template <class Tile>
__device__ __forceinline__ void clear(Sums<Tile>& sums) {
#pragma unroll
  for (int part = 0; part < Tile::kParts; ++part) clear_part<Tile>(sums, part);
}

/// Tiles whose way to y is known. The halves of a tile's columns go there beside the next tile's
/// first products, of a part each. Of gates, whose up sums are the other part, and where there is a
/// residual, for which there are no registers beside all sums, the first half goes behind the
/// tile's products. H200, 4096 rows of 4096 x 28672, us, all power drawn and cool, all behind the
/// products, half, and so: plain 789, 756, 744 and 682, 676, 659; gated 776, 755 and 660, 649. The
/// first half beside the tile's last products, whose stages are given back later: 822 for 707.
template <class Tile, class Way>
__device__ __forceinline__ void consume_overlapped(const Launch& launch, Shared<Tile>& shared,
                                                   const Consumer& me) {
  constexpr bool kGated = is_gated(Way::activation({})), kResidual = Way::has_residual({});
  constexpr int kMost = Tile::kCols / kAtOnce, kCount = kGated ? kMost / 2 : kMost;
  const int count = launch.tiles.along_m * launch.tiles.along_n;
  const auto nothing = [](int) {};
  Ring<Tile::kStages> ring;
  Sums<Tile> sums;
  GroupScales<Tile> scales(launch);
  const auto multiply = [&](auto&& meanwhile) {
    multiply_stages<Tile, Tile::kAddEvery>(
        shared, ring, sums, me,
        [&](int part) {
          meanwhile(part);
          scales.share();
          if (part == Tile::kParts - 1) scales.request();
        },
        [&](float& sum, float product, int row) { scales.add(sum, product, row); });
  };
  // The epilogue's addresses are not kept in registers beside products.
  const auto here = [] { return Consumer(ptx::opaque(static_cast<int>(threadIdx.x))); };
  clear<Tile>(sums);
  multiply(nothing);
  int parity = 0;
  for (int i = static_cast<int>(blockIdx.x);; parity ^= 1) {
    const Place place = place_of(launch.tiles, i);
    for (int k = Tile::kAddEvery; k < launch.steps; k += Tile::kAddEvery) {
      if (k + Tile::kAddEvery >= launch.steps) scales.turn(launch, i + static_cast<int>(gridDim.x));
      multiply(nothing);
    }
    Pairs residual[kResidual ? kMost : 1];
    if constexpr (kResidual) take_residual<Tile>(residual, shared, ring, here());
    ptx::mbarrier_wait(&shared.columns_full, parity);
    const auto store = [&](auto half) {
      if constexpr (Tile::kOfGates) {
        constexpr int kBehind = kGateBoxes / 2;
        return store_gates<Tile, Way, half * kBehind, half == 0 ? kBehind : kGateBoxes>(
            launch, shared, place, sums, here());
      }
      store_boxes<Tile, Way, half * kCount / 2, (half + 1) * kCount / 2>(
          launch, shared, ring, place, sums, residual, here());
    };
    constexpr Int<0> kFirst;
    constexpr Int<1> kSecond;
    i += static_cast<int>(gridDim.x);
    if constexpr (kGated || kResidual) {
      store(kFirst);
      if (i >= count) return store(kSecond);
      multiply([&](int part) {
        if (part != 0) return;
        store(kSecond);
        clear<Tile>(sums);
      });
    } else {
      if (i >= count) return store(kFirst), store(kSecond);
      multiply([&](int part) {
        part == 0 ? store(kFirst) : store(kSecond);
        clear_part<Tile>(sums, part);
      });
    }
    ptx::mbarrier_arrive(&shared.columns_free);  // every lane, for what it read
  }
}

}  // namespace ridgeline::gemm_fp8
