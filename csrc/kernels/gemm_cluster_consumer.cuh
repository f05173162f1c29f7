#pragma once
#include <algorithm>
#include <utility>

#include "device/dequant.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "device/ptx/wgmma_registers_few.cuh"
#include "device/ptx/wgmma_shared.cuh"
#include "kernels/gemm_cluster_int4.cuh"
#include "kernels/gemm_epilogue.cuh"

/// The warpgroups that multiply in the cluster kernel.
namespace ridgeline::gemm_cluster {

using namespace gemm_detail;

/// Which strip of 16 weight rows a warp has of a unit of 64 that is not whole, or none. Each of an
/// SM's schedulers has a warp of every warpgroup: which of these has none is another for each.
struct Strips {
  int last;  // of the tile, that the warp has in the last unit
  bool has_last;

  __device__ static Strips of(const ClusterParams& params, int warp, int turn) {
    const int before = (params.row_groups - 1) * 4;
    const int there = params.tile_rows / kStripRows - before;
    if (there == 4) return {before + warp, true};
    const int strip = (warp + 8 - (2 * turn + turn / 2)) % 4;
    return {before + strip, strip < there};
  }
};

/// What a warpgroup keeps in registers: 64 weight rows by all rows of x, or kWholeUnits times as
/// many, all of a tile whose stages the kGroups warpgroups share out.
template <class T, class E, class Layout, int kGroups, int kWholeUnits>
struct Consumer {
  static constexpr bool kBroad = kGroups > 2, kPartial = kWholeUnits > 0;
  static constexpr int kUnits = std::max(kWholeUnits, 1);
  static constexpr bool kFp8X = Layout::kFp8X;
  static constexpr int kTokens = Layout::kTokens;
  using Sums = SumOf<E>[kTokens / 8][4];
  const ClusterParams& params;
  int unit;        // the first one, of 64 rows of the tile
  int warp, lane;  // warp in the warpgroup
  Strips strips;
  int rows[2];     // of the weight, that the warp's eights begin with: an eight has one scale
  Sums sums[kUnits] = {};

  __device__ static std::uint64_t operand(const char* start) {
    return ptx::swizzled_operand(start, 16, 8 * kRowBytes);
  }
  static constexpr int kStep = 32 / 16;  // from one step's operand to the next's
  __device__ static void hold(Sums& values) { ptx::hold_registers(values); }

  /// The strip of the tile that the warp has of its `u`-th unit, if it has one.
  __device__ int strip_of(int u) const { return u < kUnits - 1 ? u * 4 + warp : strips.last; }
  __device__ bool has_strip(int u) const {
    return !kPartial || u < kUnits - 1 || strips.has_last;
  }
  /// Where its strips are in a stage of int4.
  struct Int4Units {
    Int4<T, Layout> of[kUnits];
  };
  __device__ Int4Units int4_units() const {
    Int4Units units;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) units.of[u] = Int4<T, Layout>(params, strip_of(u), lane);
    return units;
  }
  /// Where the scales of a stage are, the `i`-th that the block has.
  template <bool kHeld>
  __device__ typename Int4<T, Layout>::Scales scales_of(const char* ring, const Stage& stage,
                                                        int i) const {
    if (kHeld) return {ring + params.held_at, i * params.held_step};
    return {stage.weight + params.weights_at, 0};
  }
  template <bool kHeld>
  __device__ void wait_for_scales(Fixed& fixed) const {
    if (kHeld) ptx::mbarrier_wait(&fixed.scaled, 0);
  }

  /// Both operands from shared memory: four steps.
  __device__ void multiply_shared(const Stage& stage, Sums& into, bool accumulate) const {
    const char* rows_of_unit = stage.weight + params.weights_at + unit * Layout::kWeightBytes;
    const std::uint64_t a = operand(rows_of_unit), b = operand(stage.x);
    hold(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t rows = a + step * kStep, x = b + step * kStep;
      if constexpr (kTokens == kManyTokens) {
        ptx::WgmmaShared<kTokens, E>::mma(into, rows, x, accumulate || step != 0);
      } else {
        ptx::WgmmaFew<kTokens, E>::shared(into, rows, x, accumulate || step != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Four operands from registers by rows of x, whose columns they meet begin at `x`.
  template <int kOctets>
  __device__ void multiply_registers(const char* x, const std::uint32_t (&a)[4][4],
                                     float (&into)[kOctets][4], bool accumulate) const {
    const std::uint64_t b = operand(x);
    ptx::hold_registers(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      if constexpr (kOctets * 8 == kManyTokens && kFp8X) {
        ptx::WgmmaFp8Registers<kManyTokens>::mma(into, a[step], b + step * kStep,
                                                 accumulate || step != 0);
      } else if constexpr (kOctets * 8 > gemm_config::kFewRows) {
        ptx::WgmmaRegisters<kOctets * 8, E, ptx::Contiguous::kInner>::mma(into, a[step],
                                                                          b + step * kStep);
      } else {
        ptx::WgmmaFew<kOctets * 8, E>::registers(into, a[step], b + step * kStep,
                                                 accumulate || step != 0);
      }
    ptx::wgmma_commit();
  }

  /// 16 rows of the weight, 64 columns from `box` on, as operands; times a scale, rounded once.
  template <bool kScaled>
  __device__ void expand_fp8(const Stage& stage, int strip, int box, float2 scale,
                             std::uint32_t (&a)[4][4]) const {
    const char* of_warp = stage.weight + params.weights_at + strip * kStripRows * kRowBytes;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = lane / 4 + j % 2 * 8;
        const char* chunk = of_warp + r * kRowBytes + (((box * 4 + step) ^ (r & 7)) * 16);
        a[step][j] = device::convert_e4m3_pair<T>(
            *reinterpret_cast<const std::uint16_t*>(chunk + j / 2 * 8 + lane % 4 * 2));
        if (kScaled) a[step][j] = device::scale_pair<T>(a[step][j], j % 2 ? scale.y : scale.x);
      }
  }

  /// The scales of the 128 x 128 that a step multiplies, of fp8 weights, for the warp's eights.
  __device__ float2 block_scale(int step) const {
    const GemmParams& p = params.gemm;
    if (p.weight.scale_layout != ScaleLayout::kBlock || step >= params.steps)
      return {1.0f, 1.0f};
    const float* scales = static_cast<const float*>(p.weight.scales) + step;
    const auto of = [&](int row) {
      return scales[static_cast<std::int64_t>(min(row, p.N - 1) / kScaleBlock) * params.steps];
    };
    return {of(rows[0]), of(rows[1])};
  }

  /// Gives a stage back, that every lane has read.
  __device__ void release(Fixed& fixed, int stage) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&fixed.empty[stage]);
  }

  /// Every `turns`-th of `count` steps, from the `turn`-th on: multiply(step, stage, release) for
  /// each, where release(place) gives a stage back.
  template <class Multiply>
  __device__ void for_each_step(Fixed& fixed, const char* ring, int count, int turn, int turns,
                                Multiply multiply) {
    StagePlace<Layout::kApart> place;
    place.advance(turn, params);
    const auto release = [&](int stage) { this->release(fixed, stage); };
#pragma unroll 1
    for (int i = turn; i < count; i += turns, place.advance(turns, params)) {
      ptx::mbarrier_wait(&fixed.full[place.stage], place.round % 2);
      multiply(i, place.of(params, ring), place.stage, release);
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (Sums& of_unit : sums) hold(of_unit);
  }

  /// Operands in registers, expand(step, stage, unit, box, a): the product of one box of x runs
  /// while the operands of the other are made.
  template <class Expand>
  __device__ void run_expanded(Fixed& fixed, const char* ring, int count, int turn, int turns,
                               Expand expand) {
    std::uint32_t a[2][4][4] = {};
    int last = -1;  // stage whose product still runs
    for_each_step(fixed, ring, count, turn, turns,
                  [&](int i, const Stage& stage, int place, const auto& release) {
#pragma unroll
                    for (int part = 0; part < 2 * kUnits; ++part) {
                      const int u = part / 2, box = part % 2;
                      if (has_strip(u)) expand(i, stage, u, box, a[box]);
                      multiply_registers(stage.x + box * params.x_box, a[box], sums[u], true);
                      ptx::wgmma_wait<1>();
                      ptx::hold_registers(a[1 - box]);
                      if (part == 0 && last >= 0) release(last);
                    }
                    last = place;
                  });
    for (auto& of_box : a) ptx::hold_registers(of_box);
  }

  /// Int4 stages that lie in one group, by up to kRows rows of x: what is expanded is the
  /// difference to the zero point, its products go to registers of their own, which are scaled and
  /// added in float32. While the second half is multiplied, the first of the next stage is
  /// expanded. H200, us, scaled weights and so: 16 rows of 4096 x 4096 7.8 and 7.4, 14336 x 4096
  /// 20.0 and 16.9, 4096 x 28672 29.0 and 24.2; 32 rows of these 8.0 and 7.9, 20.3 and 18.9, 28.8
  /// and 26.6. Sums of 64 rows leave no registers for it.
  template <int kRows, bool kHeld>
  __device__ void run_scaled_sums(Fixed& fixed, const char* ring, int count, int turn,
                                  int turns) {
    if (turn >= count) return;
    std::uint32_t a[2][4][4] = {};
    StagePlace<Layout::kApart> place;
    place.advance(turn, params);
    Stage stage;
    const auto wait_full = [&] {
      stage = place.of(params, ring);
      ptx::mbarrier_wait(&fixed.full[place.stage], place.round % 2);
    };
    const Int4Units units = int4_units();
    uint4 first, second;
    device::Int4Differences<T> differences;
    const auto take = [&](int u, int i, float (&scale)[2]) {
      const Int4<T, Layout>& int4 = units.of[u];
      const auto scales = scales_of<kHeld>(ring, stage, i);
      first = int4.words_of(stage.weight, 0);
      second = int4.words_of(stage.weight, 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = device::to_float(int4.scale_of(scales, 0, r));
        differences.set(r, int4.zero_of(scales, 0, r));
      }
    };
    const auto expand = [&](const uint4& words, std::uint32_t (&to)[4][4]) {
      Int4<T, Layout>::expand(words, differences, differences, to);
    };
    float scale[2] = {}, next_scale[2] = {};
    wait_for_scales<kHeld>(fixed);
    wait_full();
    if (has_strip(0)) take(0, turn, scale), expand(first, a[0]);
#pragma unroll 1
    for (int i = turn; i < count; i += turns)
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float part[kRows / 8][4];
        multiply_registers(stage.x, a[0], part, false);
        if (has_strip(u)) expand(second, a[1]);
        multiply_registers(stage.x + params.x_box, a[1], part, true);
        const bool ends = u == kUnits - 1;  // the stage
        const int next = ends ? 0 : u + 1, last = place.stage;
        const bool more = (!ends || i + turns < count) && has_strip(next);
        if (ends && i + turns < count) place.advance(turns, params), wait_full();
        if (more) take(next, ends ? i + turns : i, next_scale);
        ptx::wgmma_wait<1>();
        ptx::hold_registers(a[0]);
        if (more) expand(first, a[0]);
        ptx::wgmma_wait<0>();
        ptx::hold_registers(part);
        ptx::hold_registers(a[1]);
        if (ends) release(fixed, last);
        add_scaled(sums[u], part, {scale[0], scale[1]}, 0);
        scale[0] = next_scale[0], scale[1] = next_scale[1];
      }
  }

  /// Int4 with scales in its operands.
  template <bool kZeros, bool kHeld>
  __device__ void run_scaled_rows(Fixed& fixed, const char* ring, int begin, int count, int turn,
                                  int turns) {
    const GemmParams& p = params.gemm;
    const Int4Units units = int4_units();
    wait_for_scales<kHeld>(fixed);
    if (p.weight.group % Layout::kCols == 0 || p.weight.group >= p.K) {
      device::Int4Rows<T, kZeros> rows;
      return run_expanded(fixed, ring, count, turn, turns,
                          [&](int i, const Stage& stage, int u, int box,
                              std::uint32_t(&a)[4][4]) {
                            const Int4<T, Layout>& int4 = units.of[u];
                            const auto scales = scales_of<kHeld>(ring, stage, i);
                            if (box == 0) rows = int4.template rows_of<kZeros>(scales, 0);
                            int4.expand(int4.words_of(stage.weight, box), rows, rows, a);
                          });
    }
    run_expanded(fixed, ring, count, turn, turns,
                 [&](int i, const Stage& stage, int u, int box, std::uint32_t(&a)[4][4]) {
                   const Int4<T, Layout>& int4 = units.of[u];
                   const int k0 = (begin + i) * Layout::kCols, last = p.K - 1 - k0;
                   const int into = k0 - params.group.divide(k0) * p.weight.group;
                   const auto rows_at = [&](int at) {  // of a group, 32 columns at least
                     const int group = int4.group_of(into, at, last);
                     return int4.template rows_of<kZeros>(scales_of<kHeld>(ring, stage, i), group);
                   };
                   const auto low = rows_at(box * 64), high = rows_at(box * 64 + 32);
                   int4.expand(int4.words_of(stage.weight, box), low, high, a);
                 });
  }

  /// Int4 by e4m3, stages that lie in one group, without zero points: products of a stage are
  /// scaled and added in float32. While they run, up to 32 rows of x, the next stage is expanded.
  /// In a broad tile of 128 rows there are registers for the products of half.
  template <int kRows, bool kHeld>
  __device__ void run_as_e4m3(Fixed& fixed, const char* ring, int count, int turn, int turns) {
    constexpr int kAtOnce = kBroad ? std::min(kRows, 64) : kRows;
    constexpr bool kAhead = kRows <= (kBroad ? 64 : 32);
    // Two sets by turns: copied into one, the next operands were written while the tensor cores
    // still read the last (CUDA 13.0, where the expansion is behind a branch).
    constexpr int kOperands = kAhead ? 2 : 1;
    constexpr int kItems = kUnits % kOperands == 0 ? kUnits : kUnits * kOperands;
    static_assert(kAhead || kUnits == 1);
    if (turn >= count) return;
    StagePlace<Layout::kApart> place;
    place.advance(turn, params);
    std::uint32_t a[kOperands][4][4] = {};
    const Int4Units units = int4_units();
    Stage stage;
    const auto wait_full = [&] {
      stage = place.of(params, ring);
      ptx::mbarrier_wait(&fixed.full[place.stage], place.round % 2);
    };
    const auto expand = [&](int u, std::uint32_t (&to)[4][4]) {
      if (has_strip(u)) units.of[u].expand_to_e4m3(stage.weight, to);
    };
    wait_for_scales<kHeld>(fixed);
    wait_full();
    expand(0, a[0]);
    int i = turn;
    // Returns whether there are more.
    const auto take_item = [&]<int j>() __attribute__((always_inline)) {
      constexpr int u = j % kUnits, now = j % kOperands, then = (j + 1) % kOperands;
      constexpr bool kEnds = u == kUnits - 1;  // the stage
      float part[kAtOnce / 8][4];
      float2 scale;
#pragma unroll
      for (int first = 0; first < kRows; first += kAtOnce) {
        multiply_registers(stage.x + first * kRowBytes, a[now], part, false);
        if (first == 0) scale = units.of[u].e4m3_scales(scales_of<kHeld>(ring, stage, i));
        if (first == kRows - kAtOnce) break;
        ptx::wgmma_wait<0>();
        ptx::hold_registers(part);
        add_scaled(sums[u], part, scale, first / 8);
      }
      const int last = place.stage;
      if (kEnds) i += turns;
      const bool more = !kEnds || i < count;
      if (kEnds && more) place.advance(turns, params);
      if (kAhead && more) {
        if (kEnds) wait_full();
        expand((u + 1) % kUnits, a[then]);
      }
      ptx::wgmma_wait<0>();
      ptx::hold_registers(part);
      ptx::hold_registers(a[now]);
      if (kEnds) release(fixed, last);
      add_scaled(sums[u], part, scale, (kRows - kAtOnce) / 8);
      if (!kAhead && more) wait_full(), expand((u + 1) % kUnits, a[then]);
      return more;
    };
    [&]<int... j>(std::integer_sequence<int, j...>) __attribute__((always_inline)) {
      while ((take_item.template operator()<j>() && ...)) continue;
    }(std::make_integer_sequence<int, kItems>());
  }

  /// Each step's products to registers of their own, which are scaled and added in float32.
  __device__ void run_in_parts(Fixed& fixed, const char* ring, int begin, int count, int turn,
                               int turns) {
    float2 next_scale = block_scale(begin + turn);
    for_each_step(fixed, ring, count, turn, turns,
                  [&](int i, const Stage& stage, int place, const auto& release) {
                    Sums part;
                    const float2 scale = next_scale;
                    next_scale = block_scale(begin + i + turns);
                    multiply_shared(stage, part, false);
                    ptx::wgmma_wait<0>();
                    hold(part);
                    release(place);
                    add_scaled(sums[0], part, scale, 0);
                  });
  }

  template <bool kHeld>
  __device__ void run_int4(Fixed& fixed, const char* ring, int begin, int count, int turn,
                           int turns) {
    const GemmParams& p = params.gemm;
    const bool whole = p.weight.group % Layout::kCols == 0 || p.weight.group >= p.K;
    constexpr int kFew = std::min(kTokens, 32);
    if constexpr (kFp8X) {
      if (kTokens == 32 && params.rows_held <= 16) {
        run_as_e4m3<16, kHeld>(fixed, ring, count, turn, turns);
      } else {
        run_as_e4m3<kTokens, kHeld>(fixed, ring, count, turn, turns);
      }
    } else if (whole && kTokens <= 32 && params.rows_held <= 16) {
      run_scaled_sums<16, kHeld>(fixed, ring, count, turn, turns);
    } else if (whole && kTokens <= 32) {
      run_scaled_sums<kFew, kHeld>(fixed, ring, count, turn, turns);
    } else if (p.weight.zeros) {
      run_scaled_rows<true, kHeld>(fixed, ring, begin, count, turn, turns);
    } else {
      run_scaled_rows<false, kHeld>(fixed, ring, begin, count, turn, turns);
    }
  }

  __device__ void run(Fixed& fixed, const char* ring, int begin, int count, int turn, int turns) {
    const GemmParams& p = params.gemm;
    if constexpr (Layout::kWide) {
      int last = -1;
      for_each_step(fixed, ring, count, turn, turns,
                    [&](int, const Stage& stage, int place, const auto& release) {
                      multiply_shared(stage, sums[0], true);
                      if (Layout::kApart) {  // x's ring is too short for more
                        ptx::wgmma_wait<0>();
                        return release(place);
                      }
                      ptx::wgmma_wait<1>();
                      if (last >= 0) release(last);
                      last = place;
                    });
    } else if constexpr (Layout::kInt4) {
      if (Layout::kMayHold && params.held_at > 0) {
        run_int4<Layout::kMayHold>(fixed, ring, begin, count, turn, turns);
      } else {
        run_int4<false>(fixed, ring, begin, count, turn, turns);
      }
    } else if constexpr (kFp8X) {
      run_in_parts(fixed, ring, begin, count, turn, turns);
    } else if (p.weight.scale_layout == ScaleLayout::kBlock) {
      float2 scale, next_scale = block_scale(begin + turn);
      run_expanded(fixed, ring, count, turn, turns,
                   [&](int i, const Stage& stage, int u, int box, std::uint32_t(&a)[4][4]) {
                     if (box == 0) scale = next_scale, next_scale = block_scale(begin + i + turns);
                     expand_fp8<true>(stage, strip_of(u), box, scale, a);
                   });
    } else {
      run_expanded(fixed, ring, count, turn, turns,
                   [&](int, const Stage& stage, int u, int box, std::uint32_t(&a)[4][4]) {
                     expand_fp8<false>(stage, strip_of(u), box, {}, a);
                   });
    }
  }
};

}  // namespace ridgeline::gemm_cluster
