#pragma once
#include <algorithm>
#include <cmath>

#include "common/math.h"
#include "kernels/gemm_grouped_some_config.h"
#include "kernels/gemm_grouped_strips_config.h"

/// Which kernel multiplies the rows of experts, by which tiles, and what a kernel ahead does to x:
/// pure functions of the shape.
namespace ridgeline::gemm_grouped {

constexpr int kOrderedRows = 256;  // an expert in the mean: of fewer the order takes what it saves

/// Weight rows, at most, where gathered rows are put in order by the kernel that multiplies them.
/// Of more a kernel ahead takes 1% of the time.
constexpr int kMostGatheringRows = 8192;

/// Rows an expert that may be split into terms: of few columns with scales of rows fewer.
constexpr std::int64_t kFewestTermRows = 4, kMostTermRows = 160, kMostOfShortRows = 112;
constexpr int kShortRows = 1024;  // columns

/// Whether Hopper's kernels multiply these shapes. No function of the rows: a row's bits do not
/// depend on their number.
constexpr bool runs_on_wgmma(const Shape& shape) {
  const bool nibbles = has_nibbles(shape.format);
  const bool fused =
      shape.activation == Activation::kNone || shape.activation == Activation::kSiluMul;
  return shape.sm90a && fused && shape.dtype != DType::kFloat32 && shape.K > 0 &&
         shape.experts > 0 && shape.x_rows > 0 && shape.N % (nibbles ? 32 : 16) == 0 &&
         !(nibbles && shape.x_dtype == DType::kFloat8E4M3) &&
         shape.K * static_cast<std::int64_t>(size_of(shape.x_dtype)) % 16 == 0 &&
         shape.x_aligned && shape.weight_aligned;
}

/// Whether rows of e4m3 with a scale for each 128 columns meet tiles of weights with scales of
/// blocks: where a tile's gates lie in one block, and its ups.
constexpr bool scales_groups(const Shape& shape) {
  return has_groups(shape) && !shape.batch_invariant && runs_on_wgmma(shape) &&
         (!is_gated(shape.activation) || shape.N % (2 * kScaleBlock) == 0) &&
         !is_for_strips(shape);
}

/// Whether e4m3 rows of x become 16 bits first: no other kernel for experts multiplies sums of 128
/// columns by scales of both.
constexpr bool expands_x(const Shape& shape) {
  if (shape.x_dtype != DType::kFloat8E4M3) return false;
  return !runs_on_wgmma(shape) || (shape.scale_layout == ScaleLayout::kBlock &&
                                   !scales_groups(shape) && !is_for_strips(shape));
}

constexpr bool has_few_rows(const Shape& shape) {
  return !has_nibbles(shape.format) && shape.segments == 1 &&
         mean_rows(shape) <= kFewRows;
}

/// Whether fp8 meets rows of bfloat16 as two terms of e4m3, which costs the tensor cores as much as
/// expanded weights, and the warps next to nothing. A row's bits are others so. An infinity of x
/// makes its row NaN. H200, lab, by turns, us, expanded and so, scales of rows; of blocks: 256
/// tokens of top 2 in 8 experts of 4096 x 28672 379, 275; 438, 322; 64 of them 263, 228; 386, 279;
/// 640 of them 597, 574; 711, 664; 1024 tokens of top 8 in 128 of 2048 x 1536 161, 149; 186, 157.
/// But of 768 x 2048, by tiles of many rows and so, 1536 and 2048 tokens 111, 113 and 121, 141, where
/// as many of blocks are faster.
constexpr bool has_terms(const Shape& shape) {
  const bool is_short = shape.K <= kShortRows && shape.scale_layout != ScaleLayout::kBlock;
  const std::int64_t mean = mean_rows(shape), most = is_short ? kMostOfShortRows : kMostTermRows;
  return shape.format == WeightFormat::kFp8 && shape.x_dtype == DType::kBFloat16 &&
         !shape.batch_invariant && mean >= kFewestTermRows && mean <= most;
}

constexpr bool is_ordered(const Shape& shape) {
  return shape.experts > 1 && mean_rows(shape) >= kOrderedRows;
}

/// Whether experts are taken as they lie all the same, their weights and rows one behind the other.
/// H200, us, two processes by turns, the fullest tiles first and so, 128 experts of 768 x 2048, e4m3
/// by scales of rows; of columns: 4096 tokens 126.7, 125.8; 131.8, 127.1; 8192 228.2, 227.3; 225.6,
/// 223.5. But bf16, lab, 4096 tokens 205 and 208, and eight experts of 14336 x 4096, 3072 and 8192
/// tokens of e4m3 by scales of rows 584, 588 and 1609, 1631.
constexpr bool keeps_order(const Shape& shape) {
  constexpr std::int32_t kManyExperts = 64;
  return shape.x_dtype == DType::kFloat8E4M3 && !shape.gathers && shape.experts >= kManyExperts;
}

/// H200, lab, by turns, us of a kernel ahead and so, 8192 tokens of top 8 in 128 experts of 2048 x
/// 1536: fp8 by fp8 466 and 439, bf16 822 and 763, int4 810 and 756; 4096 tokens 274 and 265, 505
/// and 481, 516 and 502; but 1024 123 and 133.
constexpr bool gathers_inside(const Shape& shape) {
  return shape.gathers && is_ordered(shape) && shape.N <= kMostGatheringRows;
}

/// Whether a block takes the next tile that none has, not each 132nd, since tiles differ in size
/// and blocks in speed; which is one more kernel, and a trip to L2 ahead of the first tile. H200,
/// lab, by turns, us, each 132nd and so, bf16, int4, e4m3 by scales of rows and of columns: 4096
/// tokens of top 8 in 128 experts of 768 x 2048 265 213 159 158 and 234 198 150 147, 1024 of top 2
/// in 8 of 4096 x 28672 1059 917 534 535 and 972 872 518 545, 2048 of 14336 x 4096 913 863 480 526
/// and 867 823 478 529; of 128 rows an expert, 2048 tokens of 2048 x 1536, but for int4 307, 191
/// 198 and 300, 181 183. But 1024 of 768 x 2048 by scales of rows 66 and 74, and 512 of 14336 x
/// 4096, of whose tiles SMs have two, 168 and 175.
constexpr bool claims_tiles(const Shape& shape) {
  constexpr int kClaimedRows = 128;  // an expert in the mean
  const bool many_tiles = ceil_div(shape.N, 128) * shape.experts >= 4 * shape.sms;
  return is_ordered(shape) ||
         (shape.experts > 1 && many_tiles && mean_rows(shape) >= kClaimedRows);
}

/// Whether many experts have a tile less of e4m3 by e4m3 if tiles are a little taller: those of
/// somewhat more rows than whole tiles. Beside rows that are put in order there is no room for it.
/// H200, lab, by turns, us, rows in order: 4096 and 8192 tokens of top 8 in 128 experts of 768 x
/// 2048 164 and 145, 267 and 261, 8192 of 2048 x 1536 438 and 422; but 6000 of the former, which
/// spares no tile, 197 and 202.
inline bool has_tall_tiles(const Shape& shape) {
  const auto mean = static_cast<float>(mean_rows(shape));
  const int rows = static_cast<int>(mean + std::sqrt(mean));
  return shape.x_dtype == DType::kFloat8E4M3 && shape.experts > 1 && mean >= kManyRows &&
         !gathers_inside(shape) && !scales_groups(shape) &&
         ceil_div(rows, kTallRows) < ceil_div(rows, kManyRows);
}

/// Whether dense weights of many columns have tiles of 256 weight rows by up to 160 of x, dealt by
/// eights and multiplied to a whole sixteen, which take less of L2 and, where experts have a little
/// more than 256 rows, leave no tile nearly empty. H200, lab, by turns, us, bf16, top 2 in 8 experts
/// of 14336 x 4096, rows in order, 512, 1024, 1536, 6144 and 8192 tokens 257, 533, 676, 2596, 3294
/// and 251, 424, 612, 2281, 2930, but 2048 tokens 771 and 807; of 4096 x 28672, 512 and 1024 tokens
/// 582, 964 and 539, 870. Of 2048 columns and fewer they win 2% or lose as much.
inline bool has_wide_tiles(const Shape& shape) {
  constexpr std::int32_t kLeastCols = 4096;
  constexpr double kLeastGain = 1.018;
  if (shape.format != WeightFormat::kDense || shape.batch_invariant || shape.segments > 1 ||
      shape.experts <= 1 || shape.K < kLeastCols || mean_rows(shape) < kPieceRows ||
      gathers_inside(shape))
    return false;
  const double wide = time_of_both([&](Dealt dealt) { return time_of_wide(shape, dealt); });
  return kLeastGain * wide < time_of_both([&](Dealt dealt) { return time_of_many(shape, dealt); });
}

/// Rows of x that a tile has, at most, of the kernel for many: twice as many as experts have in the
/// mean, for some have more; fewer leave room for more stages. Where experts have one or two tiles
/// of 256 rows, and SMs few tiles, those of 192 are alike in size. `most`: those of tiles that have
/// as many as there are.
constexpr int row_tile_for(const Shape& shape, int columns, int most) {
  const std::int64_t mean = mean_rows(shape);
  const auto rows = static_cast<int>(std::clamp<std::int64_t>(mean, 1, kManyRows));
  if (shape.experts == 1) return round_up(rows, kPieceRows);  // it has them all
  const bool few_tiles = columns * shape.experts < 4 * shape.sms;
  if (few_tiles && mean < 2 * kManyRows) most = 192;
  return 2 * rows < kManyRows ? std::min(round_up(2 * rows, kPieceRows), most) : most;
}

/// The same by scales of 128 columns, where 64 rows are multiplied at a time.
constexpr int group_row_tile(const Shape& shape) {
  const std::int64_t most = shape.experts == 1 ? shape.M : 2 * mean_rows(shape);
  return most <= kPieceRows ? kPieceRows : kGroupRows;
}

/// Tiles by mma.sync, of about as many rows as experts have; few rows take narrow blocks, which
/// spread a weight over more SMs: one token of top 8 in 128 experts of 2048 x 1536 took 30.2 us in
/// blocks of 128 weight rows, 23.6 in blocks of 64 (H200). Quantised weights have one tile.
constexpr Choice tiles_of_any(const Shape& shape) {
  const std::int64_t mean = mean_rows(shape);
  const bool dense = shape.format == WeightFormat::kDense;
  const int rows = !dense ? 64 : mean <= 32 ? 32 : mean <= 64 ? 64 : 128;
  return {.path = Path::kTile,
          .most_rows = rows,
          .tile_rows = rows,
          .tile_cols = dense && mean <= 32 ? 64 : 128};
}

/// fp8 by some rows of x in terms, which have no tiles of 80 rows: of 256 tokens of top 2 in 8
/// experts of 14336 x 4096 one expert has 84, and twice the tiles are two waves (H200, lab, us, 234
/// and, of 88 rows, 148).
inline Choice tiles_of_terms(const Shape& shape) {
  const float most = rows_of_nearly_all(shape);
  const int rows = most <= 32 ? 32 : most <= 48 ? 48 : most <= 64 ? 64 : 88;
  Choice choice = tiles_of(shape, Path::kTerms, rows, 16, 256);
  choice.x = RowsOfX::kInTerms;
  return choice;
}

inline Choice tiles_of_many(const Shape& shape) {
  const bool cut = shape.segments > 1, groups = scales_groups(shape);
  const bool wide = has_wide_tiles(shape);
  const int cols = groups ? kGroupCols : wide ? kWideCols : 128;
  const int most = groups                  ? kGroupRows
                   : wide                  ? kWideRows
                   : cut                   ? kSegmentRows
                   : has_tall_tiles(shape) ? kTallRows
                                           : kManyRows;
  return {.path = Path::kMany,
          .x = gathers_inside(shape) ? RowsOfX::kMeanwhile
               : shape.gathers       ? RowsOfX::kGathered
                                     : RowsOfX::kInPlace,
          .most_rows = most,
          .tile_rows = groups        ? group_row_tile(shape)
                       : cut || wide ? most
                                     : row_tile_for(shape, ceil_div(shape.N, cols), most),
          .tile_cols = cols,
          .ordered = is_ordered(shape) && !wide && !keeps_order(shape),
          .claimed = claims_tiles(shape),
          .scales_groups = groups};
}

/// Requires: a row of y at least, and not more than 1023 experts.
inline Choice choose(const Shape& of) {
  Shape shape = of;
  const bool expands_first = expands_x(shape);
  if (expands_first) {
    shape.x_dtype = shape.dtype;
    shape.x_aligned = true;
  }
  const bool byte_x = shape.x_dtype == DType::kFloat8E4M3;
  Choice choice =
      !runs_on_wgmma(shape)  ? tiles_of_any(shape)
      : scales_groups(shape) ? tiles_of_many(shape)
      : is_for_digits(shape) ? digits_of(shape)
      : is_for_strips(shape) ? strips_of(shape)
      : has_terms(shape)     ? tiles_of_terms(shape)
      : has_some_rows(shape) ? tiles_of_some(shape)
      : has_few_rows(shape)
          ? tiles_of(shape, Path::kFew, 32, 8, few_cols(shape.format, byte_x))
          : tiles_of_many(shape);
  choice.expands_x = expands_first;
  return choice;
}

// ---- Workspace ----------------------------------------------------------------------------------

/// Rows of e4m3 x in 16 bits, ahead of all else.
constexpr std::size_t expanded_bytes(std::int64_t x_rows, std::int64_t K, DType dtype) {
  return round_up(static_cast<std::size_t>(x_rows * K) * size_of(dtype), std::size_t{256});
}

/// Of a row of x with sums.
constexpr std::int64_t cols_with_sums(std::int32_t K) {
  return std::int64_t{ceil_div(K, kColsOfSums)} * kColsWithSums;
}

/// Of a row of x as two terms, zeros behind the last column, ...
constexpr std::int64_t cols_of_terms(std::int32_t K) {
  return std::int64_t{2} * round_up(K, kColsOfTerm);
}

/// ... and bytes of M such rows, behind which are their units.
constexpr std::int64_t terms_bytes(std::int64_t M, std::int32_t K) {
  return round_up<std::int64_t>(M * cols_of_terms(K), 256);
}

/// Behind rows that are put in order: tiles that blocks have taken, and, where warps do that
/// meanwhile, units that these have, and, of each piece of rows, those that are there.
constexpr std::int64_t counts_of(const Choice& choice, std::int64_t M, std::int32_t experts) {
  if (!choice.claimed) return 0;
  return choice.x == RowsOfX::kMeanwhile ? 2 + M / kPieceRows + experts + 1 : 1;
}

constexpr std::size_t workspace_bytes(const Shape& shape, const Choice& choice) {
  const DType x_dtype = choice.expands_x ? shape.dtype : shape.x_dtype;
  const std::size_t ahead =
      choice.expands_x ? expanded_bytes(shape.x_rows, shape.K, shape.dtype) : 0;
  const auto in_order = [&](std::int64_t cols) {
    return static_cast<std::int64_t>(size_of(x_dtype)) * shape.M * cols;
  };
  std::int64_t rows = 0;
  switch (choice.x) {
    case RowsOfX::kInPlace: break;
    case RowsOfX::kGathered:
    case RowsOfX::kMeanwhile: rows = in_order(shape.K); break;
    case RowsOfX::kWithSums: rows = in_order(cols_with_sums(shape.K)); break;
    case RowsOfX::kInTerms: rows = terms_bytes(shape.M, shape.K) + shape.M * 4; break;
  }
  return ahead + static_cast<std::size_t>(rows + counts_of(choice, shape.M, shape.experts) * 4);
}

}  // namespace ridgeline::gemm_grouped
