#pragma once
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

/// Adds the sums of the tile's tail.
template <class Tile>
__device__ __forceinline__ void add_part(const Launch& launch, int slot, Sums<Tile>& sums,
                                         const Consumer& me) {
  constexpr int kAtOnce = kEights<Tile> == 16 ? 16 : kEights<Tile> == 24 ? 8 : 4;  // registers
  if (me.thread == 0) take_sign(launch, slot * kConsumers + me.warpgroup);
  me.meet();  // the part is there
  const float4* part = part_of<Tile>(launch, slot, me);
#pragma unroll
  for (int first = 0; first < kEights<Tile>; first += kAtOnce) {
    float4 of[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) of[i] = ptx::load_from_l2(part + (first + i) * kMultipliers);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add_to(sums[0][first + i], of[i]);
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
  constexpr int kAtOnce = Tile::kRows == 256 ? 2 : kShare * kSegments == 16 ? kShare : kShare / 2;
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
