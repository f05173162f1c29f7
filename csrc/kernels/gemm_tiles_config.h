#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_shape.h"

/// How Hopper's kernels for many rows cut a product into tiles, and tiles among blocks.
namespace ridgeline::gemm_config {

/// Clusters of 1 to 8 blocks, each with an SM of its own, that an H200 runs at once: a cluster
/// stays in one of the parts that SMs come in, of 16 or 18.
constexpr std::int32_t kClusters[kMaxSegments] = {132, 66, 39, 30, 22, 17, 15, 15};
/// The same of blocks that share an SM by two.
constexpr std::int32_t kSmallClusters[kMaxSegments] = {264, 132, 79, 62, 47, 39, 32, 30};

/// The stages of K of segment `index`, of `segments` that share out `steps`.
struct Stages {
  std::int32_t begin, count;
};
constexpr Stages stages_of(std::int32_t steps, std::int32_t segments, std::int32_t index) {
  const std::int32_t begin = steps * index / segments;
  return {begin, steps * (index + 1) / segments - begin};
}

/// A tile of Hopper's kernels for many rows and what it takes, in microseconds on an H200: `step`
/// for each stage of K (128 columns of an x of 8 bits, else 64), `ends` to start and end, `add` to
/// add up the sums of several blocks; 0: a tile is multiplied by one.
struct TileTime {
  std::int32_t rows, cols;
  double step, ends, add;
};
constexpr TileTime kFp8Tiles[] = {{128, 256, 0.66, 4.0, 0.0}, {128, 128, 0.34, 3.0, 6.0}};
constexpr TileTime kExpandToFp8Tiles[] = {{128, 128, 0.46, 9.5, 1.5}};  // with x reordered ahead
constexpr TileTime kExpandTiles[] = {{256, 128, 0.62, 3.8, 6.0},
                                     {192, 128, 0.47, 3.6, 5.0},
                                     {128, 256, 0.65, 3.3, 0.0},
                                     {128, 128, 0.34, 3.5, 4.0}};

constexpr std::int64_t tiles_of(const Shape& shape, std::int32_t rows, std::int32_t cols) {
  return ceil_div<std::int64_t>(shape.M, rows) * ceil_div(shape.N, cols);
}

/// Hopper's fp8 by fp8: the tile and segments of K that take least. K is cut under the smallest
/// tile only, of which a cluster has the fewest sums to add.
constexpr void cut_for_fp8(const Shape& shape, Config& config) {
  const std::int32_t steps = ceil_div(shape.K, 2 * kBlockCols);
  double best = 0.0;
  for (const TileTime& tile : kFp8Tiles) {
    const std::int32_t most = tile.add == 0.0 ? 1 : std::min(steps, kMaxSegments);
    const std::int64_t tiles = tiles_of(shape, tile.rows, tile.cols);
    for (std::int32_t segments = 1; segments <= most; ++segments) {
      const std::int64_t waves = ceil_div<std::int64_t>(tiles, kClusters[segments - 1]);
      const double one = tile.step * ceil_div(steps, segments) + tile.ends +
                         (segments > 1 ? tile.add : 0.0);
      const double time = static_cast<double>(waves) * one;
      if (best != 0.0 && time >= best) continue;
      best = time;
      config.tile_rows = tile.rows;
      config.tile_cols = tile.cols;
      config.segments = segments;
    }
  }
}

/// Blocks that multiply the tails of tiles, each of so many tiles.
constexpr std::int32_t kTailsOfBlock = 3;
constexpr std::int64_t tail_blocks(std::int64_t tiles) {
  return ceil_div<std::int64_t>(tiles, kTailsOfBlock);
}

/// Expanded weights: the tile, and who multiplies it, that take least. Whole tiles leave SMs idle
/// in the last wave. So two or four blocks take a segment of a tile's K each; or SMs without a tile
/// take the last stages of three; or all multiply as many stages. They wait for each other, so each
/// has an SM: on a GPU of fewer there are fewer of them. Returns that time.
constexpr double cut_for_expand(const Shape& shape, Config& config) {
  constexpr double kTailAdds = 1.5, kEvenAdds = 13.0, kLeastGain = 1.05;
  const bool to_fp8 = config.path == Path::kExpandToFp8;
  const std::int32_t steps = ceil_div(shape.K, to_fp8 ? 2 * kBlockCols : kBlockCols);
  const std::int32_t at_once = std::min<std::int32_t>(shape.sms, kBlocksWanted);
  double best = 0.0;
  const auto consider = [&](const TileTime& tile, double time, std::int32_t segments,
                            std::int32_t tail, bool even = false) {
    if (best != 0.0 && time >= best) return;
    best = time;
    config.tile_rows = tile.rows;
    config.tile_cols = tile.cols;
    config.segments = segments;
    config.tail = tail;
    config.even = even;
  };
  const auto consider_tile = [&](const TileTime& tile) {
    const bool full = shape.dtype == DType::kBFloat16;  // float16 has fewer kernels
    if (tile.rows == 192 && (shape.format != WeightFormat::kInt4 || !full)) return;
    const std::int64_t tiles = tiles_of(shape, tile.rows, tile.cols);
    const auto whole = static_cast<double>(ceil_div<std::int64_t>(tiles, kBlocksWanted));
    consider(tile, whole * (tile.step * steps + tile.ends), 1, 0);
    if (tile.add == 0.0 || (tile.rows == 256 && !full)) return;
    for (const std::int32_t segments : {2, 4})
      if (tiles * segments <= at_once && segments <= steps)
        consider(tile, tile.step * ceil_div(steps, segments) + tile.ends + tile.add, segments, 0);
    if (to_fp8 || (tile.rows == 256 && shape.format != WeightFormat::kInt4)) return;
    const double leaves = tile.rows == 256 ? 3.8 : 2.7;  // a tail's sums
    const auto tail = static_cast<std::int32_t>((steps - kTailsOfBlock * leaves / tile.step) /
                                                (kTailsOfBlock + 1));
    if (tail > 0 && tiles + tail_blocks(tiles) <= at_once)
      consider(tile, tile.step * (steps - tail) + tile.ends + kTailAdds, 1, tail);
    const double waves = static_cast<double>(tiles) / at_once;
    if (tile.rows == 256 && waves > 1.0)
      consider(tile, kLeastGain * (waves * (tile.step * steps + tile.ends) + kEvenAdds), 1, 0,
               true);
  };
  if (to_fp8) {
    for (const TileTime& tile : kExpandToFp8Tiles) consider_tile(tile);
  } else {
    for (const TileTime& tile : kExpandTiles) consider_tile(tile);
  }
  return best;
}

/// Tiles of the cluster kernel by more rows of int4 than few, 64 at a time, by blocks that have an
/// SM each, or two of them one. Rows of 64 expand a weight twice as often as those of 128, but such
/// a kernel starts and ends sooner. In units of kExpandTiles, of which kernels take 6% and 0.8 us
/// more; those of an e4m3 x in units of kExpandToFp8Tiles: it is taken as it is.
struct ClusterTile {
  std::int32_t cols, blocks;  // of a tile, of an SM
  double step, ends, add;
};
constexpr ClusterTile kClusterTiles[] = {
    {128, 1, 0.378, 2.1, 1.6}, {112, 1, 0.378, 2.1, 1.6}, {64, 1, 0.218, 2.1, 0.3}};
constexpr ClusterTile kClusterCodesTiles[] = {{128, 1, 0.414, 3.2, 1.3},
                                              {112, 1, 0.414, 3.2, 1.3},
                                              {64, 1, 0.222, 2.85, 0.1},
                                              {64, 2, 0.386, 3.2, 0.1}};

/// That kernel where it takes less than `time`. H200, lab, us, expanded tiles and so: 4096 x 4096
/// by 96 to 128 rows 15.5, 10.4, by 192 19.1, 16.1, by 256 21.1, 16.5; 4096 x 6144 by 128 21.0,
/// 16.1; 14336 x 4096 by 128 31.0, 26.8; 5120 x 5120 by 192 29.4, 19.5; 2048 x 2048 by 128 11.6,
/// 5.1. With zero points or gated it gains as much, or loses up to 4% where it gains as little. x
/// of e4m3, expanded tiles without the kernel that reorders x for them, and so: 4096 x 4096 by 128
/// rows 14.8, 9.7, by 256 19.0, 15.6; 4096 x 6144 by 128 19.0, 15.5; 8192 x 8192 28.9, 27.8.
constexpr void cut_rows_for_cluster(const Shape& shape, double time, Config& config) {
  constexpr std::int32_t kColumns = 640, kMostSegments = 4;
  const bool whole = shape.group % (2 * kBlockCols) == 0 || shape.group >= shape.K;
  if (shape.format != WeightFormat::kInt4 || shape.dtype != DType::kBFloat16 ||
      !whole || shape.N % kStripRows != 0)
    return;
  const bool gated = is_gated(shape.activation);
  if (shape.byte_x && (gated || !shape.codes_x)) return;
  const auto consider = [&](const ClusterTile& tile) {
    const std::int32_t box = gated ? tile.cols / 2 : tile.cols;
    if (box % kStripRows != 0) return;
    const auto& at_once = tile.blocks == 1 ? kClusters : kSmallClusters;
    const std::int64_t tiles = ceil_div<std::int64_t>(shape.M, kFewRows) *
                               ceil_div(gated ? shape.N / 2 : shape.N, box);
    for (std::int32_t segments = 1; segments <= kMostSegments; ++segments) {
      if (tiles > at_once[segments - 1] || (segments > 1 && segments * kColumns > shape.K)) break;
      const std::int32_t steps = ceil_div(ceil_div(shape.K, 2 * kBlockCols), segments);
      const double takes = tile.step * steps + tile.ends + (segments > 1 ? tile.add : 0.0);
      if (takes >= time) continue;
      time = takes;
      config = {.path = Path::kCluster,
                .segments = segments,
                .split = false,
                .tile_rows = 0,
                .tile_cols = tile.cols,
                .fused = true};
    }
  };
  if (shape.byte_x) {
    for (const ClusterTile& tile : kClusterCodesTiles) consider(tile);
  } else {
    for (const ClusterTile& tile : kClusterTiles) consider(tile);
  }
}

/// What blocks that share tiles leave for each other in the workspace: a slot for each block's
/// sums, or for each tile's, and ahead of them signs that they are there.
constexpr std::int32_t kSigningWarps = 8, kMostSharers = 4;  // of a slot
constexpr std::size_t kSignBytes =
    kBlocksWanted * kSigningWarps * kMostSharers * sizeof(std::uint64_t);

constexpr std::size_t shared_bytes(const Shape& shape, const Config& config) {
  const std::int64_t tiles = tiles_of(shape, config.tile_rows, config.tile_cols);
  const std::int64_t slots = config.tail > 0       ? tiles
                             : config.even         ? kBlocksWanted
                             : config.segments > 1 ? tiles * config.segments
                                                   : 0;
  return slots == 0 ? 0
                    : kSignBytes + slots * config.tile_rows * config.tile_cols * sizeof(float);
}

}  // namespace ridgeline::gemm_config
