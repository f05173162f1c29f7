#pragma once
#include "device/ptx/async_copy.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/gemm_block_scales.cuh"
#include "kernels/gemm_cluster_sm90.cuh"

/// Scales of fp8 weights that belong to blocks of 128 x 128, in the cluster kernel.
namespace ridgeline::gemm_cluster {

/// Those of all steps of K and of all weight rows that a block has, for blocks that have an SM:
/// [box of the tile][block of rows][step] in shared memory. Others read them a stage ahead. H200,
/// us alone, so and held: 16 and 32 rows of 5120 x 13824 24.4 and 22.1, 23.7 and 22.0; 32 and 64 of
/// 14336 x 4096 18.9 and 17.7, 21.6 and 20.7; but of 4096 x 6144 by 16 rows, where blocks share an
/// SM, 10.4 and 10.8.
struct HeldScales {
  const ClusterParams& params;
  int begin, count;     // of the steps of K
  int first, up_first;  // row of the tile, and of its second half if paired

  /// fn(from, i) for every kStride-th of a row of blocks, the i-th of all. The kThreads that
  /// multiply call it.
  template <int kThreads, int kStride, class Fn>
  __device__ __forceinline__ void for_each(Fn fn) const {
    const GemmParams& p = params.gemm;
    const auto* scales = static_cast<const float*>(p.weight.scales) + begin;
    int at = 0;
#pragma unroll 1
    for (int box = 0; box < (params.paired ? 2 : 1); ++box)
#pragma unroll 1
      for (int row = 0; row < params.held_groups; ++row, at += count) {
        const float* from =
            scales + first_block_scale(p, (box == 0 ? first : up_first) + row * kScaleBlock);
        for (int i = threadIdx.x * kStride; i < count; i += kThreads * kStride)
          fn(from + i, at + i);
      }
  }
  /// Asks L2 for them: where what is in memory may still be written.
  template <int kThreads>
  __device__ __forceinline__ void prefetch() const {
    for_each<kThreads, 128 / sizeof(float)>([](const float* from, int) {
      ptx::prefetch_line(from);
    });
  }
  /// Has them brought. BlockScales waits for them.
  template <int kThreads>
  __device__ __forceinline__ void request(char* ring) const {
    auto* to = reinterpret_cast<float*>(ring + params.held_at);
    for_each<kThreads, 1>([=](const float* from, int i) { ptx::copy_async_4(to + i, from, true); });
    ptx::commit_copies();
  }
};

/// The scales that a step of K multiplies, for the warp's eights of a unit; 1 where they are not of
/// blocks.
template <int kUnits, bool kHeld>
struct BlockScales {
  const float* scales;  // or null
  int steps;
  std::int32_t of[kUnits][2];  // first one of an eight's rows

  template <class Consumer>
  __device__ __forceinline__ explicit BlockScales(const Consumer& by) : steps(by.params.steps) {
    const ClusterParams& params = by.params;
    const GemmParams& p = params.gemm;
    const bool blocks = p.weight.scale_layout == ScaleLayout::kBlock;
    scales = blocks ? static_cast<const float*>(p.weight.scales) + by.begin : nullptr;
    if (kHeld) scales = reinterpret_cast<const float*>(by.ring + params.held_at);
    steps -= by.begin;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const int row = by.strip_of(u) * kStripRows + eight * 8;
        of[u][eight] = kHeld ? held_row(by, row) * by.count : first_block_scale(p, by.row_of(row));
      }
    if (!kHeld) return;
    ptx::wait_copies<0>();
    ptx::named_barrier_sync(1, Consumer::kThreads);  // the scales of all steps are there
  }
  /// Of the block's step `i`.
  __device__ __forceinline__ float2 at(int i, int u = 0) const {
    if (!kHeld && (!scales || i >= steps)) return {1.0f, 1.0f};
    return {scales[of[u][0] + i], scales[of[u][1] + i]};
  }

 private:
  /// Which row of HeldScales row `i` of the tile has.
  template <class Consumer>
  static __device__ __forceinline__ int held_row(const Consumer& by, int i) {
    const ClusterParams& params = by.params;
    const bool up = params.paired && i >= params.box_rows;
    const int begin = up ? by.up_first : by.first;
    return by.row_of(i) / kScaleBlock - begin / kScaleBlock + (up ? params.held_groups : 0);
  }
};

}  // namespace ridgeline::gemm_cluster
