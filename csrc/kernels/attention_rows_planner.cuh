#pragma once
#include "kernels/attention_rows_sm90.cuh"

/// The warp of the Hopper kernel of packed rows that plans items and brings queries.
namespace ridgeline::attention_rows {

/// Walks the items of one launch: a warp, whose lane i keeps the i-th share of the sequences.
template <class Tile>
struct Planner {
  const Launch& launch;
  Shared<Tile>& shared;
  int share, before, count;  // sequences a lane; items before this lane's, and its own
  int total;
  config::Sequence sequence;  // that this lane looked at last: its only one, where there are few
  Cut cut;
  config::KeyRange live;  // of the common keys: what some sequence owns

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  /// Looks at a sequence: its items.
  __device__ __forceinline__ int look(int batch) {
    const AttentionParams& p = launch.attention;
    sequence = config::sequence_of(p, batch);
    if (!config::is_packed(p, sequence.q_len, launch.least_rows)) return 0;
    cut = cut_of<Tile::kUnsplit>(p, sequence);
    return cut.splits * p.kv_heads;
  }

  __device__ __forceinline__ void begin() {
    const AttentionParams& p = launch.attention;
    share = ceil_div(p.batch, device::kWarpSize);
    const int end = min((lane() + 1) * share, p.batch);
    count = 0;
    live = {.begin = p.shared_keys, .end = 0};
    for (int b = lane() * share; b < end; ++b) {
      if constexpr (Tile::kCommon) {
        const config::Sequence s = config::sequence_of(p, b);
        live.begin = config::lesser(live.begin, s.k_start);
        live.end = config::greater(live.end, config::lesser(s.k_len, p.shared_keys));
      } else {
        count += look(b);
      }
    }
    if constexpr (Tile::kCommon) {
      live = {-device::warp_max(-live.begin), device::warp_max(live.end)};
      total = launch.tiles * p.kv_heads * launch.max_splits;
    } else {
      const int sum = device::warp_inclusive_sum(count);
      before = sum - count;
      total = device::from_lane(sum, device::kWarpSize - 1);
    }
  }

  /// Neighbours are the tiles of rows, then the heads, before one split of the keys.
  __device__ __forceinline__ Item common_item(int index) const {
    const AttentionParams& p = launch.attention;
    const int tokens = launch.max_rows / launch.group, rest = index / launch.tiles;
    const int first = index % launch.tiles * launch.queries;
    const int keys = config::common_split_keys(p.shared_keys), split = launch.kv_heads.divide(rest);
    return {.work = {.sequence = {.q_begin = first},
                     .batch = 0,
                     .kv_head = rest - split * p.kv_heads,
                     .group = launch.group,
                     .first_row = first * launch.group,
                     .rows = min(launch.queries, tokens - first) * launch.group},
            .keys = {split * keys, min((split + 1) * keys, live.end)},
            .live = live,
            .split = split,
            .splits = launch.max_splits};
  }

  /// Of the sequence that was looked at.
  __device__ __forceinline__ Item own_item(int batch, int kv_head, int split) const {
    const int begin = cut.begin + split * cut.keys;
    return {.work = {.sequence = sequence,
                     .batch = batch,
                     .kv_head = kv_head,
                     .group = launch.group,
                     .rows = sequence.q_len * launch.group},
            .keys = {begin, config::lesser(begin + cut.keys, cut.end)},
            .live = {sequence.k_start, sequence.k_len},
            .split = split,
            .splits = cut.splits};
  }

  /// Describes item number `index`; whichever lane knows its sequence writes it.
  __device__ __forceinline__ void describe(int index, const Ring<kItems>& place) {
    ptx::mbarrier_wait(&shared.released[place.slot], place.parity);
    Item& to = shared.items[place.slot];
    if (index >= total) {
      if (lane() == 0) to.splits = 0;
    } else if constexpr (Tile::kCommon) {
      if (lane() == 0) to = common_item(index);
    } else if (index >= before && index < before + count) {
      int batch = lane() * share, rest = index - before;
      if (share > 1)
        for (int items; rest >= (items = look(batch)); ++batch) rest -= items;
      // Neighbours are the heads of one split: they share the block table's entries.
      const int split = launch.kv_heads.divide(rest);
      to = own_item(batch, rest - split * launch.attention.kv_heads, split);
    }
    __syncwarp();  // the item is written: lane 0 requests its queries
    ptx::mbarrier_arrive(&shared.described[place.slot]);
  }

  /// How many items blocks have asked for; and, next to it, how many blocks have ended.
  __device__ __forceinline__ std::int32_t* dealt_items() const {
    const AttentionParams& p = launch.attention;
    return p.counters + p.batch * p.kv_heads;
  }

  /// The item after a block's first. The bringer says when it is asked for.
  __device__ __forceinline__ int deal(int& asked_parity) const {
    ptx::mbarrier_wait(&shared.asked, asked_parity);
    asked_parity ^= 1;
    const int dealt = lane() == 0 ? atomicAdd(dealt_items(), 1) : 0;
    return static_cast<int>(gridDim.x) + device::from_lane(dealt, 0);
  }

  __device__ __forceinline__ void run() {
    if constexpr (Tile::kJoins)
      if (launch.cluster > 1) return;  // one warp does all
    begin();
    const int blocks = static_cast<int>(gridDim.x);
    const bool deals = launch.deals && total > blocks;
    Ring<kItems> next{.parity = 1};  // the first wait on a fresh barrier passes
    int index = static_cast<int>(blockIdx.x), queries_parity = 1, asked_parity = 0;
    for (;;) {
      describe(index, next);
      const Item& item = shared.items[next.slot];
      if (item.splits == 0) break;
      ptx::mbarrier_wait(&shared.q_free, queries_parity);
      request_queries<Tile>(launch, shared, item.work);
      queries_parity ^= 1;
      next.next();
      index = deals ? deal(asked_parity) : index + blocks;
    }
    // The last block to end leaves zeros behind.
    const unsigned others = gridDim.x - 1;
    if (deals && lane() == 0 && ptx::count_arrival(dealt_items() + 1, others) == others)
      *dealt_items() = 0;
  }
};

}  // namespace ridgeline::attention_rows
