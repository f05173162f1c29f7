#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_cluster_config.h"
#include "kernels/gemm_shape.h"

/// Where Hopper's kernels of up to 8 rows are faster than the cluster kernel.
namespace ridgeline::gemm_config {

constexpr std::int32_t kNarrow = 1024;  // rows of the weight

/// Whether the fullest SM has `much` times what the average one has to do where the cluster kernel
/// multiplies, or would have, if it had not tiles of three warpgroups.
constexpr bool is_crowded(const Shape& shape, double much) {
  Config config{};
  const std::int32_t tiles = cut_for_cluster(shape, config), high = config.tile_cols;
  if (high > 2 * kGroupRows && !config.shares_stages) return true;
  const double rows = blocks_per_sm(tiles, config.segments, high) * high;
  return rows * shape.sms > much * config.segments * shape.N;
}

/// Strips of the weight that the fullest SM has.
constexpr std::int32_t strips_per_sm(const Shape& shape) {
  return ceil_div(ceil_div(shape.N, kStripRows), shape.sms);
}

/// Whether one scale covers whole stages of 128 columns.
constexpr bool groups_are_whole(const Shape& shape) {
  return shape.group % (2 * kBlockCols) == 0 || shape.group >= shape.K;
}

/// Up to so many rows digits take: more are staged by every block, those of the cluster kernel cost
/// it nothing. A layer of 8B products that chain to each other, H200, us, 1 to 4 rows by digits
/// 38.9, 43.3, 46.7, 46.7, by the best of what else there is 44.3, 46.0, 48.3, 48.9.
constexpr std::int32_t digits_rows(const Shape& shape) {
  return groups_are_whole(shape) ? kStripsRows / 2 : kStripsRows;
}

/// The same of strips. H200, us, alone, caches cold, strips and cluster:
///
/// fp8 by fp8, 2 rows of 4096 x 4096 6.7 and 5.8, 8192 x 8192 17.9 and 17.1; chained 6.4 and 6.0,
/// 17.7 and 15.7; a layer of 8B products, 2 and 4 rows, 65.1 and 62.0, 65.5 and 62.5; int8 62.4 and
/// 61.4, 62.5 and 61.6, 8 rows 66.0 and 62.6. One row alone of 4096 x 4096 7.0 and 5.8, 4096 x 6144
/// 8.3 and 7.6; but a layer of int8 59.2 and 60.7.
///
/// fp8 by bf16, whose expansion the cluster kernel does anew for each SM's second tile, where SMs
/// have two strips: 2 rows of 4096 x 4096 7.4 and 6.4, 14336 x 4096 17.1 and 15.8; but 4 rows of
/// 4096 x 6144 9.2 and 9.6, of 4096 x 28672 28.8 and 30.6. A norm costs strips less: 8 rows of 4096
/// x 4096 9.7 and 7.1, 4096 x 28672 31.0 and 32.0.
///
/// bf16, 2 rows of 4096 x 4096 10.1 and 9.2, 14336 x 4096 29.1 and 27.7, but of 4096 x 28672 53.3
/// and 54.8; a layer, 2, 4 and 8 rows, 109.2 and 106.3 so, 111.7 and 107.4, 114.0 and 109.7.
///
/// With scales of blocks the cluster kernel scales the products of each stage: one row of 14336 x
/// 4096 16.5 and 20.5, 2 and 4 rows of 4096 x 4096 6.4, 7.5 and 7.0, 7.0; 8 rows of 4096 x 6144
/// 10.6 and 11.8, of 4096 x 28672 31.2 and 38.8, of 5120 x 13824 21.6 and 27.2.
///
/// Where tiles fill the SMs badly strips keep 8; where its warpgroups share out stages the cluster
/// kernel's fill them: 8 rows of fp8 by bf16 of 5120 x 13824 21.4 and 20.3, of 8192 x 57344 125.9
/// and 116.9, of 3584 x 18944 19.5 and 19.9.
///
/// A narrow bf16 weight leaves most SMs idle either way, and strips end sooner: 4 and 8 rows of
/// 2048 x 64 2.6, 3.2 and 3.5, of 4096 x 256 4.0, 4.9 and 5.1, of 2048 x 1024 2.9, 3.8 and 3.8,
/// chained 2.4, 3.6 and 3.1; but of much K, which the cluster kernel cuts, 8 rows of 7168 x 256 7.6
/// and 6.1, 1 and 4 of 14336 x 1024 10.2, 11.7 and 9.4, 11.0.
/// Alone, 8 by 8 bits, strips that leave no SM idle take less by up to 4 rows: 2 and 4 of 3584 x
/// 18944 17.7, 16.9 and the cluster kernel 19.0, 19.1, but chained 18.1, 18.2 and 16.9, 17.0.
constexpr std::int32_t strips_rows(const Shape& shape) {
  constexpr std::int32_t kLeastCols = 3072, kMostCols = 8192, kWide = 4;
  const std::int32_t strips = strips_per_sm(shape);
  const std::int32_t one = shape.chained || shape.normalizes || shape.makes_codes ? 1 : 0;
  const bool dense = shape.format == WeightFormat::kDense;
  if (dense && shape.N <= kNarrow) {
    if (shape.K > kMostCols) return 0;
    return shape.N < kNarrow && shape.K < kLeastCols ? kStripsRows : kStripsRows / 2;
  }
  if (strips > kWide && is_crowded(shape, 1.4)) return kStripsRows;
  const bool fill = strips * std::int64_t{shape.sms} * kStripRows <= shape.N + shape.N / 100;
  if (meets_bytes(shape) && !shape.chained && strips > kWide && fill) return kStripsRows / 2;
  if (shape.byte_x) return (strips == 2 || strips == 3) && shape.K < kMostCols ? one : 1;
  if (scales_blocks(shape) && strips >= 2) return strips > 2 ? kStripsRows : kStripsRows / 4;
  if (strips == 2 && shape.K >= kLeastCols) return one;
  if (dense && strips <= kWide && !shape.normalizes) return 1;
  return !dense && shape.normalizes ? kStripsRows : kStripsRows / 2;
}

constexpr bool is_for_strips(const Shape& shape) {
  return shape.format != WeightFormat::kInt4 && shape.M <= strips_rows(shape) &&
         strips_bytes(shape) <= 2 * kShareOfSm;
}

/// Groups that divide a chunk or are whole ones. Of 3 and 4 rows, which every block stages, narrow
/// weights are the cluster kernel's, if they fill the SMs.
constexpr bool is_for_digits(const Shape& shape) {
  if (shape.format != WeightFormat::kInt4 || shape.M > digits_rows(shape)) return false;
  if (groups_are_whole(shape) && shape.M > 2 && !shape.normalizes && !shape.chained &&
      strips_per_sm(shape) <= 4 && !is_crowded(shape, 1.2))
    return false;
  const bool divides = shape.group % kBlockCols == 0 && kDigitsCols % shape.group == 0;
  return (divides || shape.group % kDigitsCols == 0 || shape.group >= shape.K) &&
         digits_bytes(shape) <= 2 * kShareOfSm;
}

/// A weight that the registers of all SMs hold: of 4 bits three strips an SM, by up to kOnceRows
/// rows, of 8 bits two, by one. Not chained: its blocks leave no registers to those of the next
/// kernel. H200, us alone, strips or digits and so: int4 4096 x 4096 5.0 and 4.2, 4096 x 6144 6.3
/// and 5.5, 1024 x 4096 3.6 and 2.3; fp8 by bf16 1024 x 4096 3.8 and 2.8, but 4096 x 2048, a strip
/// an SM, 4.5 and 4.9. Chained, a layer of 8B products in int4: 39 and 46.
/// Rows of int4 cost it the staging of their bytes: digits or cluster and so, 2, 4, 8 rows of 4096
/// x 4096 5.9, 5.9, 6.1 and 4.9, 4.9, 5.1; of 4096 x 6144 7.1, 7.0, 8.4 and 6.7, 6.7, 6.9. With a
/// norm 5 to 8 rows of that 7.4, held in registers 6.9. Of fp8 the cluster kernel takes less by
/// one row of fp8 of 3072 x 3072 and 4096 x 4096, 4.8 and 4.2, 6.5 and 5.8, by one of bf16 of the
/// latter 6.6 and 6.4; with a norm 6.9 and 7.4.
constexpr bool is_for_once(const Shape& shape) {
  const bool int4 = shape.format == WeightFormat::kInt4;
  if (shape.M > (int4 ? kOnceRows : 1) || shape.K > kOnceMostCols || shape.chained ||
      shape.makes_codes || is_gated(shape.activation))
    return false;
  const std::int32_t strips = strips_per_sm(shape);
  const bool norm_of_many = shape.normalizes && shape.M > kHeldRows / 2;
  if (int4) return groups_are_whole(shape) && strips <= (norm_of_many ? 2 : 3);
  const std::int32_t most = shape.byte_x       ? kOnceMostCols / 2
                            : shape.normalizes ? kOnceMostCols
                                               : kOnceMostCols * 3 / 4;
  return shape.format == WeightFormat::kFp8 && strips <= 2 &&
         shape.K <= (strips == 2 ? most : kOnceMostCols / 2);
}

/// The kernel that holds x in registers, where x meets its norm at no cost: the cluster kernel, which
/// takes about as long without a norm, has one ahead. H200, us, 8 rows, alone and chained, cluster
/// and so: with a norm 4096 x 28672 23.0 and 20.3, 22.9 and 19.9; 3584 x 37888, gated, 34.0 and 22.3;
/// without, cluster and so, 4096 x 28672 19.6 and 20.2, 19.5 and 19.0; 14336 x 4096, two blocks or
/// more, 11.6 and 13.9. A step of 8 sequences of 8B shapes, ms, without too, and so: 2.26 and 2.20.
constexpr bool is_for_held(const Shape& shape) {
  constexpr std::int32_t kMostBytes = 227 * 1024, kLeastCols = kOnceMostCols / 2;
  return shape.format == WeightFormat::kInt4 && shape.normalizes && groups_are_whole(shape) &&
         !shape.makes_codes && shape.M > kHeldRows / 2 && shape.M <= kHeldRows &&
         shape.K >= kLeastCols && shape.K <= kOnceMostCols &&
         kHeldBytes + operand_bytes(shape) <= kMostBytes;
}

}  // namespace ridgeline::gemm_config
