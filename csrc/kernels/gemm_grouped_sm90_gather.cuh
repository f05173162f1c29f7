#pragma once
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/copy_order.cuh"
#include "device/ptx/global_order.cuh"
#include "kernels/gemm_grouped_sm90_work.cuh"

/// Gathered rows of x that a warp of each block puts in order while those before are multiplied.
/// It claims units of a row, in the order of the tiles, and counts those that are there of each
/// piece of kPieceRows rows, for which the thread waits that requests them. Only blocks that run
/// have claims. A warp that is far ahead holds its claim until its own block comes nearer, which is
/// then at an earlier tile than any that needs the claim: so of all blocks that wait, the one at
/// the earliest tile waits for none that holds.
namespace ridgeline::gemm_grouped {

/// Up to kUnitVectors of a row, or past the expert's last row, where its last piece is not whole.
struct Unit {
  const uint4* from;
  uint4* to;
  int vectors;      // none past the last row
  unsigned* ready;  // of its piece; null: no expert has the unit
};

/// Counts of the pieces from an expert's row `row` on. No two experts share one: an expert has at
/// most one more than its rows fill in y.
__device__ __forceinline__ unsigned* ready_units(const Launch& launch, int expert,
                                                 std::int32_t offset, int row) {
  return launch.gather.claims + 1 + offset / kPieceRows + expert + row / kPieceRows;
}

/// Finds units in rising order.
template <class Tile>
struct UnitWalk {
  const Launch& launch;
  Shared<Tile>& shared;
  int place = 0, before = 0;  // an expert's in the order of the tiles; units of those ahead of it

  __device__ __forceinline__ Unit find(int unit) {
    const Gather& gather = launch.gather;
    const Tables tables = tables_of(launch, shared);
    for (; place < launch.grouped.experts; ++place) {
      const int expert = order_of(launch, shared)[place];
      const std::int32_t offset = tables.offsets[expert];
      const int rows = tables.offsets[expert + 1] - offset;
      const int units = round_up(rows, kPieceRows) * gather.parts, at = unit - before;
      if (at >= units) {
        before += units;
        continue;
      }
      const int row = at / gather.parts, part = at - row * gather.parts;
      Unit found{.vectors = 0, .ready = ready_units(launch, expert, offset, row)};
      if (row < rows) {
        const int first = part * kUnitVectors;
        found.from = static_cast<const uint4*>(launch.grouped.gemm.x.data) +
                     row_of_x(launch.grouped, offset + row) * gather.stride + first;
        found.to = gather.to + (std::int64_t{offset} + row) * gather.vectors + first;
        found.vectors = min(kUnitVectors, gather.vectors - first);
      }
      return found;
    }
    return {};
  }
};

/// The unit that lane `lane` has found, but for its count.
__device__ __forceinline__ Unit unit_of_lane(const Unit& mine, int lane) {
  const auto of = [&](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(
        device::from_lane(reinterpret_cast<std::uintptr_t>(pointer), lane));
  };
  return {of(mine.from), of(mine.to), device::from_lane(mine.vectors, lane), nullptr};
}

/// The first tiles' units, which the warps that multiply bring as fast as they can: a lane finds
/// each, all copy them. Where all lanes found each, and of e4m3 twice as many, 8192 tokens of top 8
/// in 128 experts of 2048 x 1536 took 482 us for 462, int4 793 for 779 (H200, lab, by turns).
template <class Tile>
__device__ __forceinline__ void gather_first(const Launch& launch, Shared<Tile>& shared) {
  constexpr int kTogether = 4, kOfLane = kUnitVectors / device::kWarpSize;
  constexpr int kTimes = sizeof(typename Tile::X);
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  unsigned claimed = lane == 0 ? atomicAdd(launch.gather.claims, kTogether * kTimes) : 0;
  claimed = device::from_lane(claimed, 0);
  UnitWalk<Tile> walk{launch, shared};
  const Unit mine = walk.find(static_cast<int>(claimed) + min(lane, kTogether * kTimes - 1));
#pragma unroll 1
  for (int first = 0; first < kTogether * kTimes; first += kTogether) {
    Unit units[kTogether];
    uint4 vectors[kTogether][kOfLane];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      units[i] = unit_of_lane(mine, first + i);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j)
        if (const int v = lane + j * device::kWarpSize; v < units[i].vectors)
          vectors[i][j] = units[i].from[v];
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int j = 0; j < kOfLane; ++j)
        if (const int v = lane + j * device::kWarpSize; v < units[i].vectors)
          units[i].to[v] = vectors[i][j];
    ptx::fence_copies();  // the copy engine reads what this lane has written
    __syncwarp();         // every lane has
    if (first <= lane && lane < first + kTogether && mine.ready)
      ptx::add_released(mine.ready, 1u);
  }
}

/// The others', by one warp, a lane a unit at a time: by the copy engine, for what goes through
/// registers of so few warps takes longer than the products do. A unit is counted when the next has
/// been read: its place is free long before it is written.
template <class Tile>
__device__ __forceinline__ void gather(const Launch& launch, Shared<Tile>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize, slots = launch.gather.slots;
  std::uint8_t* slot = shared.ring + launch.gather.slots_at + lane * launch.gather.unit_bytes;
  UnitWalk<Tile> walk{launch, shared};
  const auto find_next = [&] {
    unsigned first = lane == 0 ? atomicAdd(launch.gather.claims, static_cast<unsigned>(slots)) : 0;
    first = device::from_lane(first, 0);
    return walk.find(static_cast<int>(first) + min(lane, slots - 1));
  };
  unsigned* before = nullptr;  // where the unit is counted that is perhaps not yet written
  const auto count_before = [&] {
    if (before) ptx::add_released(before, 1u);
    before = nullptr;
  };
  const auto is_far_ahead = [&] {
    bool far = false;
    if (lane == 0)
      far = tables_of(launch, shared).starts[walk.place] >
            atomicAdd(&shared.planned.row_tile, 0) + launch.gather.ahead;
    return device::any_lane(far);
  };
  int parity = 0;
  Unit unit = find_next();
#pragma unroll 1
  while (device::any_lane(unit.ready != nullptr)) {
    if (is_far_ahead()) {
      ptx::wait_stores_written();
      count_before();  // others may wait for it, and this block for them
      while (is_far_ahead()) __nanosleep(200);
    }
    const bool mine = lane < slots && unit.ready, copies = mine && unit.vectors > 0;
    const int bytes = unit.vectors * kVector;
    if (copies) {
      ptx::wait_stores_read<0>();
      ptx::mbarrier_expect(&shared.planned.gathered[lane], bytes);
      ptx::copy_bulk(slot, unit.from, bytes, &shared.planned.gathered[lane]);
    }
    __syncwarp();  // lanes find units together
    const Unit next = find_next();
    if (copies) {
      ptx::mbarrier_wait(&shared.planned.gathered[lane], parity);
      parity ^= 1;
      ptx::store_bulk(unit.to, slot, bytes);
    }
    if (mine) {
      ptx::commit_stores();  // of a unit past the last row, none
      ptx::wait_stores_written<1>();
      count_before();
      before = unit.ready;
    }
    unit = next;
  }
  ptx::wait_stores_written();
  count_before();
}

/// Whether an item's rows are in order; then they are seen, by the copy engine, too.
template <class Tile>
__device__ __forceinline__ bool are_rows_there(const Launch& launch, Shared<Tile>& shared,
                                               const Item& item) {
  const std::int32_t offset = tables_of(launch, shared).offsets[item.expert];
  const unsigned* ready = ready_units(launch, item.expert, offset, item.row0 - offset);
  const unsigned whole = kPieceRows * launch.gather.parts;
  const int last = ceil_div(item.rows, kPieceRows) - 1;
  unsigned least = whole;
#pragma unroll
  for (int i = 0; i < ceil_div(Tile::kRows, kPieceRows); ++i)
    least = min(least, ptx::load_from_l2(ready + min(i, last)));
  if (least < whole) return false;
  ptx::fence_device();  // what was counted is seen, ...
  ptx::fence_copies();  // ... by the copy engine, too
  return true;
}

/// By the thread that requests the rows of an item.
template <class Tile>
__device__ __forceinline__ void wait_for_rows(const Launch& launch, Shared<Tile>& shared,
                                              const Item& item) {
  while (!are_rows_there<Tile>(launch, shared, item)) {
  }
}

}  // namespace ridgeline::gemm_grouped
