#pragma once
#include <algorithm>

#include "common/math.h"
#include "kernels/gemm_grouped_shape.h"
#include "kernels/gemm_shape.h"

/// Where few rows meet strips of the experts' weights: as many as shared memory holds.
namespace ridgeline::gemm_grouped {

constexpr int kFinishers = 4;   // warps that add up sums, each those of an item by turns
constexpr int kRequesters = 4;  // warps that ask for weights, each for every kRequesters-th ring
constexpr int kRings = 8;       // of warps that multiply, one each
constexpr int kMostBytes = 227 * 1024;  // of shared memory
constexpr int kRowTileBytes = 12;       // of lists of row tiles

/// How many row tiles a block may come to, of so many blocks.
constexpr std::int64_t most_listed(std::int64_t M, int experts, int row_tile, int blocks) {
  // Of g experts with rows, each has a tile for its first row; the others fill tiles of row_tile.
  const std::int64_t groups = std::min<std::int64_t>(M, experts);
  return (groups + (M - groups) / row_tile) / blocks + 3;
}

/// Shared memory for sums, and for lists of tiles of so many warps.
constexpr std::int64_t sums_and_lists(const Shape& shape, int row_tile, int warps) {
  const int paired = is_gated(shape.activation) ? 2 : 1;
  return std::int64_t{kFinishers} * paired * kRings * gemm_config::kStripRows * row_tile * 4 +
         warps * most_listed(shape.M, shape.experts, row_tile, shape.sms) * kRowTileBytes;
}

/// As many rows of x as may be, and as fit beside rings of so many bytes; or one, which may not.
template <class Bytes>
constexpr int rows_beside(std::int64_t rings, std::int64_t most, Bytes bytes) {
  int rows = static_cast<int>(most);
  while (rows > 1 && bytes(rows) + rings > kMostBytes) --rows;
  return rows;
}

// ---- Dense, fp8 and fp4 ------------------------------------------------------------------------

constexpr int kStripTokens = 8;  // rows of x that a strip meets at a time
constexpr int kStripsFixedBytes = 640;
constexpr int kFewStages = 2;    // of a ring: fp8 768 x 2048, one token, 6.7 us, with three 7.2
constexpr int kPieceCols = 256;  // of a row of x that a warp stages at a time, 8 a lane
constexpr int kBoxesOfChunk = 2;  // that is of fp8: of as many columns as blocks that have scales

/// Columns of a strip that a warp takes at a time.
constexpr int strips_chunk_cols(WeightFormat format) {
  return format == WeightFormat::kFp4 ? 512 : format == WeightFormat::kFp8 ? 256 : 128;
}

/// Of a warp's ring.
constexpr int strips_stage_bytes(WeightFormat format) {
  return format == WeightFormat::kFp4
             ? strips_chunk_cols(format) / Int4Layout::kCols * Fp4Layout::kBytes
             : 4096;
}
constexpr int strips_rings_bytes(WeightFormat format, int stages) {
  return kRings * stages * strips_stage_bytes(format);
}

/// Bytes of a row of x in shared memory. Rows start in different banks: 16 bytes apart for
/// ldmatrix, 32 for two words a thread.
constexpr int strips_pitch(int K, WeightFormat format) {
  return round_up(round_up(K, strips_chunk_cols(format)), kPieceCols) * 2 +
         (format == WeightFormat::kFp8 ? 32 : 16);
}

/// Whether x is e4m3 with a scale for each 128 columns.
constexpr bool has_groups(const Shape& shape) {
  return shape.x_dtype == DType::kFloat8E4M3 && shape.scale_layout == ScaleLayout::kBlock &&
         shape.x_group == kScaleBlock;
}

/// Of a block, beside its rings.
constexpr std::int64_t strips_bytes(const Shape& shape, int row_tile) {
  const bool units = shape.format == WeightFormat::kFp8 && shape.x_dtype != DType::kFloat8E4M3;
  const int factors = has_groups(shape) ? kBoxesOfChunk : units ? 1 : 0;
  const int chunks = ceil_div(shape.K, strips_chunk_cols(shape.format));
  const std::int64_t row = strips_pitch(shape.K, shape.format) + factors * chunks * 4;
  return kStripsFixedBytes + row_tile * row +
         sums_and_lists(shape, row_tile, kRings + kFinishers + kRequesters);
}

constexpr int strips_rows(const Shape& shape) {
  return rows_beside(strips_rings_bytes(shape.format, kFewStages),
                     std::min<std::int64_t>(shape.M, kStripTokens),
                     [&](int rows) { return strips_bytes(shape, rows); });
}

/// Rows, at most: an expert, in the mean, three fewer than a strip meets at a time, for the weights
/// of an expert that has more go by twice. H200, lab, by turns, us, by tiles and so: 80 and 96
/// tokens of 8 of 128 experts of 768 x 2048 fp8 by bf16 60.9 61.2 and 59.5 66.8, bf16 97.1 99.0
/// and 96.5 112; 12 and 16 of 2 of 8 experts of 14336 x 4096, of which five rows fit, 118 120 and
/// 111 138. Fp8 by fp8 needs no expansion: 32 and 48 tokens of 768 x 2048 45.1 51.3 and 43.6 52.6.
/// By scales of columns: 64 and 80 tokens of 2048 x 1536 104.5 105.0 and 98.3 102.2, 48 and 64 of
/// 768 x 2048 53.1 54.6 and 53.6 59.8, 16 and 20 of 4096 x 28672 225 250 and 218 235. Tiles of fp4
/// expand more: 192 and 224 tokens of 4 of 128 experts of 5760 x 2880 476 467 and 392 440, 176 and
/// 192 of 2880 x 2880 210 199 and 191 213, 12 and 16 of 2 of 8 of 14336 x 4096, of which five rows
/// fit, 77 77 and 67 77; but of few chunks 1, 3 and 4 of 8 of 128 experts of 768 x 2048 7.9 12.7
/// 13.0 and 6.1 11.8 14.1.
constexpr std::int64_t most_rows_of_strips(Shape shape) {
  constexpr std::int64_t kFewest = 2, kFewChunks = 4, kMostOfFewChunks = 24;
  const bool few_chunks = ceil_div(shape.K, strips_chunk_cols(shape.format)) < kFewChunks;
  if (shape.x_dtype == DType::kFloat8E4M3 && (!has_groups(shape) || few_chunks))
    return kFewest * shape.experts;
  const bool fp4 = shape.format == WeightFormat::kFp4;
  if (fp4 && few_chunks) return kMostOfFewChunks;
  shape.M = std::max<std::int64_t>(shape.M, kStripTokens);
  return std::max<std::int64_t>(strips_rows(shape) - (fp4 ? 2 : 3), kFewest) * shape.experts;
}

constexpr bool is_for_strips(const Shape& shape) {
  const bool codes_by_blocks =
      shape.x_dtype == DType::kFloat8E4M3 && shape.scale_layout == ScaleLayout::kBlock;
  if (codes_by_blocks && !has_groups(shape)) return false;
  return shape.format != WeightFormat::kInt4 && !shape.batch_invariant &&
         shape.M <= most_rows_of_strips(shape) &&
         shape.N % (gemm_config::kStripRows * (is_gated(shape.activation) ? 2 : 1)) == 0 &&
         strips_bytes(shape, strips_rows(shape)) + strips_rings_bytes(shape.format, kFewStages) <=
             kMostBytes;
}

/// Requires: is_for_strips(shape).
constexpr Choice strips_of(const Shape& shape) {
  const int rows = strips_rows(shape);
  return {.path = Path::kStrips,
          .most_rows = kStripTokens,
          .tile_rows = rows,
          .tile_cols = gemm_config::kStripRows,
          .shared_bytes = static_cast<std::int32_t>(strips_bytes(shape, rows))};
}

// ---- Int4 ---------------------------------------------------------------------------------------

constexpr int kDigitsTokens = 8;  // rows of x that a strip meets at a time
constexpr int kDigitsFixedBytes = 336, kSpanBytes = 8;
constexpr int kDigitsStages = 2;  // of a ring: with three 4 tokens of 2048 x 1536 17.2 us and 18.5
constexpr int kDigitsBlocks = gemm_config::kDigitsCols / Int4Layout::kCols;  // of a chunk
constexpr int kGroupScaleBytes = gemm_config::kStripRows * 2;  // of a strip, of a group: scales ...
constexpr int kGroupZeroBytes = gemm_config::kStripRows;       // ... and zero points

/// Of 64 columns of rows of x.
constexpr int x_block_bytes(int rows) { return rows * 128 + 16; }

/// log2 of the columns that share a scale in a chunk.
constexpr int group_shift(int group) {
  int shift = 0;
  while ((1 << shift) < std::min<int>(group, gemm_config::kDigitsCols)) ++shift;
  return shift;
}

constexpr int groups_of_chunk(int group) {
  return std::max(gemm_config::kDigitsCols >> group_shift(group), 1);
}

/// Of a warp's ring.
constexpr int digits_stage_bytes(int group, bool has_zeros) {
  const int groups = groups_of_chunk(group);
  return gemm_config::kDigitsCols * gemm_config::kStripRows / 2 +
         round_up(groups * kGroupScaleBytes, 128) +
         (has_zeros ? round_up(groups * kGroupZeroBytes, 128) : 0);
}

constexpr std::int64_t digits_rings(const Shape& shape) {
  return std::int64_t{kDigitsStages} * kRings * digits_stage_bytes(shape.group, shape.has_zeros);
}

/// Of a block, beside its rings.
constexpr std::int64_t digits_bytes(const Shape& shape, int row_tile) {
  const std::int64_t blocks = ceil_div(shape.K, gemm_config::kDigitsCols) * kDigitsBlocks;
  return kDigitsFixedBytes + round_up<std::int64_t>(blocks * row_tile, 2) * kSpanBytes +
         blocks * x_block_bytes(row_tile) + sums_and_lists(shape, row_tile, kRequesters);
}

constexpr int digits_rows(const Shape& shape) {
  return rows_beside(digits_rings(shape), std::min<std::int64_t>(shape.M, kDigitsTokens),
                     [&](int rows) { return digits_bytes(shape, rows); });
}

/// Rows, at most: an expert, in the mean, six fewer than a strip meets at a time, for the weights
/// of an expert that has more go by twice. H200, lab, us, by expansion and so: 8 and 12 tokens of 2
/// of 8 experts of 14336 x 4096, of which four rows fit, 65.1 59.8 and 61.2 60.3, of 4096 x 28672
/// 123 107 and 113 112; 24, 32, 40 and 64 of 8 of 128 experts of 2048 x 1536 49.5 56.2 58.0 59.8
/// and 48.9 53.2 60.0 64.1. Strips of few chunks leave warps without one: 8 and 16 tokens of 768 x
/// 2048 18.7 23.2 and 18.1 25.6.
constexpr std::int64_t most_rows_of_digits(Shape shape) {
  constexpr int kFewChunks = 4, kFewest = 2;
  if (ceil_div(shape.K, gemm_config::kDigitsCols) < kFewChunks) return ceil_div(shape.experts, 2);
  shape.M = std::max<std::int64_t>(shape.M, kDigitsTokens);
  return std::int64_t{std::max(digits_rows(shape) - 6, kFewest)} * shape.experts;
}

constexpr bool is_for_digits(const Shape& shape) {
  constexpr int kCols = gemm_config::kDigitsCols;
  if (shape.format != WeightFormat::kInt4 || shape.batch_invariant) return false;
  const bool divides = shape.group % Int4Layout::kCols == 0 && kCols % shape.group == 0;
  if (!divides && shape.group % kCols != 0 && shape.group < shape.K) return false;
  return shape.K > kCols && shape.M <= most_rows_of_digits(shape) &&
         digits_bytes(shape, digits_rows(shape)) + digits_rings(shape) <= kMostBytes;
}

/// Requires: is_for_digits(shape).
constexpr Choice digits_of(const Shape& shape) {
  const int rows = digits_rows(shape);
  const bool wide = shape.group % (2 * Int4Layout::kCols) == 0 || shape.group >= shape.K;
  return {.path = Path::kDigits,
          .most_rows = kDigitsTokens,
          .tile_rows = rows,
          .tile_cols = gemm_config::kStripRows,
          .span_cols = wide ? 2 * Int4Layout::kCols : Int4Layout::kCols,
          .shared_bytes = static_cast<std::int32_t>(digits_bytes(shape, rows))};
}

}  // namespace ridgeline::gemm_grouped
