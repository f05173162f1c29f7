#pragma once
#include <cstdint>
#include <optional>

#include "kernels/gemm_grouped.h"

/// What the choice of the kernel for products of experts reads and says, and the sizes that both it
/// and the kernels know.
namespace ridgeline::gemm_grouped {

constexpr int kMaxExperts = 1023;  // and the rows of no expert
constexpr int kPieceRows = 64;  // rows of x that tiles of many multiply whole
constexpr int kManyRows = 256;  // of x, of a tile of many
constexpr int kTallRows = 272;  // of taller ones, of e4m3 by e4m3
constexpr int kWideRows = 160, kWideCols = 256;  // of one of two bands of weight rows
constexpr int kGroupRows = 128, kGroupCols = 256;  // of one by scales of 128 columns of K
constexpr int kSegmentRows = 192;  // and of those that keep sums of segments of K apart

/// Rows of x with sums: so many columns, zeros behind the last one, and what lies behind them.
constexpr int kColsOfSums = 256, kColsWithSums = 320;

/// Columns of a term of x, behind which lie those of the other.
constexpr int kColsOfTerm = 128;

enum class Path : std::uint8_t {
  kTile,    // any GPU: tiles, by mma.sync
  kStrips,  // Hopper, dense and fp8, few rows: blocks stream strips of the weight
  kDigits,  // Hopper, int4, few rows: the same, by the integer tensor cores
  kFew,     // Hopper, dense and fp8, few rows: tiles by wgmma, two blocks an SM
  kTerms,   // Hopper, fp8 by some rows of bfloat16, which are two terms of e4m3
  kSome,    // Hopper, some rows of a weight that is expanded: four warpgroups under a tile
  kMany,    // Hopper, the rest: two
};

/// How rows of x come to the kernel that multiplies them.
enum class RowsOfX : std::uint8_t {
  kInPlace,    // it finds them
  kGathered,   // a kernel ahead puts them in the order of y, ...
  kWithSums,   // ... leaves sums of their columns, too, ...
  kInTerms,    // ... or makes two terms of them
  kMeanwhile,  // a warp of each block puts them in order while those before are multiplied
};

/// What int4 is multiplied as: differences to the zero point, whose sums are scaled; nibbles, whose
/// sums are scaled, too, and whose zero points meet sums of x; or scaled weights, of one scale a
/// stage and without zero points, or of any.
enum class Int4As { kDifferences, kMasked, kScaled, kAny };

struct Shape {
  std::int64_t M;       // rows of y
  std::int64_t x_rows;  // rows of x
  std::int32_t experts;
  std::int32_t N;
  std::int32_t K;
  std::int32_t segments;  // of K
  DType dtype;
  DType x_dtype;
  WeightFormat format;
  ScaleLayout scale_layout;  // of fp8
  std::int32_t x_group;      // columns of e4m3 x that share a scale; 0: all of a row
  std::int32_t group;        // of int4, ...
  bool has_zeros;            // ... which has zero points
  Activation activation;
  bool gathers;  // rows of x have an order of their own
  bool batch_invariant;
  bool sm90a;           // this build and device have wgmma
  bool x_aligned;       // 16-byte loads of rows of x are possible, ...
  bool weight_aligned;  // ... and of weight rows, scales and zero points
  std::int32_t sms;     // of the GPU
};

struct Choice {
  Path path;
  bool expands_x = false;  // a kernel ahead makes 16 bits of e4m3 x
  RowsOfX x = RowsOfX::kInPlace;
  std::int32_t most_rows;  // of x, of a tile of the kernel; strips: that one meets at a time
  std::int32_t tile_rows;  // ... and here, at most
  std::int32_t tile_cols;  // weight rows of it
  bool ordered = false;    // experts of the fullest tiles come first
  bool claimed = false;    // a block takes the next tile that none has, not every so-manieth
  bool scales_groups = false;      // kMany: e4m3 x has scales of 128 columns
  std::optional<Int4As> as = {};   // kSome
  std::int32_t span_cols = 0;      // kDigits: of K, that have a unit
  std::int32_t shared_bytes = 0;   // kStrips, kDigits: of a block, beside its rings
};

/// Rows that experts have in the mean: what they have is read on the device, and a captured graph
/// serves any routing.
constexpr std::int64_t mean_rows(const Shape& shape) {
  return shape.M / (shape.experts > 0 ? shape.experts : 1);
}

/// Whether wgmma meets the weight as 16-bit floats that it is not.
constexpr bool expands(WeightFormat format, bool byte_x) {
  return format != WeightFormat::kDense && !byte_x;
}

/// Up to so many rows an expert tiles are of 32 rows by 64 weight rows, or by 128 of fp8 that is
/// expanded: four warps a scheduler hide some of that. H200, us, one token of top 2 in 8 experts of
/// 4096 x 28672: fp8 84 and 68; 32 tokens of top 8 in 128 of 2048 x 1536: 114 and 93.
constexpr std::int64_t kFewRows = 20;

/// Weight rows of a tile of few rows: four warps a scheduler hide some of the expansion.
constexpr int few_cols(WeightFormat format, bool byte_x) {
  return expands(format, byte_x) ? 128 : 64;
}

/// Tiles of `most` rows, or of as many as there are, in whole vectors of `together`.
constexpr Choice tiles_of(const Shape& shape, Path path, int most, int together, int cols) {
  const auto rows = static_cast<int>(std::min<std::int64_t>(shape.M, most));
  return {.path = path,
          .most_rows = most,
          .tile_rows = rows < most ? round_up(rows, together) : most,
          .tile_cols = cols};
}

}  // namespace ridgeline::gemm_grouped
