#pragma once
#include "device/divisor.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/matrix_copy.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_config.h"

/// Where things lie in the cluster kernel's shared memory, and the warp that requests them.
namespace ridgeline::gemm_cluster {

using gemm_config::kGroupRows;  // of one wgmma
using gemm_config::kStripRows;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kConsumers = 8;          // warps that multiply, ...
constexpr int kConsumerThreads = kConsumers * 32;
constexpr int kThreads = kConsumerThreads + 2 * 32;  // ... and two that request
constexpr int kNormWarps = 3;          // that weigh x, where it meets its norm
constexpr int kRowBytes = 128;         // of an operand's row in a stage, swizzled
constexpr int kManyTokens = 128;       // rows of x, at most
constexpr int kMaxGroups = 4;          // of 32 columns and more, in a stage
constexpr int kMaxStages = 16;

struct ClusterParams {
  CUtensorMap weight, x;
  CUtensorMap scales, zeros;  // of int4
  GemmParams gemm;
  std::int32_t paired;        // the second half of a tile has the up rows of the first's
  std::int32_t row_groups;    // 2: the warpgroups share out a tile's rows; 1: they take turns in K
  std::int32_t tile_rows;     // of the weight: up to 64 a row group
  std::int32_t box_rows;      // of those, in one request: all, or half of them if paired
  std::int32_t x_box;         // bytes of a box of x: its rows, eight by eight, of all terms
  std::int32_t x_boxes;       // that a request brings: one, or all of a stage
  std::int32_t second_term;   // bytes from a term of x to the other; 0: x is one
  std::int32_t stage_bytes, shared_bytes;
  std::int32_t steps;         // stages that K makes
  std::int32_t stages;        // that the ring has
  std::int32_t stage_groups;  // of int4: groups that a stage may touch
  device::Divisor group;      // of int4: its columns
  std::int32_t prefetched;    // stages that L2 is asked for ahead of the wait
  std::int32_t rows_held;     // of x, in the sums: whole octets
  std::int32_t rows_each;     // of x, that a block of the cluster finishes, at most
  float unit;                 // of the sums: in it, they are y
  std::int32_t by_turns;      // TurnsEnd ends the tile
  std::int32_t plain;         // no activation, no residual, and four columns of y are a vector
};

// ---- Shared memory ------------------------------------------------------------------------------

/// A stage: x, then the weight, then int4's scales and zero points, box by box.
template <WeightFormat kFormat, bool kFp8X, int kTokens>
struct StageLayout {
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  // int8 is taken for columns of 16 bits, two in one: its bytes lie as a dense weight's.
  static constexpr bool kWide = kFormat == WeightFormat::kDense || kFormat == WeightFormat::kInt8;
  static constexpr int kCols = kWide ? 64 : 128;
  static constexpr int kXBoxes = kFp8X ? 1 : kCols / 64;
  static constexpr int kWeightBytes = kGroupRows * (kInt4 ? 64 : kRowBytes);  // of a warpgroup
  static constexpr bool kFolds = kTokens == gemm_config::kNormRows;  // x meets its norm, if any
  static constexpr int kScaleBytes = kInt4 ? kMaxGroups * kGroupRows * 2 : 0;
  static constexpr int kZeroBytes = kScaleBytes / 2;
  static constexpr int kNormBytes = kCols * 2;  // of the norm's weight, where x meets it
  static constexpr int kRowOfWeight = kWeightBytes / kGroupRows;
  static constexpr int bytes(int x_rows, int tile_rows, int row_groups) {
    return kXBoxes * x_rows * kRowBytes +
           round_up(tile_rows * kRowOfWeight + row_groups * (kScaleBytes + kZeroBytes), 1024);
  }
  /// Parts of a stage by box. Those of scales: the second starts in the middle of its part.
  __device__ static int weight_at(int box, const ClusterParams& params) {
    return kXBoxes * params.x_box + box * params.box_rows * kRowOfWeight;
  }
  __device__ static int scales_at(int box, const ClusterParams& params) {
    return kXBoxes * params.x_box + params.tile_rows * kRowOfWeight +
           params.row_groups * box * (kScaleBytes / 2);
  }
  __device__ static int zeros_at(int box, const ClusterParams& params) {
    return kXBoxes * params.x_box + params.tile_rows * kRowOfWeight +
           params.row_groups * (kScaleBytes + box * (kZeroBytes / 2));
  }
};

/// Fixed parts; after them the ring, and what neighbours of the cluster send.
struct Fixed {
  std::uint64_t full[kMaxStages], empty[kMaxStages];
  std::uint64_t raw[kMaxStages];  // x is in, which is to meet its norm, and int4's scales
  std::uint64_t received;         // the sums of the cluster's other blocks
  alignas(16) float x_scale[kManyTokens];
  alignas(16) float scale[2 * kGroupRows], bias[2 * kGroupRows];  // of the tile's weight rows

  /// Where x is to meet its norm: squares of its rows, of the columns that a warp weighed.
  __device__ float* squares_of(int warp) {
    return x_scale + (1 + warp) * gemm_config::kNormRows;
  }
};
static_assert((1 + kNormWarps) * gemm_config::kNormRows <= kManyTokens);
constexpr int kFixedBytes = 2048;
static_assert(sizeof(Fixed) <= kFixedBytes);

/// Where a role is in the ring.
struct RingPlace {
  int stage = 0;
  unsigned round = 0;

  __device__ void advance(int by, int stages) {
    stage += by;
    if (stage >= stages) stage -= stages, ++round;
  }
};

// ---- Producers ----------------------------------------------------------------------------------

/// One thread of either of two warps: one requests the weight, the other what meets it. A thread
/// alone, which requested stages of x behind those of the weight, was slower: H200, fp8 by fp8, 64
/// rows, 4096 x 4096, 8.3 us where two take 7.7.
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
    char* stage;
    std::uint64_t *full, *x_full;  // to the products, and of x: one, where x meets no norm
    char* norm;  // the norm's weight, behind the ring
    int k0;
  };

  __device__ Step step_at(const RingPlace& place, int i) const {
    return {ring + place.stage * params.stage_bytes, &fixed.full[place.stage],
            (Layout::kFolds ? fixed.raw : fixed.full) + place.stage,
            ring + params.stages * params.stage_bytes + place.stage * Layout::kNormBytes,
            (begin + i) * Layout::kCols};
  }

  /// request(step) for steps from `from` on, each as soon as its stage is free.
  template <class Request>
  __device__ void for_each_step(int from, int to, Request request) const {
    RingPlace place;
    place.advance(from, params.stages);
#pragma unroll 1
    for (int i = from; i < to; ++i, place.advance(1, params.stages)) {
      if (place.round > 0) ptx::mbarrier_wait(&fixed.empty[place.stage], (place.round - 1) % 2);
      request(step_at(place, i));
    }
  }

  /// Column and row of a step's box in the weight's map.
  __device__ int2 box_of_weight(const Step& step, int box) const {
    const int row = box == 0 ? first : up_first;
    if constexpr (!Layout::kInt4) return {step.k0, row};
    return {step.k0 / Int4Layout::kCols * Int4Layout::kWords, row / kStripRows};
  }

  __device__ void prefetch_weight(const Step& step) const {
#pragma unroll 1
    for (int box = 0; box < (params.paired ? 2 : 1); ++box) {
      const int2 at = box_of_weight(step, box);
      ptx::prefetch_matrix(&params.weight, at.x, at.y, policy);
    }
  }

  __device__ void request_weight(const Step& step) const {
    ptx::mbarrier_expect(step.full, params.tile_rows * Layout::kRowOfWeight);
#pragma unroll 1
    for (int box = 0; box < (params.paired ? 2 : 1); ++box) {
      const int2 at = box_of_weight(step, box);
      ptx::copy_matrix(step.stage + Layout::weight_at(box, params), &params.weight, step.full, at.x,
                       at.y, policy);
    }
  }

  /// Scales and zero points of int4. Announces x, too. A division of numbers that are not known
  /// ahead kept requests behind the products: H200, 16 rows, 4096 x 4096, 7.3 us, without it 6.4.
  __device__ void request_scales(const Step& step) const {
    const GemmParams& p = params.gemm;
    if constexpr (!Layout::kInt4) {
      ptx::mbarrier_expect(step.x_full, Layout::kXBoxes * params.x_box);
    } else {
      ptx::mbarrier_expect(step.x_full,
                           Layout::kXBoxes * params.x_box +
                               params.tile_rows * params.stage_groups * (p.weight.zeros ? 3 : 2));
      const int group = params.group.divide(step.k0);
#pragma unroll 1
      for (int box = 0; box < (params.paired ? 2 : 1); ++box) {
        const int row = box == 0 ? first : up_first;
        ptx::copy_matrix(step.stage + Layout::scales_at(box, params), &params.scales, step.x_full,
                         row, group, policy);
        if (p.weight.zeros)
          ptx::copy_matrix(step.stage + Layout::zeros_at(box, params), &params.zeros, step.x_full,
                           row, group, policy);
      }
    }
  }

  __device__ void request_x(const Step& step) const {
    if (Layout::kXBoxes > 1 && params.x_boxes > 1)
      return ptx::copy_tensor_4d(step.stage, &params.x, step.x_full, 0, row0, step.k0 / 64, 0);
#pragma unroll
    for (int box = 0; box < Layout::kXBoxes; ++box)
      ptx::copy_matrix(step.stage + box * params.x_box, &params.x, step.x_full,
                       step.k0 + box * 64, row0);
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

  /// Where the weight may still be written L2 is asked for it first, by blocks that share an SM for
  /// half of the ring. H200, us alone, without and so: 4096 x 28672 by 64 rows fp8 by fp8 32.3 and
  /// 30.4, by 16 rows fp8 by bf16 33.8 and 32.8, int4 23.9 and 23.3; for the whole ring 31.2, 34.6
  /// and 24.1. Blocks that have an SM each: 16 rows of 4096 x 4096, int4 6.3 and 6.4, fp8 by fp8
  /// 7.1 and 7.3.
  __device__ void run_weight() const {
    if (!params.gemm.weights_ready) {
      for_each_step(0, min(params.prefetched, count),
                    [&](const Step& step) { prefetch_weight(step); });
      ptx::wait_for_dependencies();
    }
    const int first_round = Layout::kFolds ? min(params.stages, count) : count;
    for_each_step(0, first_round, [&](const Step& step) { request_weight(step); });
    if constexpr (Layout::kFolds) {  // of later rounds x, too: others weigh it, and do not wait
      ptx::wait_for_dependencies();
      for_each_step(first_round, count, [&](const Step& step) {
        request_scales(step);
        request_x(step);
        request_weight(step);
      });
    }
    // Now: blocks of the next kernel that come at the start take the SMs that this one leaves free
    // in pairs, and end last. H200, fp8 by fp8, 16 rows, 4096 x 4096: 7.3 us so, 6.1 here.
    ptx::launch_dependents();
  }

  __device__ void run_x() const {
    const int ahead = params.gemm.weights_ready ? min(params.stages, count) : 0;
    for_each_step(0, ahead, [&](const Step& step) { request_scales(step); });
    ptx::wait_for_dependencies();
    for_each_step(0, ahead, [&](const Step& step) { request_x(step); });
    for_each_step(ahead, count, [&](const Step& step) {
      request_scales(step);
      request_x(step);
    });
  }
};

}  // namespace ridgeline::gemm_cluster
