#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_dense_config.h"
#include "kernels/gemm_few_config.h"
#include "kernels/gemm_rows_config.h"
#include "kernels/gemm_shape.h"
#include "kernels/gemm_tiles_config.h"

/// Which kernel multiplies, and how K and the grid are cut: pure functions of the shape.
namespace ridgeline::gemm_config {

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

/// Whether the cluster kernel can multiply it: 64 rows of x, or as many times 64 as there are.
constexpr bool fits_cluster(const Shape& shape) {
  if (!shape.hopper || shape.K == 0 || shape.dtype == DType::kFloat32 || !can_fuse(shape))
    return false;
  const bool int4 = shape.format == WeightFormat::kInt4;
  return int4 ? shape.N % kStripRows == 0 && shape.whole_vectors : shape.weight_aligned;
}

/// Hopper's kernels for few rows. They have orders of K of their own, which no kernel for many rows
/// repeats: not where bits may not depend on M. Of 16 bits, too, which cuBLASLt cuts along K by a
/// kernel of its own and adds up by another: of 40 shapes on an H200, alone, bf16, this one takes
/// 0.59 to 0.98 of its time by 16 rows, and by 64 0.61 to 0.97, but of 3584 x 4608 1.06.
constexpr bool is_for_hopper(const Shape& shape) {
  return !shape.batch_invariant && shape.M <= kFewRows && fits_cluster(shape);
}

/// Quantised weights where bits may not depend on M: the cluster kernel alone, by any number of
/// rows, with tiles and segments of K that are the weight's.
constexpr bool is_for_cluster_alone(const Shape& shape) {
  return shape.batch_invariant && shape.format != WeightFormat::kDense && fits_cluster(shape);
}

/// Hopper's kernels for many rows. They have one order of K, but not that of the other kernels: not
/// where bits may not depend on M.
constexpr bool is_for_hopper_tiles(const Shape& shape) {
  return shape.hopper && !shape.batch_invariant && shape.M > kFewRows && shape.K > 0 &&
         shape.dtype != DType::kFloat32 && shape.format != WeightFormat::kDense &&
         shape.weight_aligned && shape.whole_vectors && can_fuse(shape);
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

/// Whether row tiles of the kernel of two warpgroups by turns are full enough for it to be faster
/// where bits may not depend on M: gated 4096 x 28672, 256, 384 and 512 rows 105, 148, 164 us and
/// the experts' kernel 110, 159, 203, but 192 rows 99 and 82; 128 rows in a model 67, and about 74
/// by the cluster kernel.
constexpr bool has_few_empty_rows(const Shape& shape) {
  return 8 * shape.M >= 7 * round_up<std::int64_t>(shape.M, 128);
}

constexpr Path path_of(const Shape& shape) {
  if (is_for_grouped(shape)) return Path::kGrouped;
  if (is_for_cluster_alone(shape)) return Path::kCluster;
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
    return Path::kCluster;
  }
  const bool full = shape.dtype == DType::kFloat32;
  if (full || !shape.weight_aligned) return may_call ? Path::kLibrary : Path::kSimple;
  if (shape.M <= kStreamRows && shape.format != WeightFormat::kInt8) return Path::kStream;
  return may_call && shape.M > kFewRows ? Path::kLibrary : Path::kTile;
}

/// Tiles of 128 rows of x, by which a weight is expanded half as often: the order of K is that of
/// 64. There are kernels of bfloat16 for them.
constexpr bool has_tall_tiles(const Shape& shape) {
  return shape.M > kFewRows && shape.dtype == DType::kBFloat16 && !shape.byte_x && !shape.codes_x;
}

/// Wide tiles of the cluster kernel, of which each SM has one: fp8, an x of bfloat16 too, as two
/// terms of e4m3, where such tiles leave few SMs idle. H200, 64 rows of 4096 x 28672, us: fp8 by
/// fp8 30.5 and 29.3, by bf16 37.1 and 32.4; 16 rows 29.9 and 29.5, 37.2 and 35.6. Gated, which one
/// block an SM finishes later than two, by bf16 38.3 and 36.1, but fp8 by fp8 32.1 and 32.8. By
/// bf16, which spares the expansion, also where they leave more idle or an SM has two in turn: 3584
/// x 18944 31.8 and 23.5, 8192 x 57344 159 and 125, gated 4096 x 24576 38.7 and 34.5; but 5120 x
/// 13824, 62 tiles, 26.4 and 27.5.
///
/// With scales of blocks it takes fewer rows, too: H200, lab, us, cluster and so, 16 rows of 4096 x
/// 28672 42.4 and 33.4, of 8192 x 57344 150 and 122; but of 3584 x 18944 24.3 and 25.1.
///
/// K is cut where tiles are few, but the blocks of a cluster fill the SMs or have much of it. H200,
/// lab, us, cluster and so, 64 rows, scales of rows; of blocks: 5120 x 13824 in two 28.2, 25.8;
/// 29.0, 25.9; 28672 x 8192 in three 79, 70; 97, 71. But 8192 x 8192 in three 22.5, 25.2; 24.5,
/// 25.8; 4096 x 6144 in four 11.8, 14.4; 13.2, 14.6; 14336 x 4096 in five 20.3, 25.7; 21.9, 26.4.
///
/// Returns the segments of K; 0: another kernel takes less.
constexpr std::int32_t segments_of_wide(const Shape& shape) {
  constexpr std::int32_t kLeastRows = 33, kLeastOfBlocks = 9, kLeastTiles = 120;
  constexpr std::int32_t kLeastOfTerms = 84, kMost = 6, kColumns = 1024, kMuch = 8192;
  const bool gated = is_gated(shape.activation), blocks = scales_blocks(shape);
  if (shape.batch_invariant || shape.format != WeightFormat::kFp8 || shape.normalizes ||
      !(shape.scales_products || blocks) || shape.M < (blocks ? kLeastOfBlocks : kLeastRows) ||
      !(shape.bfloat_x || (shape.codes_x && !gated)))
    return 0;
  const std::int32_t tiles =
      gated ? ceil_div(shape.N / 2, kWideCols / 2) : ceil_div(shape.N, kWideCols);
  if (shape.bfloat_x && tiles > kBlocksWanted)
    return tiles >= 2 * kLeastTiles && tiles <= 2 * kBlocksWanted ? 1 : 0;
  const bool few = shape.M < kLeastRows;
  if (tiles >= (shape.bfloat_x && !few ? kLeastOfTerms : kLeastTiles))
    return tiles <= kBlocksWanted ? 1 : 0;
  if (!shape.bfloat_x || few) return 0;
  for (std::int32_t segments = kMost; segments > 1; --segments)
    if (tiles <= kClusters[segments - 1] && segments * kColumns <= shape.K)
      return tiles * segments >= kLeastTiles || shape.K / segments >= kMuch ? segments : 0;
  return 0;
}

/// Whether the kernel normalizes x on its way. Where it expands int4 too, blocks that weigh x anew
/// each take longer than a kernel ahead; and tiles of fp8 whose x meets its norm are of few heights,
/// which may fill the SMs badly. H200, us, alone, 16 rows, folded and by a kernel ahead: int4 of
/// 4096 x 28672 25.1 and 23.2, of 5120 x 27648 30.3 and 27.3, of 8192 x 10240 23.6 and 20.7, but of
/// 4096 x 6144 8.9 and 9.4; fp8 by bf16 of 8192 x 10240 31.2 and 27.2, of 4096 x 6144 10.2 and 13.1.
constexpr bool folds_norm(const Shape& shape, Path path) {
  constexpr double kBadly = 1.3;
  constexpr std::int32_t kWide = 4;
  if (!shape.normalizes) return false;
  if (path == Path::kStrips || path == Path::kDigits || path == Path::kOnce || path == Path::kHeld)
    return true;
  return path == Path::kCluster && shape.M <= kNormRows && !shape.batch_invariant &&
         shape.format != WeightFormat::kInt4 &&
         !(expands_fp8(shape) && strips_per_sm(shape) > kWide && is_crowded(shape, kBadly));
}

constexpr Config choose(const Shape& of) {
  Shape shape = of;
  Config config{.path = path_of(shape),
                .segments = 1,
                .split = false,
                .tile_rows = 0,
                .tile_cols = 0,
                .fused = true};
  shape.normalizes = config.folds_norm = folds_norm(shape, config.path);
  if (config.path == Path::kStream || config.path == Path::kTile) {
    config.segments = segments_of(shape);
    config.fused = can_fuse(shape);
  }
  if (config.path == Path::kCluster || config.path == Path::kGrouped)
    cut_for_cluster(shape, config);
  if (is_for_cluster_alone(shape) && has_tall_tiles(shape)) config.tile_rows = kTallRows;
  if (const std::int32_t segments = segments_of_wide(shape);
      config.path == Path::kCluster && segments > 0) {
    config.tile_cols = kWideCols;
    config.segments = segments;
    config.shares_stages = false;
    config.splits_x = shape.bfloat_x;
  } else if (config.path == Path::kCluster) {
    cut_rest_of_cluster(shape, config);
  }
  if (config.path == Path::kGrouped) {
    if (config.segments == 1 && has_few_empty_rows(shape) && is_for_turns(shape)) {
      config.path = Path::kTurns;  // K in the same order
    } else if (is_for_few(shape.M, config.segments)) {
      config.path = Path::kCluster;
    }
  }
  if (config.path == Path::kExpand || config.path == Path::kExpandToFp8)
    cut_rest(shape, cut_rows_for_cluster(shape, cut_for_expand(shape, config), config), config);
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
