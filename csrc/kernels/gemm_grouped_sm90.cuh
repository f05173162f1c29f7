#pragma once
#include <cuda.h>

#include "device/dequant.cuh"
#include "device/divisor.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_grouped_launch.cuh"
#include "kernels/gemm_sm90.cuh"

/// What a block of Hopper's kernel for experts works on.
namespace ridgeline::gemm_grouped {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kSteps = 4;       // of a stage's columns of K, the depth of one wgmma each
constexpr int kStepBytes = 32;  // of x
constexpr int kVector = 16;                      // bytes of one copy of x
constexpr int kVectors = kRowBytes / kVector;    // of a row of x in a stage
constexpr int kBoxesWithSums = 5;  // of 64 columns: 256 of x, and the sums of both halves
constexpr int kBoxLines = 32;   // of kOutColumns of their y, which go to it at a time

template <class X>
constexpr bool expands(WeightFormat format) {
  return expands(format, sizeof(X) == 1);
}

/// What a kernel of its own knows: how int4 meets some rows of x, whether they and those with a
/// scale for each 128 columns meet gates and their ups, whether those of the latter leave as e4m3,
/// and how often a warpgroup has 64 weight rows.
struct Way {
  Int4As as = Int4As::kAny;
  bool gated = false, codes = false;
  int bands = 1;
};

/// kConsumers_ warpgroups of 64 weight rows, or of two bands of so many, by up to kRows_ rows of x:
/// of few rows one or two, of some four, of many two. X: T, or std::uint8_t, which stands for e4m3,
/// some rows of which are bfloat16 in two terms. kBlocks_: whether scales of fp8 are of blocks.
template <class T_, class X_, WeightFormat kFormat_, int kConsumers_, int kRows_,
          Way kWay_ = Way{}, bool kBlocks_ = false>
struct Tile {
  using T = T_;
  using X = X_;
  static constexpr bool kFp8X = sizeof(X) == 1;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr bool kFp4 = kFormat == WeightFormat::kFp4;
  static constexpr bool kNibbles = has_nibbles(kFormat);
  static constexpr bool kExpands = expands<X>(kFormat);
  static constexpr Way kWay = kWay_;
  static constexpr bool kBlocks = kBlocks_;
  static constexpr int kConsumers = kConsumers_, kRows = kRows_;
  static constexpr bool kSome = kConsumers == 4;
  static constexpr bool kInOrder = kRows > 32 && !kSome;  // of many rows
  static constexpr bool kPlanned = kInOrder || kSome;     // a warp has the next item ready
  // Whether the weights of nearly all experts go by once, and leave L2 to x and y. H200, lab, by
  // turns, us, without and so: int4, 64, 128 and 256 tokens of 2048 x 1536 65.1 62.5 68.2 and 60.1
  // 58.9 66.1, 16 and 64 of 4096 x 28672 122 131 and 118 127; fp8 by bf16, 128 and 256 of 2048 x
  // 1536 105 111 and 102 107. But tiles of 88 rows, 1024 tokens of 768 x 2048, 86 and 93.
  static constexpr bool kReadsOnce = !kInOrder && kRows <= 48;
  // Whether threads copy rows of x that are out of order. Else x always comes by the copy engine,
  // for which one thread or two ask.
  static constexpr bool kCopies = !kInOrder && !kSome;
  static constexpr int kBands = kWay.bands;  // of 64 weight rows a warpgroup
  static constexpr int kPiece = kInOrder && kBands == 1 ? 64 : 32;  // rows whose sums lie together
  // Of shared memory on the way to y.
  static constexpr int kLines = kSome ? 16 : kInOrder ? 2 * kBoxLines : kPiece;
  // Whether rows of e4m3 have a scale for each 128 columns: else they have one. Then they are the
  // operand of 64 rows, and weight rows that of many.
  static constexpr bool kGroups = kFp8X && kBlocks && kInOrder;
  static constexpr bool kScalesRows = kFp8X && !kGroups;
  static constexpr int kScales = kScalesRows ? round_up(kRows, kPiece) : 1;  // of rows of x
  // Boxes of 128 bytes of each row of x in a stage: two of int4 by some rows, four by up to 32, for
  // 50 of a warp's 166 instructions for 128 columns were a stage's, which are half as many so.
  // H200, lab, us, of two and of four: 16 and 64 tokens of 4096 x 28672 139, 158 and 130, 151, of
  // 14336 x 4096 80.2, 98.7 and 74.3, 94.5.
  static constexpr int kBoxes = !kNibbles || !kSome               ? 1
                                : kWay.as == Int4As::kDifferences ||
                                          kWay.as == Int4As::kMasked
                                    ? 4
                                    : 2;
  static constexpr bool kMasked = kNibbles && kSome && kWay.as == Int4As::kMasked;
  static constexpr bool kTerms = kSome && kFp8X;
  // Whether a kernel ahead has laid rows of x out as stages take them, box beside box.
  static constexpr bool kLaidOut = kMasked || kTerms;
  static constexpr int kBoxesOfX = kMasked ? kBoxesWithSums : kTerms ? 2 : kBoxes;
  static constexpr int kBoxDepth = kRowBytes / static_cast<int>(sizeof(X));  // columns of K
  static constexpr int kDepth = kBoxes * kBoxDepth;                          // of a stage
  // Of int4: one for 32 columns, or for the 128 that some rows meet as differences.
  static constexpr int kScaleSets = kBoxes == 4 ? 2 : 2 * kBoxes;
  static constexpr int kCols = kGroups ? kGroupCols : kConsumers * kBands * kWarpgroupRows;
  static constexpr int kParts = kGroups ? kCols / kScaleBlock : 1;  // products are made in
  static constexpr int kMultipliers = kConsumers * kWarpgroup;  // threads
  // Arrivals that give a stage back: of warps, where each reads for itself.
  static constexpr int kReleases = kSome ? 4 * kConsumers : kConsumers;
  static constexpr int kProducers = kWarpgroup;
  // Threads that request a stage where no row is copied: one, or one the weight and its scales and
  // one x. Where lane 0 requested the weight and box after box of x, and another the scales, int4
  // by 128 tokens of 4096 x 28672 took 206 us, of 14336 x 4096 95.6, so 172 and 80.4 (H200, lab).
  static constexpr int kAskers = kNibbles || kSome ? 2 : 1;
  // Whether who requests finds the next tile, and looks for its rows, ahead. H200, lab, by turns,
  // us, 8192 tokens, fp8 by fp8: 2048 x 1536 424 and 419, 768 x 2048 287 and 281, 4096 x 28672 3017
  // and 2958, 14336 x 4096 1561 and 1531.
  static constexpr bool kFindsAhead = kInOrder && (kNibbles || kFp8X);
  // Whether, behind a kernel that puts rows in order, only those who request x wait for it.
  static constexpr bool kStartsEarly = kAskers == 2;
  // Arrivals that fill a stage.
  static constexpr int kFills = kCopies ? 1 + device::kWarpSize : kAskers;
  static constexpr int kThreads = kMultipliers + kProducers;
  static constexpr int kBlocksPerSm = kRows <= 32 && !kSome ? 2 : 1;
  // Twice the sums are kept: of a segment of K, and of those before it.
  static constexpr bool kSegments = kFormat == WeightFormat::kDense && kRows == kSegmentRows;
  // A thread's, of producers and of consumers, where there are several warpgroups of those.
  static constexpr int kFewRegisters = kSome ? 32 : kBlocksPerSm == 2 ? 48 : 40;
  static constexpr int kManyRegisters = kSome ? 112 : kBlocksPerSm == 2 ? 96 : 232;
  static constexpr int kStripBytes = kBoxes * block_bytes_of(kFormat);  // of 4 bits
  static constexpr int kWeightBytes =
      kNibbles ? kCols / 16 * kStripBytes : kCols * kBoxes * kRowBytes / (kExpands ? 2 : 1);
  // Whether those who request find their first tile by themselves: expansion has no registers left,
  // and of many rows bf16 took 554 us for 510 so (H200, 256 tokens, 8 experts of 4096 x 28672).
  static constexpr bool kPlansAhead = kRows <= 32 && !kSome && !kExpands;
  static constexpr float kUnit = kMasked          ? device::kInt4MaskedUnit  // of the sums
                                 : kFormat == WeightFormat::kInt4 && kSome
                                     ? device::kInt4Unit<T>
                                     : 1.0f;
  // Words of 4 bits that an element is, of which a request has 256.
  static constexpr int kWordsEach = kStripBytes > 1024 ? 2 : 1;
  static constexpr int kScaleBytes = 4 * kCols;  // of a set of int4, whole powers of two
};

constexpr int kTurns = kWarpgroup / device::kWarpSize;  // warps that bring stages by turns
constexpr int kMaxStages = 16;
constexpr int kLastRows = 32;  // of x, at most, that a request brings behind those of pieces
constexpr int kStagesOfTwo = 8;  // of each of two blocks on an SM, in rings that are shaped

/// Bytes of a stage with `rows` rows of x and so many sets of scales.
template <class Tile>
constexpr int stage_bytes_of(int rows, int sets) {
  return round_up(Tile::kBoxesOfX * rows * kRowBytes + Tile::kWeightBytes +
                      (Tile::kNibbles ? sets * Tile::kScaleBytes : 0),
                  1024);
}

/// Rows of x that one request brings, of a tile's: a stage has room for whole requests.
template <class Tile>
__host__ __device__ constexpr int box_rows_of(int row_tile) {
  return Tile::kInOrder ? kPieceRows : row_tile;
}

/// What a lane of the warp that puts rows of x in order copies at a time.
constexpr int kUnitVectors = 128;

/// Bytes of x, at most, that a block puts in order ahead of its tile: what is written long before
/// it is read leaves L2 meanwhile. H200, lab, us, 8192 tokens of top 8 in 128 experts of 2048 x
/// 1536, e4m3 by scales of rows and of columns, no limit 450 and 492, 16 MiB 421 and 453; but 4
/// MiB, which the blocks' own tiles have, 527 and 559.
constexpr int kMostAhead = 16 << 20;
constexpr int kMostSlots = 16, kSlotsBytes = 12 << 10;  // for units in shared memory

/// Where rows of x are put in order while others are multiplied.
struct Gather {
  unsigned* claims;     // units that warps have taken, and, of each piece, those that are there.
                        // Null: nobody puts rows in order
  uint4* to;
  int vectors, stride;  // of a row, and between rows of x
  int parts;            // units of a row
  int unit_bytes;       // of a whole one
  int slots, slots_at;  // in shared memory, from the ring on
  int ahead;            // of its row tile, in row tiles, that a block puts rows in order

  int slots_bytes() const { return slots * unit_bytes; }
};

struct Launch {
  GroupedGemmParams grouped;
  CUtensorMap weight, scales, zeros, x;
  CUtensorMap x_behind;  // rows of a tile behind kManyRows, or behind its whole pieces
  bool in_order;  // row s of y is made of row s of x
  bool gathered;  // by a kernel ahead that has waited for those ahead of it
  bool joined;    // one request brings all boxes of a stage's x
  bool ordered;   // experts are taken in an order of their own
  unsigned* tiles_taken;  // by all blocks; null: each takes every so-manieth
  Gather gather;  // where tiles are taken
  int groups = 0;  // scales a stage has of each weight row, up to Tile::kScaleSets; int4
  device::Divisor group;  // columns that share one; int4
  int columns;    // tiles of weight rows
  int steps;      // stages that K makes
  int row_tile;   // rows of x that a tile has, at most
  int stages;     // that the ring has
  int stage_bytes, ring_bytes;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Rows [row0, row0 + rows) of y by tile `column` of the weight rows of `expert`.
struct Item {
  int expert, row0, rows, column;
};

/// What a warp has ready for those who multiply: items, two by turns, and factors of their rows, or
/// which rows of x theirs are.
template <class Tile>
struct Planned {
  Item items[2];  // without rows: the last
  Column columns[2][Tile::kGroups ? 1 : Tile::kCols];
  std::int32_t x_rows[2][Tile::kGroups ? Tile::kRows : 1];
  std::uint64_t full[2], free[2], gathered[kMostSlots];
  int row_tile;  // of all in order, that the block is at
};
struct NotPlanned {};

/// The largest outputs of a row that a warpgroup has, of two items by turns: the other has the rest
/// of the row's outputs where a tile has few rows.
struct HalfMagnitudes {
  float of_row[2][2][kWarpgroupRows];
};
struct NoMagnitudes {};

/// Fixed parts; behind them the ring, and behind that, of each expert, where its rows begin, and
/// where its row tiles.
template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) T out[Tile::kConsumers][Tile::kLines][kOutColumns];
  float x_scale[Tile::kScalesRows ? 2 : 1][Tile::kScales];  // of an item, by turns
  [[no_unique_address]] std::conditional_t<Tile::kWay.codes, HalfMagnitudes, NoMagnitudes>
      magnitudes;
  alignas(8) std::uint64_t full[kMaxStages], free[kMaxStages];
  alignas(16) std::conditional_t<Tile::kPlanned, Planned<Tile>, NotPlanned> planned;
  alignas(1024) std::uint8_t ring[];
};

/// A stage: x, the weight, and int4's scales and zero points.
template <class Tile>
struct Stage {
  struct Scales {  // of 32 columns of K, of 128, or of all
    alignas(Tile::kScaleBytes) typename Tile::T of[Tile::kCols];
    std::uint8_t zeros[Tile::kCols];
  };
  std::uint8_t* start;
  int row_tile;

  __device__ __forceinline__ Stage(std::uint8_t* start, int row_tile)
      : start(start), row_tile(row_tile) {}
  __device__ __forceinline__ Stage(const Launch& launch, Shared<Tile>& shared, int index)
      : Stage(shared.ring + index * launch.stage_bytes, launch.row_tile) {}

  /// Box `box` of x. wgmma's kRows may reach into the weight; their sums are left.
  __device__ __forceinline__ std::uint8_t* x(int box = 0) const {
    return start + box * row_tile * kRowBytes;
  }
  __device__ __forceinline__ std::uint8_t* weight() const { return x(Tile::kBoxesOfX); }
  __device__ __forceinline__ Scales& scales(int set) const {
    return reinterpret_cast<Scales*>(weight() + Tile::kWeightBytes)[set];
  }
};

/// Which stage comes next, and the parity of its use.
struct Ring {
  int stages, stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ridgeline::gemm_grouped
