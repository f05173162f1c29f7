#pragma once
#include "device/ptx/async_copy.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/attention_decode_sm90.cuh"

/// The warp of the Hopper decode kernel that brings tiles of keys and values.
namespace ridgeline::attention_decode {

/// Where one box of a tile lies.
struct Box {
  int slot_batch, slot_row;
  bool wanted;
};

/// Few block tables come while the lengths come, which saves a small batch one trip to memory.
template <class Tile>
__device__ __forceinline__ void request_tables(const Launch& launch, Shared<Tile>& shared) {
  const AttentionParams& p = launch.attention;
  for (int b = 0; b < p.batch; ++b)
    for (int i = threadIdx.x % device::kWarpSize; i < p.max_blocks; i += device::kWarpSize)
      ptx::copy_async_4(&shared.tables[b * p.max_blocks + i],
                        p.block_tables + b * p.stride_table + i, true);
  ptx::commit_copies();
}

/// Where this lane's box of the tile at key n lies.
template <class Tile>
__device__ __forceinline__ Box find_box(const Launch& launch, const Shared<Tile>& shared,
                                        const Item& item, int n) {
  const AttentionParams& p = launch.attention;
  const int lane = threadIdx.x % device::kWarpSize;
  const int first = lane / Tile::kParts * launch.box_rows;
  Box box{.slot_batch = p.cu_k != nullptr ? 0 : item.work.batch};
  n += first;
  box.wanted = first < Tile::kKeys && n < item.keys.end;
  if (p.block_tables == nullptr) {
    box.slot_row = static_cast<int>(item.work.sequence.k_begin) + n;
    return box;
  }
  const int index = launch.block_size.divide(n);
  int block = 0;  // block 0 stands in for ids out of range
  if (box.wanted && index < p.max_blocks)
    block = launch.copies_tables ? shared.tables[item.work.batch * p.max_blocks + index]
                                 : p.block_tables[item.work.batch * p.stride_table + index];
  if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.num_blocks)) block = 0;
  box.slot_batch = block;
  box.slot_row = n - index * p.block_size;
  return box;
}

/// The aligned 4 bytes in which a 2-byte element lies: the least that a lane copies by itself.
__device__ __forceinline__ const void* word_of(const char* element) {
  return element - reinterpret_cast<std::uintptr_t>(element) % 4;
}

/// The scales of a tile, a key a lane at a time; the barrier counts them as they come.
template <class Tile>
__device__ __forceinline__ void request_scales(const Launch& launch, int kv_head, int keys,
                                               const Box& box, Shared<Tile>& shared, int stage) {
  const AttentionParams& p = launch.attention;
  const auto* k = static_cast<const char*>(p.k_scale) + kv_head * p.stride_ks_head * 2;
  const auto* v = static_cast<const char*>(p.v_scale) + kv_head * p.stride_vs_head * 2;
  for (int first = 0; first < keys; first += device::kWarpSize) {
    const int i = first + static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int owner = (i >> launch.box_shift) * Tile::kParts;  // the lane that knows its box
    const std::int64_t batch = device::from_lane(box.slot_batch, owner);
    const std::int64_t row = device::from_lane(box.slot_row, owner) + (i & (launch.box_rows - 1));
    if (i >= keys) continue;
    auto& to = shared.scales[stage];
    const char* from_k = k + (batch * p.stride_ks_batch + row * p.stride_ks_row) * 2;
    const char* from_v = v + (batch * p.stride_vs_batch + row * p.stride_vs_row) * 2;
    ptx::copy_async_4(&to.k[i], word_of(from_k), true);
    ptx::copy_async_4(&to.v[i], word_of(from_v), true);
  }
  ptx::mbarrier_arrive_after_copies(&shared.full[stage]);
}

/// All tiles of this block's items, by one warp. What a tile's copies ask of the block table is
/// requested a tile ahead.
template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared) {
  const int lane = threadIdx.x % device::kWarpSize;
  const int part = lane % Tile::kParts, first = lane / Tile::kParts * launch.box_rows;
  const int box_bytes = launch.box_rows * Tile::kPartBytes;
  const std::uint64_t policy = ptx::evict_first();
  if (launch.copies_tables) request_tables<Tile>(launch, shared);
  Ring<kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  Ring<kItems> items;
  Item item{};
  const auto find_tiles = [&] {  // the next item that has keys
    for (;;) {
      ptx::mbarrier_wait(&shared.described[items.place], items.parity);
      item = shared.items[items.place];
      if (item.splits == 0) return false;
      __syncwarp();  // all lanes have read it
      if (lane == 0) ptx::mbarrier_arrive(&shared.released[items.place]);
      items.next();
      if (item.keys.begin < item.keys.end) return true;
    }
  };
  Box box{};
  int n = 0;
  for (bool started = false, more = true; more; started = true) {
    const Box here = box;
    const int kv_head = item.work.kv_head;
    [[maybe_unused]] const int keys = config::lesser(Tile::kKeys, item.keys.end - n);
    n += Tile::kKeys;
    if (n >= item.keys.end) {
      more = find_tiles();
      n = item.keys.begin;
    }
    if (!started && launch.copies_tables) {
      ptx::wait_copies<0>();
      __syncwarp();  // the block tables are there
    }
    if (more) box = find_box<Tile>(launch, shared, item, n);
    if (!started) continue;
    Stage& stage = shared.stages[ring.place];
    std::uint64_t* full = &shared.full[ring.place];
    const int boxes = device::count_lanes(here.wanted);
    ptx::mbarrier_wait(&shared.free[ring.place], ring.parity);
    if (lane == 0) ptx::mbarrier_expect(full, 2 * boxes * box_bytes);
    __syncwarp();  // the bytes are expected before the first can come
    if (here.wanted) {
      const int offset = part * Tile::kPartSpan + first * Tile::kPartBytes;
      const int column = part * (Tile::kSize / Tile::kParts);
      ptx::copy_tensor_4d(stage.k + offset, &launch.k, full, column, here.slot_row, kv_head,
                          here.slot_batch, policy);
      ptx::copy_tensor_4d(stage.v + offset, &launch.v, full, column, here.slot_row, kv_head,
                          here.slot_batch, policy);
    }
    if constexpr (Tile::kQuantised)
      request_scales<Tile>(launch, kv_head, keys, here, shared, ring.place);
    ring.next();
  }
}

}  // namespace ridgeline::attention_decode
