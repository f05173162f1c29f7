#pragma once
#include <algorithm>

#include "device/ptx/wgmma_few.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "device/ptx/wgmma_registers.cuh"
#include "device/ptx/wgmma_shared_wide.cuh"
#include "kernels/gemm_grouped_sm90_int4.cuh"
#include "kernels/gemm_grouped_sm90_terms.cuh"

/// How a tile's stages become sums, which lie with weight rows as rows.
namespace ridgeline::gemm_grouped {

// ---- Products -----------------------------------------------------------------------------------

/// 64 weight rows, in registers or in shared memory, by kN rows of x by 16 columns of K.
template <class T, int kN, int kPieces, int kEights>
__device__ __forceinline__ void multiply(float (&sums)[kPieces][kEights][4], const Fragment& weight,
                                         std::uint64_t x) {
  if constexpr (kN == 32) {
    ptx::WgmmaFew<32, T>::registers(sums[0], weight, x, true);
  } else {
    ptx::WgmmaRegisters<kN, T, ptx::Contiguous::kInner>::mma(
        reinterpret_cast<float(&)[kN / 8][4]>(sums[0]), weight, x);
  }
}

template <class T, int kN, int kPieces, int kEights>
__device__ __forceinline__ void multiply(float (&sums)[kPieces][kEights][4], std::uint64_t weight,
                                         std::uint64_t x) {
  if constexpr (kN == 32) {
    ptx::WgmmaFew<32, T>::shared(sums[0], weight, x, true);
  } else {
    ptx::WgmmaShared<kN, T>::mma(reinterpret_cast<float(&)[kN / 8][4]>(sums[0]), weight, x, true);
  }
}

/// `steps` stages, one by one: while the products of one are summed, the weights of the next are
/// expanded.
template <class Tile, int kN>
__device__ __forceinline__ void multiply_stages(const Launch& launch, Shared<Tile>& shared,
                                                Ring& ring, Sums<Tile>& sums, const Item& item,
                                                const Consumer& me, int steps) {
  using T = typename Tile::T;
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  Weights<Tile> weights(launch, shared, item, me);
  int before = -1;
  const auto take = [&](Fragment (&fragments)[kSteps]) {
    const int s = ring.stage;
    const Stage<Tile> stage(launch, shared, s);
    ptx::mbarrier_wait(&shared.full[s], ring.parity);
    if (!launch.in_order) ptx::fence_async_shared();  // x came by ordinary copies
    if constexpr (Tile::kExpands) {
      weights.load(s);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) weights.expand(fragments[step], s, step);
    }
    const std::uint64_t x = ptx::swizzled_operand(stage.x(), 16, 8 * kRowBytes);
    const std::uint64_t weight = ptx::swizzled_operand(
        stage.weight() + me.warpgroup * kWarpgroupRows * kRowBytes, 16, 8 * kRowBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint64_t columns = x + step * kStepBytes / 16;
      if constexpr (Tile::kExpands) {
        multiply<T, kN>(sums, fragments[step], columns);
      } else {
        multiply<T, kN>(sums, weight + step * kStepBytes / 16, columns);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (before >= 0) release(before);
    before = s;
    ring.next();
  };
  Fragment fragments[2][kSteps];
  int k = 0;
  for (; k + 2 <= steps; k += 2) {
    take(fragments[0]);
    take(fragments[1]);
  }
  if (k < steps) take(fragments[0]);
  ptx::wgmma_wait<0>();
#pragma unroll
  for (auto& piece : sums) ptx::hold_registers(piece);
  release(before);
}

/// fp8 by some rows of x: as multiply_stages, two by two, of which launch.steps is a multiple.
template <class Tile>
__device__ __forceinline__ void multiply_pairs(const StageWalk<Tile>& walk, Sums<Tile>& all,
                                               const Item& item, const Consumer& me) {
  auto& sums = reinterpret_cast<float(&)[Tile::kRows / 8][4]>(all);
  Weights<Tile> weights(walk.launch, walk.shared, item, me);
  BoxFragments a[2];
  int last = -1;  // stage whose product still runs
#pragma unroll 1
  for (int k = 0; k < walk.launch.steps; k += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Stage<Tile> stage = walk.wait();
      const int s = walk.ring.stage;
      weights.load(s);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) weights.expand(a[i][step], s, step);
      multiply_box<typename Tile::T, Tile::kRows>(sums, a[i], stage.x(), true);
      ptx::wgmma_wait<1>();
      if (last >= 0) walk.release(last);
      last = s;
      walk.ring.next();
    }
  }
  ptx::wgmma_wait<0>();
  ptx::hold_registers(sums);
  walk.release(last);
}

constexpr int kInFlight = 2;  // steps that are multiplied while others are expanded

/// Step by step, where registers are few. The weights of four steps are in them: those that are
/// multiplied, those that come next, and those that are expanded.
template <class Tile, int kN>
__device__ __forceinline__ void multiply_expanded(const Launch& launch, Shared<Tile>& shared,
                                                  Ring& ring, Sums<Tile>& sums,
                                                  const Item& item, const Consumer& me) {
  const auto release = [&](int stage) {
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  };
  const auto wait = [&] {
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    if (!launch.in_order) ptx::fence_async_shared();  // x came by ordinary copies
  };
  Weights<Tile> weights(launch, shared, item, me);
  Fragment fragments[kSteps];
  wait();
  weights.load(ring.stage);
#pragma unroll
  for (int step = 0; step < kSteps - kInFlight; ++step)
    weights.expand(fragments[step], ring.stage, step);
  int before = -1;
  for (int k = 1; k <= launch.steps; ++k) {
    const int s = ring.stage;
    const Stage<Tile> stage(launch, shared, s);
    const std::uint64_t x = ptx::swizzled_operand(stage.x(), 16, 8 * kRowBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma_fence();
      multiply<typename Tile::T, kN>(sums, fragments[step], x + step * kStepBytes / 16);
      ptx::wgmma_commit();
      ptx::wgmma_wait<kInFlight>();
      if (step == kInFlight - 1 && before >= 0) release(before);  // its last step is multiplied
      if (step < kInFlight) {
        weights.expand(fragments[step + kSteps - kInFlight], s, step + kSteps - kInFlight);
        continue;
      }
      if (k == launch.steps) continue;
      if (step == kInFlight) {
        ring.next();
        wait();
        weights.load(ring.stage);
      }
      weights.expand(fragments[step - kInFlight], ring.stage, step - kInFlight);
    }
    before = s;
  }
  ring.next();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (auto& piece : sums) ptx::hold_registers(piece);
  release(before);
}

/// Products of kCount stages with kPart rows of x from row kFirst on, added to their sums.
template <int kFirst, int kPart, int kCount, int kPieces, int kEights>
__device__ __forceinline__ void multiply_part(float (&sums)[kPieces][kEights][4],
                                              const std::uint64_t (&weight)[kCount],
                                              const std::uint64_t (&x)[kCount]) {
  float products[kPart / 8][4];
  ptx::wgmma_fence();
#pragma unroll
  for (int j = 0; j < kCount; ++j)
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const std::uint64_t a = weight[j] + i * kStepBytes / 16;
      const std::uint64_t b = x[j] + (kFirst * kRowBytes + i * kStepBytes) / 16;
      if constexpr (kPart >= 128) {
        ptx::WgmmaFp8<kPart>::mma(products, a, b, j != 0 || i != 0);
      } else {
        ptx::WgmmaFew<kPart, std::uint8_t>::shared(products, a, b, j != 0 || i != 0);
      }
    }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::hold_registers(products);
#pragma unroll
  for (int i = 0; i < kPart / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sums[(kFirst / 8 + i) / kEights][(kFirst / 8 + i) % kEights][j] += products[i][j];
}

/// The same of e4m3 by e4m3: the tensor cores keep 14 bits of a sum, so its parts of kCount stages
/// are added in float32, up to 136 rows of x at a time.
template <class Tile, int kN, int kCount>
__device__ __forceinline__ void multiply_codes(const Launch& launch, Shared<Tile>& shared,
                                               Ring& ring, Sums<Tile>& sums, const Consumer& me) {
  std::uint64_t x[kCount], weight[kCount];
  int stages[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j, ring.next()) {
    stages[j] = ring.stage;
    const Stage<Tile> stage(launch, shared, ring.stage);
    x[j] = ptx::swizzled_operand(stage.x(), 16, 8 * kRowBytes);
    weight[j] = ptx::swizzled_operand(
        stage.weight() + me.warpgroup * kWarpgroupRows * kRowBytes, 16, 8 * kRowBytes);
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
  }
  if (!launch.in_order) ptx::fence_async_shared();  // x came by ordinary copies
  constexpr int kPart = kN > kManyRows ? kN / 2 : std::min(kN, 128);
  multiply_part<0, kPart>(sums, weight, x);
  if constexpr (kN > kPart) multiply_part<kPart, kN - kPart>(sums, weight, x);
  if (me.thread == 0)
#pragma unroll
    for (int stage : stages) ptx::mbarrier_arrive(&shared.free[stage]);
}

template <class Tile, int kN>
__device__ __forceinline__ void multiply_tile(const Launch& launch, Shared<Tile>& shared,
                                              Ring& ring, Sums<Tile>& sums, const Item& item,
                                              const Consumer& me) {
  if constexpr (Tile::kFp8X) {
    constexpr int kAddEvery = 2;
    int k = 0;
    for (; k + kAddEvery <= launch.steps; k += kAddEvery)
      multiply_codes<Tile, kN, kAddEvery>(launch, shared, ring, sums, me);
    if (k < launch.steps) multiply_codes<Tile, kN, 1>(launch, shared, ring, sums, me);
  } else if constexpr (Tile::kExpands && Tile::kInOrder) {
    multiply_expanded<Tile, kN>(launch, shared, ring, sums, item, me);
  } else {
    multiply_stages<Tile, kN>(launch, shared, ring, sums, item, me, launch.steps);
  }
}

/// Products of an item's rows, and of those behind them to a whole piece or to all of the tile.
template <class Tile, int kN = kPieceRows>
__device__ __forceinline__ void multiply_whole(const Launch& launch, Shared<Tile>& shared,
                                               Ring& ring, Sums<Tile>& sums, const Item& item,
                                               const Consumer& me) {
  if constexpr (kN < Tile::kRows) {
    constexpr int kNext = std::min(kN + kPieceRows, Tile::kRows);
    if (item.rows > kN) return multiply_whole<Tile, kNext>(launch, shared, ring, sums, item, me);
  }
  multiply_tile<Tile, kN>(launch, shared, ring, sums, item, me);
}

/// Segments of K as the cluster kernel cuts and adds them, so that bits do not depend on which of
/// the two multiplies.
template <class Tile>
__device__ __forceinline__ void multiply_segments(const Launch& launch, Shared<Tile>& shared,
                                                  Ring& ring, Sums<Tile>& sums,
                                                  const Item& item, const Consumer& me) {
  const int segments = launch.grouped.segments;
  clear<Tile>(sums);
#pragma unroll 1
  for (int s = 0; s < segments; ++s) {
    Sums<Tile> part;
    clear<Tile>(part);
    multiply_stages<Tile, Tile::kRows>(launch, shared, ring, part, item, me,
                                       gemm_config::stages_of(launch.steps, segments, s).count);
#pragma unroll
    for (int i = 0; i < Tile::kRows / 2; ++i) {
      const int piece = i / (kPieceRows / 2), at = i % (kPieceRows / 2);
      sums[piece][at / 4][at % 4] += part[piece][at / 4][at % 4];
    }
  }
}

template <class Tile>
__device__ __forceinline__ void multiply_rows(const Launch& launch, Shared<Tile>& shared,
                                              Ring& ring, Sums<Tile>& sums,
                                              const Item& item, const Consumer& me) {
  if constexpr (Tile::kSegments) {
    multiply_segments<Tile>(launch, shared, ring, sums, item, me);
  } else if constexpr (Tile::kSome && Tile::kNibbles) {
    clear<Tile>(sums);
    multiply_int4<Tile>({launch, shared, ring}, sums, me);
  } else if constexpr (Tile::kTerms) {
    clear<Tile>(sums);
    multiply_terms<Tile>({launch, shared, ring}, sums, item, me);
  } else if constexpr (Tile::kSome) {
    clear<Tile>(sums);
    multiply_pairs<Tile>({launch, shared, ring}, sums, item, me);
  } else if constexpr (!Tile::kInOrder) {
    clear<Tile>(sums);
    multiply_tile<Tile, Tile::kRows>(launch, shared, ring, sums, item, me);
  } else {
    clear<Tile>(sums);
    multiply_whole<Tile>(launch, shared, ring, sums, item, me);
  }
}

}  // namespace ridgeline::gemm_grouped
