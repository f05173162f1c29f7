#pragma once
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_shape.h"
#include "kernels/gemm_tiles_config.h"

/// More rows than few by the cluster kernel: all of a product, or its last columns.
namespace ridgeline::gemm_config {

/// Tiles of the cluster kernel by more rows than few, 64 at a time, by blocks that have an SM each,
/// or two of them one. A weight goes to the tensor cores twice as often as with rows of 128, but
/// such a kernel starts and ends sooner. Of int4 in units of kExpandTiles; those of an e4m3 x in
/// units of kExpandToFp8Tiles: it is taken as it is. Of 8 bits by 8 in units of kFp8Tiles; up to
/// 200 blocks, two an SM, bring more of L2 a clock than one an SM of tiles twice as long. Weights
/// that are expanded, 128 rows at a time, too, of which up to 104 leave room for two stages more (of
/// fp8 by bfloat16 up to 112, where K is not cut: 112 rows of 4096 x 6144 18.3 us by other tiles and
/// 16.5, 192 of 4096 x 4096 18.8 and 16.5), and int4 by bfloat16 by as many rows as divide x with
/// few multiplied twice; fp8 by bfloat16 in units of kExpandFp8Tiles, int4 by float16 of
/// kExpandHalfTiles. int4 by 192 weight rows of three warpgroups. Of 99 cases of int4 (9 shapes, 128
/// to 1024 rows, each by cuts that were thought to be near the best) the choice is 0.2% from the
/// best on average, 6% at most.
struct ClusterTile {
  std::int32_t cols, blocks;  // of a tile, of an SM
  double step, ends, add;
  std::int32_t rows = kFewRows, most = 1 << 20;  // of x, in a tile and in all
  std::int32_t most_tiles = 1 << 20;
};
constexpr ClusterTile kClusterTiles[] = {
    {64, 1, 0.24, 2.7, 0.3},
    {112, 1, 0.40, 3.3, 1.6},
    {128, 1, 0.409, 3.0, 1.6},
    {kBroadCols, 1, 0.558, 3.1, 2.0},
    {64, 1, 0.258, 3.1, 1.5, 80},
    {128, 1, 0.465, 3.5, 1.4, 80},
    {kBroadCols, 1, 0.635, 3.8, 1.5, 80},
    {64, 1, 0.272, 3.2, 1.5, 88},
    {128, 1, 0.494, 3.3, 1.7, 88},
    {kBroadCols, 1, 0.692, 3.1, 2.1, 88},
    {64, 1, 0.286, 3.3, 1.5, 96},
    {128, 1, 0.523, 3.2, 2.0, 96},
    {kBroadCols, 1, 0.749, 2.5, 2.7, 96},
    {64, 1, 0.305, 3.4, 3.0, 112},
    {128, 1, 0.583, 3.4, 2.0, 112},
    {kBroadCols, 1, 0.855, 3.0, 2.9, 112},
    {64, 1, 0.323, 3.6, 9.8, kTallRows},
    {128, 1, 0.646, 3.4, 2.1, kTallRows},
    {128, 1, 0.905, 3.5, 5.0, 176},
    {kBroadCols, 1, 0.961, 3.4, 3.5, kTallRows}};
constexpr ClusterTile kClusterHalfTiles[] = {{64, 1, 0.26, 3.1, 8.6},  // of float16
                                             {112, 1, 0.468, 3.5, 0.9},
                                             {128, 1, 0.468, 3.5, 0.9},
                                             {64, 1, 0.392, 3.2, 0.7, 104},
                                             {64, 1, 0.36, 4.1, 1.5, kTallRows},
                                             {128, 1, 0.686, 3.2, 2.0, kTallRows}};
constexpr ClusterTile kClusterCodesTiles[] = {{128, 1, 0.414, 3.2, 1.3},
                                              {112, 1, 0.414, 3.2, 1.3},
                                              {64, 1, 0.222, 2.85, 0.1},
                                              {64, 2, 0.386, 3.2, 0.1},
                                              {64, 1, 0.279, 3.4, 1.1, 104},
                                              {64, 1, 0.277, 3.9, 1.1, kTallRows},
                                              {128, 1, 0.535, 4.5, 1.6, kTallRows},
                                              {kBroadCols, 1, 0.54, 3.6, 2.0},
                                              {kBroadCols, 1, 0.79, 3.4, 3.5, kTallRows}};
constexpr std::int32_t kMostByTwo = 384;  // rows of x, of blocks that share an SM by two
constexpr ClusterTile kClusterFp8Tiles[] = {{128, 1, 0.36, 1.0, 2.5},
                                            {64, 1, 0.17, 3.1, 0.1},
                                            {64, 2, 0.28, 2.9, 5.0, kFewRows, kMostByTwo, 200},
                                            {64, 2, 0.335, 3.5, 5.0, kFewRows, kMostByTwo},
                                            {128, 2, 0.47, 2.0, 14.0, kFewRows, kMostByTwo}};
constexpr ClusterTile kClusterInt8Tiles[] = {{128, 1, 0.335, 1.6, 2.5},
                                             {112, 1, 0.25, 2.9, 6.5},
                                             {64, 1, 0.185, 2.4, 0.1},
                                             {64, 2, 0.26, 3.5, 5.0, kFewRows, kMostByTwo, 200},
                                             {128, 2, 0.46, 2.0, 14.0, kFewRows, kMostByTwo}};
constexpr ClusterTile kClusterExpandedFp8Tiles[] = {{64, 1, 0.281, 3.6, 1.5},
                                                    {64, 2, 0.48, 4.3, 1.5, kFewRows, 256},
                                                    {128, 1, 0.512, 3.7, 3.4},
                                                    {64, 1, 0.409, 4.0, 1.5, 104},
                                                    {64, 1, 0.42, 2.6, 5.5, 112},
                                                    {64, 1, 0.474, 3.8, 1.3, kTallRows},
                                                    {128, 1, 0.755, 4.0, 2.6, kTallRows},
                                                    {112, 1, 0.755, 4.0, 2.6, kTallRows}};

/// Whether such rows may be the cluster kernel's: of whole groups.
constexpr bool may_be_for_cluster(const Shape& shape) {
  if (shape.format == WeightFormat::kInt8) return true;
  if (shape.format == WeightFormat::kFp8)
    return shape.bfloat_x || (shape.codes_x && shape.scales_products);
  const bool whole = shape.group % (2 * kBlockCols) == 0 || shape.group >= shape.K;
  const bool known = shape.byte_x ? shape.codes_x && shape.dtype == DType::kBFloat16
                                  : shape.dtype != DType::kFloat32;
  return shape.format == WeightFormat::kInt4 && whole && shape.N % kStripRows == 0 && known;
}

/// That kernel where it takes less than `time`. H200, lab, us, expanded tiles and so: 4096 x 4096
/// by 96 to 128 rows 15.5, 10.4, by 192 19.1, 16.1, by 256 21.1, 16.5; 4096 x 6144 by 128 21.0,
/// 16.1; 14336 x 4096 by 128 31.0, 26.8; 5120 x 5120 by 192 29.4, 19.5; 2048 x 2048 by 128 11.6,
/// 5.1; by larger tiles 4096 x 6144 by 128, 256 and 512 16.4, 24.1, 39.7 and 14.1, 21.7, 35.7. With
/// zero points or gated it gains as much, or loses up to 4% where it gains as little. x of e4m3:
/// 4096 x 4096 by 128 rows 14.8, 9.7, by 256 19.0, 15.6; 8192 x 8192 by 128 28.9, 27.8. fp8 by fp8,
/// tiles of 128 rows and so, chained: 4096 x 4096 by 72 to 128 rows 12.3, 8.7, by 192 12.6, 11.6;
/// 14336 x 4096 by 128 24.1, 21.6, 8192 x 8192 25.5, 24.0; 2048 x 2048 7.4, 4.6; int8 4096 x 4096
/// by 128 11.7, 9.9, 2048 x 2048 7.0, 4.4, but 14336 x 4096 23.1, 28.2. fp8 by bf16, expanded tiles
/// and so: 4096 x 4096 by 96 16.2, 11.2, by 128 16.3, 12.4, by 256 22.0, 20.8; 14336 x 4096 by 96
/// 32.5, 26.8; 8192 x 8192 by 128 36.0, 31.2; 2048 x 2048 11.5, 5.9. Gated, fp8 by bf16 and int4 by
/// e4m3: 4096 x 6144 by 96 22.1, 16.3 and 17.8, 13.4, 14336 x 4096 32.6, 26.2 and 24.2, 20.7; fp8
/// by fp8 by 72 rows 4096 x 4096 13.1, 8.4, 2048 x 2048 7.8, 4.2. Returns the lesser time.
constexpr double cut_rows_for_cluster(const Shape& shape, double time, Config& config) {
  constexpr std::int32_t kColumns = 640, kMostSegments = 4;
  constexpr double kGatesOfFp8 = 1.5;  // us more at the end, of what is expanded
  if (!may_be_for_cluster(shape)) return time;
  const bool gated = is_gated(shape.activation), int4 = shape.format == WeightFormat::kInt4;
  const double ends = gated && !int4 && !shape.byte_x ? kGatesOfFp8 : 0.0;
  const auto consider = [&](const ClusterTile& tile) {
    const std::int32_t box = gated ? tile.cols / 2 : tile.cols;
    if ((int4 && box % kStripRows != 0) || shape.M > tile.most) return;
    const auto& at_once = tile.blocks == 1 ? kClusters : kSmallClusters;
    const std::int64_t tiles =
        ceil_div<std::int64_t>(shape.M, tile.rows) * ceil_div(gated ? shape.N / 2 : shape.N, box);
    for (std::int32_t segments = 1; segments <= kMostSegments; ++segments) {
      if (tiles > std::min(at_once[segments - 1], tile.most_tiles) ||
          (segments > 1 && segments * kColumns > shape.K))
        break;
      const std::int32_t steps = ceil_div(ceil_div(shape.K, 2 * kBlockCols), segments);
      const double takes =
          tile.step * steps + tile.ends + ends + (segments > 1 ? tile.add : 0.0);
      if (takes >= time) continue;
      time = takes;
      config = {.path = Path::kCluster,
                .segments = segments,
                .split = false,
                .tile_rows = tile.rows,
                .tile_cols = tile.cols,
                .fused = true};
    }
  };
  if (shape.format == WeightFormat::kInt8) {
    for (const ClusterTile& tile : kClusterInt8Tiles) consider(tile);
  } else if (!int4 && !shape.byte_x) {
    for (const ClusterTile& tile : kClusterExpandedFp8Tiles) consider(tile);
  } else if (!int4) {
    for (const ClusterTile& tile : kClusterFp8Tiles) consider(tile);
  } else if (shape.byte_x) {
    for (const ClusterTile& tile : kClusterCodesTiles) consider(tile);
  } else if (shape.dtype == DType::kFloat16) {
    for (const ClusterTile& tile : kClusterHalfTiles) consider(tile);
  } else {
    for (const ClusterTile& tile : kClusterTiles) consider(tile);
  }
  return time;
}

/// Whole waves of tiles, and behind them the cluster kernel for the columns that remain, where that
/// takes less than `time`: a start and an end more than the units of either. Of 16 bits the waves'
/// tiles are 128 x 256, or hold all rows, up to 224: H200, lab, by turns, us, 256 and 512 rows of
/// 3584 x 18944 behind 256 x 128 and so 54.2, 102.0 and 51.2, 99.6.
constexpr void cut_rest(const Shape& shape, double time, Config& config) {
  constexpr double kMore = 1.0, kMoreOfOthers = 2.0, kMoreToFp8 = 1.5, kLong = 1e9;
  if (is_gated(shape.activation) || !may_be_for_cluster(shape)) return;
  const bool to_fp8 = shape.byte_x;
  const std::int32_t steps = ceil_div(shape.K, to_fp8 ? 2 * kBlockCols : kBlockCols);
  const auto consider = [&](const TileTime& tile, double more) {
    const auto along_m = static_cast<std::int32_t>(ceil_div<std::int64_t>(shape.M, tile.rows));
    const auto waves =
        static_cast<std::int32_t>(tiles_of(shape, tile.rows, tile.cols) / kBlocksWanted);
    Shape rest = shape;
    rest.N -= waves * kBlocksWanted / along_m * tile.cols;
    if (waves == 0 || rest.N <= 0) return;
    Config by_cluster{};
    const double of_rest = cut_rows_for_cluster(rest, kLong, by_cluster);
    const double takes = waves * (tile.step * steps + tile.ends) + of_rest + more;
    if (takes >= time) return;
    time = takes;
    config = {.path = to_fp8 ? Path::kExpandToFp8 : Path::kExpand,
              .segments = 1,
              .split = false,
              .tile_rows = tile.rows,
              .tile_cols = tile.cols,
              .fused = true,
              .rest = {rest.N, by_cluster.tile_rows, by_cluster.tile_cols, by_cluster.segments}};
  };
  if (to_fp8) {
    if (config.path == Path::kExpandToFp8)
      consider(kExpandToFp8Tiles[0], kMoreToFp8);
    return;
  }
  const bool others = shape.format == WeightFormat::kFp8 || shape.dtype == DType::kFloat16;
  for_each_expand_tile(shape, [&](const TileTime& tile) {
    if (tile.cols == 256 || (is_between(tile) && shape.M <= tile.rows))
      consider(tile, others ? kMoreOfOthers : kMore);
  });
}

/// How the cluster kernel multiplies it.
constexpr Config config_of_rest(const Rest& rest) {
  return {.path = Path::kCluster,
          .segments = rest.segments,
          .split = false,
          .tile_rows = rest.tile_rows,
          .tile_cols = rest.tile_cols,
          .fused = true,
          .rest = rest,
          .of_rest = true};
}

}  // namespace ridgeline::gemm_config
