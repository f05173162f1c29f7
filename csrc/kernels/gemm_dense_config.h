#pragma once
#include <algorithm>
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm_cluster_config.h"
#include "kernels/gemm_shape.h"

/// More than few rows by dense weights of 16 bits: where turns and the cluster kernel beat cuBLASLt.
namespace ridgeline::gemm_config {

/// Where a kernel with the activation in it beats cuBLASLt and one behind it: where tiles of 128 x
/// 128 keep four of five SMs busy, to the last wave and with rows that there are. H200, bf16: 56
/// such products of 128 to 8192 rows took 0.79 to 1.01 of its time, the median 0.88. Not GELU of
/// 512 x 5120 x 1280 (M x N x K), whose 160 tiles leave a second wave all but empty: 18.9 us and
/// 16.5; nor gated SiLU of 192 x 28672 x 4096, whose second row of tiles is half empty: 110.2 and
/// 90.5, but of 256 rows 110.3 and 119.5; nor where most of the only row of tiles may be. With a
/// residual 15 products of 512 to 4096 rows took 0.98 to 1.05 of cuBLASLt's time without one,
/// itself 1.01 to 1.07, but 512 x 4096 x 4096 1.067 and 1.057. Nor gated ones of many rows, though
/// alone they take less (4096 x 28672 x 4096 1457 us for 1577): in the engine, by turns, 64 prompts
/// of 512 tokens of 8B shapes took 716 ms without and 763 with it, one of 4096 95 and 100. Nor GELU
/// by tanh of much K, which cuBLASLt gives itself: 1024 to 4096 rows of 4096 x 4096, 8192 x 2048,
/// 5120 x 5120, 8192 x 28672 0.90 to 1.01 of this one's time, 4096 x 16384 1.02, but 2048 x 8192
/// 1.04 and 1536 x 6144 1.04 to 1.08.
///
/// Of little K, where the kernel behind is much of the time, and of rows that are no good number
/// for cuBLASLt, emptier waves do, too: of 12 shapes that this was not fitted to 57 products with
/// GELU take 0.90 of the time in the mean (0.76 to 1.07), 51 gated ones 0.86. 1280 x 5120 by 224
/// and 320 rows with GELU 12.0, 15.7 and 11.0, 11.5; 4096 x 6144 by 224 29.8 and 26.3, but by 192
/// and 256 as long, and by 448, two waves, 1.18 of it
/// (results/2026-12-01_nvidia-h200_emptier_waves.csv).
constexpr bool is_for_turns(const Shape& shape) {
  using enum Activation;
  constexpr std::int64_t kSide = 128, kLeastRows = 97, kMostGatedRows = 512;
  constexpr std::int64_t kLittleK = 2048, kMuchK = 4096;
  constexpr std::int64_t kMostOfTwo = 224, kMostOfThree = 320;  // rows, of so many tiles
  constexpr std::int64_t kFull = 80, kLeastOfOne = 45, kLeastOfMore = 63;  // of SMs, in hundredths
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
  const std::int64_t full =
      100 * std::max(shape.M, kSide) * along_n / (kSide * kBlocksWanted * waves);
  if (full >= kFull) return true;
  if (adds || shape.batch_invariant || !has_kernel_behind(shape) || shape.M <= kSide) return false;
  const bool two = shape.M <= 2 * kSide;  // tiles
  if (two && waves > 1) return false;
  if (shape.K < kLittleK) return full >= (waves == 1 ? kLeastOfOne : kLeastOfMore);
  return full >= kLeastOfMore &&
         (two ? shape.M <= kMostOfTwo : waves <= 2 && shape.M <= kMostOfThree);
}

/// Whether plain products of more than few rows of 16 bits are as fast as cuBLASLt's in `tiles` of
/// the cluster kernel. Of those that share K most are; of the others those that leave few SMs idle,
/// and those of at most 80 rows of x each, which are multiplied in no more columns. 40 shapes by 72
/// to 448 rows, 780 products of bf16: the choice is 0.5% from the faster one in the mean; of 22
/// other shapes 1.4% (results/2026-12-01_nvidia-h200_even_tiles.csv). Where cuBLASLt ends an
/// activation, or idle SMs spoke against its tiles, those that fill the SMs and that share K are.
constexpr bool is_fast_plain(const Shape& shape, const Config& config, std::int32_t tiles) {
  constexpr std::int32_t kShort = 80, kLessShort = 96, kLittleK = 1024, kSomeK = 2048;
  constexpr std::int32_t kMuchK = 4096, kMostK = 8192, kLeastBusy = 112;
  constexpr std::int32_t kMostOfOne = 240, kLeastOfTwo = 200, kMostOfTwo = 224;  // rows of x ...
  constexpr std::int32_t kMostOfThree = 256;  // ... of so many segments
  const std::int32_t on_sm = blocks_per_sm(tiles, config.segments, config.tile_cols);
  const std::int64_t rows = ceil_div(shape.M, ceil_div<std::int64_t>(shape.M, kTallRows));
  const bool small = config.tile_cols == kGroupRows && on_sm == 1 &&
                     shape.activation == Activation::kNone;
  if (config.segments > 2 && shape.K <= kMostK)
    return config.segments > 3 || shape.M <= kMostOfThree;
  if (small && config.segments == 2 && (rows <= kShort || shape.M <= kLessShort)) return true;
  if (small && config.segments == 1 && rows <= kShort && shape.K <= kLittleK) return true;
  if (tiles * config.segments < on_sm * kLeastBusy) return false;
  if (shape.M <= kTallRows)
    return shape.K >= (small && config.segments == 1 ? kSomeK : kMuchK) && on_sm <= 2;
  if (config.segments == 1) return shape.K >= kMuchK && shape.M <= kMostOfOne;
  return shape.K >= kMuchK && shape.M >= kLeastOfTwo && shape.M <= kMostOfTwo;
}

/// Rows of 16 bits that two to four tiles of the cluster kernel hold, where each block has an SM.
/// An activation is a kernel behind cuBLASLt: of 29 shapes by 136 to 448 rows, bf16, alone, 151
/// products with GELU take 0.87 of its time in the mean (0.71 to 1.07), 146 with a gated SiLU 0.89:
/// 4096 x 4096 with GELU, 160, 192 and 224 rows 22.0, 19.9, 23.4 and 16.7, 17.1, 18.2. What
/// cuBLASLt ends itself, GELU by tanh, 192 rows: 4096 x 4096 18.4 and 17.7, 8192 x 2048 24.1 and
/// 21.2, but 1024 x 4096 7.0 and 7.8 (results/2026-12-01_nvidia-h200_tiles_of_x.csv).
constexpr bool is_for_tall_tiles(const Shape& shape) {
  constexpr std::int32_t kMost = 224, kMostOfFewCols = 448;
  constexpr std::int32_t kFewCols = 4096, kMostCols = 8192;
  Config config{};
  const std::int32_t tiles = cut_for_cluster(shape, config);
  if (tiles == 0) return false;
  const bool activates = shape.activation != Activation::kNone && shape.K <= kMostCols;
  if (activates && has_kernel_behind(shape))
    return shape.M <= (shape.K <= kFewCols ? kMostOfFewCols : kMost);
  if (activates && shape.K >= kFewCols && shape.M <= kMost) return true;
  return is_fast_plain(shape, config, tiles);
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
constexpr bool is_for_tall_cluster(const Shape& shape) {
  constexpr std::int32_t kLeastOfLarge = 16384, kLeastOfKnown = 2048;
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
  if (gated || turns || (large && shape.K < kLeastOfLarge)) return false;
  return is_fast_plain(shape, config, tiles);
}

}  // namespace ridgeline::gemm_config
