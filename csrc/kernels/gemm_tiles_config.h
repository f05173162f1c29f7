#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_shape.h"

/// How Hopper's kernels cut a product into tiles, and tiles among blocks.
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
/// add up the sums of two blocks that have a segment of K each; 0: none do; `leaves` to leave a
/// tail's; `evens` to leave and add those of even shares; 0: a tile is multiplied by one block. Of
/// 270 cases of fp8 by bf16, 100 of int4, 96 of it by float16 and 118 by e4m3 (6 to 9 shapes, 80 to
/// 1536 rows, each by all cuts) the choice is 0.1 to 0.3% from the best on average, 12% at most.
/// fp8's steps of 192 and 224 rows are of 74 cases more, each by two cuts: 0.4% from the better.
struct TileTime {
  std::int32_t rows, cols;
  double step, ends, add = 0.0, leaves = 0.0, evens = 0.0;
};
constexpr TileTime kFp8Tiles[] = {
    {128, 256, 0.66, 4.0, 0.0}, {128, kGateCols, 0.61, 4.0, 0.0}, {128, 128, 0.34, 3.0, 10.5}};
constexpr TileTime kExpandToFp8Tiles[] = {{256, 128, 0.794, 4.3, 9.0, 3.8, 7.4},
                                          {192, 128, 0.674, 2.8, 9.0, 3.8, 7.4},
                                          {128, 128, 0.511, 3.4, 6.2, 2.7, 3.8}};
constexpr TileTime kExpandFp8Tiles[] = {{256, 128, 0.65, 2.5, 8.0, 4.6, 8.4},
                                        {224, 128, 0.58, 2.0, 8.0, 5.4, 8.4},
                                        {192, 128, 0.477, 4.3, 6.0, 5.4, 8.4},
                                        {160, 128, 0.478, 1.8, 6.5, 5.0, 8.4},
                                        {128, 256, 0.90, 2.0},
                                        {128, 128, 0.388, 4.0, 5.3, 3.1, 6.6}};
constexpr TileTime kExpandTiles[] = {{256, 128, 0.62, 3.8, 8.5, 4.6, 11.0},
                                     {224, 128, 0.55, 3.7, 0.0, 5.4, 11.0},
                                     {192, 128, 0.47, 3.6, 7.3, 5.4, 11.0},
                                     {160, 128, 0.40, 3.6, 6.8, 5.0, 11.0},
                                     {128, 256, 0.65, 3.3},
                                     {128, 128, 0.34, 3.5, 6.2, 3.1, 8.0}};
constexpr TileTime kExpandHalfTiles[] = {{256, 128, 0.625, 4.8, 7.5, 4.6, 10.3},  // float16
                                         {224, 128, 0.552, 4.4, 0.0, 5.4, 10.3},
                                         {192, 128, 0.479, 3.7, 7.3, 5.4, 10.3},
                                         {160, 128, 0.422, 3.7, 6.4, 5.0, 10.3},
                                         {128, 256, 0.733, 4.8},
                                         {128, 128, 0.403, 2.0, 6.2, 3.1, 5.8}};

/// Tiles of more than 128 rows and less than 256.
constexpr bool is_between(const TileTime& tile) {
  return tile.rows > 128 && tile.rows < 256;
}

/// The tiles of weights that are expanded to 16 bits.
template <class Fn>
constexpr void for_each_expand_tile(const Shape& shape, Fn&& fn) {
  if (shape.format == WeightFormat::kFp8) {
    for (const TileTime& tile : kExpandFp8Tiles) fn(tile);
  } else if (shape.dtype == DType::kFloat16) {
    for (const TileTime& tile : kExpandHalfTiles) fn(tile);
  } else {
    for (const TileTime& tile : kExpandTiles) fn(tile);
  }
}

constexpr std::int64_t tiles_of(const Shape& shape, std::int32_t rows, std::int32_t cols) {
  return ceil_div<std::int64_t>(shape.M, rows) * ceil_div(shape.N, cols);
}

/// Hopper's fp8 by fp8: the tile and segments of K that take least. K is cut under the smallest
/// tile only, of which a cluster has the fewest sums to add. Returns that time.
constexpr double cut_for_fp8(const Shape& shape, Config& config) {
  const std::int32_t steps = ceil_div(shape.K, 2 * kBlockCols);
  double best = 0.0;
  for (const TileTime& tile : kFp8Tiles) {
    if (shape.wide_groups && tile.cols != 256) continue;
    if (tile.cols == kGateCols && !shape.gates_alone) continue;
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
  return best;
}

/// Expanded weights: the tile, and who multiplies it, that take least. Whole tiles leave SMs idle
/// in the last wave. So two or four blocks take a segment of a tile's K each; or SMs without a tile
/// take the last stages of two or three; or all multiply as many stages. They wait for each other,
/// so each has an SM: on a GPU of fewer there are fewer of them. Returns that time.
constexpr double cut_for_expand(const Shape& shape, Config& config) {
  constexpr double kTailAdds = 1.5, kLeastGain = 1.01, kMoreOfFour = 1.1;
  // Gates for ups, of two warpgroups: on a way to y that is known, and on any.
  constexpr double kTradesKnown = 0.5, kTrades = 2.0, kTradesBetween = 4.0;
  const bool to_fp8 = config.path == Path::kExpandToFp8;
  const std::int32_t steps = ceil_div(shape.K, to_fp8 ? 2 * kBlockCols : kBlockCols);
  const std::int32_t at_once = std::min<std::int32_t>(shape.sms, kBlocksWanted);
  double best = 0.0;
  struct Cut {
    std::int32_t segments = 1, tail = 0, tails = 0;
    bool even = false;
  };
  const auto consider = [&](const TileTime& tile, double time, const Cut& cut) {
    if (best != 0.0 && time >= best) return;
    best = time;
    config.tile_rows = tile.rows;
    config.tile_cols = tile.cols;
    config.segments = cut.segments;
    config.tail = cut.tail;
    config.tails = cut.tails;
    config.even = cut.even;
  };
  const auto consider_tile = [&](const TileTime& tile) {
    // float16 has fewer kernels
    const bool full = shape.dtype == DType::kBFloat16 ||
                      (shape.format == WeightFormat::kInt4 && !to_fp8);
    if (!full && (is_between(tile) || (tile.rows == 256 && to_fp8))) return;
    const bool trades = is_gated(shape.activation) && tile.cols == 128;
    const bool known = shape.dtype == DType::kBFloat16 && tile.rows < 256;
    const double ends = tile.ends + (!trades            ? 0.0
                                     : known            ? kTradesKnown
                                     : is_between(tile) ? kTradesBetween
                                                        : kTrades);
    const std::int64_t tiles = tiles_of(shape, tile.rows, tile.cols);
    const auto whole = static_cast<double>(ceil_div<std::int64_t>(tiles, kBlocksWanted));
    consider(tile, whole * (tile.step * steps + ends), {});
    if (tile.evens == 0.0 || (tile.rows == 256 && !full)) return;
    for (const std::int32_t segments : {2, 4})
      if (tiles * segments <= at_once && segments <= steps && tile.add > 0.0)
        consider(tile,
                 tile.step * ceil_div(steps, segments) + ends +
                     (segments == 4 ? kMoreOfFour : 1.0) * tile.add,
                 {.segments = segments});
    for (const std::int32_t tails : {2, 3}) {
      if (tails == 2 && to_fp8) continue;  // was not measured
      const auto tail =
          static_cast<std::int32_t>((steps - tails * tile.leaves / tile.step) / (tails + 1));
      if (tail > 0 && tiles + ceil_div<std::int64_t>(tiles, tails) <= at_once &&
          (tile.rows > 128 || !to_fp8))
        consider(tile, tile.step * (steps - tail) + ends + kTailAdds,
                 {.tail = tail, .tails = tails});
    }
    const double waves = static_cast<double>(tiles) / at_once;
    if (full && waves > 1.0)
      consider(tile, kLeastGain * (waves * (tile.step * steps + ends) + tile.evens),
               {.even = true});
  };
  if (to_fp8) {
    for (const TileTime& tile : kExpandToFp8Tiles) consider_tile(tile);
  } else {
    for_each_expand_tile(shape, consider_tile);
  }
  return best;
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
