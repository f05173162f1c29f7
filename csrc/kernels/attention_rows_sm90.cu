#include <algorithm>
#include <numeric>

#include "device/launch.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_launch.h"
#include "kernels/attention_rows_consumer.cuh"
#include "kernels/attention_rows_planner.cuh"
#include "kernels/attention_rows_share.cuh"
#include "kernels/attention_views.cuh"
#include "kernels/attention_workspace.h"

namespace ridgeline {
namespace {

using namespace attention_rows;

// ---- Kernels ------------------------------------------------------------------------------------

/// Sequences of few queries, whose rows are many enough for wgmma; or the rows of all sequences
/// before the keys that all have in common. Grid: as many blocks as the SMs hold, which stay and
/// are dealt items: a tile of rows and one split of their keys. A warpgroup of 64 rows multiplies,
/// sums in fp32; one warp brings keys and values by the copy engine, one plans items and brings
/// queries.
///
/// Roofline: reads each key and value once: bandwidth, as long as few rows read it. Before common
/// keys 4 * head_dim flops a pair of row and key, on the tensor cores.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    rows_sm90_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(sizeof(Shared<Tile>) <= (Tile::kBlocks == 2 ? 113 : 227) * 1024);
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  // A cluster's dependents come when its last keys are on their way: earlier ones take the room
  // beside some blocks, two of them an SM where others have none. H200, 16 sequences of 4k keys,
  // one KV head: 15.8 us, and 13.5 so; 32: 21.6 and 21.3.
  if (!Tile::kCommon && launch.cluster == 1) ptx::launch_dependents();
  if (threadIdx.x == 0) {
    shared.make_barriers();
    ptx::prefetch_tensor_map(&launch.q);
    ptx::prefetch_tensor_map(&launch.k);
    ptx::prefetch_tensor_map(&launch.v);
  }
  __syncthreads();  // the barriers are made
  if (Tile::kJoins && launch.cluster > 1) ptx::cluster_arrive_relaxed();  // send_rows() waits
  const int warp = device::warp_index();
  constexpr int kConsumerWarps = Tile::kConsumerThreads / device::kWarpSize;
  bool shares = false;
  if constexpr (Tile::kJoins) {
    shares = launch.cluster > 1 && warp == kConsumerWarps;
    if (shares) {
      ShareBringer<Tile> share{{launch, shared}};
      share.guess();
      ptx::wait_for_dependencies();
      share.run();
      ptx::launch_dependents();
    }
  }
  if (launch.follows_common) {
    ptx::fence_device();  // L1 may have lengths and tables of a step before
  } else {
    ptx::wait_for_dependencies();
  }
  // Once all its blocks have waited, the kernel of the other keys need not: that one's blocks begin
  // as this one's end. H200, 64 sequences with 8k common keys: 49.1 us, and 48.0 so.
  if constexpr (Tile::kCommon) ptx::launch_dependents();
  if (warp < kConsumerWarps) {
    Consumer<Tile>{launch, shared, warp / 4}.run();
  } else if (warp == kConsumerWarps) {
    if (!shares) Bringer<Tile>{launch, shared}.run();
  } else {
    Planner<Tile>{launch, shared}.run();
  }
  if (launch.clears)
    attention_tile::clear_unowned_rows<typename Tile::T>(launch.attention, blockIdx.x, gridDim.x);
  if (launch.follows_common) ptx::wait_for_dependencies();  // what comes next needs both results
#endif
}

constexpr int kMergeWarps = 4;
constexpr int kMergeThreads = kMergeWarps * device::kWarpSize;
constexpr int kMergeBlocks = 4;  // of one sequence and KV head

/// Joins splits, in their order. Grid: (sequence and KV head, share of its rows). The block that
/// stores the last split of its rows could join them in the same launch, but then holds its next
/// item up, and few warps do all: H200, 8 sequences of 4k keys, five queries: 48 us, and 56.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_rows_kernel(const __grid_constant__ Launch launch) {
  const AttentionParams& p = launch.attention;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  Work work{.batch = static_cast<int>(blockIdx.x) / p.kv_heads,
            .kv_head = static_cast<int>(blockIdx.x) % p.kv_heads,
            .group = launch.group};
  work.sequence = config::sequence_of(p, work.batch);
  if (!config::is_packed(p, work.sequence.q_len, launch.least_rows)) return;
  work.rows = work.sequence.q_len * work.group;
  const int splits = cut_of(p, work.sequence).splits;
  if (splits > 1)
    merge_splits<T>(launch, work, splits, blockIdx.y * kMergeWarps + device::warp_index(),
                    kMergeBlocks * kMergeWarps);
}

/// Adds the common keys' splits to the result of the others. Grid: a warp a token and head. A row
/// that has no common keys keeps its bits.
template <class T>
__global__ void __launch_bounds__(kMergeThreads)
    join_common_kernel(const __grid_constant__ Launch launch) {
  const AttentionParams& p = launch.attention;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int item = static_cast<int>(blockIdx.x) * kMergeWarps + device::warp_index();
  const int token = item / p.heads, head = item % p.heads;
  if (token >= config::tokens(p)) return;
  const Partials partials{launch};
  const Work work{.kv_head = head / launch.group};
  const std::int64_t from = partials.index(work, token * launch.group + head % launch.group, 0);
  T* out = static_cast<T*>(p.out) + static_cast<std::int64_t>(item) * p.head_dim;
  float* own_lse = p.lse + head * p.stride_lse_head + token;
  const int column = JoinedRow::lane() * 4, here = min(column, p.head_dim - 4);
  static_assert(config::kCommonColumns <= JoinedRow::kColumns);
  // All is on its way at once.
  float4 values[config::kCommonSplits];
#pragma unroll
  for (int i = 0; i < config::kCommonSplits; ++i)
    if (i < launch.max_splits)
      values[i] = ptx::load_from_l2(reinterpret_cast<const float4*>(
          partials.sums(from) + std::int64_t{i} * launch.max_rows * p.head_dim + here));
  float lse[JoinedRow::kPerLane];
  load_lse(partials.lse(from, 1), launch.max_rows, launch.max_splits, lse);
  const float own = *own_lse * device::kLog2E;
  const auto own_values = device::floats(device::load_vec<4>(out + here));
  JoinedRow joined;
  joined.weigh(lse);
  if (joined.total == 0.0f) return;
  const float base = fmaxf(joined.largest, own);
  const float keep = device::part_weight(joined.largest, base);
  const float weight = device::part_weight(own, base);
  const float total = joined.total * keep + weight;
  const device::RowEnd end = device::end_of_row(base, total, device::kMinusInfinity);
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < config::kCommonSplits; ++i) {
    if (i >= launch.max_splits) break;
    const float part = device::from_lane(joined.weights[0], i);
    sums[0] += part * values[i].x, sums[1] += part * values[i].y;
    sums[2] += part * values[i].z, sums[3] += part * values[i].w;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[c] = sums[c] * keep + weight * own_values.data[c];
  if (column < p.head_dim)
    attention_tile::store_scaled(out + column, make_float4(sums[0], sums[1], sums[2], sums[3]),
                                 end.factor);
  __syncwarp();  // all lanes have read lse
  if (joined.lane() == 0) *own_lse = end.lse;
}

// ---- Launch -------------------------------------------------------------------------------------

/// Rows of tokens: {columns, heads, tokens, sequences}.
device::TensorView rows_of(const AttentionParams& p, bool common) {
  const bool joins = common && p.cu_q == nullptr;  // one row a sequence, all side by side
  return {.dtype = p.dtype,
          .data = p.q,
          .sizes = {p.head_dim, p.heads, p.cu_q ? p.total_q : joins ? p.batch : p.max_q,
                    p.cu_q || joins ? 1 : p.batch},
          .strides = {p.stride_q_head, joins ? p.stride_q_batch : p.stride_q_row,
                      p.stride_q_batch}};
}

template <class Tile>
Launch launch_of(const AttentionParams& p, const void* workspace) {
  Launch launch{.attention = p};
  launch.group = p.heads / p.kv_heads;
  launch.kv_heads = device::Divisor::of(p.kv_heads);
  launch.block_size = device::Divisor::of(std::max(p.block_size, 1));
  const std::int64_t tokens = Tile::kCommon ? config::tokens(p) : p.max_q;
  launch.queries = static_cast<int>(std::min<std::int64_t>(Tile::kRows / launch.group, tokens));
  launch.box_rows = p.block_tables ? std::gcd(p.block_size, kKeys) : kKeys;
  launch.boxes = kKeys / launch.box_rows * Tile::kParts;
  launch.q = device::swizzled_map(rows_of(p, Tile::kCommon), launch.group, kColumns,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, launch.queries);
  // A box is half a row: see the decode kernel.
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  using attention_launch::keys_of, attention_launch::values_of;
  launch.k = device::swizzled_map(keys_of(p), launch.box_rows, kColumns, kPromotion);
  launch.v = device::swizzled_map(values_of(p), launch.box_rows, kColumns, kPromotion);
  launch.workspace = const_cast<void*>(workspace);
  launch.slots = Tile::kSlots;
  launch.cluster = 1;
  return launch;
}

template <class Tile>
void launch_items(const Launch& launch, std::int64_t items, Stream stream) {
  const int most = Tile::kBlocks * device::multiprocessors();
  const std::int64_t blocks = launch.cluster > 1 ? items : std::min<std::int64_t>(items, most);
  if (launch.cluster > 1)  // else an SM may have two blocks while others have none
    device::cuda_check(
        cudaFuncSetAttribute(rows_sm90_kernel<Tile>,
                             cudaFuncAttributeClusterSchedulingPolicyPreference,
                             cudaClusterSchedulingPolicyLoadBalancing),
        "attention");
  device::launch_chained<rows_sm90_kernel<Tile>>(dim3(static_cast<unsigned>(blocks)),
                                                 dim3(Tile::kThreads), sizeof(Shared<Tile>),
                                                 stream, launch, "attention", launch.cluster);
}

template <class Tile>
void launch_own(const AttentionParams& p, Stream stream) {
  using T = typename Tile::T;
  Launch launch = launch_of<Tile>(p, p.workspace);
  const int shared_keys = p.leaves_shared ? p.shared_keys / kKeys * kKeys : 0;
  launch.max_splits =
      Tile::kUnsplit ? 1 : config::max_row_splits(p.head_dim, p.max_k - shared_keys);
  launch.follows_common = p.leaves_shared;
  launch.max_rows = config::max_split_rows(p.max_q, launch.group);
  const bool takes_all = Tile::kUnsplit || config::packs_all(p);
  launch.clears = takes_all && p.cu_q != nullptr;
  launch.least_rows = takes_all ? 1 : config::kMmaRows + 1;
  const std::int64_t pairs = std::int64_t{p.batch} * p.kv_heads;
  const bool joins = Tile::kJoins && config::joins_clusters(p, device::multiprocessors());
  if (joins) launch.cluster = launch.max_splits;
  launch.of_cluster = device::Divisor::of(launch.cluster);
  const std::int64_t items = pairs * launch.max_splits;
  const int multiprocessors = device::multiprocessors();
  if (joins && items > multiprocessors)
    launch.slots =
        launch.cluster <= config::kSmallCluster && items > Tile::kBlocks * multiprocessors
            ? Tile::kFollowingSlots
            : Tile::kSharedSlots;
  launch.deals = !joins && p.counters != nullptr;
  launch_items<Tile>(launch, items, stream);
  if (launch.max_splits == 1 || joins) return;
  const dim3 grid(checked_int32(pairs, "attention: KV heads"), kMergeBlocks);
  device::launch_chained<merge_rows_kernel<T>>(grid, dim3(kMergeThreads), 0, stream, launch,
                                               "attention: combine");
}

/// Bytes of a ring: what fills half an SM, or all of it. Less is on its way of 128 columns where a
/// step takes one tile: a block that begins late then waits less for the others' keys. H200, 32
/// sequences of 4k keys, one KV head: 22.9 us with 6 slots, 22.0 with 4. Beside it lie the rows of
/// other splits.
template <class T, int kSize, bool kUnsplit = false>
using OwnTile =
    Tile<T, kSize, 1, kUnsplit ? (kSize == 64 ? 12 : 6) : kSize == 64 ? 10 : 4, kUnsplit>;
template <class T, int kSize>
using CommonTile = Tile<T, kSize, 2, kSize == 64 ? 24 : 12>;

/// Calls fn(Type<T>{}, size) with the smallest of `kSizes` that holds a head.
template <int... kSizes, class Fn>
void dispatch_tile(const AttentionParams& p, Fn&& fn) {
  device::dispatch_half(p.dtype, [&](auto type) {
    dispatch_at_least<kSizes...>(p.head_dim, "attention: head size",
                                 [&](auto size) { fn(type, size); });
  });
}

}  // namespace

namespace attention_launch {

const char* rows_obstacle(const AttentionParams& p) { return obstacle_sm90(p, rows_of(p, false)); }

void rows_sm90(const AttentionParams& p, Stream stream) {
  dispatch_tile<64, 128, 256>(p, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    if (p.batch_invariant) {
      launch_own<OwnTile<T, size, true>>(p, stream);
    } else {
      launch_own<OwnTile<T, size>>(p, stream);
    }
  });
}

namespace {

template <class T, int kSize>
Launch common_launch(const AttentionParams& p) {
  const auto* workspace = static_cast<const char*>(p.workspace) + config::common_offset(p);
  Launch launch = launch_of<CommonTile<T, kSize>>(p, workspace);
  launch.max_rows = checked_int32(config::tokens(p) * launch.group, "attention: rows");
  launch.tiles = ceil_div(launch.max_rows, launch.queries * launch.group);
  launch.max_splits = ceil_div(p.shared_keys, config::common_split_keys(p.shared_keys));
  return launch;
}

}  // namespace

void common_sm90(const AttentionParams& p, Stream stream) {
  dispatch_tile<64, 128>(p, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    const Launch launch = common_launch<T, size>(p);
    const std::int64_t items = std::int64_t{launch.tiles} * p.kv_heads * launch.max_splits;
    launch_items<CommonTile<T, size>>(launch, items, stream);
  });
}

void join_common_sm90(const AttentionParams& p, Stream stream) {
  dispatch_tile<64, 128>(p, [&](auto type, auto size) {
    using T = typename decltype(type)::type;
    const std::int64_t rows = config::tokens(p) * p.heads;
    const dim3 grid(checked_int32(ceil_div<std::int64_t>(rows, kMergeWarps),
                                  "attention: rows"));
    device::launch_chained<join_common_kernel<T>>(grid, dim3(kMergeThreads), 0, stream,
                                                  common_launch<T, size>(p), "attention: join");
  });
}

}  // namespace attention_launch
}  // namespace ridgeline
