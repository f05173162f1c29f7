#pragma once
#include <cuda.h>

#include "device/dequant.cuh"
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
constexpr int kPieceRows = 64;  // rows of x that tiles of many multiply whole
constexpr int kBoxLines = 32;   // of kOutColumns of their y, which go to it at a time

/// Whether wgmma meets the weight as 16-bit floats that it is not.
template <class X>
constexpr bool expands(WeightFormat format) {
  return format != WeightFormat::kDense && sizeof(X) != 1;
}

/// What int4 is multiplied as: differences to the zero point, whose sums are scaled; or scaled
/// weights, of one scale a stage and without zero points, or of any.
enum class Int4As { kDifferences, kScaled, kAny };

/// How int4 meets some rows of x.
struct Int4Way {
  Int4As as = Int4As::kAny;
  bool gated = false;
};

/// kConsumers_ warpgroups of 64 weight rows each by up to kRows_ rows of x: of few rows one or two,
/// of some four, of many two. X: T, or std::uint8_t, which stands for e4m3.
template <class T_, class X_, WeightFormat kFormat_, int kConsumers_, int kRows_,
          Int4Way kWay_ = Int4Way{}>
struct Tile {
  using T = T_;
  using X = X_;
  static constexpr bool kFp8X = sizeof(X) == 1;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr bool kExpands = expands<X>(kFormat);
  static constexpr Int4Way kWay = kWay_;
  static constexpr int kConsumers = kConsumers_, kRows = kRows_;
  static constexpr bool kSome = kConsumers == 4;
  static constexpr bool kInOrder = kRows > 32 && !kSome;  // of many rows
  // Whether threads copy rows of x that are out of order. Else x always comes by the copy engine,
  // and one thread requests all.
  static constexpr bool kCopies = !kInOrder && !kSome;
  static constexpr int kPiece = kInOrder ? 64 : 32;  // rows whose sums lie together
  // Boxes of 128 bytes of each row of x in a stage: two of int4 by some rows, which then waits and
  // fetches scales half as often.
  static constexpr int kBoxes = kInt4 && kSome ? 2 : 1;
  static constexpr int kBoxDepth = kRowBytes / static_cast<int>(sizeof(X));  // columns of K
  static constexpr int kDepth = kBoxes * kBoxDepth;                          // of a stage
  static constexpr int kScaleSets = 2 * kBoxes;  // of int4: one for 32 columns
  static constexpr int kCols = kConsumers * kWarpgroupRows;
  static constexpr int kMultipliers = kConsumers * kWarpgroup;  // threads
  // Arrivals that give a stage back: of warps, where each multiplies for itself.
  static constexpr int kReleases = kSome ? 4 * kConsumers : kConsumers;
  static constexpr int kProducers = kWarpgroup;
  // Where a stage takes less time to multiply than to request, warps request stages by turns.
  static constexpr int kTurns = kRows <= 32 && !kSome ? kProducers / device::kWarpSize : 1;
  static constexpr int kTeam = kProducers / kTurns;  // threads that may copy rows to a stage
  static constexpr int kThreads = kMultipliers + kProducers;
  static constexpr int kBlocksPerSm = kRows <= 32 && !kSome ? 2 : 1;
  // Twice the sums are kept: of a segment of K, and of those before it.
  static constexpr bool kSegments = kFormat == WeightFormat::kDense && kRows == 192;
  // A thread's, of producers and of consumers, where there are several warpgroups of those.
  static constexpr int kFewRegisters = kSome ? 32 : kBlocksPerSm == 2 ? 48 : 40;
  static constexpr int kManyRegisters = kSome ? 112 : kBlocksPerSm == 2 ? 96 : 232;
  static constexpr int kWeightBytes =
      kCols * kBoxes * kRowBytes / (!kExpands ? 1 : kInt4 ? 4 : 2);
  // Whether those who request find their first tile by themselves: expansion has no registers left,
  // and of many rows bf16 took 554 us for 510 so (H200, 256 tokens, 8 experts of 4096 x 28672).
  static constexpr bool kPlansAhead = kRows <= 32 && !kExpands;
  static constexpr float kUnit = kInt4 && kSome ? device::kInt4Unit<T> : 1.0f;  // of the sums
  static constexpr int kScaleBytes = 4 * kCols;  // of a set of int4, whole powers of two
};

constexpr int kMaxStages = 16;
constexpr int kStagesOfTwo = 8;  // of each of two blocks on an SM, in rings that are shaped

/// Bytes of a stage with `rows` rows of x and so many sets of scales.
template <class Tile>
constexpr int stage_bytes_of(int rows, int sets) {
  return round_up(Tile::kBoxes * rows * kRowBytes + Tile::kWeightBytes +
                      (Tile::kInt4 ? sets * Tile::kScaleBytes : 0),
                  1024);
}

/// Rows of x that one request brings, of a tile's: a stage has room for whole requests.
template <class Tile>
__host__ __device__ constexpr int box_rows_of(int row_tile) {
  if (!Tile::kSome) return Tile::kInOrder ? kPieceRows : row_tile;
  return Tile::kRows == 24 ? 24 : Tile::kRows <= 32 ? 16 : Tile::kRows / 2;
}

struct Launch {
  GroupedGemmParams grouped;
  CUtensorMap weight, scales, zeros, x;
  bool in_order;  // row s of y is made of row s of x
  bool ordered;   // experts are taken in an order of their own
  int groups;     // scales a stage has of each weight row: 1 or Tile::kScaleSets; int4
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

/// What a warp has ready for those who multiply: items, two by turns, and factors of their rows.
template <class Tile>
struct Planned {
  Item items[2];  // without rows: the last
  Column columns[2][Tile::kCols];
  std::uint64_t full[2], free[2];
};
struct NotPlanned {};

/// Fixed parts; behind them the ring, and behind that, of each expert, where its rows begin, and
/// where its row tiles.
template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) T out[Tile::kConsumers][Tile::kPiece][kOutColumns];
  float x_scale[Tile::kFp8X ? 2 : 1][Tile::kFp8X ? Tile::kRows : 1];  // of an item, by turns
  alignas(8) std::uint64_t full[kMaxStages], free[kMaxStages];
  alignas(16) std::conditional_t<Tile::kInOrder, Planned<Tile>, NotPlanned> planned;
  alignas(1024) std::uint8_t ring[];
};

/// A stage: x, the weight, and int4's scales and zero points.
template <class Tile>
struct Stage {
  struct Scales {  // of 32 columns of K, or of all
    alignas(Tile::kScaleBytes) typename Tile::T of[Tile::kCols];
    std::uint8_t zeros[Tile::kCols];
  };
  std::uint8_t* start;
  int row_tile;

  __device__ __forceinline__ Stage(std::uint8_t* start, int row_tile)
      : start(start), row_tile(row_tile) {}
  __device__ __forceinline__ Stage(const Launch& launch, Shared<Tile>& shared, int index)
      : Stage(shared.ring + index * launch.stage_bytes, launch.row_tile) {}

  /// Box `box` of x. wgmma's 32 rows may reach into the weight; their sums are left.
  __device__ __forceinline__ std::uint8_t* x(int box = 0) const {
    return start + box * row_tile * kRowBytes;
  }
  __device__ __forceinline__ std::uint8_t* weight() const { return x(Tile::kBoxes); }
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

// ---- Work ---------------------------------------------------------------------------------------

template <class Tile>
__device__ __forceinline__ Tables tables_of(const Launch& launch, Shared<Tile>& shared) {
  auto* offsets = reinterpret_cast<std::int32_t*>(shared.ring + launch.ring_bytes);
  return {offsets, offsets + launch.grouped.experts + 1};
}

/// Experts in the order of their tiles, behind the tables, where launch.ordered.
template <class Tile>
__device__ __forceinline__ std::int32_t* order_of(const Launch& launch, Shared<Tile>& shared) {
  return tables_of(launch, shared).starts + launch.grouped.experts + 1;
}

/// One warp does it: those of the fullest tiles first. A block takes every 132nd tile, and so as
/// many full ones as any other. 8192 tokens of top 8 in 128 experts of 768 x 2048, whose last block
/// ended 5 to 8% after the mean, bf16 390 us and 382, fp8 by bf16 406 and 400 (H200, lab).
template <class Tile>
__device__ __forceinline__ void fill_ordered(const Launch& launch, Shared<Tile>& shared) {
  constexpr int kLevels = 4;  // of how many pieces a tile has
  const GroupedGemmParams& p = launch.grouped;
  const Tables tables = tables_of(launch, shared);
  std::int32_t* order = order_of(launch, shared);
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize, experts = p.experts;
  const auto tiles_of = [&](int e) {
    return ceil_div(tables.offsets[e + 1] - tables.offsets[e], launch.row_tile);
  };
  for (int e = lane; e <= experts; e += device::kWarpSize) tables.offsets[e] = offset_of(p, e);
  __syncwarp();  // the offsets are there
  for (int e = lane; e < experts; e += device::kWarpSize) {
    const int pieces = ceil_div(tables.offsets[e + 1] - tables.offsets[e], kPieceRows);
    tables.starts[e] = min(max(2 * pieces / max(tiles_of(e), 1) - 5, 0), kLevels - 1);
  }
  int at = 0;
  for (int level = kLevels - 1; level >= 0; --level)
    for (int first = 0; first < experts; first += device::kWarpSize) {
      const int e = first + lane;
      const bool mine = e < experts && tables.starts[e] == level;
      const int place = at + device::count_lanes_before(mine);
      if (mine) order[place] = e;
      at += device::count_lanes(mine);
    }
  __syncwarp();  // the order is there
  int tiles = 0;
  for (int first = 0; first < experts; first += device::kWarpSize) {
    const int i = first + lane, mine = i < experts ? tiles_of(order[i]) : 0;
    const int end = tiles + device::warp_inclusive_sum(mine);
    if (i < experts) tables.starts[i] = end - mine;
    tiles = device::from_lane(end, device::kWarpSize - 1);
  }
  if (lane == 0) tables.starts[experts] = tiles;
}

/// One warp does it.
template <class Tile>
__device__ __forceinline__ void fill_tables(const Launch& launch, Shared<Tile>& shared) {
  if (Tile::kInOrder && launch.ordered) return fill_ordered(launch, shared);
  tables_of(launch, shared).fill(launch.grouped, launch.row_tile,
                                 static_cast<int>(threadIdx.x) % device::kWarpSize);
}

/// The expert of a tile: its row tiles are [start, end) of `tiles`, its rows [first, last).
struct Plan {
  int tiles, expert, start, end;
  std::int32_t first, last;
};

/// That of the block's first tile, without the tables: the way from the offsets to the first
/// weights is what a block of few rows waits for, so each warp that requests finds it by itself.
/// H200, lab, one token of 128 experts, us, with the tables and so: 2048 x 1536 bf16 19.8 and 19.0,
/// fp8 11.8 and 11.2, 768 x 2048 10.7 and 10.3, 7.8 and 7.5.
template <class Tile>
__device__ __forceinline__ Plan plan_first(const Launch& launch) {
  const GroupedGemmParams& p = launch.grouped;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const int each = ceil_div(p.experts, device::kWarpSize), first = lane * each;
  const int row_tile = launch.row_tile;
  std::int32_t begin = offset_of(p, first);
  int tiles = 0;
#pragma unroll 4
  for (int i = 1; i <= each; ++i) {
    const std::int32_t end = offset_of(p, first + i);
    tiles += ceil_div(end - begin, row_tile);
    begin = end;
  }
  const int before = device::warp_inclusive_sum(tiles) - tiles;
  const int wanted = static_cast<int>(blockIdx.x) / launch.columns;
  const bool mine = before <= wanted && wanted < before + tiles;
  Plan plan{.tiles = device::from_lane(before + tiles, device::kWarpSize - 1)};
  if (mine) {
    plan.start = before;
    for (int e = first;; ++e, plan.start = plan.end) {
      plan.expert = e;
      plan.first = offset_of(p, e);
      plan.last = offset_of(p, e + 1);
      plan.end = plan.start + ceil_div(plan.last - plan.first, row_tile);
      if (wanted < plan.end) break;
    }
  }
  const int from = max(__ffs(static_cast<int>(__ballot_sync(0xffffffffu, mine))) - 1, 0);
  for (int* value : {&plan.expert, &plan.start, &plan.end, &plan.first, &plan.last})
    *value = device::from_lane(*value, from);
  return plan;
}

constexpr int kTablesBarrier = 8, kConsumersBarrier = 9;  // behind those of the warpgroups

/// Calls fn(item) for each tile of this block. Tiles of an expert follow each other; up to
/// kTogether of its row tiles walk its weight side by side. Its rows are dealt evenly. kPlanned:
/// `at` is the first tile's, and the tables may not be there yet.
template <bool kPlanned, class Tile, class Fn>
__device__ __forceinline__ void for_each_item(const Launch& launch, Shared<Tile>& shared, Plan at,
                                              Fn&& fn) {
  const int step = static_cast<int>(gridDim.x);
  for (int i = static_cast<int>(blockIdx.x);; i += step) {
    if (!kPlanned || i >= step) {
      if (kPlanned && i < 2 * step) ptx::named_barrier_sync(kTablesBarrier, Tile::kThreads);
      const Tables tables = tables_of(launch, shared);
      at.tiles = tables.starts[launch.grouped.experts];
      if (i >= at.tiles * launch.columns) return;
      const int e = tables.expert_of(launch.grouped.experts, i / launch.columns);
      at.expert = Tile::kInOrder && launch.ordered ? order_of(launch, shared)[e] : e;
      at.start = tables.starts[e], at.end = tables.starts[e + 1];
      at.first = tables.offsets[at.expert], at.last = tables.offsets[at.expert + 1];
    } else if (i >= at.tiles * launch.columns) {
      return;
    }
    const int tiles = at.end - at.start, in_expert = i - at.start * launch.columns;
    const int rows = at.last - at.first;
    Place place{0, in_expert};
    int each = rows;
    if (tiles > 1) {
      place = place_of({.along_m = tiles, .along_n = launch.columns, .together = kTogether},
                       in_expert);
      each = ceil_div(rows, tiles);
    }
    int first = place.m * each;
    if constexpr (Tile::kInOrder) {
      // Pieces are multiplied whole. Which tiles have one more changes from column to column: a
      // block that takes every 132nd tile would have them all, or none.
      const int pieces = ceil_div(rows, kPieceRows), rest = pieces % tiles;
      const int turn = place.n % tiles;
      const auto more = [&](int t) {  // that tiles ahead of `t` have
        return t < tiles ? min(t, rest) : rest + min(t - tiles, rest);
      };
      const int before = more(turn + place.m) - more(turn);
      each = pieces / tiles;
      first = (place.m * each + before) * kPieceRows;
      each = (each + more(turn + place.m + 1) - more(turn) - before) * kPieceRows;
    }
    fn(Item{.expert = at.expert,
            .row0 = at.first + first,
            .rows = min(each, rows - first),
            .column = place.n});
  }
}

}  // namespace ridgeline::gemm_grouped
