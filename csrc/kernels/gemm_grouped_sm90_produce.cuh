#pragma once
#include "device/ptx/async_copy.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/elect.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_grouped_sm90_gather.cuh"

/// The warps that bring what a tile is made of.
namespace ridgeline::gemm_grouped {

// ---- Producer -----------------------------------------------------------------------------------

/// Weight rows go to shared memory so that every other eight are gates and the next their up rows,
/// or, of weights that are not gated, as they lie: sixteen are two eights. Int4: the same of
/// sixteens; of their scales and zero points, gates come first. kWeight, kX: what the thread brings
/// of a stage, whose barrier it arrives at.
template <class Tile, bool kWeight, bool kX>
__device__ __forceinline__ void request(const Launch& launch, Shared<Tile>& shared,
                                        const Item& item, int k, int stage) {
  const GemmParams& p = launch.grouped.gemm;
  std::uint64_t* full = &shared.full[stage];
  const Stage<Tile> to(launch, shared, stage);
  const int box_rows = box_rows_of<Tile>(launch.row_tile);
  // Rows of x come by boxes, and those behind them by one of its own, of taller tiles and of two
  // bands.
  const bool taller = kX && Tile::kRows > kManyRows && item.rows > kManyRows;
  const int left = item.rows % kPieceRows;
  const bool shorter = kX && Tile::kBands > 1 && 0 < left && left <= kLastRows;
  const int boxes = !kX || !launch.in_order ? 0
                    : taller                ? kManyRows / box_rows
                    : shorter               ? item.rows / box_rows
                    : Tile::kInOrder        ? ceil_div(item.rows, box_rows)
                                            : 1;
  const int behind = taller ? launch.row_tile - kManyRows : shorter ? kLastRows : 0;
  int bytes = (boxes * Tile::kBoxesOfX * box_rows + behind) * kRowBytes;
  if (kWeight) bytes += Tile::kWeightBytes;
  if (kWeight && Tile::kNibbles) bytes += launch.groups * Tile::kCols * (p.weight.zeros ? 3 : 2);
  ptx::mbarrier_expect(full, bytes);
  if constexpr (kWeight && Tile::kNibbles) {
    const int words = k * (Tile::kStripBytes / (4 * Tile::kWordsEach));
    const int strips = item.column * (Tile::kCols / 32);
    if constexpr (Tile::kReadsOnce) {
      ptx::copy_tensor_4d(to.weight(), &launch.weight, full, words, 0, strips, item.expert,
                          ptx::evict_first());
    } else {
      ptx::copy_tensor_4d(to.weight(), &launch.weight, full, words, 0, strips, item.expert);
    }
    const int first = item.column * (is_gated(p.activation) ? Tile::kCols / 2 : Tile::kCols);
    for (int i = 0; i < launch.groups; ++i) {
      constexpr int kShare = Tile::kDepth / Tile::kScaleSets;  // columns that a set may be for
      const int group = launch.group.divide(k * Tile::kDepth + i * kShare);
      ptx::copy_tensor_4d(to.scales(i).of, &launch.scales, full, first, 0, group, item.expert);
      if (p.weight.zeros)
        ptx::copy_tensor_4d(to.scales(i).zeros, &launch.zeros, full, first, 0, group, item.expert);
    }
  } else if constexpr (kWeight) {
    const int rows = item.column * (Tile::kCols / 16);
    if constexpr (Tile::kReadsOnce) {
      ptx::copy_tensor_5d(to.weight(), &launch.weight, full, k * Tile::kDepth, 0, 0, rows,
                          item.expert, ptx::evict_first());
    } else {
      ptx::copy_tensor_5d(to.weight(), &launch.weight, full, k * Tile::kDepth, 0, 0, rows,
                          item.expert);
    }
  }
  if (kX && Tile::kBoxesOfX > 1 && launch.joined) {
    ptx::copy_tensor_4d(to.x(), &launch.x, full, 0, item.row0, k * Tile::kBoxesOfX, 0);
  } else if (kX) {
    for (int i = 0; i < boxes; ++i)
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box)
        ptx::copy_matrix(to.x(box) + i * box_rows * kRowBytes, &launch.x, full,
                         k * Tile::kDepth + box * Tile::kBoxDepth, item.row0 + i * box_rows);
    if (behind > 0)
      ptx::copy_matrix(to.x() + boxes * box_rows * kRowBytes, &launch.x_behind, full,
                       k * Tile::kDepth, item.row0 + boxes * box_rows);
  }
}

/// Items that the planner has ready, for one thread.
template <class Tile>
__device__ __forceinline__ bool is_item_ready(Shared<Tile>& shared, int turn) {
  return ptx::mbarrier_test(&shared.planned.full[turn % 2], turn / 2 % 2);
}

template <class Tile>
__device__ __forceinline__ Item take_item(Shared<Tile>& shared, int turn) {
  ptx::mbarrier_wait(&shared.planned.full[turn % 2], turn / 2 % 2);
  const Item item = shared.planned.items[turn % 2];
  ptx::mbarrier_arrive(&shared.planned.free[turn % 2]);
  return item;
}

/// All of the block's tiles by the copy engine, by one thread.
template <class Tile, bool kWeight, bool kX>
__device__ __forceinline__ void request_all(const Launch& launch, Shared<Tile>& shared) {
  Ring ring{.stages = launch.stages, .parity = 1};  // the first wait on a fresh barrier passes
  const auto request_step = [&](const Item& item, int k) {
    ptx::mbarrier_wait(&shared.free[ring.stage], ring.parity);
    request<Tile, kWeight, kX>(launch, shared, item, k, ring.stage);
    ring.next();
  };
  const bool claims = Tile::kInOrder && launch.tiles_taken;
  const bool gathers = Tile::kInOrder && launch.gather.claims;
  const int full = min(launch.stages, launch.steps) - 1;  // the ring: then there is time
  int index = static_cast<int>(blockIdx.x), turn = 0;
  bool ready = false;  // whether the item's rows are in order
  const auto next_item = [&] {
    if constexpr (Tile::kInOrder)
      if (claims) {
        const Item item = take_item(shared, turn++);
        ready = !kX || !gathers || item.rows == 0 || are_rows_there<Tile>(launch, shared, item);
        return item;
      }
    const Item item = item_at<Tile>(launch, shared, index);
    index += static_cast<int>(gridDim.x);
    return item;
  };
  Item item = next_item();
  while (item.rows > 0) {
    if constexpr (kX && Tile::kInOrder)
      if (gathers && !ready) wait_for_rows<Tile>(launch, shared, item);
    Item next{};
    bool found = false;
    for (int k = 0; k < launch.steps; ++k) {
      request_step(item, k);
      if constexpr (Tile::kFindsAhead) {
        if (found || k < full) continue;
        if (claims && k + 1 < launch.steps && !is_item_ready(shared, turn)) continue;
        next = next_item();
        found = true;
      }
    }
    item = found ? next : next_item();
  }
}

/// The same where rows of x may be out of order: warps, by turns, request stages and copy rows.
template <class Tile>
__device__ __forceinline__ void copy_all(const Launch& launch, Shared<Tile>& shared,
                                         const Plan& plan, int thread) {
  const GroupedGemmParams& grouped = launch.grouped;
  const GemmParams& p = grouped.gemm;
  constexpr int kStep = device::kWarpSize / kVectors;  // rows between those of a thread
  constexpr int kCount = Tile::kRows / kStep;
  constexpr int kElements = kVector / static_cast<int>(sizeof(typename Tile::X));
  const int turn = thread / device::kWarpSize, lane = thread % device::kWarpSize;
  const int first = lane / kVectors, vector = lane % kVectors;
  const auto* base = static_cast<const char*>(p.x.data);
  Ring ring{.stages = launch.stages, .parity = 1};  // the first wait on a fresh barrier passes
  for_each_item<Tile::kPlansAhead>(launch, shared, plan, [&](const Item& item) {
    std::uint32_t places[kCount];  // in units of a vector
    const int copied = launch.in_order ? 0 : item.rows;
    const auto find = [&] {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int r = first + i * kStep;
        if (r >= copied) break;
        const std::int64_t row = row_of_x(grouped, item.row0 + r);
        places[i] = static_cast<std::uint32_t>(row * (p.x.stride_row / kElements)) + vector;
      }
    };
    bool found = false;
    for (int k = 0; k < launch.steps; ++k, ring.next()) {
      const int s = ring.stage;
      if (s % kTurns != turn) continue;
      ptx::mbarrier_wait(&shared.free[s], ring.parity);
      if (ptx::elect_one()) request<Tile, true, true>(launch, shared, item, k, s);
      if (!found) find();  // with the first weights on their way
      found = true;
      const bool inside = k * Tile::kDepth + vector * kElements < p.K;
      std::uint8_t* stage = Stage<Tile>(launch, shared, s).x();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int r = first + i * kStep;
        if (r >= copied) break;
        const std::int64_t at = inside ? std::int64_t{places[i]} + k * kVectors : 0;
        ptx::copy_async_16(stage + r * kRowBytes + (vector ^ (r % 8)) * kVector,
                           base + at * kVector, inside);
      }
      ptx::mbarrier_arrive_after_copies(&shared.full[s]);
    }
  });
}

constexpr int kXBringer = 3;  // warp of the producers that requests x, where one does so alone

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared,
                                        const Plan& plan, int thread) {
  const int warp = thread / device::kWarpSize;
  if constexpr (Tile::kCopies) {
    copy_all<Tile>(launch, shared, plan, thread);
  } else if (warp == 0) {
    if (ptx::elect_one()) request_all<Tile, true, Tile::kAskers == 1>(launch, shared);
  } else if (Tile::kAskers == 2 && warp == kXBringer) {
    if (launch.gathered) ptx::wait_for_dependencies();  // x is in order
    if (ptx::elect_one()) request_all<Tile, false, true>(launch, shared);
  }
}

// ---- Planner ------------------------------------------------------------------------------------

constexpr int kGatherer = 1, kPlanner = 2;  // warps of the producers; the others request

/// One warp has the next items ready, their scales and biases. Of many rows by many columns the way
/// to an item and to its factors stood between two tiles for 1300 clocks (H200). It waits for no
/// scale: as it read them, those of short tiles were late, 1400 clocks a tile (8192 tokens of top 8
/// in 128 experts of 768 x 2048, fp8 by fp8; so 340).
template <class Tile>
__device__ __forceinline__ void plan(const Launch& launch, Shared<Tile>& shared) {
  using T = typename Tile::T;
  const GroupedGemmParams& grouped = launch.grouped;
  const GemmParams& p = grouped.gemm;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const bool gated = is_gated(p.activation);
  constexpr bool kScaled = Tile::kFormat == WeightFormat::kFp8 && !Tile::kBlocks;
  auto& planned = shared.planned;
  // Biases and scales are read through L1, which may have older ones until those ahead are done. x
  // is not there before, either.
  if (Tile::kStartsEarly && launch.gathered) ptx::wait_for_dependencies();
  const bool claims = Tile::kInOrder && launch.tiles_taken;
  int turn = 0, index = static_cast<int>(blockIdx.x);
  const auto turn_to_next = [&] {
    if (claims) {
      index = lane == 0 ? static_cast<int>(atomicAdd(launch.tiles_taken, 1u)) : 0;
      index = device::from_lane(index, 0);
    }
    index += static_cast<int>(gridDim.x);
  };
  const auto hand_over = [&](const Item& item) {
    if (lane == 0) planned.items[turn % 2] = item;
    if constexpr (Tile::kInOrder)
      if (launch.gather.claims && lane == 0) atomicExch(&planned.row_tile, index / launch.columns);
    // Every lane, for what it wrote, and for what it copies.
    ptx::mbarrier_arrive(&planned.full[turn % 2]);
    ptx::mbarrier_arrive_after_copies(&planned.full[turn % 2]);
    ++turn;
  };
  const auto wait_free = [&] {
    ptx::mbarrier_wait(&planned.free[turn % 2], turn / 2 % 2 ^ 1);
  };
  for (;; turn_to_next()) {
    const Item item = item_at<Tile>(launch, shared, index);
    wait_free();
    if (item.rows == 0) return hand_over(item);
    if constexpr (Tile::kScalesRows)
      for (int r = lane; r < item.rows; r += device::kWarpSize)
        ptx::copy_async_4(
            &shared.x_scale[turn % 2][r],
            &p.x.scale[p.x.scale_per_row ? row_of_x(grouped, item.row0 + r) : 0], true);
    if constexpr (Tile::kGroups)
      for (int r = lane; r < Tile::kRows; r += device::kWarpSize)
        planned.x_rows[turn % 2][r] =
            static_cast<std::int32_t>(row_of_x(grouped, item.row0 + min(r, item.rows - 1)));
    for (int c = lane; c < (Tile::kGroups ? 0 : Tile::kCols); c += device::kWarpSize) {
      // Gated, every other eight of them are gates and the next their up rows.
      const int plain = item.column * Tile::kCols + c;
      const int n = gated ? plain / 16 * 8 + plain % 8 + (plain % 16 < 8 ? 0 : p.N / 2) : plain;
      const bool inside = n < p.N;
      const std::int64_t at = std::int64_t{item.expert} * p.N + n;
      Column& column = planned.columns[turn % 2][c];
      if (kScaled && inside) {
        const bool of_row = p.weight.scale_layout == ScaleLayout::kRow;
        ptx::copy_async_4(&column.scale, static_cast<const float*>(p.weight.scales) +
                                             (of_row ? at : item.expert), true);
      } else {
        column.scale = 1.0f;
      }
      column.bias = inside && p.bias ? device::to_float(static_cast<const T*>(p.bias)[at]) : -0.0f;
    }
    hand_over(item);
  }
}

}  // namespace ridgeline::gemm_grouped
