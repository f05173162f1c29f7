#pragma once
#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/cluster_share.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_decode_fresh.cuh"
#include "kernels/attention_decode_merge.cuh"
#include "kernels/attention_decode_producer.cuh"

/// Decode of one sequence on Hopper, where latencies one after the other are most there is: a
/// cluster of blocks owns a KV head, each block an item of it, and they join their results through
/// shared memory. No block plans for others.
namespace ridgeline::attention_decode {

constexpr int kCluster = 16;    // blocks
constexpr int kMergeLanes = 4;  // share the parts of a unit

/// The tile of a block that has few leaves, mostly one: its code is run through once, and shorter
/// without parts in registers. H200, 1 sequence of 256 keys: 4.19 us with them, and 3.96 so.
template <class Tile>
struct LeanTile : Tile {
  static constexpr int kNearLevels = 0;
};

/// What the other blocks of the cluster send: of each part those units of the sums that this block
/// joins, and all bases and totals. It lies where the queries of later items would.
template <class Tile>
struct Exchange {
  static constexpr int kPairs = Tile::kRows / 2;
  float4 sums[kPairs * Tile::kPairUnits];  // units, a part after the other
  float4 ends[kCluster * kPairs];
  std::uint64_t arrived;

  __device__ __forceinline__ static Exchange& of(Shared<Tile>& shared) {
    static_assert(sizeof(Exchange) <= (kItems - 1) * sizeof(shared.queries[0]));
    return reinterpret_cast<Exchange&>(shared.queries[1]);
  }
};

/// Up to so many keys the kernel behind it starts beside it: a product fits there, but not twice on
/// an SM, and brings weights meanwhile. H200, products and attention of a token, 200 keys: bf16
/// 3.68 ms, so 3.65; int4 1.54, 1.51. Attention behind attention, us, of 1k, 2k, 4k, 8k keys: 5.6,
/// 6.3, 8.4, 12.7 if none starts early, 4.8, 6.0, 9.0, 14.6 if all do.
constexpr int kEarlyKeys = 2048;

/// Units of a pair of rows that each block joins.
template <class Tile>
constexpr int kUnits = Tile::kPairUnits / kCluster;

__device__ __forceinline__ int rank() { return ptx::cluster_rank(); }
__device__ __forceinline__ int row_pairs(const Launch& launch) {
  return (launch.group_size + 1) / 2;
}

__device__ __forceinline__ Work work_of_block(const Launch& launch) {
  return {.sequence = {.q_len = 1},
          .kv_head = static_cast<int>(blockIdx.x) / kCluster,
          .group = launch.group_size,
          .rows = launch.group_size};
}

/// This block's item, where the sequence has `length` keys.
template <class Tile>
__device__ __forceinline__ Item item_of_block(const Launch& launch, int length) {
  Item item{.work = work_of_block(launch), .split = rank()};
  item.work.sequence.k_len = min(max(length, 0), launch.attention.max_k);
  Cut cut = leaves_of<Tile>(launch, item.work.sequence);
  const int span = cut.end - cut.begin;
  while (kCluster * cut.keys < span) cut.keys *= 2;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  item.leaf = cut.leaf;
  item.splits = config::greater(device::count_lanes(lane * cut.keys < span), 1);
  item.keys.begin = cut.begin + rank() * cut.keys;
  item.keys.end = config::lesser(item.keys.begin + cut.keys, cut.end);
  return item;
}

/// Whether key and queries come as the projection leaves them.
template <class Tile>
__device__ __forceinline__ bool has_fresh(const Launch& launch) {
  return !Tile::kQuantised && launch.fresh.k != nullptr;
}

/// The warp that brings tiles. The item is planned while the kernels ahead still run, for the
/// length that is there then, which only a guess may read; or it is at rest, as the tiles are.
template <class Tile>
__device__ __forceinline__ void produce_item(const Launch& launch, Shared<Tile>& shared) {
  const std::int32_t* at = launch.attention.seq_lens;
  const int lane = threadIdx.x % device::kWarpSize;
  int length = ptx::load_from_l2(at);
  if (length <= kEarlyKeys) ptx::launch_dependents();
  Item item = item_of_block<Tile>(launch, length);
  Bringer<Tile> bringer{launch, shared};
  const bool is_planned = has_fresh<Tile>(launch);
  if (!is_planned) ptx::wait_for_dependencies();
  for (;;) {
    const int now = is_planned ? length : ptx::load_from_l2(at);
    bringer.load_entries(item.work.batch, item.keys.begin);
    if (now == length) break;
    length = now;
    item = item_of_block<Tile>(launch, length);
  }
  if (item.keys.begin < item.keys.end) bringer.bring(item, item.keys.begin);
  describe<Tile>(launch, item, 0, shared);
  if (lane == 0 && item.splits > 1)
    ptx::mbarrier_expect(&Exchange<Tile>::of(shared).arrived,
                         item.splits * row_pairs(launch) * (kUnits<Tile> + 1) *
                             static_cast<int>(sizeof(float4)));
  for (int n = item.keys.begin + Tile::kKeys; n < item.keys.end; n += Tile::kKeys)
    bringer.bring(item, n);
  // Of longer ones as the last tile is asked for, if that is not long before the end. H200, us: fp8
  // 4k keys 8.76 and 8.05, 8k 12.38 and 11.67, int8 4k 8.88 and 8.30; but bf16 4k 8.8 and 9.1.
  if (Tile::kQuantised && length > kEarlyKeys) ptx::launch_dependents();
}

/// This warp's columns of the item's rows to the blocks that join them.
template <class Tile>
__device__ __forceinline__ void send_part(const Launch& launch, const WarpState<Tile>& warp) {
  Exchange<Tile>& exchange = Exchange<Tile>::of(warp.shared);
  const int pairs = row_pairs(launch);
  if (warp.t >= pairs) return;
  const device::ColumnSoftmax& gathered = warp.softmax[0];
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) {
    const float(&sums)[4] = warp.sums[i][0];
    const int unit = 8 * (warp.warp * Tile::kSums + i) + warp.g;
    ptx::put_in_block(
        &exchange.sums[(rank() * pairs + warp.t) * kUnits<Tile> + unit % kUnits<Tile>],
        make_float4(sums[0], sums[1], sums[2], sums[3]), &exchange.arrived, unit / kUnits<Tile>);
  }
  const int to = warp.warp * 8 + warp.g;
  if (to < kCluster)
    ptx::put_in_block(
        &exchange.ends[rank() * pairs + warp.t],
        make_float4(gathered.base[0], gathered.sum[0], gathered.base[1], gathered.sum[1]),
        &exchange.arrived, to);
}

/// This block's units of the rows: the upper levels of the tree whose lower ones the parts are.
template <class Tile>
__device__ __forceinline__ void join_parts(const Launch& launch, const Item& item,
                                           Shared<Tile>& shared) {
  constexpr int kEach = kCluster / kMergeLanes;  // parts of a lane
  Exchange<Tile>& exchange = Exchange<Tile>::of(shared);
  const int lane = threadIdx.x % kMergeLanes, unit = threadIdx.x / kMergeLanes;
  const int units = row_pairs(launch) * kUnits<Tile>;
  static_assert(Tile::kRows / 2 * kUnits<Tile> <= kConsumerThreads / kMergeLanes);
  if (!device::any_lane(unit < units)) return;
  // Lane by lane: both elements of the even row, then of the odd one.
  const bool is_odd = lane >= 2, is_second = lane % 2 != 0;
  const int pair = min(unit, units - 1) / kUnits<Tile>, row = 2 * pair + is_odd;
  const RowEnds to = shared.ends[0][row];
  const float sink = sink_of_row(launch, item.work, row);
  ptx::mbarrier_wait(&exchange.arrived, 0);
  device::PairPart parts[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int part = lane * kEach + i;
    if (part >= item.splits || unit >= units) continue;
    parts[i].ends = exchange.ends[part * row_pairs(launch) + pair];
    parts[i].sums = exchange.sums[part * units + unit];
  }
  device::join_parts(parts);
  device::join_lanes<kMergeLanes>(parts[0]);
  if (unit >= units || to.out == nullptr) return;
  const float4 &ends = parts[0].ends, &sums = parts[0].sums;
  const device::RowEnd end = device::quick_end_of_row(is_odd ? ends.z : ends.x,
                                                      is_odd ? ends.w : ends.y, sink);
  const float sum = is_odd ? (is_second ? sums.w : sums.y) : (is_second ? sums.z : sums.x);
  const int of_row = rank() * kUnits<Tile> + unit % kUnits<Tile>;
  store_element<Tile>(launch.attention, to.out, column_of<Tile>(of_row, is_second),
                      sum * end.factor);
  if (of_row == 0 && !is_second) *to.lse = end.lse;
}

template <class Tile>
__device__ __forceinline__ void consume_item(const Launch& launch, Shared<Tile>& shared) {
  WarpState<Tile> warp{launch, shared};
  typename WarpState<Tile>::Parts parts;
  Place<Tile> place;
  // The queries are there before the item is described. H200, one sequence of 4k fp8 keys: 8.94 us
  // if they are waited for behind it, 8.64 so.
  ptx::mbarrier_wait(&shared.fetched[0], 0);
  warp.load_queries(work_of_block(launch), 0);
  ptx::mbarrier_wait(&shared.described[0], 0);
  const Item& item = shared.items[0];
  if (rank() < item.splits) {
    warp.see(item);
    const int fresh = has_fresh<Tile>(launch) ? item.work.sequence.k_len - 1 : -1;
    gather<Tile>(item, warp, parts, place, LacksFresh<Tile>{shared, fresh});
    if (item.splits == 1) return store_rows<Tile>(launch, item, 0, warp);
    ptx::cluster_wait();  // the others can be written to
    send_part<Tile>(launch, warp);
  }
  if (item.splits > 1) join_parts<Tile>(launch, item, shared);
}

/// Decode of one sequence. Grid: a cluster for each KV head, whose blocks take equal runs of the
/// sequence's leaves, a power of two of them. The warps are those of decode_sm90_kernel; the last
/// brings the queries. Bits are those of decode_sm90_kernel: leaves and their tree are.
///
/// Roofline: reads every key and value once: bandwidth, and for short sequences the latencies of
/// length and block table, keys, one item, and the way to the other blocks. H200, 32/8 heads of
/// 128, bf16, not chained, by that kernel and by this: 1k keys 8.7 and 5.7 us, 8k 17.0 and 13.4.
template <class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    decode_cluster_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&Exchange<Tile>::of(shared).arrived, 1);
    shared.make_barriers();
    for (const CUtensorMap* map : {&launch.k, &launch.v, &launch.end_k, &launch.end_v})
      ptx::prefetch_tensor_map(map);
  }
  __syncthreads();  // the barriers are made
  ptx::cluster_arrive();
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  if (warp < kWarps) {
    consume_item<Tile>(launch, shared);
  } else if (warp == kWarps) {
    produce_item<Tile>(launch, shared);
  } else if (has_fresh<Tile>(launch)) {
    if constexpr (!Tile::kQuantised)
      FreshRows<Tile>{launch, work_of_block(launch)}.bring(shared, rank() == 0);
  } else {
    ptx::wait_for_dependencies();
    request_queries<Tile>(launch, work_of_block(launch), shared.queries[0]);
    ptx::mbarrier_arrive_after_copies(&shared.fetched[0]);
  }
#endif
}

/// Keys up to which a block an SM brings and multiplies them as fast as two, and it does not count
/// that one of 8 clusters shares its SMs with another. H200, one sequence of 32k keys, by the other
/// kernel and by this: bf16 37.3 us and 36 to 40, fp8 25 and 36.
constexpr int kClusterKeys = 16384;

/// How many clusters the GPU holds at once. Some have no 16 SMs side by side.
template <class Tile>
int clusters_at_once() {
  constexpr auto kKernel = decode_cluster_kernel<LeanTile<Tile>>;
  constexpr auto kShared = static_cast<int>(sizeof(Shared<LeanTile<Tile>>));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const char* what = "attention: clusters";
  device::cuda_check(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), what);
  device::cuda_check(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what);
  int clusters = 0;
  device::cuda_check(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config), what);
  return clusters;
}

/// Whether a cluster for each KV head fills half of the GPU, and all run at once. Where offsets of
/// queries are given, rows may be nobody's: the other kernel clears them.
template <class Tile>
bool takes_cluster(const AttentionParams& p) {
  const int most = device::multiprocessors() / kCluster;
  if (p.batch != 1 || p.cu_q != nullptr || p.cu_k != nullptr || p.batch_invariant ||
      p.max_k > kClusterKeys || p.kv_heads > most || 2 * p.kv_heads < most)
    return false;
  static const int at_once = clusters_at_once<Tile>();
  return p.kv_heads <= at_once;
}

template <class Tile>
void launch_clusters(Launch launch, Stream stream) {
  launch.copies_tables = false;
  device::launch_chained<decode_cluster_kernel<LeanTile<Tile>>>(
      dim3(launch.attention.kv_heads * kCluster), dim3(kThreads), sizeof(Shared<LeanTile<Tile>>),
      stream, launch, "attention", kCluster);
}

}  // namespace ridgeline::attention_decode
