#pragma once
#include "device/ptx/cluster.cuh"
#include "kernels/attention_rows_merge.cuh"

/// How the blocks of a cluster, which have a split each of one sequence and KV head, join them: each
/// sends every other the rows that it joins. H200, 32 sequences of 4k keys, one KV head: 21.2 us if
/// they are read there once all are left, 20.5 so; 21.2 if threads store them there (st.async).
namespace ridgeline::attention_rows {

/// The rows of a split that one block joins: [begin, end).
struct RowShare {
  int each, begin, end;

  __device__ __forceinline__ RowShare(const Launch& launch, const Work& work, int rank) {
    each = 2 * launch.of_cluster.divide((work.rows + 1) / 2 + launch.cluster - 1);
    begin = min(rank * each, work.rows), end = min(begin + each, work.rows);
  }
};

/// This block's split: where its keys were, once they are used.
template <class Tile>
__device__ __forceinline__ SplitRow<Tile>* own_rows(Shared<Tile>& shared) {
  static_assert(kWarpgroupRows * sizeof(SplitRow<Tile>) <= sizeof(shared.kv));
  return reinterpret_cast<SplitRow<Tile>*>(shared.kv);
}

/// Says how many bytes come to this block. One thread.
template <class Tile>
__device__ __forceinline__ void expect_rows(const Launch& launch, Shared<Tile>& shared,
                                            const Item& item) {
  const RowShare mine(launch, item.work, item.split);
  const int others = item.splits - (item.split < item.splits);
  ptx::mbarrier_expect(&shared.arrived, others * (mine.end - mine.begin) *
                                            static_cast<int>(sizeof(SplitRow<Tile>)));
}

/// The results of this thread's two rows, `first` and 8 further, and then all to the blocks that
/// join them.
template <class Tile>
__device__ __forceinline__ void send_rows(const Launch& launch, Shared<Tile>& shared,
                                          const Item& item, int first,
                                          device::LazySoftmax& softmax,
                                          const float (&sums)[Tile::kSize / 8][4]) {
  const int lane = JoinedRow::lane(), rank = item.split;
  softmax.join_quad();
  ptx::named_barrier_sync(kConsumersMeet, Tile::kConsumerThreads);  // all have used the last tile
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (row >= item.work.rows) break;
    const device::RowEnd end = softmax.end(r, device::kMinusInfinity);
    SplitRow<Tile>& to = own_rows(shared)[row];
    if (lane % 4 == 0) to.lse = end.lse;
#pragma unroll
    for (int i = 0; i < Tile::kSize / 8; ++i)
      *reinterpret_cast<float2*>(&to.sums[8 * i + lane % 4 * 2]) =
          make_float2(sums[i][2 * r] * end.factor, sums[i][2 * r + 1] * end.factor);
  }
  ptx::fence_async_shared();
  ptx::named_barrier_sync(kConsumersMeet, Tile::kConsumerThreads);  // the rows are there
  ptx::cluster_wait();  // the others can be written to
  const int to = ptx::thread_index();
  if (to >= launch.cluster || to == rank) return;
  const RowShare theirs(launch, item.work, to);
  if (theirs.begin >= theirs.end) return;
  ptx::copy_to_block(&shared.sent[(rank - (rank > to)) * theirs.each],
                     &own_rows(shared)[theirs.begin],
                     (theirs.end - theirs.begin) * static_cast<int>(sizeof(SplitRow<Tile>)),
                     &shared.arrived, to);
}

/// By the consumers of all blocks of a cluster, two rows a warp, as merge_splits() would. Code that
/// runs once costs what it takes to fetch: eight lanes a row have what is the same for its columns.
template <class Tile>
__device__ __forceinline__ void join_cluster(const Launch& launch, Shared<Tile>& shared,
                                             const Item& item) {
  using T = typename Tile::T;
  constexpr int kRows = 2, kLanes = 8, kMost = Tile::kCluster;
  constexpr int kWarps = Tile::kConsumerThreads / device::kWarpSize;
  if (item.splits == 1) return;
  const AttentionParams& p = launch.attention;
  const Work& work = item.work;
  const int rank = item.split;
  const RowShare mine(launch, work, rank);
  const int lane = JoinedRow::lane(), split = lane % kLanes, last = mine.end - 1;
  const int begin = mine.begin + kRows * device::warp_index();
  const auto row_at = [&](int row, int i) -> const SplitRow<Tile>& {
    return i == rank ? own_rows(shared)[row]
                     : shared.sent[(i - (i > rank)) * mine.each + row - mine.begin];
  };
  if (rank >= item.splits) ptx::cluster_wait();  // as the others did before they sent
  if (begin > last) {
    ptx::mbarrier_wait(&shared.arrived, 0);
    ptx::cluster_arrive_relaxed();
  }
#pragma unroll 1
  for (int first = begin; first <= last; first += kRows * kWarps) {
    const int row = min(first + lane / kLanes % kRows, last);
    const float sink = attention_tile::sink_of(p, work.head(row));
    const std::int64_t offset = attention_tile::out_offset(p, work, row);
    if (first == begin) {
      ptx::mbarrier_wait(&shared.arrived, 0);
      ptx::cluster_arrive_relaxed();
    }
    float lse = device::kMinusInfinity;
    if (split < item.splits) lse = row_at(row, split).lse * device::kLog2E;
    const float largest = device::warp_reduce<device::MaxOrNaN, kLanes>(lse);
    const float weight = device::part_weight(lse, device::exponent_base(largest));
    const float total = device::warp_reduce<device::Sum, kLanes>(weight);
    const device::RowEnd end = device::quick_end_of_row(largest, total, sink);
#pragma unroll 1
    for (int from = 0; from < p.head_dim; from += JoinedRow::kColumns) {
      const int column = from + lane * 4, here = min(column, p.head_dim - 4);
      float4 sums[kRows] = {};
#pragma unroll
      for (int i = 0; i < kMost; ++i)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float part = device::from_lane(weight, r * kLanes + i);
          if (i >= item.splits) continue;
          const float4 value = *reinterpret_cast<const float4*>(
              &row_at(min(first + r, last), i).sums[here]);
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
  ptx::cluster_wait();  // the others have what was sent from here
}

}  // namespace ridgeline::attention_rows
