#pragma once
#include "device/dequant.cuh"
#include "device/ptx/warpgroup.cuh"
#include "device/ptx/wgmma_few.cuh"
#include "device/ptx/wgmma_shared.cuh"
#include "kernels/gemm_cluster_sm90.cuh"
#include "kernels/gemm_epilogue.cuh"

/// The warpgroups that multiply in the cluster kernel.
namespace ridgeline::gemm_cluster {

using namespace gemm_detail;

/// What a warpgroup keeps in registers: 64 weight rows by all rows of x.
template <class T, class E, WeightFormat kFormat, bool kFp8X, int kTokens>
struct Consumer {
  using Layout = StageLayout<kFormat, kFp8X, kTokens>;
  using Wgmma = ptx::WgmmaFew<kTokens, E>;
  using Sums = SumOf<E>[kTokens / 8][4];
  const ClusterParams& params;
  int unit;        // which 64 rows of the tile
  int warp, lane;  // warp in the warpgroup
  int rows[2];     // of the weight, that the warp's eights begin with: an eight has one scale
  Sums sums = {};

  __device__ static std::uint64_t operand(const char* start) {
    return ptx::swizzled_operand(start, 16, 8 * kRowBytes);
  }
  static constexpr int kStep = 32 / 16;  // from one step's operand to the next's
  __device__ static void hold(Sums& values) { ptx::hold_registers(values); }

  __device__ const char* weight(const char* stage) const {
    return stage + Layout::kXBoxes * params.x_box + unit * Layout::kWeightBytes;
  }

  /// Both operands from shared memory: four steps.
  __device__ void multiply_shared(const char* stage, Sums& into, bool accumulate) const {
    const std::uint64_t a = operand(weight(stage)), b = operand(stage);
    hold(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t rows = a + step * kStep, x = b + step * kStep;
      if constexpr (kTokens == kManyTokens) {
        ptx::WgmmaShared<kTokens, E>::mma(into, rows, x, accumulate || step != 0);
      } else {
        Wgmma::shared(into, rows, x, accumulate || step != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// Four operands from registers: 64 columns, box `box` of x.
  template <int kOctets>
  __device__ void multiply_registers(const char* stage, const std::uint32_t (&a)[4][4], int box,
                                     float (&into)[kOctets][4], bool accumulate) const {
    const std::uint64_t b = operand(stage + box * params.x_box);
    ptx::hold_registers(into);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::WgmmaFew<kOctets * 8, E>::registers(into, a[step], b + step * kStep,
                                               accumulate || step != 0);
    ptx::wgmma_commit();
  }

  /// The warp's 16 rows, 64 columns from `box` on, as operands; times a scale, rounded once.
  template <bool kScaled>
  __device__ void expand_fp8(const char* stage, int box, float2 scale,
                             std::uint32_t (&a)[4][4]) const {
    const char* of_warp = weight(stage) + warp * kStripRows * kRowBytes;
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

  /// Where the thread finds its words, scales and zero points of int4 in a stage.
  struct Places {
    int words, scales, zeros;
  };

  __device__ Places find_places() const {
    const int r = unit * kGroupRows + warp * kStripRows + lane / 4;
    const int box = params.paired && r >= params.box_rows ? 1 : 0, at = r - box * params.box_rows;
    return {Layout::weight_at(0, params) + unit * Layout::kWeightBytes + warp * 1024 + lane * 16,
            Layout::scales_at(box, params) + at * 2, Layout::zeros_at(box, params) + at};
  }

  /// Scales and zero points of the thread's two rows, for one group of a stage.
  struct Scaling {
    device::Pair<T> scale[2], zero[2];
  };

  /// Those of group `g` of the stage.
  __device__ Scaling scaling_of(const char* stage, const Places& places, int g) const {
    const T* scales = reinterpret_cast<const T*>(stage + places.scales) + g * params.box_rows;
    const char* zeros = stage + places.zeros + g * params.box_rows;
    Scaling scaling;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t zero = Int4Layout::kSymmetricZero;
      if (params.gemm.weight.zeros) zero = static_cast<std::uint8_t>(zeros[8 * i]);
      scaling.scale[i] = {scales[8 * i], scales[8 * i]};
      scaling.zero[i] = device::int4_zero<T>(zero);
    }
    return scaling;
  }

  __device__ static uint4 words_of(const char* stage, const Places& places, int box) {
    return *reinterpret_cast<const uint4*>(stage + places.words + box * 512);
  }

  /// Sixteen columns of the warp's rows as an operand.
  __device__ static void expand_int4(std::uint32_t word, const Scaling& scaling,
                                     std::uint32_t (&a)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      a[j] = device::expand_int4<T>(word, j, scaling.zero[j % 2], scaling.scale[j % 2]);
  }

  /// 64 columns of groups that a stage has several of, `into` columns of the first before it.
  __device__ void expand_groups(const char* stage, const Places& places, int box, int into,
                                int last, std::uint32_t (&a)[4][4]) const {
    const uint4 raw = words_of(stage, places, box);
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    const int group = params.gemm.weight.group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 columns a group at least
      const int at = into + min(box * 64 + half * 32, last);
      int g = 0;
      for (int next = group; at >= next; next += group) ++g;
      const Scaling scaling = scaling_of(stage, places, g);
      expand_int4(words[2 * half], scaling, a[2 * half]);
      expand_int4(words[2 * half + 1], scaling, a[2 * half + 1]);
    }
  }

  /// 64 columns less their zero points, exactly.
  __device__ static void expand_group(const uint4& words, const device::Pair<T> (&zero)[2],
                                      std::uint32_t (&a)[4][4]) {
    const std::uint32_t of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = device::expand_int4<T>(of[i], j, zero[j % 2]);
  }

  /// 64 columns of one group.
  __device__ static void expand_group(const uint4& words, const Scaling& scaling,
                                      std::uint32_t (&a)[4][4]) {
    expand_int4(words.x, scaling, a[0]);
    expand_int4(words.y, scaling, a[1]);
    expand_int4(words.z, scaling, a[2]);
    expand_int4(words.w, scaling, a[3]);
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
    RingPlace place;
    place.advance(turn, params.stages);
    const auto release = [&](int stage) { this->release(fixed, stage); };
#pragma unroll 1
    for (int i = turn; i < count; i += turns, place.advance(turns, params.stages)) {
      ptx::mbarrier_wait(&fixed.full[place.stage], place.round % 2);
      multiply(i, ring + place.stage * params.stage_bytes, place.stage, release);
    }
    ptx::wgmma_wait<0>();
    hold(sums);
  }

  /// Operands in registers, expand(step, stage, box, a): the product of one box of x runs while
  /// the operands of the other are made.
  template <class Expand>
  __device__ void run_expanded(Fixed& fixed, const char* ring, int count, int turn, int turns,
                               Expand expand) {
    std::uint32_t a[2][4][4];
    int last = -1;  // stage whose product still runs
    for_each_step(fixed, ring, count, turn, turns,
                  [&](int i, const char* stage, int place, const auto& release) {
#pragma unroll
                    for (int box = 0; box < 2; ++box) {
                      expand(i, stage, box, a[box]);
                      multiply_registers(stage, a[box], box, sums, true);
                      ptx::wgmma_wait<1>();
                      if (box == 0 && last >= 0) release(last);
                    }
                    last = place;
                  });
  }

  /// Int4 stages that lie in one group, by up to kRows rows of x: what is expanded is the
  /// difference to the zero point, its products go to registers of their own, which are scaled and
  /// added in float32. While the second half is multiplied, the first of the next stage is
  /// expanded. H200, us, scaled weights and so: 16 rows of 4096 x 4096 7.8 and 7.4, 14336 x 4096
  /// 20.0 and 16.9, 4096 x 28672 29.0 and 24.2; 32 rows of these 8.0 and 7.9, 20.3 and 18.9, 28.8
  /// and 26.6. Sums of 64 rows leave no registers for it.
  template <int kRows>
  __device__ void run_scaled_sums(Fixed& fixed, const char* ring, const Places& places, int count,
                                  int turn, int turns) {
    if (turn >= count) return;
    std::uint32_t a[2][4][4];
    RingPlace place;
    place.advance(turn, params.stages);
    const char* stage = ring + place.stage * params.stage_bytes;
    ptx::mbarrier_wait(&fixed.full[place.stage], place.round % 2);
    uint4 second = words_of(stage, places, 1);
    Scaling scaling = scaling_of(stage, places, 0);
    expand_group(words_of(stage, places, 0), scaling.zero, a[0]);
#pragma unroll 1
    for (int i = turn; i < count; i += turns) {
      float part[kRows / 8][4];
      multiply_registers(stage, a[0], 0, part, false);
      expand_group(second, scaling.zero, a[1]);
      multiply_registers(stage, a[1], 1, part, true);
      const int last = place.stage;
      const float scale[2] = {device::to_float(scaling.scale[0].x),
                              device::to_float(scaling.scale[1].x)};
      const bool more = i + turns < count;
      uint4 first;
      if (more) {
        place.advance(turns, params.stages);
        stage = ring + place.stage * params.stage_bytes;
        ptx::mbarrier_wait(&fixed.full[place.stage], place.round % 2);
        first = words_of(stage, places, 0);
        second = words_of(stage, places, 1);
        scaling = scaling_of(stage, places, 0);
      }
      ptx::wgmma_wait<1>();
      if (more) expand_group(first, scaling.zero, a[0]);
      ptx::wgmma_wait<0>();
      ptx::hold_registers(part);
      release(fixed, last);
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j)
        sums[j / 4][j % 4] = fmaf(scale[j % 4 / 2], part[j / 4][j % 4], sums[j / 4][j % 4]);
    }
  }

  /// Each step's products to registers of their own, which are scaled and added in float32.
  __device__ void run_in_parts(Fixed& fixed, const char* ring, int begin, int count, int turn,
                               int turns) {
    float2 next_scale = block_scale(begin + turn);
    for_each_step(fixed, ring, count, turn, turns,
                  [&](int i, const char* stage, int place, const auto& release) {
                    Sums part;
                    const float2 scale = next_scale;
                    next_scale = block_scale(begin + i + turns);
                    multiply_shared(stage, part, false);
                    ptx::wgmma_wait<0>();
                    hold(part);
                    release(place);
#pragma unroll
                    for (int j = 0; j < kTokens / 2; ++j)
                      sums[j / 4][j % 4] += (j % 4 < 2 ? scale.x : scale.y) * part[j / 4][j % 4];
                  });
  }

  __device__ void run(Fixed& fixed, const char* ring, int begin, int count, int turn, int turns) {
    const GemmParams& p = params.gemm;
    if constexpr (Layout::kWide) {
      int last = -1;
      for_each_step(fixed, ring, count, turn, turns,
                    [&](int, const char* stage, int place, const auto& release) {
                      multiply_shared(stage, sums, true);
                      ptx::wgmma_wait<1>();
                      if (last >= 0) release(last);
                      last = place;
                    });
    } else if constexpr (Layout::kInt4) {
      const int group = p.weight.group;
      const Places places = find_places();
      const bool whole = group % Layout::kCols == 0 || group >= p.K;
      const bool few = whole && kTokens == 32;
      if (few && params.rows_held <= 16) {
        run_scaled_sums<16>(fixed, ring, places, count, turn, turns);
      } else if (few) {
        run_scaled_sums<32>(fixed, ring, places, count, turn, turns);
      } else if (whole) {
        Scaling scaling;
        run_expanded(fixed, ring, count, turn, turns,
                     [&](int, const char* stage, int box, std::uint32_t(&a)[4][4]) {
                       if (box == 0) scaling = scaling_of(stage, places, 0);
                       expand_group(words_of(stage, places, box), scaling, a);
                     });
      } else {
        run_expanded(fixed, ring, count, turn, turns,
                     [&](int i, const char* stage, int box, std::uint32_t(&a)[4][4]) {
                       const int k0 = (begin + i) * Layout::kCols;
                       expand_groups(stage, places, box, k0 % group, p.K - 1 - k0, a);
                     });
      }
    } else if constexpr (kFp8X) {
      run_in_parts(fixed, ring, begin, count, turn, turns);
    } else if (p.weight.scale_layout == ScaleLayout::kBlock) {
      float2 scale, next_scale = block_scale(begin + turn);
      run_expanded(fixed, ring, count, turn, turns,
                   [&](int i, const char* stage, int box, std::uint32_t(&a)[4][4]) {
                     if (box == 0) scale = next_scale, next_scale = block_scale(begin + i + turns);
                     expand_fp8<true>(stage, box, scale, a);
                   });
    } else {
      run_expanded(fixed, ring, count, turn, turns,
                   [&](int, const char* stage, int box, std::uint32_t(&a)[4][4]) {
                     expand_fp8<false>(stage, box, {}, a);
                   });
    }
  }
};

}  // namespace ridgeline::gemm_cluster
