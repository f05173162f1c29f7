#pragma once
#include "device/ptx/async_copy.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/attention_decode_items.cuh"

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
  for (int i = threadIdx.x % device::kWarpSize; i < p.batch * p.max_blocks;
       i += device::kWarpSize) {
    const int b = launch.max_blocks.divide(i);
    ptx::copy_async_4(&shared.tables[i],
                      p.block_tables + b * p.stride_table + i - b * p.max_blocks, true);
  }
  ptx::commit_copies();
}

/// Boxes of the tile at key n. Those of a sequence's last tile are small, for most of a large one
/// may hold none of its keys.
struct Boxes {
  const CUtensorMap* maps[2];  // keys, values
  int rows, shift;             // 1 << shift
};

template <class Tile>
__device__ __forceinline__ Boxes boxes_of(const Launch& launch, const Item& item, int n) {
  if (n + Tile::kKeys <= item.keys.end)
    return {{&launch.k, &launch.v}, launch.box_rows, launch.box_shift};
  return {{&launch.end_k, &launch.end_v}, kEndRows, kEndShift};
}

/// Where this lane's box of the tile at key n lies. block_at(i, wanted): entry i of the block table
/// if it is wanted; by all lanes.
template <class Tile, class BlockAt>
__device__ __forceinline__ Box find_box(const Launch& launch, const Item& item, int n, int rows,
                                        BlockAt&& block_at) {
  const AttentionParams& p = launch.attention;
  const int lane = threadIdx.x % device::kWarpSize;
  const int first = lane / Tile::kParts * rows;
  Box box{.slot_batch = p.cu_k != nullptr ? 0 : item.work.batch};
  n += first;
  box.wanted = first < Tile::kKeys && n < item.keys.end;
  if (p.block_tables == nullptr) {
    box.slot_row = static_cast<int>(item.work.sequence.k_begin) + n;
    return box;
  }
  const int index = launch.block_size.divide(n);
  int block = block_at(index, box.wanted && index < p.max_blocks);
  // Block 0 stands in for ids out of range.
  if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.num_blocks)) block = 0;
  box.slot_batch = block;
  box.slot_row = n - index * p.block_size;
  return box;
}

/// This lane's part of a tile: columns from `column` on of its box's rows.
template <class Tile>
__device__ __forceinline__ int column_of_lane() {
  return static_cast<int>(threadIdx.x) % Tile::kParts * (Tile::kSize / Tile::kParts);
}

/// How many of them. H200, us with 3, 2 and 1, each launch behind another: 32 sequences of 160 keys
/// 11.0, 10.9, 10.5, of 500 21.1, 20.5, 20.4, of 1k 35.1, 34.5, 34.4; behind a kernel of 5 us, 32 of
/// 500 19.7, 19.75, 20.0; 32 of 4k 125.2, 124.5, 124.5.
constexpr int kTilesAhead = 2;

/// Brings the first tiles of item `index` to L2 if lengths and block tables stay what they are
/// while the kernels ahead still run, which only a guess may read. One warp, sequence b its lane b;
/// later ones are not looked at.
template <class Tile>
__device__ __forceinline__ void prefetch_guess(const Launch& launch, int index) {
  const AttentionParams& p = launch.attention;
  const int lane = threadIdx.x % device::kWarpSize;
  config::Sequence s{.q_len = p.max_q};
  Cut cut{};
  int load = 0, runs = 0;
  if (lane < launch.sequences) {
    const int length = ptx::load_from_l2(p.seq_lens + launch.first_sequence + lane);
    s.k_len = static_cast<int>(config::clamped(length, 0, p.max_k));
    runs = runs_of<Tile>(launch, s);
    cut = leaves_of<Tile>(launch, s);
    load = load_of<Tile>(runs, cut);
  }
  load = device::group_sum(load, device::kWarpSize);
  if (launch.sequences > device::kWarpSize)  // those after are as long, more or less
    load = load / device::kWarpSize * launch.sequences;
  int limit = item_limit(launch, load);
  if (cuts_finer<Tile>(launch, limit)) limit = dealt_keys(limit);
  grow<Tile>(cut, limit);
  const int count = runs * cut.splits;
  const int sum = device::warp_inclusive_sum(count);
  const int owner = device::count_lanes(sum <= index);
  if (owner == device::kWarpSize) return;
  s.k_len = device::from_lane(s.k_len, owner);
  const Item item =
      item_of<Tile>(launch, s, cut_of<Tile>(launch, s, limit), launch.first_sequence + owner,
                    index - device::from_lane(sum - count, owner));
  const std::int32_t* table = p.block_tables + item.work.batch * p.stride_table;
  const std::uint64_t policy = ptx::evict_first();
  for (int tile = 0; tile < kTilesAhead; ++tile) {
    const int n = item.keys.begin + tile * Tile::kKeys;
    const Boxes boxes = boxes_of<Tile>(launch, item, n);
    const Box box = find_box<Tile>(launch, item, n, boxes.rows, [&](int i, bool wanted) {
      return wanted ? ptx::load_from_l2(table + i) : 0;
    });
    if (!box.wanted) continue;
    for (const CUtensorMap* map : boxes.maps)
      ptx::prefetch_tensor_4d(map, column_of_lane<Tile>(), box.slot_row, item.work.kv_head,
                              box.slot_batch, policy);
  }
}

/// The aligned 4 bytes in which a 2-byte element lies: the least that a lane copies by itself.
__device__ __forceinline__ const void* word_of(const char* element) {
  return element - reinterpret_cast<std::uintptr_t>(element) % 4;
}

/// Scales of keys or values.
struct Source {
  const void* scales;
  std::int64_t stride_batch, stride_row, stride_head;  // of scales
};

/// The scales of a tile, a key a lane at a time; the barrier counts them as they come.
template <class Tile>
__device__ __forceinline__ void request_scales(const Launch& launch, const Source& source,
                                               int kv_head, int keys, const Boxes& boxes,
                                               const Box& box, Shared<Tile>& shared, int stage) {
  const auto* scales = static_cast<const char*>(source.scales) + kv_head * source.stride_head * 2;
  for (int first = 0; first < keys; first += device::kWarpSize) {
    const int i = first + static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int owner = (i >> boxes.shift) * Tile::kParts;  // the lane that knows its box
    const std::int64_t batch = device::from_lane(box.slot_batch, owner);
    const std::int64_t row = device::from_lane(box.slot_row, owner) + (i & (boxes.rows - 1));
    if (i >= keys) continue;
    const char* from = scales + (batch * source.stride_batch + row * source.stride_row) * 2;
    ptx::copy_async_4(&shared.scales[stage][i], word_of(from), true);
  }
  ptx::mbarrier_arrive_after_copies(&shared.full[stage]);
}

/// The item and where its rows go, for the warps that multiply. One warp.
template <class Tile>
__device__ __forceinline__ void describe(const Launch& launch, const Item& item, int place,
                                         Shared<Tile>& shared) {
  const int lane = threadIdx.x % device::kWarpSize;
  if (lane < Tile::kRows)
    shared.ends[place][lane] = ends_of_row(launch, item.work, item.work.first_row + lane);
  if (lane == 0) shared.items[place] = item;
  __syncwarp();  // the item is described
  if (lane == 0) ptx::mbarrier_arrive(&shared.described[place]);
}

/// Brings tiles of an item: keys, then values. One warp.
template <class Tile>
struct Bringer {
  const Launch& launch;
  Shared<Tile>& shared;
  const AttentionParams& p = launch.attention;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const std::uint64_t policy = ptx::evict_first();
  const Source sources[2] = {
      {p.k_scale, p.stride_ks_batch, p.stride_ks_row, p.stride_ks_head},
      {p.v_scale, p.stride_vs_batch, p.stride_vs_row, p.stride_vs_head}};
  // More of them on their way make the memory slower. H200, bf16, with 96, 64 and 48 KB, us: 32
  // sequences of 8k keys 258, 248, 248; 32 of 4k 129.8 and 128.4 with 64 and 48, 32 of 512 21.2 and
  // 20.7, of 200 to 8200 123.0 and 121.6. With 32, 128 of 4k 489 and 492.
  static constexpr int kInFlight = config::greater(kFlightBytes / Tile::kBytes, 2);
  static_assert(kInFlight < Tile::kStages, "a stage that has landed is not yet asked for again");
  Ring<Tile::kStages> ring{.parity = 1};  // the first wait on a fresh barrier passes
  Ring<Tile::kStages> landed;
  int requested = 0;
  int first_entry, entry;  // of an item's block table, one a lane, from first_entry on

  /// Those from key n on.
  __device__ __forceinline__ void load_entries(int batch, int n) {
    first_entry = launch.block_size.divide(n);
    entry = 0;
    const int i = first_entry + lane;
    if (p.block_tables != nullptr && i < p.max_blocks)
      entry = launch.copies_tables ? shared.tables[batch * p.max_blocks + i]
                                   : ptx::load_from_l2(p.block_tables + batch * p.stride_table + i);
  }

  /// The tile at key n.
  __device__ __forceinline__ void bring(const Item& item, int n) {
    if (launch.block_size.divide(n + Tile::kKeys - 1) - first_entry >= device::kWarpSize)
      load_entries(item.work.batch, n);
    const Boxes boxes = boxes_of<Tile>(launch, item, n);
    const Box box = find_box<Tile>(launch, item, n, boxes.rows, [&](int i, bool wanted) {
      const int block = device::from_lane(entry, (i - first_entry) % device::kWarpSize);
      return wanted ? block : 0;
    });
    const int box_bytes = boxes.rows * Tile::kPartBytes;
    const int bytes = device::count_lanes(box.wanted) * box_bytes;
    const int offset =
        lane % Tile::kParts * Tile::kPartSpan + lane / Tile::kParts * box_bytes;
    [[maybe_unused]] const int keys = config::lesser(Tile::kKeys, item.keys.end - n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint64_t* full = &shared.full[ring.place];
      ptx::mbarrier_wait(&shared.free[ring.place], ring.parity);
      if (++requested > kInFlight) {
        ptx::mbarrier_wait(&shared.full[landed.place], landed.parity);
        landed.next();
      }
      if (lane == 0) ptx::mbarrier_expect(full, bytes);
      __syncwarp();  // the bytes are expected before the first can come
      if (box.wanted)
        ptx::copy_tensor_4d(shared.stages[ring.place] + offset, boxes.maps[i], full,
                            column_of_lane<Tile>(), box.slot_row, item.work.kv_head,
                            box.slot_batch, policy);
      if constexpr (Tile::kQuantised)
        request_scales<Tile>(launch, sources[i], item.work.kv_head, keys, boxes, box, shared,
                             ring.place);
      ring.next();
    }
  }
};

/// The warp that plans this block's items and brings their tiles: keys, then values. What it asks
/// of memory for the next item is on its way while it brings the tiles of this one. It plans while
/// the kernels ahead still run, if it can, for the lengths that are there then, which only a guess
/// may read, and again if they were others. H200, 128 sequences of 260 keys: 43.1 us planned after
/// these have ended, and 40.9 so.
template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared) {
  const AttentionParams& p = launch.attention;
  const int lane = threadIdx.x % device::kWarpSize;
  const int blocks = static_cast<int>(gridDim.x);
  int index = static_cast<int>(blockIdx.x);
  Bringer<Tile> bringer{launch, shared};
  Plan<Tile> plan{launch, launch.plans_ahead ? shared.lengths : nullptr};
  Item item;
  if (launch.plans_ahead) {
    plan.read_lengths();
  } else {
    ptx::wait_for_dependencies();
    // A block of the chunks' kernel needs an SM of its own: none stack on those that are free first.
    if (p.precedes_chunks) ptx::launch_dependents();
    if (launch.copies_tables) request_tables<Tile>(launch, shared);
  }
  for (bool is_sure = !launch.plans_ahead;; is_sure = true) {
    plan.cut_sequences();
    plan.number_items(shared.first_items);
    item = plan.take(shared.first_items, index);
    if (!is_sure) ptx::wait_for_dependencies();
    if (launch.copies_tables) {
      ptx::wait_copies<0>();
      __syncwarp();  // the block tables are there
    }
    bringer.load_entries(item.work.batch, item.keys.begin);
    if (is_sure || plan.holds()) break;
  }
  const int all = plan.all;
  // Items after a block's first are dealt as blocks come to their last tiles: a block that joins
  // splits falls behind, and would else be the last to arrive, and join, ever again. H200, bf16,
  // 128 sequences of 4k keys: 793 us, and 555 dealt.
  const bool deals = p.counters != nullptr && all > blocks;
  Ring<kItems> items{.parity = 1};
  for (;; items.next()) {
    const auto announce = [&] {
      ptx::mbarrier_wait(&shared.released[items.place], items.parity);
      describe<Tile>(launch, item, items.place, shared);
    };
    if (item.splits == 0) {
      ptx::launch_dependents();
      announce();
      break;
    }
    int dealt = 0;
    bool asks = deals;
    for (int n = item.keys.begin;; n += Tile::kKeys) {
      const int left = item.keys.end - n;
      if (asks && left <= kAskedAhead * Tile::kKeys) {
        asks = false;
        if (lane == 0) dealt = atomicAdd(dealt_items(p), 1);
      }
      if (left > 0) bringer.bring(item, n);
      if (n == item.keys.begin) {
        announce();
        if constexpr (Tile::kSharesQueries)
          request_queries<Tile>(launch, item.work, shared.queries[items.place]);
        ptx::mbarrier_arrive_after_copies(&shared.fetched[items.place]);
      }
      if (left <= Tile::kKeys) break;
    }
    __syncwarp();  // the lanes are done with the item
    if (lane == 0) ptx::mbarrier_arrive(&shared.released[items.place]);
    index = deals ? blocks + device::from_lane(dealt, 0) : index + blocks;
    item = plan.take(shared.first_items, index);
    bringer.load_entries(item.work.batch, item.keys.begin);
  }
  // The last block to end leaves zeros behind.
  if (lane == 0 && deals &&
      ptx::count_arrival(dealt_items(p) + 1, gridDim.x - 1) == gridDim.x - 1)
    *dealt_items(p) = 0;
}

}  // namespace ridgeline::attention_decode
