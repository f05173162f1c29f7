#pragma once
#include <algorithm>
#include <cmath>

#include "device/properties.cuh"
#include "kernels/gemm_grouped_sm90.cuh"

/// What the rows that experts have in the mean decide: a captured graph serves any routing.
namespace ridgeline::gemm_grouped {

constexpr int kOrderedRows = 256;  // an expert in the mean: of fewer the order takes what it saves

/// Weight rows, at most, where gathered rows are put in order by the kernel that multiplies them.
/// Of more a kernel ahead takes 1% of the time.
constexpr int kMostGatheringRows = 8192;

inline std::int64_t mean_rows(const GroupedGemmParams& params) {
  return params.gemm.M / std::max(params.experts, 1);
}

/// Up to so many rows an expert tiles are of 32 rows by 64 weight rows, or by 128 of fp8 that is
/// expanded: four warps a scheduler hide some of that. H200, us, one token of top 2 in 8 experts of
/// 4096 x 28672: fp8 84 and 68; 32 tokens of top 8 in 128 of 2048 x 1536: 114 and 93.
constexpr std::int64_t kFewRows = 20;

/// Up to so many, weights that are expanded are multiplied by four warpgroups, a tile of 256 weight
/// rows, which ask for x once: H200, us, by tiles of many and so, int4 of 4096 x 28672, top 2 of 8
/// experts, 128, 256 and 384 tokens 419 and 225, 471 and 292, 536 and 544. Tiles of 128 weight
/// rows, two blocks an SM: 258 and, of 64 rows of x, 424.
constexpr std::int64_t kMostSomeRows = 80;

/// Rows an expert that may be split into terms.
constexpr std::int64_t kFewestTermRows = 4, kMostTermRows = 160;

inline bool is_int4(const GroupedGemmParams& params) {
  return params.gemm.weight.format == WeightFormat::kInt4;
}

inline bool has_few_rows(const GroupedGemmParams& params) {
  return !is_int4(params) && mean_rows(params) <= kFewRows;
}

/// Whether tiles are of some rows. Those of int4 are multiplied in another order than many.
inline bool has_some_rows(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  const std::int64_t mean = mean_rows(params);
  if (mean > kMostSomeRows) return false;
  if (is_int4(params)) return !p.batch_invariant;
  return p.weight.format == WeightFormat::kFp8 && p.x.dtype != DType::kFloat8E4M3 &&
         mean > kFewRows;
}

/// Rows of nearly all experts, where they are dealt at random.
inline float most_rows(const GroupedGemmParams& params) {
  const auto mean = static_cast<float>(mean_rows(params));
  return std::min(mean + 2 * std::sqrt(mean), static_cast<float>(params.gemm.M));
}

/// Whether int4's groups are whole halves of 256 columns.
inline bool has_whole_groups(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  return p.weight.group % (kColsOfSums / 2) == 0 || p.weight.group >= p.K;
}

/// Whether the kernel that puts rows of x in order leaves sums of their columns, too, for int4 to
/// be multiplied as nibbles. H200, lab, by turns, us, as differences and so, 16, 64 and 256 tokens
/// of top 8 in 128 experts of 2048 x 1536 44.8, 63.5, 72.4 and 41.7, 59.8, 70.2. Not of fewer rows
/// than experts, as one token's: an infinity of x makes its row NaN so, which differences do not.
inline bool has_sums(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  return is_int4(params) && p.x.dtype == DType::kBFloat16 && params.rows != nullptr &&
         !p.weight.zeros && has_some_rows(params) && has_whole_groups(params) &&
         mean_rows(params) > 0 && most_rows(params) <= 32;
}

/// Of a row of x so, and the sums.
inline std::int64_t cols_with_sums(const GroupedGemmParams& params) {
  return std::int64_t{ceil_div(params.gemm.K, kColsOfSums)} * kColsWithSums;
}

/// Whether fp8 meets rows of bfloat16 as two terms of e4m3, which costs the tensor cores as much as
/// expanded weights, and the warps next to nothing. A row's bits are others so. An infinity of x
/// makes its row NaN. H200, lab, by turns, us, expanded and so, scales of rows; of blocks: 256
/// tokens of top 2 in 8 experts of 4096 x 28672 379, 275; 438, 322; 64 of them 263, 228; 386, 279;
/// 640 of them 597, 574; 711, 664; 1024 tokens of top 8 in 128 of 2048 x 1536 161, 149; 186, 157.
/// But of 768 x 2048 768 and 2048 tokens 71, 76 and 138, 149, where as many of blocks are faster.
inline bool has_terms(const GroupedGemmParams& params) {
  const GemmParams& p = params.gemm;
  const std::int64_t mean = mean_rows(params);
  return p.weight.format == WeightFormat::kFp8 && p.x.dtype == DType::kBFloat16 &&
         !p.batch_invariant && mean >= kFewestTermRows && mean <= kMostTermRows &&
         !is_for_strips(params);
}

inline std::size_t terms_bytes(const GroupedGemmParams& params) {
  return round_up(static_cast<std::size_t>(params.gemm.M * cols_of_terms(params)),
                  std::size_t{256});
}

/// The same product of x in terms at the start of the workspace; behind them are their units.
inline GroupedGemmParams of_terms(const GroupedGemmParams& params) {
  GroupedGemmParams terms = params;
  GemmInput& x = terms.gemm.x;
  x.data = params.gemm.workspace;
  x.dtype = DType::kFloat8E4M3;
  x.stride_row = cols_of_terms(params);
  x.scale = reinterpret_cast<const float*>(static_cast<const char*>(params.gemm.workspace) +
                                           terms_bytes(params));
  x.scale_per_row = true;
  terms.rows = nullptr;
  terms.x_rows = params.gemm.M;
  return terms;
}

inline bool is_ordered(const GroupedGemmParams& params) {
  return params.experts > 1 && mean_rows(params) >= kOrderedRows;
}

/// H200, lab, by turns, us of a kernel ahead and so, 8192 tokens of top 8 in 128 experts of 2048 x
/// 1536: fp8 by fp8 466 and 439, bf16 822 and 763, int4 810 and 756; 4096 tokens 274 and 265, 505
/// and 481, 516 and 502; but 1024 123 and 133.
inline bool gathers_inside(const GroupedGemmParams& params) {
  return params.rows != nullptr && is_ordered(params) && params.gemm.N <= kMostGatheringRows;
}

inline std::int64_t gathered_bytes(const GroupedGemmParams& params) {
  const std::int64_t cols = has_sums(params) ? cols_with_sums(params) : params.gemm.K;
  return params.gemm.M * cols * static_cast<std::int64_t>(size_of(params.gemm.x.dtype));
}

/// Behind the rows in order.
inline unsigned* claims_of(const GroupedGemmParams& params) {
  return reinterpret_cast<unsigned*>(static_cast<char*>(params.gemm.workspace) +
                                     gathered_bytes(params));
}
inline std::int64_t claims_count(const GroupedGemmParams& params) {
  return params.gemm.M / kPieceRows + params.experts + 2;
}

/// Whether many experts have a tile less of e4m3 by e4m3 if tiles are a little taller: those of
/// somewhat more rows than whole tiles. Beside rows that are put in order there is no room for it.
/// H200, lab, by turns, us, rows in order: 4096 and 8192 tokens of top 8 in 128 experts of 768 x
/// 2048 164 and 145, 267 and 261, 8192 of 2048 x 1536 438 and 422; but 6000 of the former, which
/// spares no tile, 197 and 202.
inline bool has_tall_tiles(const GroupedGemmParams& params) {
  const auto mean = static_cast<float>(mean_rows(params));
  const int rows = static_cast<int>(mean + std::sqrt(mean));
  return params.experts > 1 && mean >= kManyRows && !gathers_inside(params) &&
         ceil_div(rows, kTallRows) < ceil_div(rows, kManyRows);
}

/// Rows of x that a tile has, at most, of the kernel for many: twice as many as experts have in the
/// mean, for some have more; fewer leave room for more stages. Where experts have one or two tiles
/// of 256 rows, and SMs few tiles, those of 192 are alike in size. `most`: those of tiles that have
/// as many as there are.
inline int row_tile_for(const GroupedGemmParams& params, int columns, int most) {
  const std::int64_t mean = mean_rows(params);
  const auto rows = static_cast<int>(std::clamp<std::int64_t>(mean, 1, kManyRows));
  if (params.experts == 1) return round_up(rows, kPieceRows);  // it has them all
  const bool few_tiles = columns * params.experts < 4 * device::multiprocessors();
  if (few_tiles && mean < 2 * kManyRows) most = 192;
  return 2 * rows < kManyRows ? std::min(round_up(2 * rows, kPieceRows), most) : most;
}

}  // namespace ridgeline::gemm_grouped
