#pragma once
#include "device/dequant.cuh"
#include "device/fp4.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "device/ptx/wgmma_registers_few.cuh"
#include "kernels/gemm_grouped_sm90_expand.cuh"

/// How weights of 4 bits meet some rows of x: a stage has 128 or 256 columns of K, in boxes of 64.
namespace ridgeline::gemm_grouped {

// ---- Operands -----------------------------------------------------------------------------------

using BoxFragments = Fragment[kSteps];  // 64 columns of K

/// Where a lane finds its weights in a stage. Its rows lane / 4 and lane / 4 + 8 are those of a
/// strip, or, gated, of one half of a strip of gates and of its up rows.
template <class Tile>
struct Int4Lane {
  using T = typename Tile::T;
  static constexpr int kBlockBytes = block_bytes_of(Tile::kFormat);

  bool zeros;
  bool high;      // gated: the rows of the strips from the eighth on
  int words;      // bytes from a stage's weight to those of the first row
  int columns;    // of a set of scales: the first row's
  int exponents;  // fp4: bytes from a stage's weight to that of the first row

  __device__ __forceinline__ Int4Lane(const Launch& launch, const Consumer& me) {
    zeros = launch.grouped.gemm.weight.zeros != nullptr;
    const int strip = me.warpgroup * 4 + me.warp;
    high = strip % 2 == 1;
    words = (Tile::kWay.gated ? strip / 2 * 2 : strip) * Tile::kStripBytes + me.lane * 16;
    columns = strip * (Tile::kWay.gated ? 8 : 16) + me.quad;
    exponents = words - me.lane * 16 + Fp4Layout::kCodeBytes + me.quad +
                (Tile::kWay.gated && high ? 8 : 0);
  }

  __device__ __forceinline__ bool is_high(int r) const { return Tile::kWay.gated ? high : r == 1; }

  /// Of a box, 16 columns a word.
  struct Words {
    uint4 of[Tile::kWay.gated ? 2 : 1];
  };
  __device__ __forceinline__ Words load(const Stage<Tile>& stage, int box) const {
    Words to;
#pragma unroll
    for (int r = 0; r < (Tile::kWay.gated ? 2 : 1); ++r)
      to.of[r] = *reinterpret_cast<const uint4*>(stage.weight() + words +
                                                 r * Tile::kStripBytes + box * kBlockBytes);
    return to;
  }

  /// Fp4: of a half of a box.
  __device__ __forceinline__ std::uint8_t exponent_of(const Stage<Tile>& stage, int half,
                                                      int r) const {
    return stage.weight()[exponents + r * (Tile::kWay.gated ? Tile::kStripBytes : 8) +
                          half / 2 * kBlockBytes + half % 2 * Int4Layout::kRows];
  }

  __device__ __forceinline__ T scale_of(const Stage<Tile>& stage, int set, int r) const {
    return stage.scales(set).of[columns + r * (Tile::kWay.gated ? Tile::kCols / 2 : 8)];
  }
  __device__ __forceinline__ std::uint32_t zero_of(const Stage<Tile>& stage, int set,
                                                   int r) const {
    if (!zeros) return Int4Layout::kSymmetricZero;
    return stage.scales(set).zeros[columns + r * (Tile::kWay.gated ? Tile::kCols / 2 : 8)];
  }

  static constexpr bool kAny = Tile::kWay.as == Int4As::kAny;
  using Rows = std::conditional_t<Tile::kFp4, device::Fp4Rows, device::Int4Rows<T, kAny>>;

  __device__ __forceinline__ Rows rows_of(const Stage<Tile>& stage, int set) const {
    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Tile::kFp4) {
        rows.set(r, exponent_of(stage, set, r));
      } else {
        rows.set(r, scale_of(stage, set, r), zero_of(stage, set, r), is_high(r));
      }
    }
    return rows;
  }

  /// Steps [kBegin, kEnd) of a box as operands, of which `to` has those of all or of half of it.
  template <int kBegin = 0, int kEnd = kSteps, int kPlaces, class Values>
  __device__ __forceinline__ void expand(const Words& words, const Values& values,
                                         Fragment (&to)[kPlaces]) const {
#pragma unroll
    for (int step = kBegin; step < kEnd; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4& of = words.of[Tile::kWay.gated ? i % 2 : 0];
        const std::uint32_t word =
            step == 0 ? of.x : step == 1 ? of.y : step == 2 ? of.z : of.w;
        to[step % kPlaces][i] = values.expand(word, i, is_high(i % 2));
      }
  }
};

// ---- Products -----------------------------------------------------------------------------------

/// 64 weight rows by kN rows of x by the columns of a box, or of half of it. first(): products
/// ahead of them.
template <class T, int kN, int kCount, class Fn>
__device__ __forceinline__ void multiply_box(float (&sums)[kN / 8][4],
                                             const Fragment (&fragments)[kCount],
                                             const std::uint8_t* x, bool accumulate,
                                             const Fn& first) {
  const std::uint64_t columns = ptx::swizzled_operand(x, 16, 8 * kRowBytes);
  ptx::hold_registers(sums);
  ptx::wgmma_fence();
  first();
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    const std::uint64_t at = columns + step * kStepBytes / 16;
    if constexpr (kN <= 32) {
      ptx::WgmmaFew<kN, T>::registers(sums, fragments[step], at, accumulate || step != 0);
    } else {
      ptx::WgmmaRegisters<kN, T, ptx::Contiguous::kInner>::mma(sums, fragments[step], at);
    }
  }
  ptx::wgmma_commit();
}

template <class T, int kN, int kCount>
__device__ __forceinline__ void multiply_box(float (&sums)[kN / 8][4],
                                             const Fragment (&fragments)[kCount],
                                             const std::uint8_t* x, bool accumulate) {
  multiply_box<T, kN>(sums, fragments, x, accumulate, [] {});
}

/// The stages of a tile as they come.
template <class Tile>
struct StageWalk {
  const Launch& launch;
  Shared<Tile>& shared;
  Ring& ring;

  __device__ __forceinline__ Stage<Tile> wait() const {
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    return {launch, shared, ring.stage};
  }
  /// Gives a stage back, that every lane has read.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % device::kWarpSize == 0) ptx::mbarrier_arrive(&shared.free[stage]);
  }
};

/// Boxes of 128 columns that share a scale, by up to 32 rows: what is expanded is the difference to
/// the zero point, or the number itself, whose products go to registers of their own, which are
/// scaled and added in float32. While the second box is multiplied, the first of the next two is
/// expanded.
template <class Tile>
__device__ __forceinline__ void multiply_differences(const StageWalk<Tile>& walk,
                                                     const Int4Lane<Tile>& int4,
                                                     float (&sums)[Tile::kRows / 8][4]) {
  using T = typename Tile::T;
  constexpr int kN = Tile::kRows, kPairs = Tile::kBoxes / 2;
  BoxFragments a[2];
  Stage<Tile> stage = walk.wait();
  auto second = int4.load(stage, 1);
  float scale[2], next_scale[2] = {};
  std::conditional_t<Tile::kMasked, device::Int4Masked, device::Int4Differences<T>> values;
  // Before the loop, or ptxas serialises the products that they meet.
  Fragment minus_zeros;
#pragma unroll
  for (int i = 0; i < 4; ++i) minus_zeros[i] = device::Int4Masked::minus_zero(int4.is_high(i % 2));
  const auto take_scales = [&](float (&to)[2], int set) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to[r] = device::to_float(int4.scale_of(stage, set, r));
      if constexpr (Tile::kMasked) {
        if (int4.is_high(r)) to[r] *= 0.0625f;
      } else {
        values.set(r, int4.zero_of(stage, set, r));
      }
    }
  };
  take_scales(scale, 0);
  int4.expand(int4.load(stage, 0), values, a[0]);
#pragma unroll 1
  for (int k = 1; k <= walk.launch.steps; ++k) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float part[kN / 8][4];
      multiply_box<T, kN>(part, a[0], stage.x(2 * pair), Tile::kMasked, [&] {
        if constexpr (Tile::kMasked)  // the sums of both halves lie side by side
          ptx::WgmmaFew<kN, T>::registers(
              part, minus_zeros,
              ptx::swizzled_operand(stage.x(Tile::kBoxes), 16, 8 * kRowBytes) +
                  pair * kStepBytes / 16,
              false);
      });
      // Not ahead of the products before: ptxas would let those of a[1] start one by one.
#pragma unroll
      for (uint4& of : second.of) of = ptx::opaque(of);
      int4.expand(second, values, a[1]);
      multiply_box<T, kN>(part, a[1], stage.x(2 * pair + 1), true);
      const bool ends = pair == kPairs - 1;
      const int last = walk.ring.stage;
      if (ends) walk.ring.next();
      const bool more = !ends || k < walk.launch.steps;
      typename Int4Lane<Tile>::Words first;
      if (more) {
        if (ends) stage = walk.wait();
        const int box = ends ? 0 : 2 * (pair + 1);
        first = int4.load(stage, box);
        second = int4.load(stage, box + 1);
        take_scales(next_scale, box / 2);
      }
      ptx::wgmma_wait<1>();
      if (more) int4.expand(first, values, a[0]);
      ptx::wgmma_wait<0>();
      ptx::hold_registers(part);
      if (ends) walk.release(last);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i)
        sums[i / 4][i % 4] = fmaf(scale[i % 4 / 2], part[i / 4][i % 4], sums[i / 4][i % 4]);
      scale[0] = next_scale[0], scale[1] = next_scale[1];
    }
  }
}

/// Scaled weights: the products of one box run while the operands of the other are made.
template <class Tile>
__device__ __forceinline__ void multiply_scaled(const StageWalk<Tile>& walk,
                                                const Int4Lane<Tile>& int4,
                                                float (&sums)[Tile::kRows / 8][4]) {
  using T = typename Tile::T;
  constexpr int kN = Tile::kRows;
  constexpr bool kAny = Int4Lane<Tile>::kAny;
  const int per_box = !Tile::kFp4 && walk.launch.groups == 1 ? 0 : 2, per_half = per_box / 2;
  BoxFragments a[2];
  int last = -1;  // stage whose product still runs
#pragma unroll 1
  for (int k = 0; k < walk.launch.steps; ++k) {
    const Stage<Tile> stage = walk.wait();
    typename Int4Lane<Tile>::Rows rows;
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      const auto words = int4.load(stage, box);
      if (!kAny && box % 2 == 0) rows = int4.rows_of(stage, box / 2);
      if (kAny) rows = int4.rows_of(stage, box * per_box);
      int4.template expand<0, kSteps / 2>(words, rows, a[box % 2]);
      if (kAny) rows = int4.rows_of(stage, box * per_box + per_half);
      int4.template expand<kSteps / 2, kSteps>(words, rows, a[box % 2]);
      multiply_box<T, kN>(sums, a[box % 2], stage.x(box), true);
      ptx::wgmma_wait<1>();
      if (box == 0 && last >= 0) walk.release(last);
    }
    last = walk.ring.stage;
    walk.ring.next();
  }
  ptx::wgmma_wait<0>();
  ptx::hold_registers(sums);
  walk.release(last);
}

/// The same of more than 96 rows, which leave registers for the operands of half a box. Boxes go
/// one by one: where a loop makes operands twice, ptxas serialises the products that they meet.
template <class Tile>
__device__ __forceinline__ void multiply_scaled_halves(const StageWalk<Tile>& walk,
                                                       const Int4Lane<Tile>& int4,
                                                       float (&sums)[Tile::kRows / 8][4]) {
  using T = typename Tile::T;
  constexpr int kN = Tile::kRows, kHalf = kSteps / 2;
  constexpr bool kAny = Int4Lane<Tile>::kAny;
  const int per_box = !Tile::kFp4 && walk.launch.groups == 1 ? 0 : 2, per_half = per_box / 2;
  Fragment a[2][kHalf];
  int last = -1;  // stage whose product still runs
#pragma unroll 1
  for (int k = 0; k < walk.launch.steps; ++k) {
    const Stage<Tile> stage = walk.wait();
    typename Int4Lane<Tile>::Rows rows;
#pragma unroll 1
    for (int box = 0; box < Tile::kBoxes; ++box) {
      const auto words = int4.load(stage, box);
      if (kAny || box == 0) rows = int4.rows_of(stage, box * per_box);
      int4.template expand<0, kHalf>(words, rows, a[0]);
      multiply_box<T, kN>(sums, a[0], stage.x(box), true);
      ptx::wgmma_wait<1>();
      if (box == 0 && last >= 0) walk.release(last);
      if (kAny) rows = int4.rows_of(stage, box * per_box + per_half);
      int4.template expand<kHalf, kSteps>(words, rows, a[1]);
      multiply_box<T, kN>(sums, a[1], stage.x(box) + kHalf * kStepBytes, true);
      ptx::wgmma_wait<1>();
    }
    last = walk.ring.stage;
    walk.ring.next();
  }
  ptx::wgmma_wait<0>();
  ptx::hold_registers(sums);
  walk.release(last);
}

/// Sums of a tile.
template <class Tile>
__device__ __forceinline__ void multiply_int4(const StageWalk<Tile>& walk, Sums<Tile>& all,
                                              const Consumer& me) {
  auto& sums = reinterpret_cast<float(&)[Tile::kRows / 8][4]>(all);
  const Int4Lane<Tile> int4(walk.launch, me);
  if constexpr (Tile::kBoxes == 4) {
    multiply_differences<Tile>(walk, int4, sums);
  } else if constexpr (Tile::kRows > 96) {
    multiply_scaled_halves<Tile>(walk, int4, sums);
  } else {
    multiply_scaled<Tile>(walk, int4, sums);
  }
}

}  // namespace ridgeline::gemm_grouped
