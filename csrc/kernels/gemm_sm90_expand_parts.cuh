#pragma once
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/copy_order.cuh"
#include "device/ptx/global_order.cuh"
#include "kernels/gemm_sm90_expand.cuh"

/// Where several blocks multiply a tile: the way of their sums, through L2, to the block that
/// finishes them. A block's threads hold the same elements of a tile as those of any other, so sums
/// go from registers to registers, 16 bytes a thread side by side. H200, int4, two segments of 256
/// rows of 4096 x 4096: 18.4 us so, 19.7 where a cluster's blocks read each other's shared memory;
/// and of clusters of four only 30 run at once.
namespace ridgeline::gemm_expand {

/// Of each band of weight rows, by eights of rows of x.
template <class Tile>
using Sums = float[Tile::kBands][Tile::kRows / 8][4];

template <class Tile>
constexpr int kEights = Tile::kRows / 8;
constexpr int kMultipliers = kConsumers * kWarpgroup;  // threads that hold sums
constexpr int kWarps = kMultipliers / device::kWarpSize;
static_assert(kWarps == gemm_config::kSigningWarps);

/// This thread's sums in slot `slot`; those of the next eight rows are kMultipliers further.
template <class Tile>
__device__ __forceinline__ float4* part_of(const Launch& launch, int slot, const Consumer& me) {
  return launch.parts.sums + std::int64_t{slot} * kEights<Tile> * kMultipliers +
         me.warpgroup * kWarpgroup + me.thread;
}

__device__ __forceinline__ float4 as_float4(const float (&sums)[4]) {
  return {sums[0], sums[1], sums[2], sums[3]};
}

__device__ __forceinline__ void add_to(float (&sums)[4], const float4& part) {
  sums[0] += part.x;
  sums[1] += part.y;
  sums[2] += part.z;
  sums[3] += part.w;
}

/// Whoever finds this sign finds what this thread knows to be stored.
__device__ __forceinline__ void put_sign(const Launch& launch, int at) {
  ptx::fence_device();
  *static_cast<volatile unsigned long long*>(&launch.parts.signs[at]) = launch.parts.ticket;
}

/// Waits for a sign, and takes it away: a captured launch runs again with the same ticket.
__device__ __forceinline__ void take_sign(const Launch& launch, int at) {
  while (ptx::load_from_l2(&launch.parts.signs[at]) != launch.parts.ticket) {
  }
  ptx::fence_device();
  launch.parts.signs[at] = 0;
}

/// The sums of a tile's tail, for the block that has its first columns.
template <class Tile>
__device__ __forceinline__ void leave_part(const Launch& launch, int slot, const Sums<Tile>& sums,
                                           const Consumer& me) {
  float4* part = part_of<Tile>(launch, slot, me);
#pragma unroll
  for (int i = 0; i < kEights<Tile>; ++i) part[i * kMultipliers] = as_float4(sums[0][i]);
  me.meet();  // the warpgroup's sums are stored
  if (me.thread == 0) put_sign(launch, slot * kConsumers + me.warpgroup);
}

/// The sums of a tail come as stages behind those of the head, some eights in each's memory of x:
/// they are on their way while the tensor cores work. H200, int4, stamps, 512 rows of 3584 x 18944:
/// to add them takes 1.6 us, where the threads that do read them from L2 4.8.
constexpr int kPartStages = 4;
template <class Tile>
constexpr int kPartEights = kEights<Tile> / kPartStages;

/// Whether this is a head.
template <class Tile>
__device__ __forceinline__ bool takes_part(const Launch& launch, const Work& work) {
  return Tile::kTails && !work.is_tail && work.steps < launch.steps;
}

/// By the thread that then brings it.
__device__ __forceinline__ void wait_for_part(const Launch& launch, int slot) {
  for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup)
    take_sign(launch, slot * kConsumers + warpgroup);
  ptx::fence_copies();  // of what another block's threads have written
}

template <class Tile>
__device__ __forceinline__ void bring_part(const Launch& launch, Shared<Tile>& shared, int slot,
                                           int i, int stage) {
  constexpr int kEightsAll = kEights<Tile>, kCount = kPartEights<Tile> * kMultipliers;
  constexpr int kBytes = kCount * static_cast<int>(sizeof(float4));
  static_assert(kBytes == sizeof(shared.x[0]) && kPartEights<Tile> * kPartStages == kEightsAll);
  ptx::mbarrier_expect(&shared.full[stage], kBytes);
  ptx::copy_bulk(shared.x[stage],
                 launch.parts.sums + std::int64_t{slot} * kEightsAll * kMultipliers + i * kCount,
                 kBytes, &shared.full[stage], ptx::evict_first());
}

/// Adds the sums of the tile's tail.
template <class Tile>
__device__ __forceinline__ void add_part(Shared<Tile>& shared, Ring<Tile::kStages>& ring,
                                         Sums<Tile>& sums, const Consumer& me) {
#pragma unroll
  for (int i = 0; i < kPartStages; ++i, ring.next()) {
    ptx::mbarrier_wait(&shared.full[ring.stage], ring.parity);
    const float4* part = reinterpret_cast<const float4*>(shared.x[ring.stage]) +
                         me.warpgroup * kWarpgroup + me.thread;
#pragma unroll
    for (int j = 0; j < kPartEights<Tile>; ++j)
      add_to(sums[0][i * kPartEights<Tile> + j], part[j * kMultipliers]);
    me.meet();  // the warpgroup has read its sums
    if (me.thread == 0) ptx::mbarrier_arrive(&shared.free[ring.stage]);
  }
}

/// The blocks of a tile, each of which has a segment of K, give each other the rows of x that the
/// other finishes: afterwards the work.segment-th of kSegments shares of `sums` is whole, added in
/// the order of the segments. They wait for each other: neighbours of the grid, of which all run
/// but for those of one tile, which others' ends let in.
template <class Tile, int kSegments>
__device__ __forceinline__ void exchange(const Launch& launch, const Work& work, Sums<Tile>& sums,
                                         const Consumer& me) {
  constexpr int kShare = kEights<Tile> / kSegments;
  constexpr int kAtOnce = Tile::kRows == 256                            ? 2
                          : kShare * kSegments == 16 || kShare % 2 == 1 ? kShare
                                                                        : kShare / 2;
  static_assert(kShare * kSegments == kEights<Tile> && kShare % kAtOnce == 0);
  const int first_block = static_cast<int>(blockIdx.x) - work.segment;
  float4* part = part_of<Tile>(launch, static_cast<int>(blockIdx.x), me);
#pragma unroll
  for (int to = 0; to < kSegments; ++to)
    if (to != work.segment)
#pragma unroll
      for (int i = to * kShare; i < (to + 1) * kShare; ++i)
        part[i * kMultipliers] = as_float4(sums[0][i]);
  __syncwarp();  // the warp's sums are stored
  if (me.lane < kSegments && me.lane != work.segment) {
    const auto sign = [&](int from, int to) {
      return ((first_block + to) * kWarps + me.warpgroup * 4 + me.warp) * kSegments + from;
    };
    put_sign(launch, sign(work.segment, me.lane));
    take_sign(launch, sign(me.lane, work.segment));
  }
  me.meet();  // the others' sums are there
#pragma unroll
  for (int own = 0; own < kSegments; ++own) {
    if (own != work.segment) continue;
#pragma unroll
    for (int first = own * kShare; first < (own + 1) * kShare; first += kAtOnce) {
      float4 of[kSegments][kAtOnce];
#pragma unroll
      for (int from = 0; from < kSegments; ++from)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          of[from][i] = from == own
                            ? as_float4(sums[0][first + i])
                            : ptx::load_from_l2(part_of<Tile>(launch, first_block + from, me) +
                                                (first + i) * kMultipliers);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        auto& sum = sums[0][first + i];
        sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
        for (int from = 0; from < kSegments; ++from) add_to(sum, of[from][i]);
      }
    }
  }
}

}  // namespace ridgeline::gemm_expand
