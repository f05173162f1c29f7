#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "common/math.h"
#include "kernels/gemm_grouped_times.h"

/// Which tiles of some rows of x weights meet that are expanded: pure functions of the shape.
namespace ridgeline::gemm_grouped {

/// Up to so many rows an expert, weights that are expanded are multiplied by four warpgroups, a tile
/// of 256 weight rows, which ask for x once: H200, us, by tiles of many and so, int4 of 4096 x
/// 28672, top 2 of 8 experts, 128, 256 and 384 tokens 419 and 225, 471 and 292, 536 and 544. Tiles
/// of 128 weight rows, two blocks an SM: 258 and, of 64 rows of x, 424.
constexpr std::int64_t kMostSomeRows = 80;

/// Rows an expert, at most, of which 4 bits by bfloat16 have tiles of 256 weight rows, where those
/// take less time.
constexpr std::int64_t kMostTallRows = 1024;

/// Rows of nearly all experts, where they are dealt at random.
inline float rows_of_nearly_all(const Shape& shape) {
  const auto mean = static_cast<float>(mean_rows(shape));
  return std::min(mean + 2 * std::sqrt(mean), static_cast<float>(shape.M));
}

/// Whether int4's groups are whole halves of 256 columns.
constexpr bool has_whole_groups(const Shape& shape) {
  return shape.group % (kColsOfSums / 2) == 0 || shape.group >= shape.K;
}

/// Whether the kernel that puts rows of x in order leaves sums of their columns, too, for int4 by
/// tiles of up to 32 rows to be multiplied as nibbles. H200, lab, by turns, us, as differences and
/// so, 16, 64 and 256 tokens of top 8 in 128 experts of 2048 x 1536 44.8, 63.5, 72.4 and 41.7,
/// 59.8, 70.2. Not of fewer rows than experts, as one token's: an infinity of x makes its row NaN
/// so, which differences do not.
constexpr bool has_sums(const Shape& shape) {
  return shape.x_dtype == DType::kBFloat16 && shape.gathers && !shape.has_zeros &&
         mean_rows(shape) > 0;
}

// ---- Times --------------------------------------------------------------------------------------

/// What int4 is multiplied as by tiles of more rows than 32.
constexpr Int4As tall_way(const Shape& shape) {
  const bool scaled =
      shape.format == WeightFormat::kInt4 && has_whole_groups(shape) && !shape.has_zeros;
  return scaled ? Int4As::kScaled : Int4As::kAny;
}

/// A tile of 256 weight rows by up to `rows` of x, and what 128 columns of K take it, in us of an
/// H200: plain, and of gates and their ups.
struct TallTile {
  int rows;
  double plain, gated;
};
// Those that 4 bits have of more than 64 rows of x; of any kind some, for fewer kernels. What 64 rows
// of any kind take was not measured beside the others: 0.87 to 1.04 of other products.
constexpr std::array kTallScaled{TallTile{80, 0.935, 1.075}, TallTile{96, 1.09, 1.15},
                                 TallTile{112, 1.25, 1.385}, TallTile{128, 1.455, 1.52}};
constexpr std::array kTallAny{TallTile{64, 0.9, 1.05}, TallTile{96, 1.255, 1.335},
                              TallTile{128, 1.575, 1.705}};
constexpr std::array kTallFp4{TallTile{64, 0.85, 1.1}, TallTile{96, 1.09, 1.26},
                              TallTile{128, 1.37, 1.8}};

inline std::span<const TallTile> tall_tiles(const Shape& shape) {
  std::span<const TallTile> tiles = kTallScaled;
  if (tall_way(shape) == Int4As::kAny) tiles = kTallAny;
  if (shape.format == WeightFormat::kFp4) tiles = kTallFp4;
  return shape.dtype == DType::kBFloat16 ? tiles : tiles.first(1);
}

/// us that a product takes by tall tiles. Fitted to 82 products of five shapes by each of their
/// tiles (results/2026-11-30_nvidia-h200_expert_tiles.csv).
inline double time_of_tall(const Shape& shape, Dealt dealt, const TallTile& tile) {
  constexpr double kEnds = 1.0;
  const double of_columns = is_gated(shape.activation) ? tile.gated : tile.plain;
  const double tiles = expected_tiles(shape, dealt, tile.rows);
  return expected_waves(shape, tiles, ceil_div(shape.N, 256)) *
         (ceil_div(shape.K, 128) * of_columns + kEnds);
}

/// The tall tile that takes least, of both ways that rows are dealt in the mean, and its time.
struct BestTall {
  int rows;
  double time;
};
inline BestTall best_tall_tile(const Shape& shape) {
  BestTall best{0, std::numeric_limits<double>::infinity()};
  for (const TallTile& tile : tall_tiles(shape)) {
    const double time =
        time_of_both([&](Dealt dealt) { return time_of_tall(shape, dealt, tile); });
    if (time < best.time) best = {tile.rows, time};
  }
  return best;
}

// ---- Choice -------------------------------------------------------------------------------------

/// Whether tiles are of some rows. Those of 4 bits are multiplied in another order than many.
inline bool has_some_rows(const Shape& shape) {
  const std::int64_t mean = mean_rows(shape);
  if (has_nibbles(shape.format)) {
    if (shape.batch_invariant || mean <= kMostSomeRows) return !shape.batch_invariant;
    // Of int4 of any kind tall tiles win little: where they were to win less than 5%, they lost.
    const bool any = shape.format == WeightFormat::kInt4 && tall_way(shape) == Int4As::kAny;
    const double least_gain = any ? 1.05 : 1.0;
    return shape.dtype == DType::kBFloat16 && mean <= kMostTallRows &&
           least_gain * best_tall_tile(shape).time <
               time_of_both([&](Dealt dealt) { return time_of_many(shape, dealt); });
  }
  return expands(shape.format, shape.x_dtype == DType::kFloat8E4M3) && mean > kFewRows &&
         mean <= kMostSomeRows;
}

/// Tiles of as many rows as nearly all experts have, where rows are dealt at random, or of those
/// that take the least time.
inline Choice tiles_of_some(const Shape& shape) {
  const float most = rows_of_nearly_all(shape);
  const bool whole = shape.format == WeightFormat::kInt4 && has_whole_groups(shape);
  int rows = most <= 64 ? 64 : 80;
  std::optional<Int4As> as;
  if (whole && most <= 32) {
    rows = most <= 16 ? 16 : most <= 24 ? 24 : 32;
    as = has_sums(shape) ? Int4As::kMasked : Int4As::kDifferences;
  } else if (has_nibbles(shape.format)) {
    as = tall_way(shape);
    if (most > 64) rows = best_tall_tile(shape).rows;
    // 144 tokens of 14336 x 4096: of 64 rows 119 us, of 48 113.
    if (*as == Int4As::kScaled && most <= 46) rows = 48;
    if (*as == Int4As::kAny && most <= 32) rows = 32;
  }
  Choice choice = tiles_of(shape, Path::kSome, rows, 16, 256);
  choice.as = as;
  if (shape.gathers)
    choice.x = as == Int4As::kMasked ? RowsOfX::kWithSums : RowsOfX::kGathered;
  return choice;
}

}  // namespace ridgeline::gemm_grouped
