#pragma once
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/matrix_copy.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_cluster_sm90.cuh"
#include "kernels/gemm_prefetch.cuh"

/// What fills the cluster kernel's rings: the threads that request stages, and what L2 is asked for
/// ahead of them.
namespace ridgeline::gemm_cluster {

/// Asks L2 for x, of which every block waits for the same lines, and for the scales of the tile's
/// weight rows. One warp calls it.
__device__ __forceinline__ void prefetch_ahead(const GemmParams& p, int lane, int first) {
  gemm_detail::prefetch_x(p, lane);
  constexpr int kOfLine = 128 / sizeof(float);
  if (p.x.scale && p.x.scale_per_row && lane * kOfLine < p.M)
    ptx::prefetch_line(p.x.scale + lane * kOfLine);
  const bool by_row = p.weight.scales_products() && p.weight.scale_layout == ScaleLayout::kRow;
  if (by_row && lane * kOfLine < 2 * kGroupRows && first + lane * kOfLine < p.N)
    ptx::prefetch_line(static_cast<const float*>(p.weight.scales) + first + lane * kOfLine);
}

/// One thread of either of two warps: one requests the weight, the other x. A thread alone, which
/// requested stages of x behind those of the weight, was slower: H200, fp8 by fp8, 64 rows, 4096 x
/// 4096, 8.3 us where two take 7.7. A request takes a thread longest, so that both boxes of a
/// stage's x are one, and scales, which never wait for x, the weight's thread's: int4, us chained,
/// 16 and 64 rows of 4096 x 4096 7.4 and 5.6, 8.7 and 6.9 with elect_one(), by which other
/// weights took half as much less: fp8 by fp8 7.1 and 6.1, 7.9 and 7.1, bf16 10.6 and 9.4.
template <class Layout>
struct Producer {
  const ClusterParams& params;
  Fixed& fixed;
  char* ring;
  int begin, count;     // of the steps of K
  int first, up_first;  // row of the tile, and of its second half if paired
  int row0;             // of x
  std::uint64_t policy = ptx::evict_first();

  struct Step {
    char* weight;
    std::uint64_t *full, *x_full;  // to the products, and of x: one, where x meets no norm
    char* norm;  // the norm's weight
    int k0;
  };

  __device__ Step step_at(int stage, int i) const {
    return {ring + params.weights_at + stage * params.weight_step, &fixed.full[stage],
            (Layout::kFolds ? fixed.raw : fixed.full) + stage,
            norm_at(stage), (begin + i) * Layout::kCols};
  }
  __device__ char* x_at(int stage) const { return ring + stage * params.x_step; }
  /// The norm's weight, behind the ring.
  __device__ char* norm_at(int stage) const {
    return ring + params.ring_bytes + stage * Layout::kNormBytes;
  }
  /// Where stages of x and of the weight lie together.
  __device__ char* x_of(const Step& step) const { return step.weight - params.weights_at; }

  /// request(step) for steps from `from`, at most a round, on, each as soon as its stage is free.
  template <class Request>
  __device__ void for_each_step(int from, int to, Request request) const {
    RingPlace place;
    place.advance(from, params.stages);
#pragma unroll 1
    for (int i = from; i < to; ++i, place.advance(1, params.stages)) {
      if (place.round > 0) ptx::mbarrier_wait(&fixed.empty[place.stage], (place.round - 1) % 2);
      request(step_at(place.stage, i));
    }
  }

  /// Of int4 gates and ups are parts of one box.
  __device__ void prefetch_weight(const Step& step) const {
    if constexpr (Layout::kInt4)
      return ptx::prefetch_parts(&params.weight,
                                 step.k0 / Int4Layout::kCols * Int4Layout::kWords,
                                 first / kStripRows, policy);
#pragma unroll 1
    for (int box = 0; box < (params.paired ? 2 : 1); ++box)
      ptx::prefetch_matrix(&params.weight, step.k0, box == 0 ? first : up_first, policy);
  }

  /// The scales of all stages, and zero points.
  __device__ void request_all_scales() const {
    ptx::mbarrier_expect(&fixed.scaled,
                         params.tile_rows * params.held_groups * bytes_of_group());
    request_scales(ring + params.held_at, begin * Layout::kCols, &fixed.scaled);
  }

  __device__ int bytes_of_group() const { return params.gemm.weight.zeros ? 3 : 2; }

  /// Those of some groups, from the one of column `k0` on.
  __device__ void request_scales(char* to, int k0, std::uint64_t* full) const {
    const int group = params.group.divide(k0);
    ptx::copy_parts(to + Layout::scales_at(params), &params.scales, full, first, group, policy);
    if (params.gemm.weight.zeros)
      ptx::copy_parts(to + Layout::zeros_at(params), &params.zeros, full, first, group, policy);
  }

  __device__ void request_weight(const Step& step) const {
    ptx::mbarrier_expect(step.full, params.tile_rows * Layout::kRowOfWeight);
#pragma unroll 1
    for (int box = 0; box < (params.paired ? 2 : 1); ++box)
      ptx::copy_matrix(step.weight + box * params.box_rows * Layout::kRowOfWeight, &params.weight,
                       step.full, step.k0, box == 0 ? first : up_first, policy);
  }

  /// A stage's x to its place in the ring of x.
  __device__ void request_x(char* to, const Step& step) const {
    ptx::mbarrier_expect(step.x_full, params.x_bytes);
    if (Layout::kXBoxes > 1 && params.x_boxes > 1)
      return ptx::copy_tensor_4d(to, &params.x, step.x_full, 0, row0, step.k0 / 64, 0);
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box)
      ptx::copy_matrix(to + box * params.x_box, &params.x, step.x_full, step.k0 + box * 64, row0);
  }

  /// The norm's weight, which x meets first.
  __device__ void request_norm(const Step& step) const {
    constexpr int kBytes = Layout::kNormBytes / Layout::kCols;
    const int bytes = min(Layout::kCols, params.gemm.K - step.k0) * kBytes;
    ptx::mbarrier_expect(step.x_full, bytes);
    ptx::copy_bulk(step.norm,
                   static_cast<const char*>(params.gemm.x.norm_weight) + step.k0 * kBytes, bytes,
                   step.x_full);
  }

  /// Where the weight may still be written L2 is asked for it first. H200, us alone, without and
  /// so: half of the ring by blocks that share an SM, 4096 x 28672 by 64 rows fp8 by fp8 32.3 and
  /// 30.4, by 16 rows fp8 by bf16 33.8 and 32.8, int4 23.9 and 23.3; for the whole ring 31.2, 34.6
  /// and 24.1. Four stages by blocks that have an SM each, 16 rows of 4096 x 4096, fp8 by fp8 6.3
  /// and 5.7, by bf16 7.1 and 6.5, bf16 10.2 and 9.6; all of the ring 6.1, 7.1 and 10.6.
  __device__ void run_weight() const {
    if (!params.gemm.weights_ready) {
      for_each_step(0, min(params.prefetched, count),
                    [&](const Step& step) { prefetch_weight(step); });
      ptx::wait_for_dependencies();
    }
    if constexpr (Layout::kInt4) return request_int4();
    const int let_on = (begin + count - 1 - params.released) * Layout::kCols;
    const int first_round = Layout::kFolds ? min(params.stages, count) : count;
    for_each_step(0, first_round, [&](const Step& step) {
      request_weight(step);
      if (step.k0 >= let_on) ptx::launch_dependents();
    });
    if constexpr (Layout::kFolds) {  // of later rounds x, too: others weigh it, and do not wait
      ptx::wait_for_dependencies();
      for_each_step(first_round, count, [&](const Step& step) {
        request_x(x_of(step), step);
        request_weight(step);
        if (step.k0 >= let_on) ptx::launch_dependents();
      });
    }
  }

  /// All steps of int4, whose stages are short, so that the thread which requests them may be what
  /// the products wait for: what it can know ahead it does, and keeps. 35 instructions a stage,
  /// where for_each_step() has 100, and scales of all stages at once. H200, us, alone, by turns,
  /// scales by the stage and so, 14336 x 4096: 16 rows 13.7 and 12.2, 64 rows 17.1 and 15.6, 16 by
  /// e4m3 12.4 and 11.8. (The same loop for 8-bit and dense weights: 4096 x 4096 to 4% longer.)
  __device__ void request_int4() const {
    constexpr int kAcross = Layout::kCols / Int4Layout::kCols * Int4Layout::kWords;
    const bool by_stage = params.held_at == 0;
    const int groups = by_stage ? params.stage_groups * bytes_of_group() : 0;
    const int bytes = params.tile_rows * (Layout::kRowOfWeight + groups);
    const int stages = params.stages, step_bytes = params.weight_step;
    const int row = first / kStripRows, let_on = count - 1 - params.released;
    char *const begins = ring + params.weights_at, *weight = begins;
    std::uint64_t* full = fixed.full;
    int stage = 0, column = begin * kAcross;
    unsigned parity = 1;  // of the round before
    if (!by_stage) request_all_scales();
#pragma unroll 1
    for (int i = 0; i < count; ++i, column += kAcross) {
      if (i >= stages) ptx::mbarrier_wait(&fixed.empty[stage], parity);
      ptx::mbarrier_expect(full, bytes);
      ptx::copy_parts(weight, &params.weight, full, column, row, policy);
      if (by_stage) request_scales(weight, (begin + i) * Layout::kCols, full);
      if (i >= let_on) ptx::launch_dependents();
      weight += step_bytes, ++full;
      if (++stage == stages) stage = 0, weight = begins, full = fixed.full, parity ^= 1;
    }
  }

  __device__ void run_x() const {
    if (!params.beside) ptx::wait_for_dependencies();
    if (params.lets_rest_on) ptx::launch_dependents();
    // A stage of x is free when the weight that it met is multiplied. Steps that share a stage are
    // the same warpgroups', so that its barrier has no two of them at once.
    RingPlace place, of_x, freed;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i >= params.x_stages) {
        ptx::mbarrier_wait(&fixed.empty[freed.stage], freed.round % 2);
        freed.advance(1, params.stages);
      }
      const Step step = step_at(place.stage, i);
      request_x(x_at(Layout::kApart ? of_x.stage : place.stage), step);
      place.advance(1, params.stages);
      if (Layout::kApart) of_x.advance(1, params.x_stages);
    }
    if (params.beside) ptx::wait_for_dependencies();  // what comes behind waits for this one alone
  }
};

}  // namespace ridgeline::gemm_cluster
