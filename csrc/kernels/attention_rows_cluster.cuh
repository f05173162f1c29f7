#pragma once
#include "device/ptx/cluster.cuh"
#include "kernels/attention_rows_merge.cuh"

/// How the blocks of a cluster, which have a split each of one sequence and KV head, join them.
namespace ridgeline::attention_rows {

/// The result of a block's split, in the place of its keys and values, once they are used.
template <class Tile>
struct Parked {
  float sums[kWarpgroupRows][Tile::kSize + 8];  // a warp's rows lie in different banks
  float lse[kWarpgroupRows];

  __device__ __forceinline__ static Parked& of(Shared<Tile>& shared) {
    static_assert(sizeof(Parked) <= sizeof(shared.kv));
    return reinterpret_cast<Parked&>(shared.kv);
  }
};

/// The results of this thread's two rows, `first` and 8 further.
template <class Tile>
__device__ __forceinline__ void park_rows(Shared<Tile>& shared, const Work& work, int first,
                                          device::LazySoftmax& softmax,
                                          const float (&sums)[Tile::kSize / 8][4]) {
  Parked<Tile>& parked = Parked<Tile>::of(shared);
  const int lane = JoinedRow::lane();
  softmax.join_quad();
  ptx::named_barrier_sync(kConsumersMeet, Tile::kConsumerThreads);  // all have used the last tile
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (row >= work.rows) break;
    const device::RowEnd end = softmax.end(r, device::kMinusInfinity);
    if (lane % 4 == 0) parked.lse[row] = end.lse;
    float* to = &parked.sums[row][lane % 4 * 2];
#pragma unroll
    for (int i = 0; i < Tile::kSize / 8; ++i)
      *reinterpret_cast<float2*>(to + 8 * i) =
          make_float2(sums[i][2 * r] * end.factor, sums[i][2 * r + 1] * end.factor);
  }
}

/// By the consumers of all blocks of a cluster, two rows a warp, as merge_splits() would. Code that
/// runs once costs what it takes to fetch: eight lanes a row have what is the same for its columns.
template <class Tile>
__device__ __forceinline__ void join_cluster(const Launch& launch, Shared<Tile>& shared,
                                             const Item& item) {
  using T = typename Tile::T;
  constexpr int kRows = 2, kLanes = 8, kMost = config::kRowCluster;
  constexpr int kWarps = Tile::kConsumerThreads / device::kWarpSize;
  if (item.splits == 1) return;
  ptx::cluster_arrive();
  const AttentionParams& p = launch.attention;
  const Parked<Tile>& parked = Parked<Tile>::of(shared);
  const Work& work = item.work;
  const int lane = JoinedRow::lane(), split = lane % kLanes, last = work.rows - 1;
  const int begin = kRows * (device::warp_index() * launch.cluster + ptx::cluster_rank());
  if (begin > last) ptx::cluster_wait();
#pragma unroll 1
  for (int first = begin; first <= last; first += kRows * launch.cluster * kWarps) {
    const int row = min(first + lane / kLanes % kRows, last);
    const float sink = attention_tile::sink_of(p, work.head(row));
    const std::int64_t offset = attention_tile::out_offset(p, work, row);
    if (first == begin) ptx::cluster_wait();  // the results are there
    float lse = device::kMinusInfinity;
    if (split < item.splits)
      lse = ptx::load_from_block(&parked.lse[row], split) * device::kLog2E;
    float weight;
    device::RowEnd end;
#pragma unroll 1
    for (int from = 0; from < p.head_dim; from += JoinedRow::kColumns) {
      const int column = from + lane * 4, here = min(column, p.head_dim - 4);
      float4 values[kMost][kRows];
#pragma unroll
      for (int i = 0; i < kMost; ++i)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (i < item.splits)
            values[i][r] = ptx::load_from_block(
                reinterpret_cast<const float4*>(&parked.sums[min(first + r, last)][here]), i);
      if (from == 0) {
        const float largest = device::warp_reduce<device::MaxOrNaN, kLanes>(lse);
        weight = device::part_weight(lse, device::exponent_base(largest));
        const float total = device::warp_reduce<device::Sum, kLanes>(weight);
        end = device::quick_end_of_row(largest, total, sink);
      }
      float4 sums[kRows] = {};
#pragma unroll
      for (int i = 0; i < kMost; ++i)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float part = device::from_lane(weight, r * kLanes + i);
          const float4& value = values[i][r];
          if (i >= item.splits) continue;
          sums[r].x += part * value.x, sums[r].y += part * value.y;
          sums[r].z += part * value.z, sums[r].w += part * value.w;
        }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t to = device::from_lane(offset, r * kLanes) + column;
        const float factor = device::from_lane(end.factor, r * kLanes);
        if (first + r <= last && column < p.head_dim)
          attention_tile::store_scaled(static_cast<T*>(p.out) + to, sums[r], factor);
      }
    }
    if (split == 0 && lane < kRows * kLanes && first + lane / kLanes <= last)
      attention_tile::store_lse(p, work, row, end.lse);
  }
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the others have read what lies here
}

}  // namespace ridgeline::attention_rows
