#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_few_config.h"
#include "kernels/gemm_rows_config.h"
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

/// Whether a kernel of its own would stand behind cuBLASLt, if there is one.
constexpr bool has_kernel_behind(const Shape& shape) {
  return !shape.library || !shape.library_finishes;
}

/// Where a kernel with the activation in it beats cuBLASLt and one behind it: where tiles of 128 x
/// 128 keep four of five SMs busy, to the last wave and with rows that there are. H200, bf16: 56
/// such products of 128 to 8192 rows took 0.79 to 1.01 of its time, the median 0.88. Not GELU of
/// 512 x 5120 x 1280 (M x N x K), whose 160 tiles leave a second wave all but empty: 18.9 us and
/// 16.5; nor of 256 x 4096 x 1024, 64 tiles: 12.2 and 9.6; nor gated SiLU of 192 x 28672 x 4096,
/// whose second row of tiles is half empty: 110.2 and 90.5, but of 256 rows 110.3 and 119.5; nor
/// where most of the only row of tiles may be. With a residual 15 products of 512 to 4096 rows took
/// 0.98 to 1.05 of cuBLASLt's time without one, itself 1.01 to 1.07, but 512 x 4096 x 4096 1.067
/// and 1.057. Nor gated ones of many rows, though alone they take less (4096 x 28672 x 4096 1457 us
/// for 1577): in the engine, by turns, 64 prompts of 512 tokens of 8B shapes took 716 ms without
/// and 763 with it, one of 4096 95 and 100. Nor GELU by tanh of much K, which cuBLASLt gives
/// itself: 1024 to 4096 rows of 4096 x 4096, 8192 x 2048, 5120 x 5120, 8192 x 28672 0.90 to 1.01 of
/// this one's time, 4096 x 16384 1.02, but 2048 x 8192 1.04 and 1536 x 6144 1.04 to 1.08.
constexpr bool is_for_turns(const Shape& shape) {
  using enum Activation;
  constexpr std::int64_t kSide = 128, kLeastRows = 97, kMostGatedRows = 512, kMuchK = 4096;
  const bool adds = shape.activation == kNone && shape.has_residual && !shape.batch_invariant;
  const bool activates =
      shape.activation == kGelu || shape.activation == kGeluTanh || shape.activation == kSiluMul;
  const bool by_library =
      shape.activation == kGeluTanh && shape.K >= kMuchK && !has_kernel_behind(shape);
  if (!(adds || (activates && !shape.has_residual)) || by_library || !shape.hopper ||
      !shape.sm90a || shape.format != WeightFormat::kDense || shape.dtype == DType::kFloat32 ||
      shape.M < kLeastRows || (is_gated(shape.activation) && shape.M > kMostGatedRows) ||
      shape.K == 0 || !shape.weight_aligned || !shape.whole_vectors || shape.N % kStripRows != 0)
    return false;
  const std::int64_t along_n = ceil_div<std::int64_t>(shape.N, kSide);
  const std::int64_t waves =
      ceil_div<std::int64_t>(ceil_div(shape.M, kSide) * along_n, kBlocksWanted);
  return 5 * std::max(shape.M, kSide) * along_n >= 4 * kSide * kBlocksWanted * waves;
}

/// Rows of 16 bits that two to four tiles of the cluster kernel hold, where each block has an SM.
/// H200, bf16, alone, 160, 192 and 224 rows, cuBLASLt and so, us: 4096 x 4096 19.7, 18.0, 20.8 and
/// 15.9, 16.8, 17.3; 7168 x 4096 26.2, 30.1, 32.5 and 24.0, 26.2, 26.8; 4096 x 1024, in three
/// segments, 9.4, 9.5, 9.5 and 8.3, 8.5, 9.3; 8192 x 2048, in two, 224 rows 25.8 and 21.2, but 160
/// rows 17.0 and 18.9. Nor are 136 and 256 rows of 4096 x 4096 taken, 14.9, 17.8 and 15.6, 18.5,
/// nor less K or more idle SMs: 3072 x 3072 11.0, 10.8, 13.1 and 11.4, 11.7, 12.0.
///
/// An activation is a kernel behind cuBLASLt: 151 products with GELU take 0.87 of its time in the
/// mean (0.71 to 1.07), 146 with a gated SiLU 0.89: 4096 x 4096 with GELU 22.0, 19.9, 23.4 and
/// 16.7, 17.1, 18.2 (results/2026-12-01_nvidia-h200_tiles_of_x.csv). What cuBLASLt ends itself,
/// GELU by tanh, 192 rows: 4096 x 4096 18.4 and 17.7, 8192 x 2048 24.1 and 21.2, but 1024 x 4096
/// 7.0 and 7.8.
constexpr bool is_for_tall_tiles(const Shape& shape) {
  constexpr std::int32_t kLeast[] = {153, 200, 0, 0};  // rows of a plain one, by segments
  constexpr std::int32_t kMost = 224, kMostOfFewCols = 448;
  constexpr std::int32_t kFewCols = 4096, kMostCols = 8192, kLeastBusy = 112;
  Config config{};
  const std::int32_t tiles = cut_for_cluster(shape, config);
  if (tiles == 0 || shape.K > kMostCols) return false;
  if (has_kernel_behind(shape))
    return shape.M <= (shape.K <= kFewCols ? kMostOfFewCols : kMost);
  if (shape.activation != Activation::kNone && shape.K >= kFewCols) return shape.M <= kMost;
  const bool busy = shape.K >= kFewCols && tiles * config.segments >= kLeastBusy;
  return shape.M >= kLeast[config.segments - 1] && shape.M <= kMost &&
         (config.segments > 2 || busy);
}

/// Rows of 16 bits, more than few, that one tile of the cluster kernel holds, where its blocks
/// leave few SMs idle. H200, bf16, chained, 72 and 128 rows, cuBLASLt and so, us: 4096 x 4096 12.2,
/// 11.4 and 14.0, 12.7; 8192 x 4096 23.7, 19.3 and 25.9, 21.2; 14336 x 4096 35.9, 31.1 and 37.1,
/// 34.0; 4096 x 14336 33.9, 30.0 and 33.1, 31.5; 28672 x 8192 133, 114 and 125, 118; 18944 x 3584
/// 43.1, 37.1 and 44.3, 42.3. Tiles of more than 64 weight rows that share K need much of it:
/// alone, 28672 x 8192 128, 114 and 126, 119, but 8192 x 7168 31.9, 33.0 and 33.7, 34.7, 6144 x
/// 8192 27.4, 28.5 and 28.7, 30.0. With more SMs idle 4096 x 6144 16.3, 16.2 and 16.8, 18.0; 5120 x
/// 5120 16.8, 18.1 and 18.0, 19.7. Less K is less to gain: 2048 x 8192 11.2, 10.8 and 11.6, 11.9.
/// GELU by turns is as fast: 128 rows of 4096 x 28672 69.8 and 71.7. Gated 4096 x 28672 takes 67.0,
/// 59.9 and 67.9, 66.4 chained to itself, but in the engine a step of 128 sequences of 8B shapes
/// 6.15 ms and 6.31 so; without gates 6.03.
///
/// An activation is a kernel behind cuBLASLt, of 2 to 4 us. So then tiles may leave more SMs idle,
/// as long as each has one at most: what they would have had of the weight counts. H200, bf16 with
/// GELU, alone, 72, 96 and 128 rows, before and so, us: 1024 x 4096 8.0, 8.1, 7.9 and 6.6, 6.9,
/// 7.3; 2048 x 8192 14.8, 15.2, 16.0 and 12.3, 12.6, 13.7; 4096 x 6144, with 110 blocks, 19.5,
/// 20.0, 20.7 and 18.0, 18.9, 19.9; but 5120 x 5120, with 92, 20.3, 21.2, 21.8 and 20.7, 21.3,
/// 21.5, and 6144 x 12288, two on some SMs, 45.4, 45.0, 46.1 and 48.0, 50.2, 52.9. By turns 128
/// rows of 4096 x 16384 take 41.4 and so 39.7; gated 3072 x 16384 29.9 and 30.3
/// (results/2026-11-30_nvidia-h200_ends_of_few_tiles.csv). Where cuBLASLt has the activation this
/// is for more K alone: GELU by tanh, 96 and 128 rows, cuBLASLt and so: 1024 x 4096 6.2, 6.3 and
/// 6.9, 7.6; 2048 x 8192 13.7, 14.4 and 13.4, 14.2; 4096 x 4096 16.5, 15.6 and 14.4, 14.7.
///
/// Tiles of 64 weight rows whose K is cut in three or four are fast where they are few, too: 15
/// shapes of up to 2048 weight rows, plain, 72 to 128 rows, 0.77 to 1.03 of cuBLASLt's time, but
/// 128 rows of 14336 x 1024 1.12 (results/2026-12-01_nvidia-h200_tiles_of_x.csv).
constexpr bool is_for_tall_cluster(const Shape& shape) {
  constexpr std::int32_t kLeastCols = 4096, kLeastBusy = 112;
  constexpr std::int32_t kLeastOfLarge = 16384, kLeastOfKnown = 2048, kMostCols = 8192;
  constexpr std::int64_t kMostIdle = 6'000'000;  // weights
  if (!shape.hopper || shape.batch_invariant || shape.format != WeightFormat::kDense ||
      shape.dtype == DType::kFloat32 || !shape.weight_aligned || shape.M <= kFewRows ||
      shape.K == 0 || !can_fuse(shape))
    return false;
  if (shape.M > kTallRows) return is_for_tall_tiles(shape);
  const bool gated = is_gated(shape.activation), turns = is_for_turns(shape);
  Config config{};
  const std::int32_t tiles = cut_for_cluster(shape, config);
  const std::int32_t on_sm = blocks_per_sm(tiles, config.segments, config.tile_cols);
  const std::int32_t blocks = tiles * config.segments;
  const bool large = config.tile_cols > kGroupRows && config.segments > 1;
  const bool gains = has_kernel_behind(shape) || shape.K >= kLeastOfKnown;
  if (shape.activation != Activation::kNone && gains && !(gated && turns) && on_sm == 1 &&
      (kBlocksWanted - blocks) * (std::int64_t{shape.N} * shape.K / kBlocksWanted) < kMostIdle)
    return true;
  if (gated || turns || shape.K < kLeastCols || on_sm > 2) return false;
  if (large) return blocks >= on_sm * kLeastBusy && shape.K >= kLeastOfLarge;
  return (config.segments > 2 && shape.K <= kMostCols) || blocks >= on_sm * kLeastBusy;
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
