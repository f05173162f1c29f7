#pragma once
#include "device/dequant.cuh"
#include "kernels/gemm_cluster_block_scales.cuh"
#include "kernels/gemm_cluster_int4_loops.cuh"

/// The loops over the stages of the cluster kernel, but of int4.
namespace ridgeline::gemm_cluster {

/// 16 rows of fp8 weights, 64 columns from `box` on, as operands; times a scale, rounded once.
template <bool kScaled, class Consumer>
__device__ __forceinline__ void expand_fp8(const Consumer& of, const Stage& stage, int strip,
                                           int box, float2 scale, std::uint32_t (&a)[4][4]) {
  using T = typename Consumer::T;
  const char* of_warp = stage.weight + of.params.weights_at + strip * kStripRows * kRowBytes;
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = of.lane / 4 + j % 2 * 8;
      const char* chunk = of_warp + r * kRowBytes + (((box * 4 + step) ^ (r & 7)) * 16);
      const auto raw =
          *reinterpret_cast<const std::uint16_t*>(chunk + j / 2 * 8 + of.lane % 4 * 2);
      a[step][j] = kScaled ? device::scale_e4m3_pair<T>(raw, j % 2 ? scale.y : scale.x)
                           : device::convert_e4m3_pair<T>(raw);
    }
}

/// Both operands from shared memory, of 64 columns of 16 bits.
template <class Consumer>
__device__ __forceinline__ void run_shared(Consumer& by) {
  int last = -1;
  by.for_each_stage([&](int, const Stage& stage, int place) {
    by.multiply_shared(stage, by.sums[0], true);
    if (Consumer::Layout::kApart) {  // x's ring is too short for more
      ptx::wgmma_wait<0>();
      return by.release(place);
    }
    ptx::wgmma_wait<1>();
    if (last >= 0) by.release(last);
    last = place;
  });
}

/// The same of fp8: each stage's products to registers of their own, which are scaled and added in
/// float32.
template <class Consumer>
__device__ __forceinline__ void run_in_parts(Consumer& by) {
  const BlockScales<1, false> scales(by);
  float2 next_scale = scales.at(by.turn);
  by.for_each_stage([&](int i, const Stage& stage, int place) {
    typename Consumer::Sums part;
    const float2 scale = next_scale;
    next_scale = scales.at(i + by.turns);
    by.multiply_shared(stage, part, false);
    ptx::wgmma_wait<0>();
    by.hold(part);
    by.release(place);
    add_scaled(by.sums[0], part, scale, 0);
  });
}

template <class Consumer>
__device__ __forceinline__ void run_expanded_fp8(Consumer& by) {
  if (by.params.gemm.weight.scale_layout == ScaleLayout::kBlock) {
    // A scale of sums, not of as many weights: other bits than those of more rows.
    if constexpr (Consumer::kScalesSums) {
      if (Consumer::kPartial || !by.params.gemm.batch_invariant) {
        const BlockScales<Consumer::kUnits, Consumer::kHoldsBlocks> scales(by);
        Stage stage;
        return by.template run_scaled_sums<Consumer::kTokens>(
            [&](int u, const Stage& next, int i) {
              stage = next;
              return scales.at(i, u);
            },
            [&](int u, int box, std::uint32_t(&a)[4][4]) {
              expand_fp8<false>(by, stage, by.strip_of(u), box, {}, a);
            });
      }
    }
    if constexpr (!Consumer::kPartial) {
      const BlockScales<1, Consumer::kHoldsBlocks> scales(by);
      float2 scale, next_scale = scales.at(by.turn);
      return by.run_expanded([&](int i, const Stage& stage, int u, int box,
                                 std::uint32_t(&a)[4][4]) {
        if (box == 0) scale = next_scale, next_scale = scales.at(i + by.turns);
        expand_fp8<true>(by, stage, by.strip_of(u), box, scale, a);
      });
    }
  }
  by.run_expanded([&](int, const Stage& stage, int u, int box, std::uint32_t(&a)[4][4]) {
    expand_fp8<false>(by, stage, by.strip_of(u), box, {}, a);
  });
}

/// The loop of a weight's format.
template <class Consumer>
__device__ __forceinline__ void run(Consumer& by) {
  using Layout = typename Consumer::Layout;
  if constexpr (Layout::kWide) {
    run_shared(by);
  } else if constexpr (Layout::kInt4) {
    run_int4(by);
  } else if constexpr (Layout::kFp8X) {
    run_in_parts(by);
  } else {
    run_expanded_fp8(by);
  }
}

}  // namespace ridgeline::gemm_cluster
