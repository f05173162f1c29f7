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
  SlotRing ring{launch.slots, 0, 1};  // the first wait on a fresh barrier passes
  const std::uint64_t policy = ptx::evict_first();

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

  __device__ __forceinline__ void ask() const {
    if (launch.deals && box() == 0) ptx::mbarrier_arrive(&shared.asked);
  }

  /// Keys come one tile ahead of values; `place`: of the first.
  __device__ __forceinline__ void bring_ahead(const Item& item, Place place) {
    const int kv_head = item.work.kv_head, end = item.keys.end;
    const int n = item.keys.begin;
    if (n + kKeys >= end) ask();
    if (n >= end) return;
    request(place, kv_head, launch.k);
    bring_rest(item, place, n + kKeys);
  }

  /// Keys from n on, and values from the tile before on; `place`: of that.
  __device__ __forceinline__ void bring_rest(const Item& item, Place place, int n) {
    const int kv_head = item.work.kv_head;
    for (; n < item.keys.end; n += kKeys) {
      if (n + kKeys >= item.keys.end) ask();
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
    if (keys.begin >= keys.end) return ask();
    for (int n0 = last_step<Tile>(keys); n0 + Tile::kStepKeys > keys.begin; n0 -= Tile::kStepKeys) {
      if (n0 <= keys.begin) ask();
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

  __device__ __forceinline__ void run() {
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
