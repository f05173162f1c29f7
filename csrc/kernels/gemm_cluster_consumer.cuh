#pragma once
#include <algorithm>

#include "device/ptx/wgmma_few_bytes.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "device/ptx/wgmma_registers_few.cuh"
#include "device/ptx/wgmma_shared_between.cuh"
#include "kernels/gemm_cluster_block.cuh"
#include "kernels/gemm_epilogue.cuh"

/// The warpgroups that multiply in the cluster kernel: what they hold, and how they go on.
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

/// Adds `part` times the scales of a thread's two weight rows to sums, from octet `first` on.
template <int kAll, int kPart>
__device__ __forceinline__ void add_scaled(float (&sums)[kAll][4], const float (&part)[kPart][4],
                                           float2 scale, int first) {
#pragma unroll
  for (int j = 0; j < kPart * 4; ++j) {
    float& sum = sums[first + j / 4][j % 4];
    sum = fmaf(j % 4 < 2 ? scale.x : scale.y, part[j / 4][j % 4], sum);
  }
}

/// A warpgroup that multiplies: 64 weight rows by all rows of x, or kWholeUnits times as many, all
/// of a tile whose stages the kGroups warpgroups share out. Which loop its stages go through,
/// gemm_cluster_loops.cuh says.
template <class T_, class E, class Layout_, int kGroups, int kWholeUnits>
struct Consumer {
  using T = T_;
  using Layout = Layout_;
  static constexpr bool kBroad = kGroups > 2, kPartial = kWholeUnits > 0;
  static constexpr int kUnits = std::max(kWholeUnits, 1);
  static constexpr int kTokens = Layout::kTokens;
  static constexpr int kThreads = kGroups * kGroupThreads;  // that multiply
  static constexpr bool kHoldsBlocks = gemm_cluster::kHoldsBlocks<Layout, kGroups>;
  /// Whether there are registers for the products of a stage beside the sums.
  static constexpr bool kScalesSums =
      kUnits <= gemm_config::kScaledUnitsByStages &&
      (kTokens <= 32 || (kTokens == 64 && (Layout::kAlone || kBroad)));
  using Sums = SumOf<E>[kTokens / 8][4];
  using Reader = StageReader<Layout::kApart>;
  const ClusterParams& params;
  Fixed& fixed;
  const char* ring;
  int begin, count;  // stages of K that the block has: of them every `turns`-th from `turn` on ...
  int turn, turns;   // ... is the warpgroup's
  int unit;          // the first one, of 64 rows of the tile
  int warp, lane;    // warp in the warpgroup
  Strips strips;
  int first, up_first;  // row of the tile, and of its second half if paired
  Sums sums[kUnits] = {};

  static __device__ void hold(Sums& values) { ptx::hold_registers(values); }

  /// The strip of the tile that the warp has of its `u`-th unit, if it has one.
  __device__ int strip_of(int u) const { return u < kUnits - 1 ? u * 4 + warp : strips.last; }
  __device__ bool has_strip(int u) const {
    return !kPartial || u < kUnits - 1 || strips.has_last;
  }

  /// The weight row that row `i` of the tile is. An eight of the warp's has one scale of blocks.
  __device__ int row_of(int i) const {
    return params.paired && i >= params.box_rows ? up_first + i - params.box_rows : first + i;
  }

  /// Both operands from shared memory: four steps.
  __device__ void multiply_shared(const Stage& stage, Sums& into, bool accumulate) const {
    const std::uint64_t a =
        operand(stage.weight + params.weights_at + unit * Layout::kWeightBytes);
    hold(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t rows = a + step * kOperandStep, x = stage.x + step * kOperandStep;
      if constexpr (kTokens > gemm_config::kFewRows) {
        ptx::WgmmaShared<kTokens, E>::mma(into, rows, x, accumulate || step != 0);
      } else {
        ptx::WgmmaFew<kTokens, E>::shared(into, rows, x, accumulate || step != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Four operands from registers by rows of x, whose columns they meet begin at `x`.
  template <int kOctets>
  __device__ void multiply_registers(std::uint64_t x_operand, const std::uint32_t (&a)[4][4],
                                     float (&into)[kOctets][4], bool accumulate) const {
    ptx::hold_registers(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t x = x_operand + step * kOperandStep;
      if constexpr (kOctets * 8 == kManyTokens && Layout::kFp8X) {
        ptx::WgmmaFp8Registers<kManyTokens>::mma(into, a[step], x, accumulate || step != 0);
      } else if constexpr (kOctets * 8 > gemm_config::kFewRows) {
        ptx::WgmmaRegisters<kOctets * 8, E, ptx::Contiguous::kInner>::mma(into, a[step], x);
      } else {
        ptx::WgmmaFew<kOctets * 8, E>::registers(into, a[step], x, accumulate || step != 0);
      }
    }
    ptx::wgmma_commit();
  }
  /// From a stage's first 64 columns of x to the others.
  __device__ std::uint64_t half() const { return operand_step(params.x_box); }

  /// Gives a stage back, that every lane has read.
  __device__ void release(int stage) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&fixed.empty[stage]);
  }

  /// Ahead of the warpgroup's first stage.
  __device__ Reader reader() const {
    Reader reader{params, fixed, ring};
    reader.advance(turn);
    return reader;
  }

  /// multiply(i, stage, place) for each of its stages: the `i`-th of the block, in `place` of the
  /// ring.
  template <class Multiply>
  __device__ __forceinline__ void for_each_stage(Multiply multiply) {
    Reader at = reader();
#pragma unroll 1
    for (int i = turn; i < count; i += turns, at.advance(turns))
      multiply(i, at.wait(), at.stage);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (Sums& of_unit : sums) hold(of_unit);
  }

  /// Operands in registers, expand(i, stage, unit, box, a).
  template <class Expand>
  __device__ __forceinline__ void run_expanded(Expand expand) {
    if constexpr ((Layout::kAlone || kWholeUnits == 1) && kTokens == 64) {
      run_stages_ahead(expand);
    } else {
      run_boxes_by_turns(expand);
    }
  }

  /// Operands in registers, up to kRows rows of x, whose products of a stage go to registers of
  /// their own, which are scaled and added in float32: take(unit, stage, i) reads a stage's weights
  /// of a unit and returns the scales of the thread's two rows, expand(unit, box, a) makes operands
  /// of them. While the second half is multiplied, the first of the next stage is expanded. H200,
  /// us, scaled weights and so, int4: 16 rows of 4096 x 4096 7.8 and 7.4, 14336 x 4096 20.0 and
  /// 16.9, 4096 x 28672 29.0 and 24.2; 32 rows of these 8.0 and 7.9, 20.3 and 18.9, 28.8 and 26.6;
  /// fp8 with scales of blocks, 16 rows: 8.6 and 7.6, 24.0 and 20.4, 49.1 and 39.4, 64 rows of 4096
  /// x 4096 10.5 and 8.9, where a block has an SM: sums of 64 rows leave no registers for it else.
  template <int kRows, class Take, class Expand>
  __device__ __forceinline__ void run_scaled_sums(Take take, Expand expand) {
    if (turn >= count) return;
    std::uint32_t a[2][4][4] = {};
    Reader at = reader();
    int i = turn;
    Stage stage = at.wait();
    float2 scale{}, next_scale{};
    if (has_strip(0)) scale = take(0, stage, i), expand(0, 0, a[0]);
    bool more = true;
#pragma unroll 1
    while (more)
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const bool ends = u == kUnits - 1;  // the stage
        const int next = ends ? 0 : u + 1, place = at.stage;
        float part[kRows / 8][4];
        multiply_registers(stage.x, a[0], part, false);
        if (has_strip(u)) expand(u, 1, a[1]);
        multiply_registers(stage.x + half(), a[1], part, true);
        if (ends) {
          more = i + turns < count;
          if (more) i += turns, at.advance(turns), stage = at.wait();
        }
        // Behind the last stage that one is expanded once more: a branch costs every stage.
        if (has_strip(next)) next_scale = take(next, stage, i);
        ptx::wgmma_wait<1>();
        ptx::hold_registers(a[0]);
        if (has_strip(next)) expand(next, 0, a[0]);
        ptx::wgmma_wait<0>();
        ptx::hold_registers(part);
        ptx::hold_registers(a[1]);
        if (ends) release(place);
        add_scaled(sums[u], part, scale, 0);
        scale = next_scale;
      }
    ptx::hold_registers(a[0]);
  }

  /// The product of one box of x runs while the operands of the other are made.
  template <class Expand>
  __device__ __forceinline__ void run_boxes_by_turns(Expand expand) {
    std::uint32_t a[2][4][4] = {};
    int last = -1;  // place of the stage whose product still runs
    for_each_stage([&](int i, const Stage& stage, int place) {
#pragma unroll
      for (int part = 0; part < 2 * kUnits; ++part) {
        const int u = part / 2, box = part % 2;
        if (has_strip(u)) expand(i, stage, u, box, a[box]);
        multiply_registers(stage.x + box * half(), a[box], sums[u], true);
        ptx::wgmma_wait<1>();
        ptx::hold_registers(a[1 - box]);
        if (part == 0 && last >= 0) release(last);
      }
      last = place;
    });
    for (auto& of_box : a) ptx::hold_registers(of_box);
  }

  /// Both products of a stage run while the operands of the next one are made, in twice as many
  /// registers: a warp, which waits until the tensor cores take an operand, waits for fewer. By the
  /// loop alone, its stages in shared memory, clocks an SM takes for 64 x 128 weights of fp8 by 64
  /// rows of bf16, by turns and so: 437 and 396.
  template <class Expand>
  __device__ __forceinline__ void run_stages_ahead(Expand expand) {
    static_assert(kUnits == 1);
    if (turn >= count) return;
    std::uint32_t a[2][2][4][4];
    Reader at = reader();
    int i = turn;
    Stage stage = at.wait();
    const auto make = [&](std::uint32_t (&to)[2][4][4]) {
#pragma unroll
      for (int box = 0; box < 2; ++box)
        if (has_strip(0)) expand(i, stage, 0, box, to[box]);
    };
    make(a[0]);
    bool more = true;
#pragma unroll 1
    while (more)
#pragma unroll
      for (int now = 0; now < 2 && more; ++now) {
#pragma unroll
        for (int box = 0; box < 2; ++box)
          multiply_registers(stage.x + box * half(), a[now][box], sums[0], true);
        const int place = at.stage;
        more = i + turns < count;
        if (more) {
          i += turns, at.advance(turns), stage = at.wait();
          make(a[1 - now]);
        }
        ptx::wgmma_wait<0>();
        hold(sums[0]);
        for (auto& of_box : a[now]) ptx::hold_registers(of_box);
        release(place);
      }
  }
};

}  // namespace ridgeline::gemm_cluster
