#pragma once
#include "device/divisor.cuh"
#include "device/ptx/matrix_copy.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/wgmma.cuh"
#include "kernels/gemm_config.h"
#include "kernels/gemm_epilogue.cuh"

/// What the cluster kernel is told, and where things lie in its shared memory.
namespace ridgeline::gemm_cluster {

using gemm_config::kGroupRows;  // of one wgmma
using gemm_config::kStripRows;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kGroupThreads = 128;
constexpr int kConsumers = 8;          // warps that multiply, but of broad tiles, ...
constexpr int kConsumerThreads = kConsumers * 32;
constexpr int kThreads = kConsumerThreads + 2 * 32;  // ... and two that request
constexpr int kNormWarps = 3;          // that weigh x, where it meets its norm
constexpr int kRowBytes = 128;         // of an operand's row in a stage, swizzled
constexpr int kManyTokens = gemm_config::kTallRows;  // rows of x that Fixed has
constexpr int kBoxAlignment = 128;     // of a copy in a stage, ...
constexpr int kStageAlignment = 1024;  // ... and where it is swizzled
constexpr int kMaxStages = 16;
constexpr int kStagesOfX = 4;          // where x has a ring of its own, of bytes ...
constexpr int kFewestOfX = 5;          // ... and of 16 bits, at least, ...
constexpr int kEnoughOfFp8 = 8;        // ... where so many stages of the weight are left

struct ClusterParams {
  CUtensorMap weight, x;
  CUtensorMap scales, zeros;  // of int4
  GemmParams gemm;
  std::int32_t before;        // columns of y that another kernel has; 0: this one has all
  std::int32_t beside;        // that kernel, which may still run: it is waited for at the end
  std::int32_t lets_rest_on;  // that other kernel starts when this one's last blocks do
  std::int32_t paired;        // the second half of a tile has the up rows of the first's
  std::int32_t row_groups;    // units of 64 weight rows that a tile has, the last may not be whole
  std::int32_t turns;         // warpgroups that take stages by turns; 1: they share out the units
  std::int32_t readers;       // warps that read a stage
  std::int32_t tile_rows;     // of the weight: up to 64 a row group
  std::int32_t box_rows;      // of those, in one request: all, or half of them if paired
  std::int32_t x_box;         // bytes of a box of x: its rows, eight by eight, of all terms
  std::int32_t x_boxes;       // that a request brings: one, or all of a stage
  std::int32_t second_term;   // bytes from a term of x to the other; 0: x is one
  std::int32_t x_bytes;       // of a stage's x, all boxes
  std::int32_t x_step, weight_step;  // bytes from a stage's x to the next's, and of the weight's
  std::int32_t weights_at;    // bytes from the first x to the first weight
  std::int32_t ring_bytes;
  std::int32_t shared_bytes;
  std::int32_t steps;         // stages that K makes, ...
  device::Divisor segments;   // ... and blocks that share them out
  std::int32_t stages;        // that the ring of weights has, ...
  std::int32_t x_stages;      // ... and that of x, at most as many
  std::int32_t scale_bytes, zero_bytes;  // of int4: of a part, in a stage or of all stages
  std::int32_t zeros_behind;  // of int4: bytes from the scales to the zero points
  std::int32_t stage_groups;  // of int4: groups that a stage may touch
  std::int32_t held_at;       // bytes to the scales of all stages; 0: a stage has its own
  std::int32_t held_groups;   // groups of those, or, of blocks, rows of these under a box, ...
  std::int32_t held_step;     // ... and scales from a stage's to the next's
  device::Divisor group;      // of int4: its columns
  std::int32_t prefetched;    // stages that L2 is asked for ahead of the wait
  std::int32_t released;      // stages still to request when the next kernel is let on
  std::int32_t rows_held;     // of x, in the sums: whole octets
  std::int32_t rows_each;     // of x, that a block of the cluster finishes, at most
  float unit;                 // of the sums: in it, they are y
  std::int32_t by_turns;      // TurnsEnd ends the tile
  std::int32_t plain;         // no activation
  std::int32_t vectors;       // four columns of y are one, and those of a residual, ...
  std::int32_t residual_at;   // ... which comes so far behind the rings' begin; 0: there is none

  /// gemm_config::stages_of(). A block starts without divisions, two of which it made for its tile:
  /// H200, us, with and so: 64 rows of 4096 x 4096, int4 6.87 and 6.57, fp8 by bf16 8.41 and 8.21,
  /// by fp8 6.49 and 6.35; chained 6.71 and 6.43, 8.33 and 8.13, 6.93 and 6.73.
  __device__ gemm_config::Stages stages_of(int segment) const {
    const int begin = segments.divide(steps * segment);
    return {begin, segments.divide(steps * (segment + 1)) - begin};
  }
};

// ---- Shared memory ------------------------------------------------------------------------------

/// A stage: x, then the weight, then int4's scales and zero points, box by box.
template <WeightFormat format, bool fp8_x, int tokens, bool alone = false>
struct StageLayout {
  static constexpr WeightFormat kFormat = format;
  static constexpr bool kFp8X = fp8_x;
  static constexpr int kTokens = tokens;
  static constexpr bool kAlone = alone;  // each block has an SM, and its registers
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr bool kExpandsInt4 = kInt4 && !kFp8X;
  // int8 is taken for columns of 16 bits, two in one: its bytes lie as a dense weight's.
  static constexpr bool kWide = kFormat == WeightFormat::kDense || kFormat == WeightFormat::kInt8;
  static constexpr int kCols = kWide ? 64 : 128;
  /// x, of which a stage takes as much memory as of the weight, has a shorter ring of its own: it
  /// comes from L2. H200, 64 rows, us alone and chained, in one ring and so: 4096 x 4096 7.4 and
  /// 7.1, 7.1 and 6.9; 14336 x 4096 17.9 and 17.0, 17.3 and 16.7. 16 rows 6.3 and 6.5. int8, 64
  /// rows, 4096 x 6144 10.4 and 8.8, 10.3 and 9.0; 14336 x 4096 18.0 and 15.4, 18.2 and 16.2.
  static constexpr bool kOfBytes =  // both operands
      (kFormat == WeightFormat::kFp8 && kFp8X) || kFormat == WeightFormat::kInt8;
  /// 17 to 32 rows of 16 bits by fp8 have one, too, where each block has an SM, for more of the
  /// weight on its way. H200, us alone, by turns, in one ring and so: 24 and 32 rows of 4096 x 4096
  /// 6.67 and 6.33, 6.82 and 6.45; of 14336 x 4096 18.6 and 16.4, 18.6 and 16.5; 16 rows 6.14 and
  /// 6.23.
  static constexpr bool kXRing = kAlone && kTokens == 32;
  static constexpr bool kApart = kXRing || (kOfBytes && kTokens == 64);
  /// There is a kernel of its own for such blocks.
  static constexpr bool kMayBeAlone = kFormat == WeightFormat::kFp8 && !kFp8X && !kAlone &&
                                      (kTokens == 32 || kTokens == 64);
  using Alone = StageLayout<format, fp8_x, tokens, true>;
  static constexpr int kXBoxes = kFp8X ? 1 : kCols / 64;
  static constexpr int kWeightBytes = kGroupRows * (kInt4 ? 64 : kRowBytes);  // of a warpgroup
  static constexpr bool kFolds = kTokens == gemm_config::kNormRows;  // x meets its norm, if any
  /// Of int4: a block may have the scales of all of its stages from the start.
  static constexpr bool kMayHold = kInt4 && kTokens <= gemm_config::kFewRows;
  /// L2 is asked for x ahead of the wait. H200, us, alone, caches cold, without and so: 64 rows of
  /// 4096 x 4096 fp8 by fp8 7.0 and 6.7, 4096 x 6144 10.1 and 9.2; 16 rows of int4 5.4 and 5.1. But
  /// 64 rows of int4 6.5 and 6.8.
  static constexpr bool kAsksForX = kApart || (kExpandsInt4 && kTokens <= 32) ||
                                    (kFolds && kFormat == WeightFormat::kFp8);
  static_assert(!(kFolds && kInt4));
  static constexpr int kNormBytes = kCols * 2;  // of the norm's weight, where x meets it
  static constexpr int kRowOfWeight = kWeightBytes / kGroupRows;
  /// Where scales are, and zero points behind them, of gates and then of ups.
  __device__ static int scales_at(const ClusterParams& params) {
    return params.held_at > 0 ? 0 : params.tile_rows * kRowOfWeight;
  }
  __device__ static int zeros_at(const ClusterParams& params) {
    return scales_at(params) + params.zeros_behind;
  }
};

/// Fixed parts, at the end; ahead of them the rings, the norm's weight, and what neighbours send.
struct Fixed {
  std::uint64_t full[kMaxStages], empty[kMaxStages];
  std::uint64_t raw[kMaxStages];  // x is in, which is to meet its norm
  std::uint64_t received;         // the sums of the cluster's other blocks
  std::uint64_t squared;          // squares of x by all of them
  std::uint64_t scaled;           // the scales of all stages are in
  alignas(16) float x_scale[kManyTokens];
  alignas(16) float scale[2 * kGroupRows], bias[2 * kGroupRows];  // of the tile's weight rows

  /// Where x is to meet its norm: squares of its rows, of the columns of a block of the cluster.
  __device__ float* squares_of(int block) { return x_scale + block * gemm_config::kNormRows; }

  /// What a row's norm divides it by, as a factor.
  __device__ float norm_of(const GemmParams& p, int row, int blocks) {
    float squares = 0.0f;
    for (int block = 0; block < blocks; ++block) squares += squares_of(block)[row];
    return gemm_detail::norm_factor(p, squares);
  }
};
static_assert(gemm_config::kMaxSegments * gemm_config::kNormRows <= kManyTokens);
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

struct Stage {
  std::uint64_t x;     // wgmma's operand: rows of x by the first columns of the stage
  const char* weight;  // ClusterParams::weights_at ahead of it
};

/// wgmma's operand of rows that lie `kRowBytes` apart, and how far operands are by their bytes.
__device__ __forceinline__ std::uint64_t operand(const char* start) {
  return ptx::swizzled_operand(start, 16, 8 * kRowBytes);
}
__device__ __forceinline__ std::uint64_t operand_step(unsigned bytes) { return bytes >> 4; }
constexpr int kOperandStep = 32 / 16;  // of 16 columns of 16 bits, or 32 of 8

/// Where one is that reads both rings, that of x a shorter one if `kApart`.
template <bool kApart>
struct StageReader {
  const ClusterParams& params;
  Fixed& fixed;
  const char* ring;
  std::uint64_t first_x = operand(ring);
  int stage = 0, parity = 0, stage_of_x = 0;

  __device__ void advance(int by) {
    stage += by;
    const bool wraps = stage >= params.stages;
    stage -= wraps ? params.stages : 0;
    parity ^= wraps;
    if (kApart) {
      stage_of_x += by;
      stage_of_x -= stage_of_x >= params.x_stages ? params.x_stages : 0;
    }
  }
  /// The stage, as soon as it is there.
  __device__ Stage wait() const {
    ptx::mbarrier_wait(&fixed.full[stage], parity);
    const int x = (kApart ? stage_of_x : stage) * params.x_step;
    return {first_x + operand_step(x), ring + (kApart ? stage * params.weight_step : x)};
  }
};

}  // namespace ridgeline::gemm_cluster
