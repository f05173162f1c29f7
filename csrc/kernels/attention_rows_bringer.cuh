#pragma once
#include "kernels/attention_rows_sm90.cuh"

/// The warp of the Hopper kernel of packed rows that brings keys and values.
namespace ridgeline::attention_rows {

/// The warp that brings tiles of keys and values, a box a lane.
template <class Tile>
struct Bringer {
  struct Place {
    int row, batch;
  };

  const Launch& launch;
  Shared<Tile>& shared;
  Ring<Tile::kSlots> ring{.parity = 1};  // the first wait on a fresh barrier passes
  const std::uint64_t policy = ptx::evict_first();
  int guessed = 0;  // where the keys of a cluster's block begin

  __device__ static int box() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  /// The block table's entry for this lane's box of the tile at n; block 0 stands in for none.
  __device__ __forceinline__ int entry_of(int batch, int n) const {
    const AttentionParams& p = launch.attention;
    if (box() >= launch.boxes || p.block_tables == nullptr) return 0;
    const int index = launch.block_size.divide(n + box() / Tile::kParts * launch.box_rows);
    if (index >= p.max_blocks) return 0;
    return p.block_tables[batch * p.stride_table + index];
  }

  __device__ __forceinline__ Place place_of(const Work& work, int n, int block) const {
    const AttentionParams& p = launch.attention;
    n += box() / Tile::kParts * launch.box_rows;
    if (p.block_tables == nullptr)
      return {static_cast<int>(work.sequence.k_begin) + n, p.cu_k != nullptr ? 0 : work.batch};
    // Block 0 stands in for ids out of range, too.
    if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.num_blocks)) block = 0;
    return {n - launch.block_size.divide(n) * p.block_size, block};
  }
  __device__ __forceinline__ Place place_of(const Work& work, int n) const {
    return place_of(work, n, entry_of(work.batch, n));
  }

  __device__ __forceinline__ void request(const Place& place, int kv_head, const CUtensorMap& map) {
    std::uint64_t* full = &shared.full[ring.slot];
    auto& target = shared.kv[ring.slot];
    ptx::mbarrier_wait(&shared.free[ring.slot], ring.parity);
    if (box() == 0) ptx::mbarrier_expect(full, sizeof(target));
    __syncwarp();  // the bytes are announced
    if (box() < launch.boxes) {
      const int part = box() % Tile::kParts, first = box() / Tile::kParts * launch.box_rows;
      // What is read once makes room at once; several tiles of rows read the common keys. H200,
      // 8 sequences of 4k keys, five queries: 47.0 us, and 44.4 so.
      if constexpr (Tile::kCommon) {
        ptx::copy_tensor_4d(target[part][first], &map, full, part * kColumns, place.row, kv_head,
                            place.batch);
      } else {
        ptx::copy_tensor_4d(target[part][first], &map, full, part * kColumns, place.row, kv_head,
                            place.batch, policy);
      }
    }
    __syncwarp();  // before the warp waits as one again
    ring.next();
  }

  /// Keys come one tile ahead of values; `place`: of the first.
  __device__ __forceinline__ void bring_ahead(const Item& item, Place place) {
    const int kv_head = item.work.kv_head, end = item.keys.end;
    int n = item.keys.begin;
    if (n >= end) return;
    request(place, kv_head, launch.k);
    for (n += kKeys; n < end; n += kKeys) {
      const Place next = place_of(item.work, n);
      request(next, kv_head, launch.k);
      request(place, kv_head, launch.v);
      place = next;
    }
    request(place, kv_head, launch.v);
  }

  /// The last step first: its keys, then its values.
  __device__ __forceinline__ void bring_steps(const Item& item) {
    const config::KeyRange keys = item.keys;
    if (keys.begin >= keys.end) return;
    for (int n0 = last_step<Tile>(keys); n0 + Tile::kStepKeys > keys.begin; n0 -= Tile::kStepKeys) {
      Place places[Tile::kStepTiles];
#pragma unroll
      for (int i = 0; i < Tile::kStepTiles; ++i) places[i] = place_of(item.work, n0 + i * kKeys);
#pragma unroll
      for (const CUtensorMap* map : {&launch.k, &launch.v})
#pragma unroll
        for (int i = 0; i < Tile::kStepTiles; ++i)
          if (has_tile(keys, n0 + i * kKeys)) request(places[i], item.work.kv_head, *map);
    }
  }

  /// Where the keys of a cluster's block begin; the first tile is brought to L2. Both if lengths
  /// and tables stay what they are while the kernels ahead still run: only a guess may read these.
  /// H200, 32 sequences of 4k keys, one KV head: 22.9 us without it, 21.9 so, 22.7 with three.
  __device__ __forceinline__ void guess() {
    const AttentionParams& p = launch.attention;
    if (p.block_tables == nullptr || p.seq_lens == nullptr || p.k_start != nullptr) return;
    const Share share(launch);
    const int length = ptx::load_from_l2(p.seq_lens + share.batch);
    const config::Sequence s{.q_len = p.max_q,
                             .k_len = static_cast<int>(config::clamped(length, 0, p.max_k))};
    const Cut cut = cut_of(p, s);
    guessed = cut.begin + share.split * cut.keys;
    const int n = guessed + box() / Tile::kParts * launch.box_rows;
    if (n >= min(guessed + kKeys, cut.end)) return;
    const int index = launch.block_size.divide(n);
    const int block = ptx::load_from_l2(p.block_tables + share.batch * p.stride_table + index);
    if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.num_blocks)) return;
    for (const CUtensorMap* map : {&launch.k, &launch.v})
      ptx::prefetch_tensor_4d(map, box() % Tile::kParts * kColumns, n - index * p.block_size,
                              share.kv_head, block, policy);
  }

  /// The one split of a cluster's block. Its first block is looked up beside the lengths, where it
  /// was guessed.
  __device__ __forceinline__ void bring_share() {
    const AttentionParams& p = launch.attention;
    const Share share(launch);
    const int entry = entry_of(share.batch, guessed);
    Item item{.work = {.sequence = config::sequence_of(p, share.batch),
                       .batch = share.batch,
                       .kv_head = share.kv_head}};
    const config::Sequence& s = item.work.sequence;
    if (!config::is_packed(p, s.q_len, launch.least_rows)) return;
    const Cut cut = cut_of(p, s);
    item.keys.begin = cut.begin + share.split * cut.keys;
    item.keys.end = config::lesser(item.keys.begin + cut.keys, cut.end);
    const bool is_right = item.keys.begin == guessed;
    bring_ahead(item, is_right ? place_of(item.work, guessed, entry)
                               : place_of(item.work, item.keys.begin));
  }

  __device__ __forceinline__ void run() {
    if constexpr (Tile::kJoins)
      if (launch.cluster > 1) return bring_share();
    for (Ring<kItems> items;; items.next()) {
      ptx::mbarrier_wait(&shared.described[items.slot], items.parity);
      const Item item = shared.items[items.slot];
      if (item.splits == 0) break;
      ptx::mbarrier_arrive(&shared.released[items.slot]);
      if constexpr (Tile::kUnsplit) {
        bring_steps(item);
      } else {
        bring_ahead(item, place_of(item.work, item.keys.begin));
      }
    }
  }
};

}  // namespace ridgeline::attention_rows
