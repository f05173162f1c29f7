#pragma once
#include <algorithm>
#include <numeric>

#include "device/launch.cuh"
#include "device/properties.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "kernels/attention_decode_cluster.cuh"
#include "kernels/attention_decode_merge.cuh"
#include "kernels/attention_decode_producer.cuh"
#include "kernels/attention_views.cuh"

/// The Hopper decode kernel and its launch, for the two files that make it of 16-bit and 8-bit
/// caches.
namespace ridgeline::attention_decode {

// ---- Consumers ----------------------------------------------------------------------------------

/// Joins the splits of an item's rows if it was the last to arrive, and frees its place.
template <class Tile>
__device__ __forceinline__ void conclude(const Launch& launch, Shared<Tile>& shared,
                                         const Ring<kItems>& ring) {
  const Item& item = shared.items[ring.place];
  if (item.splits > 1) ptx::mbarrier_wait(&shared.counted[ring.place], ring.parity);
  // The weights of the item after it are read, or will be before the next are stored; those of
  // splits take their place.
  static_assert(sizeof(PartWeights<Tile>) <= sizeof(shared.weights));
  if (item.splits > 1 && item.is_last) {
    merge_splits<Tile>(launch, item.work, item.splits,
                       reinterpret_cast<PartWeights<Tile>&>(shared.weights));
    ptx::named_barrier_sync(kConsumersMeet, kConsumerThreads);  // which are read
  }
  __syncwarp();  // the warp is done with the item
  if (threadIdx.x % device::kWarpSize == 0) ptx::mbarrier_arrive(&shared.released[ring.place]);
}

template <class Tile>
__device__ __forceinline__ void consume(const Launch& launch, Shared<Tile>& shared) {
  WarpState<Tile> warp{launch, shared};
  typename WarpState<Tile>::Parts parts;
  Place<Tile> place;
  Ring<kItems> items, before;
  bool follows = false;
  for (;; items.next()) {
    ptx::mbarrier_wait(&shared.described[items.place], items.parity);
    const Item& item = shared.items[items.place];
    const bool ends = item.splits == 0;
    if (!ends) {
      ptx::mbarrier_wait(&shared.fetched[items.place], items.parity);
      warp.begin(item, items.place);
      gather<Tile>(item, warp, parts, place);
      store_item<Tile>(launch, item, items.place, warp);
      if (place.held >= 0 && warp.lane == 0) ptx::mbarrier_arrive(&shared.free[place.held]);
      ptx::fence_block();  // its share comes before its arrival
      __syncwarp();  // the warp has stored its share
      if (warp.lane == 0) ptx::mbarrier_arrive(&shared.stored[items.place]);
    }
    if (follows) {  // the arrival of the item before has been counted meanwhile
      conclude<Tile>(launch, shared, before);
      before.next();
    }
    if (ends) break;
    follows = true;
  }
}

// ---- Kernels ------------------------------------------------------------------------------------

/// Decode on Hopper. Grid: at most two blocks an SM, which stay and are dealt items: one split of
/// the keys that a sequence's queries see, for one KV head and all of its rows. One warp plans
/// items and brings their tiles by the copy engine, one counts those that are stored, and four
/// multiply: each weighs its own 16 keys of every 64 and sums its own quarter of the columns, in
/// fp32. The block that stores the last split of its rows joins them, as the tree of leaves says.
///
/// Roofline: reads every key and value once: bandwidth, with 96 KB a block on its way.
template <class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    decode_sm90_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(sizeof(Shared<Tile>) <= kBlockBytes, "two blocks an SM");
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
  // Dependents that were asked for now would take places by twos on the SMs whose blocks end first,
  // and the kernels after them in the chain too: they are let go as blocks come to their last
  // tiles. H200, a token of 8B shapes in bf16, asked for now and as blocks end: 5.57 and 4.20 ms.
  if (launch.attention.counters == nullptr) ptx::launch_dependents();
  if (threadIdx.x == 0) {
    shared.make_barriers();
    for (const CUtensorMap* map : {&launch.k, &launch.v, &launch.end_k, &launch.end_v})
      ptx::prefetch_tensor_map(map);
  }
  __syncthreads();  // the barriers are made
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  if (warp > kWarps && launch.guesses) prefetch_guess<Tile>(launch, static_cast<int>(blockIdx.x));
  const auto clear_rows = [&] {
    if (launch.attention.cu_q != nullptr && launch.first_sequence == 0)
      attention_tile::clear_unowned_rows<typename Tile::T>(launch.attention, blockIdx.x, gridDim.x);
  };
  if (warp == kWarps) {
    produce<Tile>(launch, shared);
    clear_rows();
    return;
  }
  ptx::wait_for_dependencies();
  clear_rows();  // while the first item is planned
  if (warp < kWarps) {
    consume<Tile>(launch, shared);
  } else {
    count_items<Tile>(launch, shared);
  }
#endif
}

/// Joins splits where no counters tell which block is the last. Grid: (sequence, KV head).
template <class Tile>
__global__ void __launch_bounds__(kConsumerThreads)
    merge_splits_kernel(const __grid_constant__ Launch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ PartWeights<Tile> weights;
  const AttentionParams& p = launch.attention;
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int batch = launch.first_sequence + static_cast<int>(blockIdx.x) / p.kv_heads;
  Work work{.sequence = config::sequence_of(p, batch),
            .batch = batch,
            .kv_head = static_cast<int>(blockIdx.x) % p.kv_heads,
            .group = launch.group_size};
  work.rows = work.sequence.q_len * work.group;
  Plan<Tile> plan{launch};
  plan.cut_sequences();
  const int splits = cut_of<Tile>(launch, work.sequence, plan.limit).splits;
  if (splits > 1 && config::is_split(p, work.sequence.q_len))
    merge_splits<Tile>(launch, work, splits, weights);
#endif
}

// ---- Launch -------------------------------------------------------------------------------------

/// Whether lengths and tables, as they are while kernels ahead run, tell which tiles come first.
inline bool guesses_tiles(const AttentionParams& p) {
  return p.block_tables != nullptr && p.max_q == 1 && p.k_start == nullptr &&
         p.seq_lens != nullptr && !p.leaves_shared;
}

/// The most rows of a KV head that a sequence has.
inline int most_rows(const AttentionParams& p) {
  return std::max(config::max_split_rows(p.max_q, p.heads / p.kv_heads), 1);
}

template <class Tile>
Launch launch_of(const AttentionParams& p) {
  Launch launch{.attention = p};
  launch.block_size = Divisor::of(std::max(p.block_size, 1));
  launch.kv_heads = Divisor::of(p.kv_heads);
  launch.group = Divisor::of(std::max(p.heads / p.kv_heads, 1));
  launch.one = Divisor::of(config::decode_splits(p.kv_heads, config::kDecodeItems));
  launch.half = Divisor::of(config::decode_splits(p.kv_heads, 2 * config::kDecodeItems));
  launch.group_size = p.heads / p.kv_heads;
  const int most = std::min(config::kKeyTile, Tile::kKeys);
  launch.box_rows = p.block_tables ? std::gcd(p.block_size, most) : most;
  while (1 << launch.box_shift < launch.box_rows) ++launch.box_shift;
  constexpr int kColumns = Tile::kSize / Tile::kParts;
  // A box is every other 128 bytes where rows have 256: fetching 256 at a time brings each twice.
  // H200, bf16, 32 sequences of 4k keys, the copies without the products: 139 us, and 131.
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  using attention_launch::keys_of, attention_launch::values_of;
  launch.k = device::swizzled_map(keys_of(p), launch.box_rows, kColumns, kPromotion);
  launch.v = device::swizzled_map(values_of(p), launch.box_rows, kColumns, kPromotion);
  launch.end_k = device::swizzled_map(keys_of(p), kEndRows, kColumns, kPromotion);
  launch.end_v = device::swizzled_map(values_of(p), kEndRows, kColumns, kPromotion);
  launch.max_blocks = Divisor::of(std::max(p.max_blocks, 1));
  launch.max_splits = config::max_decode_splits(p);
  launch.row_pairs = ceil_div(most_rows(p), 2);
  launch.guesses = guesses_tiles(p);
  launch.plans_ahead = launch.guesses && p.cu_q == nullptr;
  launch.copies_tables = p.block_tables != nullptr && !launch.plans_ahead &&
                         std::int64_t{p.batch} * p.max_blocks <= kTableEntries;
  return launch;
}

template <class Tile>
void launch_tiles(const AttentionParams& p, Stream stream) {
  Launch launch = launch_of<Tile>(p);
  if constexpr (Tile::kSharesQueries) {
    if (launch.guesses && takes_cluster<Tile>(p)) return launch_clusters<Tile>(launch, stream);
  }
  const int most_blocks = 2 * device::multiprocessors();
  for (int first = 0; first == 0 || first < p.batch; first += kMaxSequences) {
    launch.first_sequence = first;
    launch.sequences = std::min(p.batch - first, kMaxSequences);
    const std::int64_t items = std::int64_t{launch.sequences} * p.kv_heads * launch.max_splits *
                               ceil_div(most_rows(p), Tile::kRows);
    launch.blocks = static_cast<int>(std::clamp<std::int64_t>(items, 1, most_blocks));
    launch.blocks_divisor = Divisor::of(launch.blocks);
    device::launch_chained<decode_sm90_kernel<Tile>>(dim3(launch.blocks), dim3(kThreads),
                                                     sizeof(Shared<Tile>), stream, launch,
                                                     "attention");
    if (p.counters != nullptr || launch.max_splits == 1 || launch.sequences == 0) continue;
    const int pairs = checked_int32(std::int64_t{launch.sequences} * p.kv_heads,
                                    "attention: KV heads");
    device::launch_chained<merge_splits_kernel<Tile>>(dim3(pairs), dim3(kConsumerThreads), 0,
                                                      stream, launch, "attention: combine");
  }
}

}  // namespace ridgeline::attention_decode
