#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_shape.h"
#include "kernels/gemm_tiles_config.h"

/// How the cluster kernel cuts a product of few rows of x.
namespace ridgeline::gemm_config {

/// Blocks of the cluster kernel that an SM has at once, or in turn, where each of `tiles`, of so
/// many weight rows, is a cluster of `segments`.
constexpr std::int32_t blocks_per_sm(std::int32_t tiles, std::int32_t segments,
                                     std::int32_t rows) {
  if (tiles <= kClusters[segments - 1]) return 1;
  if (rows > 2 * kGroupRows) return ceil_div(tiles, kClusters[segments - 1]);
  return std::max(2, ceil_div(2 * tiles, kSmallClusters[segments - 1]));
}

/// What the cluster kernel takes for few rows of x, in microseconds on an H200, by the blocks and
/// stages of the fullest SM, and by those of the mean one, which count where the bus bounds. A
/// stage is one of 128 columns, a row one of 100 weight rows, a unit the part of a tile that a
/// warpgroup has. What ends in `_m` is for 64 rows of x, and for fewer, from 16 on, as much less.
struct ClusterTime {
  double block = 0, block_m = 0;        // each block
  double row = 0, unit = 0, unit_m = 0, stage_m = 0;  // each stage of each block
  double mean_row = 0, mean_stage = 0;  // each stage of the mean SM
  double odd = 0, odd_m = 0;            // tiles of rows that 64 does not divide
  double tall = 0, tall_m = 0;          // sums that two or three warpgroups share out
  double segments = 0, segments_m = 0;  // sums that blocks give each other, but by TurnsEnd ...
  double part = 0, part_m = 0;          // ... and each row of those that they give
  double further = 0;                   // each segment behind the first
  double lonely = 0;                    // each stage and row of blocks that have an SM each
  double late = 0;                      // such blocks start late, if chained
  double x_m = 0;                       // x of each stage of the mean SM, if chained
  double many = 0;                      // more blocks than half of the SMs
  double wave = 0;                      // blocks of three warpgroups come after each other
};
constexpr ClusterTime kInt4Time{.block_m = 0.46, .row = 0.048, .unit = 0.045, .unit_m = 0.067,
                                .stage_m = 0.032, .mean_row = 0.073, .mean_stage = 0.035,
                                .odd = 0.15, .odd_m = 0.55, .tall = 0.20, .segments = 0.40,
                                .part = 0.64, .part_m = 0.31, .lonely = 0.031, .wave = 4.2};
constexpr ClusterTime kInt4ByFp8Time{.block = 0.04, .block_m = 0.32, .row = 0.037, .unit = 0.075,
                                     .unit_m = 0.049, .stage_m = 0.016, .mean_row = 0.051,
                                     .mean_stage = 0.028, .odd = 0.42, .tall_m = 0.87,
                                     .segments = 0.58, .segments_m = 0.10, .part_m = 0.33,
                                     .lonely = 0.025, .wave = 3.6};
constexpr ClusterTime kBytesTime{.block_m = 0.72, .row = 0.112, .unit_m = 0.014, .mean_row = 0.263,
                                 .mean_stage = 0.006, .odd = 0.15, .odd_m = 0.29,
                                 .segments = 0.31, .segments_m = 0.46, .further = 0.1,
                                 .lonely = 0.006, .late = 0.37, .x_m = 0.02};
constexpr ClusterTime kDenseTime{.block = 0.43, .block_m = 0.70, .row = 0.196, .unit = 0.010,
                                 .unit_m = 0.014, .stage_m = 0.026, .mean_row = 0.53, .odd = 0.15,
                                 .segments_m = 0.54, .further = 0.1, .x_m = 0.1, .many = 0.14};

/// Whether the cluster kernel has x of 8 bits: e4m3 with scales along K, or whose columns go by an
/// order, is brought to 16 ahead of it.
constexpr bool meets_bytes(const Shape& shape) {
  return shape.format == WeightFormat::kInt8 || shape.codes_x;
}

constexpr bool expands_fp8(const Shape& shape) {
  return shape.format == WeightFormat::kFp8 && !meets_bytes(shape);
}

/// Of fp8 that is expanded, whose sums of 128 columns are scaled.
constexpr bool scales_blocks(const Shape& shape) {
  return expands_fp8(shape) && !shape.scales_products;
}

/// Few rows of x whose bits may depend on M, but of fp8 that is expanded.
constexpr bool has_cluster_time(const Shape& shape) {
  return shape.M <= kFewRows && !shape.batch_invariant && !expands_fp8(shape);
}

constexpr const ClusterTime& cluster_time(const Shape& shape) {
  if (shape.format == WeightFormat::kDense) return kDenseTime;
  if (shape.format == WeightFormat::kInt4) return meets_bytes(shape) ? kInt4ByFp8Time : kInt4Time;
  return kBytesTime;
}

/// What a stage of 128 columns costs a block, in weight rows and stages: where bits may not depend
/// on M, of more than few rows of 16 bits, and of fp8 that is expanded.
struct ClusterCosts {
  std::int32_t rows;  // besides those of its tile
  std::int32_t ends;  // stages that its start and its end take
  double further;     // and a further segment
  double alone;       // a block that has an SM hides less
};

constexpr ClusterCosts cluster_costs(const Shape& shape) {
  const bool int4 = shape.format == WeightFormat::kInt4;
  const bool many = shape.M > kFewRows / 2 && !shape.batch_invariant;
  if (shape.format == WeightFormat::kDense)  // of invariant bits, what they were measured with
    return shape.batch_invariant
               ? ClusterCosts{.rows = 40, .ends = 0, .further = 0.5, .alone = 1.0}
               : ClusterCosts{.rows = 40, .ends = 6, .further = 4.0, .alone = 1.3};
  ClusterCosts costs{.rows = 50, .ends = 12, .further = 4.0, .alone = 1.5};
  if (meets_bytes(shape) && !int4) {
    costs.alone = 1.4;
    if (many) costs = {.rows = 40, .ends = 6, .further = 6.0, .alone = 1.3};
  } else if (!meets_bytes(shape) && many) {
    costs.further = 6.0, costs.alone = 1.0;
  }
  return costs;
}

/// What the fullest SM has to do by those costs. Three warpgroups that have an SM hide more: H200,
/// fp8 by 16 bits of 3584 x 18944 by 128 and by 176 weight rows, 16, 32 and 64 rows, us: 25.8,
/// 25.8, 30.9 and 21.7, 22.4, 26.7.
constexpr double load_of(const Shape& shape, std::int32_t rows, std::int32_t segments,
                         std::int32_t blocks) {
  const ClusterCosts costs = cluster_costs(shape);
  const std::int32_t stages = ceil_div(ceil_div(shape.K, 2 * kBlockCols), segments);
  const double each = stages + costs.further * (segments - 1) + costs.ends;
  const double alone = rows > 2 * kGroupRows ? std::min(costs.alone, 1.2) : costs.alone;
  return (blocks == 1 ? alone : 1.0) * blocks * (rows + costs.rows) * each;
}

/// A cut's time, less what all cuts of the product take.
constexpr double time_of(const Shape& shape, std::int32_t rows, std::int32_t segments,
                         std::int32_t tiles) {
  const ClusterTime& of = cluster_time(shape);
  const double m = static_cast<double>(std::clamp<std::int64_t>(shape.M, 16, kFewRows)) / kFewRows;
  const double height = rows / 100.0, units = ceil_div(rows, kGroupRows);
  const double stages = ceil_div(ceil_div(shape.K, 2 * kBlockCols), segments);
  const double on_sm = blocks_per_sm(tiles, segments, rows);
  const double on_mean = static_cast<double>(tiles) * segments / kBlocksWanted;
  const bool turns = rows <= kGroupRows && segments == 2;
  double time = on_sm * (of.block + of.block_m * m);
  time += stages * on_sm *
          (of.row * height + (of.unit + of.unit_m * m) * units + of.stage_m * m);
  time += stages * on_mean * (of.mean_row * height + of.mean_stage);
  if (rows % kGroupRows != 0) time += of.odd + of.odd_m * m;
  if (rows > kGroupRows) time += of.tall + of.tall_m * m;
  if (segments > 1 && !turns)
    time += of.segments + of.segments_m * m +
            (of.part + of.part_m * m) * height * (segments - 1) / segments;
  time += of.further * (segments - 1);
  // Behind a norm the weight is on its way when x comes: of 6144 x 4096 a layer of 8B products has
  // 128 blocks of 48 weight rows take longer than 96 of 64, though behind themselves they do not.
  // H200, a step of 64 sequences, ms: fp8 3.40 and 3.45, bf16 4.72 and 4.77.
  if (shape.chained) time += of.x_m * m * stages * on_mean;
  if (on_sm == 1.0) time += of.lonely * stages * height + (shape.chained ? of.late : 0.0);
  if (2 * tiles * segments > kBlocksWanted) time += of.many;
  if (rows > 2 * kGroupRows) time += of.wave * (on_sm - 1.0);
  return time;
}

/// Tiles of which an SM has one, or two in turn, and whose stages three warpgroups share out, so
/// that 16 weight rows more or less are so much work more or less, where warpgroups that share out
/// the rows are done when the one is that has 64: of up to 32 rows of x, where weights are expanded.
/// Returns how many, or 0 where the cut in `config`, of `tiles`, is to stay. A segment more, whose
/// sums go a longer way, has to spare some stages. H200, us alone, the best of the other cuts and
/// so, 16 and 32 rows: int4 of 3584 x 18944 15.0, 14.0 and 16.6, 15.8; by e4m3 14.5, 13.1 and 15.3,
/// 14.3, of 4096 x 28672 21.3, 19.2 and 22.7, 21.5; fp8 by 16 bits of 3584 x 18944 22.0, 20.4 and
/// 22.8, 20.5, of 5120 x 17920 29.3, 25.9 and 30.2, 26.9; but int4 of 4096 x 6144 6.9, 8.6.
constexpr std::int32_t cut_by_stages(const Shape& shape, std::int32_t tiles, Config& config) {
  constexpr std::int32_t kLeastRows = 80, kMostOfFp8 = 224, kMost = 4, kColumns = 1280;
  constexpr std::int32_t kSpared = 1500;  // rows by stages, of a segment more
  constexpr std::int32_t kMany = 64;      // stages beside which the end is short
  constexpr std::int32_t kBusy = 128;     // SMs
  const bool int4 = shape.format == WeightFormat::kInt4, gated = is_gated(shape.activation);
  const bool bytes = int4 && meets_bytes(shape);
  if (shape.M > kRowsByStages || shape.dtype != DType::kBFloat16 || shape.batch_invariant ||
      !(int4 || expands_fp8(shape)) || shape.normalizes)
    return 0;
  const auto work_of = [&](std::int32_t rows, std::int32_t segments, std::int32_t blocks) {
    return blocks * rows * ceil_div(ceil_div(shape.K, 2 * kBlockCols), segments);
  };
  const bool scaled = int4 ? !bytes : !shape.scales_products;
  const std::int32_t most_rows = scaled ? kScaledUnitsByStages * kGroupRows
                                 : int4 ? 4 * kGroupRows
                                        : kMostOfFp8;
  const std::int32_t work =
      work_of(round_up(config.tile_cols, kGroupRows), config.segments,
              blocks_per_sm(tiles, config.segments, config.tile_cols));
  std::int32_t best = 0, chosen = 0;
  for (std::int32_t rows = kLeastRows; rows <= most_rows; rows += kStripRows) {
    if (gated && rows % (2 * kStripRows) != 0) continue;
    const std::int32_t count = ceil_div(gated ? shape.N / 2 : shape.N, gated ? rows / 2 : rows);
    for (std::int32_t segments = 1; segments <= kMost && segments * kColumns <= shape.K;
         ++segments) {
      const std::int32_t blocks = ceil_div(count, kClusters[segments - 1]);
      if (blocks > (segments > 1 || (int4 && !bytes) ? 1 : 2)) continue;
      if (segments > 1 && rows > 3 * kGroupRows) continue;
      const std::int32_t own = work_of(rows, segments, blocks), spared = work - own;
      const bool is_long = bytes && ceil_div(shape.K, 2 * kBlockCols) >= kMany * segments;
      const std::int32_t least = segments > 1 && !is_long ? kSpared : int4 && !bytes ? 1 : 0;
      // Ends cost something, too; and tiles for every SM wait for the last of the kernel ahead.
      const std::int32_t more = count * segments > kBusy * blocks ? 2 : 1;
      const std::int32_t cost = work_of(rows + more * kStripRows, segments, blocks);
      if (spared < least || (chosen > 0 && cost > best)) continue;
      best = cost, chosen = count;
      config.tile_cols = rows, config.segments = segments, config.shares_stages = true;
    }
  }
  return chosen;
}

/// 49 to 64 rows of x by int4, where other tiles are `blocks`, two, for some SMs: tiles of 48
/// weight rows and all of K, of which nearly every SM has one, whose stages three warpgroups share
/// out. H200, us alone, by 64 weight rows and half of K and so, 64 rows: 4096 x 6144 10.6 and 9.8,
/// 5120 x 6144 12.4 and 11.4; but 48 rows of 4096 x 6144 9.1 and 9.7, 64 of 14336 x 6144 26.0 and
/// 28.5, of which each block reads all of x; 64 of 4096 x 6144 by e4m3 9.1 and 9.2, of fp8 11.7 and
/// 11.7.
constexpr bool is_for_short_tiles(const Shape& shape, std::int32_t blocks) {
  constexpr std::int32_t kMoreRows = 48, kMostColumns = 5120, kFewest = 96;  // tiles
  const std::int32_t tiles = ceil_div(shape.N, kShortCols);
  return shape.format == WeightFormat::kInt4 && !meets_bytes(shape) && blocks > 1 &&
         shape.M > kMoreRows && shape.M <= kFewRows && shape.K <= kMostColumns &&
         shape.dtype == DType::kBFloat16 && !shape.batch_invariant &&
         !is_gated(shape.activation) && tiles <= kClusters[0] && tiles >= kFewest;
}

/// Dense, more than few rows of x: the smallest tiles of the weight, and as many segments of K as
/// leave each block an SM, for the less of x a block brings the sooner it is done. Returns how many
/// tiles, of x too, or 0 where there is none. H200, bf16, us, 192 rows, by 64 weight rows, by 128
/// in two segments: 4096 x 4096 16.9, 18.2; 7168 x 4096 25.5, 27.9.
constexpr std::int32_t cut_for_tall_tiles(const Shape& shape, Config& config) {
  constexpr std::int32_t kColumns = 640, kMost = 4;
  const bool gated = is_gated(shape.activation);
  const std::int32_t along_n =
      gated ? ceil_div(shape.N / 2, kGroupRows / 2) : ceil_div(shape.N, kGroupRows);
  const std::int64_t tiles = ceil_div<std::int64_t>(shape.M, kTallRows) * along_n;
  for (std::int32_t segments = kMost; segments > 0; --segments) {
    if (segments > 1 && segments * kColumns > shape.K) continue;
    if (tiles > kClusters[segments - 1]) continue;
    config.tile_cols = kGroupRows;
    config.segments = segments;
    return static_cast<std::int32_t>(tiles);
  }
  return 0;
}

/// Tile and segments of K of the cluster kernel. Clusters of up to six blocks, since of seven 32 do
/// not always run at once, and 640 columns a block at least. Where a weight is expanded a tile of
/// fewer rows than its warpgroups have spares nothing; else some rows decide whether the last tiles
/// find an SM. Of 1013 cases on an H200 (39 shapes and 8 gated ones, 16 to 64 rows, alone and
/// chained, each by 2 to 17 cuts) the choice is 0.7% from the best on average, and was 3.5% by the
/// costs above and three tiles. The warpgroups of a tile of up to 64 rows take stages by turns, an
/// order of K of their own: not where bits may not depend on M. Returns how many tiles.
constexpr std::int32_t cut_for_cluster(const Shape& shape, Config& config) {
  constexpr std::int32_t kColumns = 640, kMost = 6, kMostOfTall = 4, kLeastRows = 48;
  constexpr std::int32_t kColumnsOfThree = 2560;  // of a segment under tiles of three warpgroups
  const bool gated = is_gated(shape.activation), timed = has_cluster_time(shape);
  const bool int4 = shape.format == WeightFormat::kInt4;
  const bool expanded = int4 || expands_fp8(shape);
  if (shape.format == WeightFormat::kDense && shape.M > kFewRows && !shape.batch_invariant) {
    const std::int32_t tiles = cut_for_tall_tiles(shape, config);
    if (shape.M > kTallRows || (tiles > 0 && config.segments > 2)) return tiles;
  }
  double best = 0.0;
  std::int32_t chosen = 0;
  const auto consider = [&](std::int32_t rows) {
    const std::int32_t box = gated ? rows / 2 : rows;
    if (box % (int4 ? kStripRows : 8) != 0 || (shape.batch_invariant && rows <= kGroupRows)) return;
    const std::int32_t tiles = ceil_div(gated ? shape.N / 2 : shape.N, box);
    const bool three = rows > 2 * kGroupRows;
    const std::int32_t most = timed && rows > kGroupRows ? kMostOfTall : kMost;
    for (std::int32_t segments = 1; segments <= most; ++segments) {
      const std::int32_t blocks = blocks_per_sm(tiles, segments, rows);
      if (segments > 1 && (blocks > (three ? 1 : 2) ||
                           segments * (three ? kColumnsOfThree : kColumns) > shape.K))
        break;
      if (three && !timed && (blocks > 1 || segments > 1)) break;
      // Of x with a ring of its own a stage has no room for the sums that warpgroups exchange.
      const bool bytes = meets_bytes(shape) && !int4 && shape.M > kFewRows / 2;
      if (bytes && rows < kGroupRows && segments == 2) continue;
      const double time = timed ? time_of(shape, rows, segments, tiles)
                                : load_of(shape, rows, segments, blocks);
      if (chosen > 0 && time >= best) continue;
      best = time;
      chosen = tiles;
      config.tile_cols = rows;
      config.segments = segments;
    }
  };
  if (timed && !expanded) {
    for (std::int32_t rows = kLeastRows; rows <= 2 * kGroupRows; rows += 8) consider(rows);
    return chosen;
  }
  for (const std::int32_t rows : {kGroupRows, 2 * kGroupRows - kStripRows, 2 * kGroupRows})
    consider(rows);
  // Of more than few rows of x two blocks of an SM bring these twice. H200, bf16, us, 28672 x 8192 in
  // two segments, tiles of 64 and so: 72 rows 120.1 and 113.9, 128 rows 143 and 119.
  if (shape.M > kFewRows && !expanded && config.tile_cols == kGroupRows &&
      blocks_per_sm(chosen, config.segments, config.tile_cols) == 2) {
    config.tile_cols = 2 * kGroupRows;
    return ceil_div(shape.N, 2 * kGroupRows);
  }
  const bool may_be_three = expanded && !shape.batch_invariant && shape.M <= kFewRows &&
                            shape.dtype == DType::kBFloat16 && !shape.normalizes;
  if (may_be_three)
    for (const std::int32_t rows : {kBroadCols - kStripRows, kBroadCols}) consider(rows);
  if (is_for_short_tiles(shape, blocks_per_sm(chosen, config.segments, config.tile_cols))) {
    config.tile_cols = kShortCols, config.segments = 1, config.shares_stages = true;
    return ceil_div(shape.N, kShortCols);
  }
  const std::int32_t by_stages = cut_by_stages(shape, chosen, config);
  return by_stages > 0 ? by_stages : chosen;
}

/// Large weights that are expanded, of which tiles of 128 rows would be two whole waves or more, one
/// an SM, and at most half of another: where an SM has two blocks at once a few last tiles take as
/// long as a wave. Tiles of the rest are half as high, or share K with a neighbour, are at most as
/// many blocks as there are SMs, and start where others end. H200, lab, us alone, one kernel and so:
/// 64 rows of int4, 4096 x 36864 41.3 and 35.7, 8192 x 51200 119.4 and 100.2, 8192 x 57344 124.6 and
/// 112.8, 16384 x 106496 459.6 and 420.5; by e4m3 35.8 and 30.1, 102.0 and 89.9, 107.5 and 98.2,
/// 416.5 and 378.6; 32 rows of int4, 8192 x 57344 93.4 and 85.2; fp8 with scales of blocks, 64 rows
/// of 4096 x 36864 81.0 and 61.6. With 0.64 of a wave, 8192 x 61440, 0 to 15% longer. Tiles that
/// three warpgroups take by turns fill the SMs as well, and of fp8 better than three waves.
constexpr void cut_rest_of_cluster(const Shape& shape, Config& config) {
  constexpr std::int32_t kLeastColumns = 1280;  // of K, which two blocks share
  const bool int4 = shape.format == WeightFormat::kInt4, bytes = int4 && meets_bytes(shape);
  const bool gated = is_gated(shape.activation);
  if (!(int4 || expands_fp8(shape)) || shape.M > kFewRows || shape.K < kLeastColumns ||
      shape.batch_invariant || shape.normalizes)
    return;
  const std::int32_t cols = gated ? shape.N / 2 : shape.N;
  const std::int32_t wave = kBlocksWanted * (gated ? kGroupRows : 2 * kGroupRows);
  const std::int32_t waves = cols / wave, left = cols % wave;
  const bool few = left <= wave / 4;
  if (waves < 2 || left == 0 || left > wave / 2) return;
  if (config.shares_stages && (!few || (!int4 && waves % 2 == 1))) return;
  config.tile_cols = 2 * kGroupRows;
  config.segments = 1;
  config.shares_stages = false;
  const bool high = int4 && !bytes && !few;
  config.rest = {.cols = left,
                 .tile_cols = high ? 2 * kGroupRows : kGroupRows,
                 .segments = bytes && !few ? 1 : 2,
                 .beside = true};
}

}  // namespace ridgeline::gemm_config
