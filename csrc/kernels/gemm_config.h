#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_shape.h"
#include "kernels/gemm_tiles_config.h"

/// Which kernel multiplies, and how K and the grid are cut: pure functions of the shape.
namespace ridgeline::gemm_config {

/// Gate and up strips pair up only where the halves of the weight are whole strips.
constexpr bool can_fuse(const Shape& shape) {
  return !is_gated(shape.activation) || shape.N / 2 % kStripRows == 0;
}

/// Cuts of K: enough warps to fill the bus at few rows. The same for every M, so that a row's sum
/// has one order. A block of the few-row kernel holds gate and up strips: then at most half.
constexpr std::int32_t segments_of(const Shape& shape) {
  const std::int64_t strips = ceil_div(shape.N, kStripRows);
  const std::int32_t most = is_gated(shape.activation) ? kMaxSegments / 2 : kMaxSegments;
  const std::int32_t blocks = ceil_div(shape.K, kBlockCols);
  std::int32_t segments = 1;
  while (segments < most && segments * 2 <= blocks && strips * segments < kWarpsWanted)
    segments *= 2;
  return segments;
}

/// Hopper's kernels for few rows. They have orders of K of their own, which no kernel for many rows
/// repeats: not where bits may not depend on M.
constexpr bool is_for_hopper(const Shape& shape) {
  if (!shape.hopper || shape.batch_invariant || shape.M > kFewRows || shape.K == 0) return false;
  if (shape.dtype == DType::kFloat32 || !can_fuse(shape)) return false;
  const bool int4 = shape.format == WeightFormat::kInt4;
  return int4 ? shape.N % kStripRows == 0 && shape.whole_vectors : shape.weight_aligned;
}

/// Up to so many rows strips and digits take: more rows are staged by every block, those of the
/// cluster kernel cost it nothing. Chained, it starts later than they do. H200, us, alone and
/// chained, strips or digits and cluster, 4096 x 4096: int4, 4 rows 6.5 / 6.0 and 6.3 / 7.7, 8 rows
/// 8.8 / 8.1 and 6.3 / 7.7; fp8 by bf16 8.1 / 7.4 and 7.1 / 7.9, 9.8 / 9.1 and 7.1 / 7.9; fp8 by
/// fp8, 2 rows 7.0 / 6.4 and 6.3 / 7.0, 8 rows 7.6 / 7.0 and 6.3 / 7.0. All of it with 4096 x 6144,
/// 14336 x 4096, 8192 x 8192 and 4096 x 28672: the former from 3% faster to 30% slower.
constexpr std::int32_t strips_rows(const Shape& shape) {
  const bool int4 = shape.format == WeightFormat::kInt4;
  const bool whole = shape.group % (2 * kBlockCols) == 0 || shape.group >= shape.K;
  if (shape.normalizes || (int4 && (shape.chained || !whole))) return kStripsRows;
  if (int4) return kStripsRows / 2;
  if (shape.format != WeightFormat::kFp8) return kStripsRows;
  return shape.byte_x && !shape.chained ? 1 : kStripsRows / 2;
}

constexpr bool is_for_strips(const Shape& shape) {
  return shape.format != WeightFormat::kInt4 && shape.M <= strips_rows(shape) &&
         strips_bytes(shape) <= 2 * kShareOfSm;
}

/// Groups that divide a chunk or are whole ones.
constexpr bool is_for_digits(const Shape& shape) {
  if (shape.format != WeightFormat::kInt4 || shape.M > strips_rows(shape)) return false;
  const bool divides = shape.group % kBlockCols == 0 && kDigitsCols % shape.group == 0;
  return (divides || shape.group % kDigitsCols == 0 || shape.group >= shape.K) &&
         digits_bytes(shape) <= 2 * kShareOfSm;
}

/// A weight that the registers of all SMs hold: of 4 bits three strips an SM, by up to kOnceRows
/// rows, of 8 bits two, by one. Not chained: its blocks leave no registers to those of the next
/// kernel. H200, us alone, strips or digits and so: int4 4096 x 4096 5.0 and 4.2, 4096 x 6144 6.3
/// and 5.5, 1024 x 4096 3.6 and 2.3; fp8 by bf16 7.0 and 6.5, 1024 x 4096 3.8 and 2.8, but 4096 x
/// 2048, a strip an SM, 4.5 and 4.9. Chained, a layer of 8B products in int4: 39 and 46.
/// Rows of int4 cost it the staging of their bytes: up to 8, and up to 16 of few columns by a
/// weight of two strips an SM. H200, us alone, digits or cluster and so: 2, 4, 8 rows of 4096 x
/// 4096 5.9, 5.9, 6.1 and 4.9, 4.9, 5.1; of 4096 x 6144 7.1, 7.0, 8.4 and 6.7, 6.7, 6.9; 12 and 16
/// of 4096 x 4096 6.2, 6.2 and 6.3, 6.5, of 3072 x 3072 5.3, 5.3 and 4.6, 4.8.
constexpr bool is_for_once(const Shape& shape) {
  const bool int4 = shape.format == WeightFormat::kInt4;
  const bool whole = shape.group % (2 * kBlockCols) == 0 || shape.group >= shape.K;
  if (shape.M > (int4 ? kOnceRows : 1) || shape.K > kOnceMostCols || shape.chained ||
      shape.makes_codes || is_gated(shape.activation))
    return false;
  const std::int32_t strips = ceil_div(ceil_div(shape.N, kStripRows), shape.sms);
  if (int4 && shape.M > kOnceRows / 2)
    return whole && strips <= 2 && shape.M * shape.K <= kOnceX && !shape.byte_x;
  if (int4) return whole && strips <= 3;
  return shape.format == WeightFormat::kFp8 && strips <= 2 &&
         (strips == 2 || shape.K <= kOnceMostCols / 2);
}

/// The kernel that holds x in registers, from where digits take longer. It cannot fold a norm of
/// more columns than a block has. H200, us, 8 rows, alone, cluster and so: 14336 x 4096 16.2 and
/// 14.2, 8192 x 8192 14.1 and 13.6, 4096 x 28672 21.4 and 20.1, 3584 x 18944 17.4 and 14.5, but
/// 5120 x 13824 15.2 and 16.2; chained 17.6 and 14.3, 16.2 and 14.2, 23.5 and 19.9, 17.3 and 15.6,
/// 17.3 and 16.0, 4096 x 4096 8.5 and 6.0. A layer of 8B products, 4, 5 and 8 rows: 46.4 and 53.0,
/// 62.5 and 55.6, 64.5 and 54.6.
constexpr bool is_for_held(const Shape& shape) {
  constexpr std::int32_t kMostBytes = 227 * 1024, kLeastCols = kOnceMostCols / 2;
  const bool whole = shape.group % (2 * kBlockCols) == 0 || shape.group >= shape.K;
  const std::int32_t blocks = ceil_div(shape.K, kOnceMostCols);
  if (shape.format != WeightFormat::kInt4 || !whole || shape.makes_codes || shape.M > kHeldRows ||
      shape.M <= kHeldRows / 2 || shape.K < kLeastCols || blocks > kHeldBlocks ||
      (blocks > 1 && shape.normalizes))
    return false;
  const std::int64_t pairs = ceil_div(shape.N, 2 * kStripRows);
  const std::int64_t strips = 2 * ceil_div<std::int64_t>(pairs, kClusters[blocks - 1]);
  const std::int64_t parts = blocks * ceil_div<std::int64_t>(shape.M, blocks) * strips;
  if (blocks == 1) return kHeldBytes + operand_bytes(shape) <= kMostBytes;
  return kHeldBytes + parts * kStripRows * std::int64_t{sizeof(float)} <= kMostBytes;
}

/// Hopper's kernels for many rows. They have one order of K, but not that of the other kernels: not
/// where bits may not depend on M.
constexpr bool is_for_hopper_tiles(const Shape& shape) {
  return shape.hopper && !shape.batch_invariant && shape.M > kFewRows && shape.K > 0 &&
         shape.dtype != DType::kFloat32 && shape.format != WeightFormat::kDense &&
         shape.weight_aligned && shape.whole_vectors && can_fuse(shape);
}

/// Where the cluster kernel, chained and one launch, beats cuBLASLt's split of K, a kernel that
/// adds its parts and their gaps. H200, bf16, 16, 32 and 64 rows, us: 4096 x 4096 10.7, 10.8, 11.4
/// and 13.3, 13.5, 12.4; 14336 x 4096 29.5, 29.7, 31.0 and 33.1, 34.2, 36.7. In a later run 3584 x
/// 4608 10.9, 11.2, 12.0 and 11.2, 11.5, 11.8; 4096 x 8192 18.7, 18.6, 19.5 and 20.4, 20.4, 21.3;
/// 4096 x 28672 58.9, 58.8, 61.3 and 63.8, 64.5, 67.4; 4096 x 128256 249, 247, 260 and 258, 271,
/// 286. A gated product spares a second kernel: 1024 x 6144 5.6, 5.8, 7.2 and 7.5, 8.1, 8.5; 4096 x
/// 28672 59.2, 60.2, 62.7 and 67.0, 67.5, 70.1. Not 5120 x 5120, whose tiles fill the SMs badly:
/// 18.6, 17.8, 21.4 and 18.5, 16.7, 17.1; nor 2560 x 4096: 8.0, 8.5, 9.3 and 8.3, 8.4, 8.5. But a
/// norm that it folds is a kernel of its own ahead of cuBLASLt: lab, 16 rows of 5120 x 5120, 3072 x
/// 3072, 2048 x 2048 and 1024 x 1024 27.8, 16.8, 11.4 and 7.7, so 16.5, 9.3, 6.3 and 4.6.
constexpr bool cluster_beats_library(const Shape& shape) {
  const bool folds =
      shape.normalizes && shape.M <= kNormRows && shape.dtype == DType::kBFloat16;
  if (is_gated(shape.activation) || folds) return true;
  const std::int64_t elements = std::int64_t{shape.N} * shape.K;
  const bool fills = elements <= 4096 * 6144 || elements >= 4096 * 7168;
  return fills && elements >= (shape.M <= 32 ? 3584 * 3584 : 4096 * 4096);
}

/// Where bits may not depend on M: the cluster kernel and the experts' add the same products in the
/// same order, segments of K and then their sums.
constexpr bool is_for_grouped(const Shape& shape) {
  const bool fused = shape.activation == Activation::kNone ||
                     (shape.activation == Activation::kSiluMul && !shape.has_residual);
  return shape.sm90a && shape.batch_invariant && shape.format == WeightFormat::kDense &&
         shape.dtype != DType::kFloat32 && fused && shape.weight_aligned && shape.K > 0 &&
         shape.N % kStripRows == 0;
}

/// Where the former is faster. H200, us: 4096 x 4096 by 128 and 256 rows 15.8 and 30, the latter 37
/// and 38. Gated 4096 x 28672, whose K is not cut, by 128 rows 68 and 76, by 192 147 and 82.
constexpr bool is_for_few(std::int64_t rows, std::int32_t segments) {
  return rows <= (segments > 1 ? 4 : 2) * kFewRows;
}

/// Where a kernel with the activation in it beats cuBLASLt and one behind it: where tiles of 128 x
/// 128 keep four of five SMs busy, to the last wave and with rows that there are. H200, bf16: 56
/// such products of 128 to 8192 rows took 0.79 to 1.01 of its time, the median 0.88. Not GELU of
/// 512 x 5120 x 1280 (M x N x K), whose 160 tiles leave a second wave all but empty: 18.9 us and
/// 16.5; nor of 256 x 4096 x 1024, 64 tiles: 12.2 and 9.6; nor gated SiLU of 192 x 28672 x 4096,
/// whose second row of tiles is half empty: 110.2 and 90.5, but of 256 rows 110.3 and 119.5; nor
/// where most of the only row of tiles may be. Nor gated ones of many rows,
/// though alone they take less (4096 x 28672 x 4096 1457 us for 1577): in the engine, by turns, 64
/// prompts of 512 tokens of 8B shapes took 716 ms without and 763 with it, one of 4096 95 and 100.
constexpr bool is_for_turns(const Shape& shape) {
  using enum Activation;
  constexpr std::int64_t kSide = 128, kLeastRows = 97, kMostGatedRows = 512;
  const bool fused =
      shape.activation == kGelu || shape.activation == kGeluTanh || shape.activation == kSiluMul;
  if (!fused || shape.has_residual || !shape.hopper || !shape.sm90a ||
      shape.format != WeightFormat::kDense || shape.dtype == DType::kFloat32 ||
      shape.M < kLeastRows || (is_gated(shape.activation) && shape.M > kMostGatedRows) ||
      shape.K == 0 || !shape.weight_aligned || !shape.whole_vectors ||
      shape.N % kStripRows != 0)
    return false;
  const std::int64_t along_n = ceil_div<std::int64_t>(shape.N, kSide);
  const std::int64_t waves =
      ceil_div<std::int64_t>(ceil_div(shape.M, kSide) * along_n, kBlocksWanted);
  return 5 * std::max(shape.M, kSide) * along_n >= 4 * kSide * kBlocksWanted * waves;
}

/// Rows of 16 bits, more than few, that one tile of the cluster kernel holds, where its blocks
/// leave few SMs idle. H200, bf16, chained, 72 and 128 rows, cuBLASLt and so, us: 4096 x 4096 12.2,
/// 11.4 and 14.0, 12.7; 8192 x 4096 23.7, 19.3 and 25.9, 21.2; 14336 x 4096 35.9, 31.1 and 37.1,
/// 34.0; 4096 x 14336 33.9, 30.0 and 33.1, 31.5; 28672 x 8192 133, 114 and 125, 118; 18944 x 3584
/// 43.1, 37.1 and 44.3, 42.3. With more SMs idle 4096 x 6144 16.3, 16.2 and 16.8, 18.0; 5120 x 5120
/// 16.8, 18.1 and 18.0, 19.7. Less K is less to gain: 2048 x 8192 11.2, 10.8 and 11.6, 11.9. GELU
/// by turns is as fast: 128 rows of 4096 x 28672 69.8 and 71.7. Gated 4096 x 28672 takes 67.0, 59.9
/// and 67.9, 66.4 chained to itself, but in the engine a step of 128 sequences of 8B shapes 6.15 ms
/// and 6.31 so; without gates 6.03.
constexpr bool is_for_tall_cluster(const Shape& shape) {
  constexpr std::int32_t kMostRows = 2 * kFewRows, kLeastCols = 4096, kLeastBusy = 112;
  if (!shape.hopper || shape.batch_invariant || shape.format != WeightFormat::kDense ||
      shape.dtype == DType::kFloat32 || !shape.weight_aligned || shape.M <= kFewRows ||
      shape.M > kMostRows || shape.K < kLeastCols ||
      is_gated(shape.activation) || is_for_turns(shape))
    return false;
  Config config{};
  const std::int32_t tiles = cut_for_cluster(shape, config);
  const std::int32_t on_sm = blocks_per_sm(tiles, config.segments);
  return on_sm <= 2 && tiles * config.segments >= on_sm * kLeastBusy;
}

/// Whether row tiles of the kernel of two warpgroups by turns are full enough for it to be faster
/// where bits may not depend on M: gated 4096 x 28672, 256, 384 and 512 rows 105, 148, 164 us and
/// the experts' kernel 110, 159, 203, but 192 rows 99 and 82; 128 rows in a model 67, and about 74
/// by the cluster kernel.
constexpr bool has_few_empty_rows(const Shape& shape) {
  return 8 * shape.M >= 7 * round_up<std::int64_t>(shape.M, 128);
}

constexpr Path path_of(const Shape& shape) {
  if (is_for_grouped(shape)) return Path::kGrouped;
  if (is_for_tall_cluster(shape)) return Path::kCluster;
  if (!shape.batch_invariant && is_for_turns(shape)) return Path::kTurns;
  if (is_for_hopper_tiles(shape)) {
    if (!shape.byte_x) return Path::kExpand;
    return shape.format == WeightFormat::kInt4 ? Path::kExpandToFp8 : Path::kFp8;
  }
  const bool dense = shape.format == WeightFormat::kDense;
  const bool may_call = dense && shape.library && !shape.batch_invariant;
  if (is_for_hopper(shape)) {
    if (is_for_once(shape)) return Path::kOnce;
    if (is_for_strips(shape)) return Path::kStrips;
    if (is_for_held(shape)) return Path::kHeld;
    if (is_for_digits(shape)) return Path::kDigits;
    return may_call && !cluster_beats_library(shape) ? Path::kLibrary : Path::kCluster;
  }
  const bool full = shape.dtype == DType::kFloat32;
  if (full || !shape.weight_aligned) return may_call ? Path::kLibrary : Path::kSimple;
  if (shape.M <= kStreamRows && shape.format != WeightFormat::kInt8) return Path::kStream;
  return may_call && shape.M > kFewRows ? Path::kLibrary : Path::kTile;
}

/// Wide tiles of the cluster kernel, of which each SM has one: fp8, an x of bfloat16 too, as two
/// terms of e4m3, where such tiles leave few SMs idle. H200, 64 rows of 4096 x 28672, us: fp8 by
/// fp8 30.5 and 29.3, by bf16 37.1 and 32.4; 16 rows 29.9 and 29.5, 37.2 and 35.6. Gated, which one
/// block an SM finishes later than two, by bf16 38.3 and 36.1, but fp8 by fp8 32.1 and 32.8.
constexpr bool is_for_wide(const Shape& shape) {
  constexpr std::int32_t kLeastRows = 33, kLeastTiles = 120;
  const bool gated = is_gated(shape.activation);
  if (shape.format != WeightFormat::kFp8 || !shape.scales_products || shape.M < kLeastRows ||
      !(shape.bfloat_x || (shape.codes_x && !gated)))
    return false;
  const std::int32_t tiles =
      gated ? ceil_div(shape.N / 2, kWideCols / 2) : ceil_div(shape.N, kWideCols);
  return tiles >= kLeastTiles && tiles <= kBlocksWanted;
}

constexpr Config choose(const Shape& shape) {
  Config config{.path = path_of(shape),
                .segments = 1,
                .split = false,
                .tile_rows = 0,
                .tile_cols = 0,
                .fused = true};
  if (config.path == Path::kStream || config.path == Path::kTile) {
    config.segments = segments_of(shape);
    config.fused = can_fuse(shape);
  }
  if (config.path == Path::kHeld) config.segments = ceil_div(shape.K, kOnceMostCols);
  if (config.path == Path::kCluster || config.path == Path::kGrouped)
    cut_for_cluster(shape, config);
  if (config.path == Path::kCluster && is_for_wide(shape)) {
    config.tile_cols = kWideCols;
    config.segments = 1;
    config.splits_x = shape.bfloat_x;
  }
  if (config.path == Path::kGrouped) {
    if (config.segments == 1 && has_few_empty_rows(shape) && is_for_turns(shape)) {
      config.path = Path::kTurns;  // K in the same order
    } else if (is_for_few(shape.M, config.segments)) {
      config.path = Path::kCluster;
    }
  }
  if (config.path == Path::kExpand || config.path == Path::kExpandToFp8)
    cut_rows_for_cluster(shape, cut_for_expand(shape, config), config);
  if (config.path == Path::kFp8) cut_rows_for_cluster(shape, cut_for_fp8(shape, config), config);
  if (config.path == Path::kTile) {
    config.tile_rows = shape.M <= 64 ? 64 : 128;
    const std::int64_t tiles =
        ceil_div<std::int64_t>(shape.M, config.tile_rows) * ceil_div(shape.N, kTileCols);
    // Sums of int8 in float32 depend on the cuts, beyond 2^24.
    const bool invariant = shape.format == WeightFormat::kInt8 && shape.batch_invariant;
    config.split = config.segments > 1 && tiles < kBlocksWanted && !invariant;
    config.fused = config.fused && !config.split;
  }
  if (config.path == Path::kSimple) config.fused = !is_gated(shape.activation);
  return config;
}

/// Bytes of the float32 sums that a second kernel, or another block, finishes.
constexpr std::size_t partial_bytes(const Shape& shape, const Config& config) {
  if (config.path == Path::kExpand || config.path == Path::kExpandToFp8)
    return shared_bytes(shape, config);
  if (config.fused || config.path == Path::kLibrary) return 0;
  return static_cast<std::size_t>(config.split ? config.segments : 1) * shape.M * shape.N *
         sizeof(float);
}

}  // namespace ridgeline::gemm_config
