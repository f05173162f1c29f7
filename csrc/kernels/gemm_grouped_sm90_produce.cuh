#pragma once
#include "device/ptx/async_copy.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_grouped_sm90_gather.cuh"

/// The warps that bring what a tile is made of.
namespace ridgeline::gemm_grouped {

// ---- Producer -----------------------------------------------------------------------------------

/// Weight rows go to shared memory so that every other eight are gates and the next their up rows,
/// or, of weights that are not gated, as they lie: sixteen are two eights. Int4: the same of
/// sixteens; of their scales, gates come first.
template <class Tile>
__device__ __forceinline__ void request(const Launch& launch, Shared<Tile>& shared,
                                        const Item& item, int k, int stage) {
  std::uint64_t* full = &shared.full[stage];
  const Stage<Tile> to(launch, shared, stage);
  const int box_rows = box_rows_of<Tile>(launch.row_tile);
  const int boxes = launch.in_order ? ceil_div(item.rows, box_rows) : 0;
  const int bytes = Tile::kWeightBytes + boxes * Tile::kBoxes * box_rows * kRowBytes;
  ptx::mbarrier_expect(full, bytes);
  if constexpr (Tile::kInt4) {
    ptx::copy_tensor_4d(to.weight(), &launch.weight, full,
                        k * Tile::kBoxes * Int4Layout::kWords, 0, item.column * (Tile::kCols / 32),
                        item.expert);
  } else {
    ptx::copy_tensor_5d(to.weight(), &launch.weight, full, k * Tile::kDepth, 0, 0,
                        item.column * (Tile::kCols / 16), item.expert);
  }
  for (int i = 0; i < boxes; ++i)
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box)
      ptx::copy_matrix(to.x(box) + i * box_rows * kRowBytes, &launch.x, full,
                       k * Tile::kDepth + box * Tile::kBoxDepth, item.row0 + i * box_rows);
}

/// Scales and zero points of int4: those of the gates, then of the up rows. By a thread of another
/// warp: one that requests all of a stage takes longer than its multiplication.
template <class Tile>
__device__ __forceinline__ void request_scales(const Launch& launch, Shared<Tile>& shared,
                                               const Item& item, int k, int stage) {
  const GemmParams& p = launch.grouped.gemm;
  std::uint64_t* full = &shared.full[stage];
  const Stage<Tile> to(launch, shared, stage);
  ptx::mbarrier_expect(full, launch.groups * Tile::kCols * (p.weight.zeros ? 3 : 2));
  const int first = item.column * (is_gated(p.activation) ? Tile::kCols / 2 : Tile::kCols);
  for (int i = 0; i < launch.groups; ++i) {
    const int group = (k * Tile::kDepth + i * 32) / p.weight.group;
    ptx::copy_tensor_4d(to.scales(i).of, &launch.scales, full, first, 0, group, item.expert);
    if (p.weight.zeros)
      ptx::copy_tensor_4d(to.scales(i).zeros, &launch.zeros, full, first, 0, group, item.expert);
  }
}

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared,
                                        const Plan& plan, int thread) {
  const GroupedGemmParams& grouped = launch.grouped;
  const GemmParams& p = grouped.gemm;
  constexpr int kStep = Tile::kTeam / kVectors;  // rows between those of a thread
  constexpr int kCount = Tile::kCopies ? Tile::kRows / kStep : 1;
  constexpr int kElements = kVector / static_cast<int>(sizeof(typename Tile::X));
  const int turn = thread / Tile::kTeam, member = thread % Tile::kTeam;
  const int first = member / kVectors, vector = member % kVectors;
  const auto* base = static_cast<const char*>(p.x.data);
  if (!Tile::kCopies && thread > 0 && !(Tile::kInt4 && thread == Tile::kTeam - device::kWarpSize))
    return;
  Ring ring{.stages = launch.stages, .parity = 1};  // the first wait on a fresh barrier passes
  for_each_item<Tile::kPlansAhead>(launch, shared, plan, [&](const Item& item) {
    std::uint32_t places[kCount];  // in units of a vector
    const int copied = !Tile::kCopies || launch.in_order ? 0 : item.rows;
    const auto find = [&] {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int r = first + i * kStep;
        if (r >= copied) break;
        const std::int64_t row = row_of_x(grouped, item.row0 + r);
        places[i] = static_cast<std::uint32_t>(row * (p.x.stride_row / kElements)) + vector;
      }
    };
    if (Tile::kInOrder && launch.gather.claims && thread == 0)
      wait_for_rows<Tile>(launch, shared, item);
    bool found = Tile::kTurns == 1;
    if (found) find();
    for (int k = 0; k < launch.steps; ++k, ring.next()) {
      const int s = ring.stage;
      if (s % Tile::kTurns != turn) continue;
      ptx::mbarrier_wait(&shared.free[s], ring.parity);
      if (member == 0) request<Tile>(launch, shared, item, k, s);
      if (Tile::kInt4 && member == Tile::kTeam - device::kWarpSize)
        request_scales<Tile>(launch, shared, item, k, s);
      if (!found) find();  // with the first weights on their way
      found = true;
#pragma unroll
      for (int box = 0; box < (Tile::kCopies ? Tile::kBoxes : 0); ++box) {
        const bool inside = k * Tile::kDepth + box * Tile::kBoxDepth + vector * kElements < p.K;
        std::uint8_t* stage = Stage<Tile>(launch, shared, s).x(box);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int r = first + i * kStep;
          if (r >= copied) break;
          const std::int64_t at =
              inside ? std::int64_t{places[i]} + (k * Tile::kBoxes + box) * kVectors : 0;
          ptx::copy_async_16(stage + r * kRowBytes + (vector ^ (r % 8)) * kVector,
                             base + at * kVector, inside);
        }
      }
      if constexpr (Tile::kCopies) ptx::mbarrier_arrive_after_copies(&shared.full[s]);
    }
  });
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
  const bool gated = is_gated(p.activation), fp8 = Tile::kFormat == WeightFormat::kFp8;
  auto& planned = shared.planned;
  int turn = 0;
  const auto hand_over = [&](const Item& item) {
    if (lane == 0) planned.items[turn % 2] = item;
    // Every lane, for what it wrote, and for what it copies.
    ptx::mbarrier_arrive(&planned.full[turn % 2]);
    ptx::mbarrier_arrive_after_copies(&planned.full[turn % 2]);
    ++turn;
  };
  const auto wait_free = [&] {
    ptx::mbarrier_wait(&planned.free[turn % 2], turn / 2 % 2 ^ 1);
  };
  for_each_item<false>(launch, shared, Plan{}, [&](const Item& item) {
    wait_free();
    if constexpr (Tile::kFp8X)
      for (int r = lane; r < item.rows; r += device::kWarpSize)
        ptx::copy_async_4(
            &shared.x_scale[turn % 2][r],
            &p.x.scale[p.x.scale_per_row ? row_of_x(grouped, item.row0 + r) : 0], true);
    for (int c = lane; c < Tile::kCols; c += device::kWarpSize) {
      // Gated, every other eight of them are gates and the next their up rows.
      const int plain = item.column * Tile::kCols + c;
      const int n = gated ? plain / 16 * 8 + plain % 8 + (plain % 16 < 8 ? 0 : p.N / 2) : plain;
      const bool inside = n < p.N;
      const std::int64_t at = std::int64_t{item.expert} * p.N + n;
      Column& column = planned.columns[turn % 2][c];
      if (fp8 && inside) {
        const bool of_row = p.weight.scale_layout == ScaleLayout::kRow;
        ptx::copy_async_4(&column.scale, static_cast<const float*>(p.weight.scales) +
                                             (of_row ? at : item.expert), true);
      } else {
        column.scale = 1.0f;
      }
      column.bias = inside && p.bias ? device::to_float(static_cast<const T*>(p.bias)[at]) : -0.0f;
    }
    hand_over(item);
  });
  wait_free();
  hand_over(Item{});
}

}  // namespace ridgeline::gemm_grouped
