#pragma once
#include <algorithm>
#include <cmath>

#include "common/math.h"
#include "kernels/gemm_grouped_shape.h"

/// How long tiles of many rows an expert take, whose rows are known on the device alone.
namespace ridgeline::gemm_grouped {

/// How rows are dealt to experts: at random, or so unevenly that shares differ by a factor of e^0.5,
/// as routers do.
enum class Dealt { kAtRandom, kUnevenly };

/// time(dealt) of both, added: a choice for rows at random alone lost more by uneven ones than it
/// won.
template <class Time>
double time_of_both(const Time& time) {
  return time(Dealt::kAtRandom) + time(Dealt::kUnevenly);
}

/// Tiles of up to `most` rows that an expert has in the mean.
inline double expected_tiles(const Shape& shape, Dealt dealt, int most) {
  const auto mean = static_cast<double>(mean_rows(shape));
  constexpr double kUneven = 0.5, kRare = 1e-4;
  double tiles = 1.0;
  for (double rows = most + 0.5;; rows += most) {
    const double deviations =
        dealt == Dealt::kAtRandom ? (rows - mean) / std::sqrt(mean)
                                  : std::log(rows / mean) / kUneven + kUneven / 2.0;
    const double more = 0.5 * std::erfc(deviations / std::sqrt(2.0));
    if (more < kRare) return tiles;
    tiles += more;
  }
}

/// How often an SM has a tile, if experts have `each` in the mean by `columns`: few are whole waves.
inline double expected_waves(const Shape& shape, double each, int columns) {
  constexpr double kMany = 8.0;
  const double tiles = shape.experts * each, whole = std::floor(tiles);
  const auto waves = [&](double row_tiles) {
    const double of_sm = columns * row_tiles / shape.sms;
    return of_sm < kMany ? std::max(std::ceil(of_sm), 1.0) : of_sm + 0.5;
  };
  const double fewer = waves(whole), more = waves(whole + 1.0);
  return fewer + (tiles - whole) * (more - fewer);
}

/// us of an H200 that a product takes by tiles of 128 weight rows by whole pieces of 64, as int4, or
/// dense. The latter and that by wide tiles are fitted to 92 products of bf16 of four shapes of
/// 4096 columns and more (results/2026-11-30_nvidia-h200_wide_tiles.csv).
inline double time_of_many(const Shape& shape, Dealt dealt) {
  struct Units { double of_columns, of_piece, ends; };  // the first two for 64 columns of K
  const bool gated = is_gated(shape.activation), dense = shape.format == WeightFormat::kDense;
  const Units units = dense   ? gated ? Units{0.327, 0.114, 2.2} : Units{0.155, 0.182, 2.2}
                      : gated ? Units{0.34, 0.097, 1.0}
                              : Units{0.25, 0.135, 1.0};
  const double tiles = expected_tiles(shape, dealt, kManyRows);
  const double pieces = expected_tiles(shape, dealt, kPieceRows) / tiles;
  return expected_waves(shape, tiles, ceil_div(shape.N, 128)) *
         (ceil_div(shape.K, 64) * (units.of_columns + units.of_piece * pieces) + units.ends);
}

/// The same of dense weights by tiles of 256 weight rows by up to 160 of x, to a whole sixteen.
inline double time_of_wide(const Shape& shape, Dealt dealt) {
  constexpr double kOfColumns = 0.306, kOfRow = 0.004, kEnds = 15.7, kOfGates = 0.5;
  const double tiles = expected_tiles(shape, dealt, kWideRows);
  const double rows = static_cast<double>(mean_rows(shape)) / tiles + 8.0;
  return expected_waves(shape, tiles, ceil_div(shape.N, kWideCols)) *
         (ceil_div(shape.K, 64) * (kOfColumns + kOfRow * rows) + kEnds +
          (is_gated(shape.activation) ? kOfGates : 0.0));
}

}  // namespace ridgeline::gemm_grouped
