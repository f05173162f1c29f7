#pragma once
#include "kernels/attention_rows_bringer.cuh"
#include "kernels/attention_rows_cluster.cuh"

/// The one split of a cluster's block, planned and brought by one warp.
namespace ridgeline::attention_rows {

/// All is made out while the kernels ahead still run, from what the lanes read then: lengths, ends
/// and the first entries of the block table. Once these kernels have ended, the lanes read the same
/// again: if nothing differs, keys are already on their way.
template <class Tile>
struct ShareBringer {
  static constexpr int kTiles = Tile::kSlots / 2 + 1;  // whose keys and values may fill the ring
  /// Lanes: those before have entries; the length, the first key, the ends of the queries.
  static constexpr int kLength = 28, kFirstKey = 29, kQueries = 30;
  static_assert(kTiles * kKeys / 16 <= kLength);

  Bringer<Tile> bringer;
  const Launch& launch = bringer.launch;
  Shared<Tile>& shared = bringer.shared;
  const std::int32_t* watched = nullptr;  // by this lane
  std::int32_t seen = 0;
  int first_entry = 0;
  bool guesses = false, fills = false;  // the ring, by the guess
  Item item;

  /// Of the queries or of what fills the ring: a lane each, made out ahead. H200, 8 sequences of 4k
  /// keys, one KV head: 12.1 us if a warp makes one out after the other at its start, 11.8 so.
  struct Copy {
    const CUtensorMap* map;
    void* to;
    std::uint64_t* full = nullptr;  // null: none
    int column, row, head, batch;
  };
  static constexpr int kCopies =  // of a lane, at most: blocks have a multiple of 16 keys
      ceil_div(Tile::kParts + Tile::kSlots * Tile::kParts * kKeys / 16, device::kWarpSize);
  Copy copies[kCopies];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  template <class Read>
  __device__ __forceinline__ void describe(Read&& read) {
    const AttentionParams& p = launch.attention;
    const Share share(launch);
    const config::Sequence s = config::sequence_of(p, share.batch, read);
    item.work = {.sequence = s,
                 .batch = share.batch,
                 .kv_head = share.kv_head,
                 .group = launch.group,
                 .rows = s.q_len * launch.group};
    item.live = {s.k_start, s.k_len};
    item.split = share.split, item.splits = 0;
    if (!config::is_packed(p, s.q_len, launch.least_rows)) return;
    const Cut cut = cut_of(p, s);
    item.splits = cut.splits;
    item.keys.begin = cut.begin + share.split * cut.keys;
    item.keys.end = config::lesser(item.keys.begin + cut.keys, cut.end);
  }

  /// Where a box of a tile lies, by the entries seen.
  __device__ __forceinline__ typename Bringer<Tile>::Place place_of(int tile, int box) const {
    const AttentionParams& p = launch.attention;
    const int n = item.keys.begin + tile * kKeys + box / Tile::kParts * launch.box_rows;
    const int index = launch.block_size.divide(n);
    int block = device::from_lane(seen, (index - first_entry) % device::kWarpSize);
    if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.num_blocks)) block = 0;
    return {n - index * p.block_size, block};
  }

  /// The first tile, and the queries, are brought to L2. H200, 32 sequences of 4k keys, one KV
  /// head: 22.9 us without it, 21.9 so, 22.7 with three.
  __device__ __forceinline__ void guess() {
    const AttentionParams& p = launch.attention;
    if (p.block_tables == nullptr || p.seq_lens == nullptr) return;
    guesses = true;
    const int batch = Share(launch).batch;
    if (lane() == kLength) watched = p.seq_lens + batch;
    if (lane() == kFirstKey && p.k_start != nullptr) watched = p.k_start + batch;
    if (lane() >= kQueries && p.cu_q != nullptr) watched = p.cu_q + batch + lane() - kQueries;
    if (watched != nullptr) seen = ptx::load_from_l2(watched);
    describe([&](const std::int32_t* from) {
      int at = kQueries + static_cast<int>(from - p.cu_q) - batch;
      if (from == p.seq_lens + batch) at = kLength;
      if (from == p.k_start + batch) at = kFirstKey;
      return device::from_lane(seen, at);
    });
    if (lane() == 0) shared.items[0] = item;
    if (item.split >= item.splits) return;
    first_entry = launch.block_size.divide(item.keys.begin);
    const int index = first_entry + lane();
    if (lane() < kLength && index < p.max_blocks &&
        index * p.block_size < min(item.keys.begin + kTiles * kKeys, item.keys.end)) {
      watched = p.block_tables + batch * p.stride_table + index;
      seen = ptx::load_from_l2(watched);
    }
    fills = item.keys.begin + last_tile() * kKeys < item.keys.end;
    if (fills) plan_fill();
    const typename Bringer<Tile>::Place place = place_of(0, lane());
    if (lane() < launch.boxes)
      for (const CUtensorMap* map : {&launch.k, &launch.v})
        ptx::prefetch_tensor_4d(map, lane() % Tile::kParts * kColumns, place.row,
                                item.work.kv_head, place.batch, bringer.policy);
    if (lane() < Tile::kParts)
      ptx::prefetch_tensor_4d(&launch.q, lane() * kColumns, item.work.kv_head * launch.group,
                              static_cast<int>(item.work.sequence.q_begin),
                              p.cu_q != nullptr ? 0 : item.work.batch, bringer.policy);
  }

  /// The last tile whose keys fill the ring.
  __device__ __forceinline__ int last_tile() const { return launch.slots / 2; }

  /// The queries come first: they are in the L2 cache.
  __device__ __forceinline__ void plan_fill() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int index = i * device::kWarpSize + lane() - Tile::kParts;
      const int slot = max(index, 0) / launch.boxes, box = index - slot * launch.boxes;
      const bool keys = slot == 0 || slot % 2 == 1;
      const auto place = place_of(keys ? (slot + 1) / 2 : slot / 2 - 1, max(box, 0));
      Copy& copy = copies[i];
      if (index < 0) {
        copy = {.map = &launch.q,
                .to = shared.q[lane()],
                .full = &shared.q_full,
                .column = lane() * kColumns,
                .row = item.work.kv_head * launch.group,
                .head = static_cast<int>(item.work.sequence.q_begin),
                .batch = launch.attention.cu_q != nullptr ? 0 : item.work.batch};
      } else if (slot < launch.slots) {
        const int part = box % Tile::kParts, first = box / Tile::kParts * launch.box_rows;
        copy = {.map = keys ? &launch.k : &launch.v,
                .to = shared.kv[slot][part][first],
                .full = &shared.full[slot],
                .column = part * kColumns,
                .row = place.row,
                .head = item.work.kv_head,
                .batch = place.batch};
      }
    }
  }

  /// Queries, and the first keys and values: as many as there are slots.
  __device__ __forceinline__ void fill() {
    if (lane() < launch.slots) ptx::mbarrier_expect(&shared.full[lane()], sizeof(shared.kv[0]));
    if (lane() == launch.slots) expect_queries<Tile>(launch, shared);
    __syncwarp();  // the bytes are announced
#pragma unroll
    for (const Copy& copy : copies)
      if (copy.full != nullptr)
        ptx::copy_tensor_4d(copy.to, copy.map, copy.full, copy.column, copy.row, copy.head,
                            copy.batch, bringer.policy);
    __syncwarp();  // before the warp waits as one again
    bringer.ring.parity ^= 1;
  }

  /// What a wrong guess asked for has come: nothing of it is used.
  __device__ __forceinline__ void drop() {
    for (int i = 0; i < launch.slots; ++i) ptx::mbarrier_wait(&shared.full[i], 0);
    ptx::mbarrier_wait(&shared.q_full, 0);
    bringer.ring.parity ^= 1;
  }

  __device__ __forceinline__ void run() {
    std::int32_t now = 0;
    if (watched != nullptr) now = ptx::load_from_l2(watched);
    if (fills) fill();
    const bool wrong = !guesses || device::any_lane(now != seen);
    const bool wastes = wrong && fills;
    if (wastes) drop();
    if (wrong) {
      describe([](const std::int32_t* from) { return ptx::load_from_l2(from); });
      if (lane() == 0) shared.items[0] = item;
    }
    if (lane() == 0) shared.wasted = wastes;
    if (lane() == 0 && item.splits > 1) expect_rows<Tile>(launch, shared, item);
    __syncwarp();  // both are written
    ptx::mbarrier_arrive(&shared.described[0]);
    if (item.split >= item.splits) return;
    if (wrong || !fills) {
      request_queries<Tile>(launch, shared, item.work);
      bringer.bring_ahead(item, bringer.place_of(item.work, item.keys.begin));
    } else {
      const int last = last_tile();
      if (launch.slots % 2 == 0)
        bringer.request(place_of(last - 1, lane()), item.work.kv_head, launch.v);
      bringer.bring_rest(item, place_of(last, lane()), item.keys.begin + (last + 1) * kKeys);
    }
  }
};

}  // namespace ridgeline::attention_rows
