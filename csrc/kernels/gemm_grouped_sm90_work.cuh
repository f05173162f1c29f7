#pragma once
#include "kernels/gemm_grouped_sm90.cuh"

/// Which tiles are a block's, and of which expert.
namespace ridgeline::gemm_grouped {

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
  constexpr int kLevels = 4;  // of how many pieces a tile has, twice: the whole tile, down to ...
  const int lowest = 2 * (launch.row_tile / kPieceRows) - (kLevels - 1);
  const GroupedGemmParams& p = launch.grouped;
  const Tables tables = tables_of(launch, shared);
  std::int32_t* order = order_of(launch, shared);
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize, experts = p.experts;
  const auto tiles_of = [&](int e) {
    return ceil_div(tables.offsets[e + 1] - tables.offsets[e], launch.row_tile);
  };
  for (int e = lane; e <= experts; e += device::kWarpSize)
    tables.offsets[e] = fresh_offset_of(p, e);
  __syncwarp();  // the offsets are there
  for (int e = lane; e < experts; e += device::kWarpSize) {
    const int pieces = ceil_div(tables.offsets[e + 1] - tables.offsets[e], kPieceRows);
    tables.starts[e] = min(max(2 * pieces / max(tiles_of(e), 1) - lowest, 0), kLevels - 1);
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

// Behind those of the warpgroups.
constexpr int kTablesBarrier = 8, kConsumersBarrier = 9, kHalvesBarrier = 10;

/// Tile `index` of an expert's, or of those of `at`. Tiles of an expert follow each other; up to
/// kTogether of its row tiles walk its weight side by side. Its rows are dealt evenly.
template <class Tile>
__device__ __forceinline__ Item item_of(const Launch& launch, const Plan& at, int index) {
  const int tiles = at.end - at.start, in_expert = index - at.start * launch.columns;
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
    // Pieces are multiplied whole; tiles of more than whole ones are dealt eights of rows. Which
    // tiles have one more changes from column to column: a block that takes every 132nd tile would
    // have them all, or none.
    const bool taller = Tile::kRows > kManyRows && rows > tiles * kManyRows;
    const int dealt = taller || Tile::kBands > 1 ? 8 : kPieceRows;
    const int pieces = ceil_div(rows, dealt), rest = pieces % tiles;
    const int turn = place.n % tiles;
    const auto more = [&](int t) {  // that tiles ahead of `t` have
      return t < tiles ? min(t, rest) : rest + min(t - tiles, rest);
    };
    const int before = more(turn + place.m) - more(turn);
    each = pieces / tiles;
    first = (place.m * each + before) * dealt;
    each = (each + more(turn + place.m + 1) - more(turn) - before) * dealt;
  }
  return {.expert = at.expert,
          .row0 = at.first + first,
          .rows = min(each, rows - first),
          .column = place.n};
}

/// The expert of tile `index`, by the tables; false past the last.
template <class Tile>
__device__ __forceinline__ bool find(Plan& at, const Launch& launch, Shared<Tile>& shared,
                                     int index) {
  const Tables tables = tables_of(launch, shared);
  at.tiles = tables.starts[launch.grouped.experts];
  if (index >= at.tiles * launch.columns) return false;
  const int e = tables.expert_of(launch.grouped.experts, index / launch.columns);
  at.expert = Tile::kInOrder && launch.ordered ? order_of(launch, shared)[e] : e;
  at.start = tables.starts[e], at.end = tables.starts[e + 1];
  at.first = tables.offsets[at.expert], at.last = tables.offsets[at.expert + 1];
  return true;
}

/// Tile `index` of all; without rows past the last.
template <class Tile>
__device__ __forceinline__ Item item_at(const Launch& launch, Shared<Tile>& shared, int index) {
  Plan at{};
  return find(at, launch, shared, index) ? item_of<Tile>(launch, at, index) : Item{};
}

/// Calls fn(item) for each tile of this block. kPlanned: `at` is the first tile's, and the tables
/// may not be there yet.
template <bool kPlanned, class Tile, class Fn>
__device__ __forceinline__ void for_each_item(const Launch& launch, Shared<Tile>& shared, Plan at,
                                              Fn&& fn) {
  const int step = static_cast<int>(gridDim.x);
  for (int i = static_cast<int>(blockIdx.x);; i += step) {
    if (!kPlanned || i >= step) {
      if (kPlanned && i < 2 * step) ptx::named_barrier_sync(kTablesBarrier, Tile::kThreads);
      if (!find(at, launch, shared, i)) return;
    } else if (i >= at.tiles * launch.columns) {
      return;
    }
    fn(item_of<Tile>(launch, at, i));
  }
}

}  // namespace ridgeline::gemm_grouped
