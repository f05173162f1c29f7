#pragma once
#include <cstdint>

#include "common/math.h"
#include "kernels/gemm.h"

/// What the choice of a product's kernel reads and says, and the sizes that both it and the kernels
/// know.
namespace ridgeline::gemm_config {

constexpr int kBlockCols = 64;      // columns of K a pipeline stage holds
constexpr int kStripRows = 16;      // weight rows a warp multiplies at a time: two n8 operands
constexpr int kMaxSegments = 8;     // warps a block of the few-row kernel has
constexpr int kStreamRows = 16;     // the few-row kernel's most rows: one m16 operand
constexpr int kFewRows = 64;        // of x, in a tile of the cluster kernel
constexpr int kStripsRows = 8;      // Hopper: the most rows of the strips and the digits kernel
constexpr int kDigitsCols = 512;    // columns of K that a warp of the latter takes at a time
constexpr int kOnceCols = 256;  // of K that a warp has where registers hold the weight, ...
constexpr int kOnceMostCols = 16 * kOnceCols;  // ... and all of a block
constexpr int kOnceRows = 8;                   // the most of x there, by int4
constexpr int kHeldRows = 8;    // the most of the kernel that holds x in registers, ...
constexpr int kHeldStages = 4;  // ... stages of a warp's ring ...
constexpr int kHeldStageBytes = 2144;
constexpr int kHeldBytes = 156 * 1024;  // ... and shared memory, besides bias and residual
constexpr int kTallRows = 128;      // of x, in a tall tile of the cluster kernel
constexpr int kNormRows = 16;       // of x that the cluster kernel folds a norm of
constexpr int kGroupRows = 64;      // weight rows that a warpgroup of the cluster kernel multiplies
constexpr int kWideCols = 224;   // weight rows of the cluster kernel's wide tiles
constexpr int kBroadCols = 192;  // and of its broad ones, of three warpgroups, at most
constexpr int kShortCols = 48;   // and of its short ones, of three warpgroups, too
constexpr int kRowsByStages = 32;    // the most of x where three take stages by turns, ...
// ... and times 64 weight rows whose sums are scaled: of int4 by 16-bit x, and of blocks of fp8.
constexpr int kScaledUnitsByStages = 3;
constexpr int kShareOfSm = 112 * 1024;  // shared memory a block takes so that two share an SM
constexpr int kCodesCols = 16384;   // columns of a row whose codes the strips kernel makes
constexpr int kGateCols = 224;   // weight rows of fp8 by fp8's tiles of gates and ups
constexpr int kTileCols = 128;      // weight rows a block of the tile kernel owns
constexpr int kWarpsWanted = 1500;  // 11 an SM of 132: with 8 KB each in flight, the bus is full
// Fewer tiles than this leave SMs idle: K is split over the grid.
constexpr int kBlocksWanted = 132;

/// Shared memory of a block of strips or digits, and of one of the cluster kernel's that has an SM
/// of its own: two do not fit an SM, but one beside decode attention's does, or one of kShareOfSm.
/// Where two fitted, those of products with less x stacked. H200, a token of 8B products, 4 rows:
/// bf16 5.01 ms, so 3.59; fp8 2.92, 2.64; int4 1.73, 1.44; one row the same.
constexpr int kShareOfStrips = 114 * 1024;
static_assert(kShareOfSm + kShareOfStrips + 2 * 1024 <= 228 * 1024);

enum class Path : std::uint8_t {
  kStrips,   // Hopper, 8 rows or fewer: each block streams whole strips of the weight
  kDigits,   // Hopper, int4, 8 rows or fewer: the same, by the integer tensor cores
  kCluster,  // Hopper, up to 64 rows, and more of them: tiles, K cut by a cluster of blocks
  kStream,   // up to 16 rows: each warp streams a strip of the weight
  kTile,     // shared-memory tiles
  kExpand,   // Hopper, more rows: a weight of 4 or 8 bits is expanded between memory and wgmma
  kExpandToFp8,  // Hopper, more rows: int4 is expanded to e4m3, which x is
  kFp8,      // Hopper, more rows, both operands of 8 bits
  kLibrary,  // cuBLASLt
  kSimple,   // any alignment, and float32 without the library
  kGrouped,  // Hopper, dense, where bits may not depend on M: the experts' kernel, of one
  kTurns,    // Hopper, dense, more rows, more than a product: two warpgroups by turns
  kOnce,     // Hopper, one row, of int4 a few, a small weight of 4 or 8 bits: registers hold it
  kHeld,     // Hopper, int4, 5 to 8 rows with a norm: registers hold x
};

struct Shape {
  std::int64_t M;
  std::int32_t N;
  std::int32_t K;
  DType dtype;
  WeightFormat format;
  Activation activation;
  std::int32_t group;   // of int4
  bool sm90a;           // this build and device have wgmma
  bool has_residual;
  bool hopper;          // the copy engine and wgmma are there and can reach x and the weight
  bool weight_aligned;  // 16-byte loads of weight rows are possible
  bool whole_vectors;   // Hopper's kernels for many rows can reach scales, residual and y
  bool byte_x;          // x is of 8 bits, and the tensor cores can multiply it so
  bool codes_x;         // x is of e4m3, as the cluster kernel can take it; ...
  bool bfloat_x;        // ... or of bfloat16, as y is
  bool scales_products;  // a row of the weight, or all, have one scale
  bool library;         // cuBLASLt can be opened ...
  bool library_finishes;  // ... and gives y: no kernel stands behind it
  bool batch_invariant;
  bool chained;     // kernels follow each other, and this one requests its weights meanwhile
  bool normalizes;  // x has a norm, which some of the kernels can fold
  bool makes_codes = false;          // and becomes e4m3 there
  bool wide_groups = false;          // of 256 columns of x have scales
  bool gates_alone = false;  // silu_mul to bfloat16 of fp8 rows with a scale each, and nothing else
  std::int32_t sms = kBlocksWanted;  // of the GPU
};

/// Gate and up strips pair up only where the halves of the weight are whole strips.
constexpr bool can_fuse(const Shape& shape) {
  return !is_gated(shape.activation) || shape.N / 2 % kStripRows == 0;
}

/// Whether a kernel of its own would stand behind cuBLASLt, if there is one.
constexpr bool has_kernel_behind(const Shape& shape) {
  return !shape.library || !shape.library_finishes;
}

/// Whether cuBLASLt knows how y ends: it adds bias and residual, or without one has an activation,
/// of bfloat16 two; its relu of float16 makes zeros of NaN in some of its kernels.
constexpr bool library_knows(Activation activation, bool has_residual, DType dtype) {
  if (activation == Activation::kNone) return true;
  if (has_residual) return false;
  if (activation == Activation::kRelu) return dtype == DType::kBFloat16;
  return activation == Activation::kGeluTanh && dtype != DType::kFloat32;
}

/// Shared memory that a block which has strips of the weight keeps bias and residual in, at most.
constexpr std::int64_t operand_bytes(const Shape& shape) {
  const std::int64_t rows = 2 + (shape.has_residual ? shape.M : 0);
  return rows * ceil_div(ceil_div(shape.N, kStripRows), shape.sms) * kStripRows * 2;
}

/// Shared memory of the strips kernel: ring and barriers, sums, x and its units.
constexpr std::int64_t strips_bytes(const Shape& shape) {
  constexpr std::int64_t kRing = 66 * 1024, kSums = 2 * 8 * kStripRows * sizeof(float);
  constexpr std::int64_t kUnit = 256 / sizeof(float);  // columns that share a byte of units
  const int together = shape.format == WeightFormat::kInt8 ? 2 : 1;  // int8 in a column of 16 bits
  const std::int64_t cols = round_up<std::int64_t>(ceil_div(shape.K, together), 512);
  return kRing + shape.M * (kSums + 2 * cols + cols / kUnit + 32) + operand_bytes(shape);
}

/// Shared memory of the digits kernel, at most: rings, sums, x and the spans of it.
constexpr std::int64_t digits_bytes(const Shape& shape) {
  constexpr std::int64_t kRing = 8 * 2 * (8 * 512 + 256 + 128) + 1024;
  constexpr std::int64_t kSums = 2 * 8 * kStripRows * sizeof(float), kX = 2 * kDigitsCols + 64;
  return kRing + shape.M * kSums + ceil_div(shape.K, kDigitsCols) * (shape.M * kX + 128) +
         operand_bytes(shape);
}

/// The last columns of y, behind whole waves of the others' tiles: tiles of the cluster kernel.
struct Rest {
  std::int32_t cols = 0;  // or there are none
  std::int32_t tile_rows = 0, tile_cols = 0, segments = 0;
  bool beside = false;    // the others: its blocks fill the SMs as theirs end
};

struct Config {
  Path path;
  std::int32_t segments;   // K is cut into this many; their sums are added in order
  bool split;              // a second kernel adds them; else one block or cluster does
  std::int32_t tile_rows;  // of the kernels that have tiles of x
  std::int32_t tile_cols;  // of the weight, in Hopper's kernels that have tiles of it
  bool fused;              // the epilogue is in the product's kernel
  bool folds_norm = false;     // x meets its norm there, and not in a kernel ahead
  bool splits_x = false;   // kCluster: x becomes two terms of e4m3 first
  bool shares_stages = false;  // kCluster: three warpgroups take stages of whole tiles by turns
  std::int32_t tail = 0;   // kExpand: last stages of each tile that blocks besides multiply ahead
  std::int32_t tails = 0;  // ... each of so many tiles
  bool even = false;       // kExpand: blocks multiply as many stages each, parts of tiles too
  Rest rest = {};          // columns that the cluster kernel multiplies behind this one ...
  bool of_rest = false;    // ... which is that
};

}  // namespace ridgeline::gemm_config
