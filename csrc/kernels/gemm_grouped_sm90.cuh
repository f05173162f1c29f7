#pragma once
#include <cuda.h>

#include "device/ptx/async_copy.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/gemm_grouped_launch.cuh"
#include "kernels/gemm_sm90.cuh"

/// What a block of Hopper's kernel for experts works on, and the warps that bring it.
namespace ridgeline::gemm_grouped {

using namespace gemm_sm90;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kSteps = 4;       // of a stage's columns of K, the depth of one wgmma each
constexpr int kStepBytes = 32;  // of x
constexpr int kVector = 16;                      // bytes of one copy of x
constexpr int kVectors = kRowBytes / kVector;    // of a row of x in a stage
constexpr int kPieceRows = 64;                   // rows of x that the epilogue takes at a time

/// Whether wgmma meets the weight as 16-bit floats that it is not.
template <class X>
constexpr bool expands(WeightFormat format) {
  return format != WeightFormat::kDense && sizeof(X) != 1;
}

/// kConsumers_ warpgroups of 64 weight rows each by up to kRows_ rows of x. X: T, or std::uint8_t,
/// which stands for e4m3.
template <class T_, class X_, WeightFormat kFormat_, int kConsumers_, int kRows_>
struct Tile {
  using T = T_;
  using X = X_;
  static constexpr bool kFp8X = sizeof(X) == 1;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr bool kExpands = expands<X>(kFormat);
  static constexpr int kConsumers = kConsumers_, kRows = kRows_;
  // Boxes of 128 bytes of each row of x in a stage: two of int4 by few rows, which then waits and
  // fetches scales half as often.
  static constexpr int kBoxes = kInt4 && kRows <= 32 ? 2 : 1;
  static constexpr int kBoxDepth = kRowBytes / static_cast<int>(sizeof(X));  // columns of K
  static constexpr int kDepth = kBoxes * kBoxDepth;                          // of a stage
  static constexpr int kScaleSets = 2 * kBoxes;  // of int4: one for 32 columns
  static constexpr int kCols = kConsumers * kWarpgroupRows;
  static constexpr int kMultipliers = kConsumers * kWarpgroup;  // threads
  // Arrivals that give a stage back: of warps, where each multiplies for itself.
  static constexpr int kReleases = kInt4 && kRows_ <= 32 ? 4 * kConsumers : kConsumers;
  static constexpr int kProducers = kWarpgroup;
  // Where a stage takes less time to multiply than to request, warps request stages by turns.
  static constexpr int kTurns = kRows <= 32 ? kProducers / device::kWarpSize : 1;
  static constexpr int kTeam = kProducers / kTurns;  // threads that bring a stage
  static constexpr int kThreads = kMultipliers + kProducers;
  static constexpr int kBlocksPerSm = kRows <= 32 ? 2 : 1;
  // Twice the sums are kept: of a segment of K, and of those before it.
  static constexpr bool kSegments = kFormat == WeightFormat::kDense && kRows == 192;
  // A thread's, of producers and of consumers, where there are two warpgroups of those.
  static constexpr int kFewRegisters =
      kBlocksPerSm == 2 ? (kInt4 ? 56 : 48) : kSegments ? 40 : 88;
  static constexpr int kManyRegisters =
      kBlocksPerSm == 2 ? (kInt4 ? 88 : 96) : kSegments ? 232 : 208;
  static constexpr int kWeightBytes =
      kCols * kBoxes * kRowBytes / (!kExpands ? 1 : kInt4 ? 4 : 2);
  // Whether the launch shapes the ring. Int4 has no registers left for what it would be told.
  static constexpr bool kShaped = kRows <= 32 && !kInt4;
  static constexpr int kScaleBytes = kInt4 ? kScaleSets * (2 * kCols + round_up(kCols, 128)) : 0;
};

constexpr int kMaxStages = 16;
constexpr int kStagesOfTwo = 8;  // of each of two blocks on an SM, in rings that are shaped

/// Bytes of a stage with `rows` rows of x.
template <class Tile>
constexpr int stage_bytes_of(int rows) {
  return round_up(Tile::kBoxes * rows * kRowBytes + Tile::kWeightBytes + Tile::kScaleBytes, 1024);
}

template <class Tile>
constexpr int kStagesFixed = std::min(
    kMaxStages, (Tile::kBlocksPerSm == 1 ? 200 : 86) * 1024 / stage_bytes_of<Tile>(Tile::kRows));

struct Launch {
  GroupedGemmParams grouped;
  CUtensorMap weight, scales, zeros, x;
  bool in_order;  // row s of y is made of row s of x
  int groups;     // scales a stage has of each weight row: 1 or Tile::kScaleSets; int4
  int columns;    // tiles of weight rows
  int steps;      // stages that K makes
  int row_tile;   // rows of x that a tile has, at most
  int stages;     // that the ring has
  int stage_bytes, ring_bytes;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// Fixed parts; behind them the ring, and behind that, of each expert, where its rows begin, and
/// where its row tiles.
template <class Tile>
struct Shared {
  using T = typename Tile::T;

  alignas(1024) T out[Tile::kConsumers][std::min(Tile::kRows, kPieceRows)][kOutColumns];
  float x_scale[Tile::kFp8X ? Tile::kConsumers : 1][Tile::kFp8X ? Tile::kRows : 1];
  alignas(8) std::uint64_t full[kMaxStages], free[kMaxStages];
  alignas(1024) std::uint8_t ring[];
};

/// A stage: x, the weight, and int4's scales and zero points.
template <class Tile>
struct Stage {
  struct Scales {
    alignas(128) typename Tile::T of[Tile::kScaleSets][Tile::kCols];  // of 32 columns of K
    alignas(128) std::uint8_t zeros[Tile::kScaleSets][round_up(Tile::kCols, 128)];
  };
  std::uint8_t* start;
  int row_tile;

  __device__ __forceinline__ Stage(const Launch& launch, Shared<Tile>& shared, int index)
      : start(shared.ring +
              index * (Tile::kShaped ? launch.stage_bytes : stage_bytes_of<Tile>(Tile::kRows))),
        row_tile(Tile::kShaped ? launch.row_tile : Tile::kRows) {}

  /// Box `box` of x. wgmma's 32 rows may reach into the weight; their sums are left.
  __device__ __forceinline__ std::uint8_t* x(int box = 0) const {
    return start + box * row_tile * kRowBytes;
  }
  __device__ __forceinline__ std::uint8_t* weight() const { return x(Tile::kBoxes); }
  __device__ __forceinline__ Scales& scales() const {
    return *reinterpret_cast<Scales*>(weight() + Tile::kWeightBytes);
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

/// Where rows of each expert begin; behind that, where their tiles.
template <class Tile>
__device__ __forceinline__ std::int32_t* offsets_of(const Launch& launch, Shared<Tile>& shared) {
  return reinterpret_cast<std::int32_t*>(shared.ring + launch.ring_bytes);
}
template <class Tile>
__device__ __forceinline__ std::int32_t* starts_of(const Launch& launch, Shared<Tile>& shared) {
  return offsets_of(launch, shared) + launch.grouped.experts + 1;
}

/// Rows [row0, row0 + rows) of y by tile `column` of the weight rows of `expert`.
struct Item {
  int expert, row0, rows, column;
};

/// Counts each expert's tiles, and those ahead of it.
template <class Tile>
__device__ __forceinline__ void plan(const Launch& launch, Shared<Tile>& shared) {
  std::int32_t* offsets = offsets_of(launch, shared);
  std::int32_t* starts = starts_of(launch, shared);
  const GroupedGemmParams& p = launch.grouped;
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e <= p.experts; e += Tile::kThreads)
    offsets[e] = p.offsets ? p.offsets[e] : e * static_cast<std::int32_t>(p.gemm.M);
  __syncthreads();  // the offsets are there
  if (device::warp_index() == 0) {  // each lane counts the tiles of some experts
    const int each = ceil_div(p.experts, device::kWarpSize), first = thread * each;
    const int row_tile = Tile::kShaped ? launch.row_tile : Tile::kRows;
    const auto tiles_of = [&](int e) {
      return e < p.experts ? ceil_div(offsets[e + 1] - offsets[e], row_tile) : 0;
    };
    int tiles = 0;
    for (int i = 0; i < each; ++i) tiles += tiles_of(first + i);
    int before = device::warp_inclusive_sum(tiles) - tiles;
    for (int e = first; e < min(first + each, p.experts); ++e) {
      starts[e] = before;
      before += tiles_of(e);
    }
    if (thread == device::kWarpSize - 1) starts[p.experts] = before;
  }
  __syncthreads();  // the plan is whole
}

/// Calls fn(item) for each tile of this block. Tiles of an expert follow each other; up to
/// kTogether of its row tiles walk its weight side by side. Its rows are dealt evenly. A walk from
/// expert to expert instead of halving: one token of 128 int4 experts of 2048 x 1536 15.4 us, so
/// 13.9 (H200, lab).
template <class Tile, class Fn>
__device__ __forceinline__ void for_each_item(const Launch& launch, Shared<Tile>& shared,
                                              Fn&& fn) {
  const std::int32_t* offsets = offsets_of(launch, shared);
  const std::int32_t* starts = starts_of(launch, shared);
  const int experts = launch.grouped.experts, count = starts[experts] * launch.columns;
  int e = 0;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    for (int end = experts; e + 1 < end;) {  // the last expert whose tiles begin at i or before
      const int middle = (e + end) / 2;
      (starts[middle] * launch.columns <= i ? e : end) = middle;
    }
    const int tiles = starts[e + 1] - starts[e], at = i - starts[e] * launch.columns;
    const int first = offsets[e], rows = offsets[e + 1] - first;
    Place place{0, at};
    int each = rows;
    if (tiles > 1) {
      place = place_of({.along_m = tiles, .along_n = launch.columns, .together = kTogether}, at);
      each = ceil_div(rows, tiles);
    }
    fn(Item{.expert = e,
            .row0 = first + place.m * each,
            .rows = min(each, rows - place.m * each),
            .column = place.n});
  }
}

// ---- Producer -----------------------------------------------------------------------------------

/// Weight rows go to shared memory so that every other eight are gates and the next their up rows,
/// or, of weights that are not gated, as they lie: sixteen are two eights. Int4: the same of
/// sixteens; of their scales, gates come first.
template <class Tile>
__device__ __forceinline__ void request(const Launch& launch, Shared<Tile>& shared,
                                        const Item& item, int k, int stage) {
  std::uint64_t* full = &shared.full[stage];
  const Stage<Tile> to(launch, shared, stage);
  const int box_rows = Tile::kShaped ? launch.row_tile : std::min(Tile::kRows, kPieceRows);
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
  auto& scales = Stage<Tile>(launch, shared, stage).scales();
  ptx::mbarrier_expect(full, launch.groups * Tile::kCols * (p.weight.zeros ? 3 : 2));
  const int first = item.column * (is_gated(p.activation) ? Tile::kCols / 2 : Tile::kCols);
  for (int i = 0; i < launch.groups; ++i) {
    const int group = (k * Tile::kDepth + i * 32) / p.weight.group;
    ptx::copy_tensor_4d(scales.of[i], &launch.scales, full, first, 0, group, item.expert);
    if (p.weight.zeros)
      ptx::copy_tensor_4d(scales.zeros[i], &launch.zeros, full, first, 0, group, item.expert);
  }
}

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared, int thread) {
  const GroupedGemmParams& grouped = launch.grouped;
  const GemmParams& p = grouped.gemm;
  constexpr int kStep = Tile::kTeam / kVectors;  // rows between those of a thread
  constexpr int kCount = Tile::kRows / kStep;
  constexpr int kElements = kVector / static_cast<int>(sizeof(typename Tile::X));
  const int turn = thread / Tile::kTeam, member = thread % Tile::kTeam;
  const int first = member / kVectors, vector = member % kVectors;
  const auto* base = static_cast<const char*>(p.x.data);
  Ring ring{.stages = Tile::kShaped ? launch.stages : kStagesFixed<Tile>,
            .parity = 1};  // the first wait on a fresh barrier passes
  for_each_item(launch, shared, [&](const Item& item) {
    std::uint32_t places[kCount];  // in units of a vector
    const int copied = Tile::kSegments || launch.in_order ? 0 : item.rows;
    const auto find = [&] {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int r = first + i * kStep;
        if (r >= copied) break;
        const std::int64_t row = row_of_x(grouped, item.row0 + r);
        places[i] = static_cast<std::uint32_t>(row * (p.x.stride_row / kElements)) + vector;
      }
    };
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
      for (int box = 0; box < (Tile::kSegments ? 0 : Tile::kBoxes); ++box) {
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
      ptx::mbarrier_arrive_after_copies(&shared.full[s]);
    }
  });
}

}  // namespace ridgeline::gemm_grouped
