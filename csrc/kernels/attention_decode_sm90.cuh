#pragma once
#include <cuda.h>

#include <type_traits>

#include "common/math.h"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/global_order.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/reduce.cuh"
#include "kernels/attention_tile.cuh"

/// What a block of the Hopper decode kernel works on: tiles, shared memory, items, and the warp
/// that keeps their order.
namespace ridgeline::attention_decode {

namespace config = attention_config;
using attention_tile::Work;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps =
    4;  // that multiply; then one brings tiles and one keeps the order of the work
constexpr int kConsumerThreads = kWarps * device::kWarpSize;
constexpr int kThreads = kConsumerThreads + 2 * device::kWarpSize;
constexpr int kTileBytes = 16384;  // of keys, and as much of values
constexpr int kStages = 3;         // 96 KB: two blocks an SM
constexpr int kStep = 16;          // keys of one MMA
constexpr int kItems = 4;  // items in the making: read ahead, worked on, waiting to be joined
constexpr int kTableEntries = 512;  // block tables of fewer in all are copied to shared memory
constexpr int kMaxSequences = 256;  // of one launch

/// A tile of keys in the cache's type and the type that multiplies it. fp8 and int8 are exact in
/// fp16. kSize columns are computed; a head of fewer is padded with zeros by the copy engine.
template <DType kCache_, int kSize_, int kQueryTiles_>
struct Tile {
  static constexpr DType kCache = kCache_;
  using T = std::conditional_t<kCache == DType::kBFloat16, __nv_bfloat16, __half>;
  static constexpr bool kQuantised = size_of(kCache) == 1;
  static constexpr int kSize = kSize_;
  static constexpr int kSums = kSize / 16;          // MMAs that a step's values take
  static constexpr int kQueryTiles = kQueryTiles_;  // of 8 rows, of one warp
  static constexpr int kRows = 8 * kQueryTiles;
  static constexpr int kRowBytes = kSize * static_cast<int>(size_of(kCache));
  static constexpr int kPartBytes = kRowBytes < 128 ? kRowBytes : 128;  // of a swizzled row
  static constexpr int kParts = kRowBytes / kPartBytes;
  static constexpr int kKeys = kTileBytes / kRowBytes;
  static constexpr int kPartSpan = kKeys * kPartBytes;
  static constexpr int kPairUnits = kSums * 8;  // float4 of the sums of two rows
  // Where a sequence has at most 8 rows, they wait in shared memory; the pitch keeps them apart by
  // 4 banks.
  static constexpr bool kSharesQueries = kQueryTiles == 1 && kSize <= 128;
  static constexpr int kQueryPitch = kSize + 8;
};

/// Bytes from the start of a tile to 16-byte chunk `chunk` of row `row` under the engine's swizzle.
template <class Tile>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kChunks = Tile::kPartBytes / 16;
  const int turn = kChunks == 8 ? row % 8 : row / 2 % 4;
  return chunk / kChunks * Tile::kPartSpan + row * Tile::kPartBytes +
         ((chunk % kChunks) ^ turn) * 16;
}

// ---- Shared memory ------------------------------------------------------------------------------

/// Keys, then values, of up to kKeys keys; at the end of an item the last stage serves as scratch
/// memory for the warps' sums.
struct Stage {
  char k[kTileBytes];
  char v[kTileBytes];
};

/// One split of a sequence's keys for one KV head and at most kWarps * kRows of its rows.
struct Item {
  Work work;
  config::KeyRange keys;  // begins at a multiple of kKeyTile
  int split, splits;      // splits 0: there are no more items
  int arrivals;           // items that the rows of this sequence and KV head are made of
  bool is_last;           // to arrive of them: this block joins them
};

template <class Tile>
struct Shared {
  struct None {};
  struct Scales {
    std::uint32_t k[Tile::kKeys], v[Tile::kKeys];  // the 4 bytes that hold a key's scale
  };
  using Queries = std::uint16_t[8][Tile::kQueryPitch];  // of q's type

  alignas(1024) Stage stages[kStages];
  std::conditional_t<Tile::kQuantised, Scales, None> scales[kStages];
  alignas(16) std::conditional_t<Tile::kSharesQueries, Queries, None> queries[kItems];
  Item items[kItems];
  std::int32_t tables[kTableEntries];
  int first_items[kMaxSequences + 1];  // of each sequence
  alignas(16) float largest[kWarps][Tile::kRows];
  float total[kWarps][Tile::kRows];
  float value_unit[kWarps];
  alignas(8) std::uint64_t full[kStages], free[kStages];
  // Of an item: it is described; its partials are stored; is_last is known; its place is free.
  std::uint64_t described[kItems], stored[kItems], counted[kItems], released[kItems];

  __device__ __forceinline__ void make_barriers() {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], Tile::kQuantised ? 1 + device::kWarpSize : 1);
      ptx::mbarrier_init(&free[i], kWarps);
    }
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(&described[i], Tile::kSharesQueries ? 1 + device::kWarpSize : 1);
      ptx::mbarrier_init(&stored[i], kWarps);
      ptx::mbarrier_init(&counted[i], 1);
      ptx::mbarrier_init(&released[i], kWarps + 1);
    }
    ptx::fence_mbarrier_init();
  }
};

/// Division by a number that the host knows, of numbers below 2^31.
struct Divisor {
  std::uint32_t factor, shift;

  static Divisor of(std::uint32_t value) {
    std::uint32_t shift = 0;
    while ((std::uint64_t{1} << shift) < value) ++shift;
    const std::uint64_t excess = (std::uint64_t{1} << shift) - value;
    return {static_cast<std::uint32_t>((excess << 32) / value + 1), shift};
  }
  __device__ __forceinline__ int divide(int number) const {
    const auto n = static_cast<std::uint32_t>(number);
    return static_cast<int>((__umulhi(n, factor) + n) >> shift);
  }
};

struct Launch {
  AttentionParams attention;
  CUtensorMap k, v;
  Divisor block_size, kv_heads;
  Divisor one, half;  // the splits of kDecodeItems, and of twice as many items
  int group_size;     // query heads a KV head
  int first_sequence, sequences;
  int box_rows, box_shift;  // keys that one copy brings, 1 << box_shift: they lie in one block
  int max_splits;           // of a sequence, ...
  int row_pairs;            // ... and pairs of rows: the shape of the workspace
  bool copies_tables;
};

/// Which of kCount places comes next, and the parity of its use.
template <int kCount>
struct Ring {
  int place = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++place == kCount) {
      place = 0;
      parity ^= 1;
    }
  }
};

// ---- Items --------------------------------------------------------------------------------------

template <class Tile>
__device__ __forceinline__ int row_blocks(int rows) {
  return ceil_div(rows, kWarps * Tile::kRows);
}

/// The keys that a sequence's queries see: `splits` runs of `keys` from `begin`, a multiple of
/// kKeyTile, on. A function of the sequence, the heads and how many sequences there are.
struct Cut {
  std::int32_t begin, end, keys, splits;
};

__device__ __forceinline__ Cut cut_of(const Launch& launch, const config::Sequence& s) {
  const AttentionParams& p = launch.attention;
  const config::KeyRange first = config::visible_keys(p, s, 0);
  const config::KeyRange last = config::visible_keys(p, s, s.q_len - 1);
  Cut cut{.begin = first.begin / config::kKeyTile * config::kKeyTile,
          .end = config::lesser(last.end, s.k_len)};
  const int span = config::greater(cut.end - cut.begin, 1);
  cut.keys = config::decode_keys(launch.one.divide(span - 1) + 1, launch.half.divide(span - 1) + 1,
                                 s.q_len * launch.group_size);
  // Exact: the quotient is small, and the correction undoes its rounding.
  cut.splits = static_cast<int>(__fdividef(static_cast<float>(span), static_cast<float>(cut.keys)));
  while (cut.splits * cut.keys < span) ++cut.splits;
  while ((cut.splits - 1) * cut.keys >= span) --cut.splits;
  return cut;
}

/// How many items the sequence is; those of a KV head and split are its blocks of rows.
template <class Tile>
__device__ __forceinline__ int items_of(const Launch& launch, int batch) {
  const config::Sequence s = config::sequence_of(launch.attention, batch);
  if (launch.attention.batch_invariant || !config::is_split(s.q_len, launch.group_size)) return 0;
  return cut_of(launch, s).splits * launch.attention.kv_heads *
         row_blocks<Tile>(s.q_len * launch.group_size);
}

/// Neighbours are the heads of one split: they share the block table's entries and the scales.
template <class Tile>
__device__ __forceinline__ Item item_of(const Launch& launch, int batch, int index) {
  const AttentionParams& p = launch.attention;
  Item item{.work = {.sequence = config::sequence_of(p, batch),
                     .batch = batch,
                     .group = launch.group_size}};
  Work& work = item.work;
  work.rows = work.sequence.q_len * work.group;
  const int blocks = row_blocks<Tile>(work.rows), rest = blocks == 1 ? index : index / blocks;
  work.first_row = (index - rest * blocks) * (kWarps * Tile::kRows);
  item.split = launch.kv_heads.divide(rest);
  work.kv_head = rest - item.split * p.kv_heads;
  const Cut cut = cut_of(launch, work.sequence);
  item.splits = cut.splits;
  item.arrivals = cut.splits * blocks;
  item.keys.begin = cut.begin + item.split * cut.keys;
  item.keys.end = config::lesser(item.keys.begin + cut.keys, cut.end);
  return item;
}

/// first_items[b]: the number of the first item of sequence b. One warp.
template <class Tile>
__device__ __forceinline__ void number_items(const Launch& launch, int* first_items) {
  const int lane = threadIdx.x % device::kWarpSize;
  for (int b = lane; b < launch.sequences; b += device::kWarpSize)
    first_items[b + 1] = items_of<Tile>(launch, launch.first_sequence + b);
  int before = 0;
  for (int first = 0; first < launch.sequences; first += device::kWarpSize) {
    const int b = first + lane;
    const int count = b < launch.sequences ? first_items[b + 1] : 0;
    const int sum = before + device::warp_inclusive_sum(count);
    if (b < launch.sequences) first_items[b + 1] = sum;
    before = device::from_lane(sum, device::kWarpSize - 1);
  }
  if (lane == 0) first_items[0] = 0;
  __syncwarp();  // the sums are there
}

/// The rows of an item to shared memory, zeros past the last; the barrier counts them as they come.
template <class Tile>
__device__ __forceinline__ void request_queries(const AttentionParams& p, const Work& work,
                                                typename Shared<Tile>::Queries& to,
                                                std::uint64_t* described) {
  constexpr int kChunks = Tile::kSize / 8;
  const auto* q = static_cast<const std::uint16_t*>(p.q) + work.batch * p.stride_q_batch;
#pragma unroll
  for (int first = 0; first < 8 * kChunks; first += device::kWarpSize) {
    const int i = first + static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int row = i / kChunks, column = i % kChunks * 8;
    const bool valid = row < work.rows && column < p.head_dim;
    const std::uint16_t* from = q;
    if (valid)
      from += (work.sequence.q_begin + work.query(row)) * p.stride_q_row +
              work.head(row) * p.stride_q_head + column;
    ptx::copy_async_16(&to[row][column], from, valid);
  }
  ptx::mbarrier_arrive_after_copies(described);
}

/// How many items blocks have asked for; and, next to it, how many blocks have ended.
__device__ __forceinline__ std::int32_t* dealt_items(const AttentionParams& p) {
  return p.counters + p.batch * p.kv_heads;
}

/// The warp that keeps the order of the work: it describes this block's items, two
/// ahead of those that multiply, and counts the arrival of those that are stored. So the trips to
/// memory of both are waited for by no other warp.
template <class Tile>
__device__ __forceinline__ void keep_order(const Launch& launch, Shared<Tile>& shared) {
  const AttentionParams& p = launch.attention;
  const int lane = threadIdx.x % device::kWarpSize;
  number_items<Tile>(launch, shared.first_items);
  const int items = shared.first_items[launch.sequences];
  int batch = 0;
  Ring<kItems> next{.parity = 1}, oldest;
  const auto describe = [&](int index) {
    ptx::mbarrier_wait(&shared.released[next.place], next.parity);
    Item item{};
    if (index < items) {
      while (shared.first_items[batch + 1] <= index) ++batch;
      item =
          item_of<Tile>(launch, launch.first_sequence + batch, index - shared.first_items[batch]);
    }
    if (lane == 0) shared.items[next.place] = item;
    if (lane == 0) ptx::mbarrier_arrive(&shared.described[next.place]);
    if constexpr (Tile::kSharesQueries)
      request_queries<Tile>(p, item.work, shared.queries[next.place],
                            &shared.described[next.place]);
    next.next();
  };
  // From the third on, items are dealt as blocks ask for them: a block that joins splits falls
  // behind, and would else be the last to arrive, and join, ever again. H200, bf16, 128 sequences
  // of 4k keys: 793 us, and 555 dealt.
  int dealt = static_cast<int>(blockIdx.x + gridDim.x);
  const auto deal = [&] {
    if (p.counters == nullptr) return dealt += static_cast<int>(gridDim.x);
    if (lane == 0) dealt = static_cast<int>(2 * gridDim.x) + atomicAdd(dealt_items(p), 1);
    return device::from_lane(dealt, 0);
  };
  int oldest_index = static_cast<int>(blockIdx.x), next_index = dealt;
  for (int turn = 0; turn < 2 || oldest_index < items; ++turn) {
    const int ahead = turn == 0 ? oldest_index : turn == 1 ? next_index : deal();
    describe(ahead);
    if (turn < 2) continue;
    oldest_index = next_index, next_index = ahead;
    Item& item = shared.items[oldest.place];
    ptx::mbarrier_wait(&shared.stored[oldest.place], oldest.parity);
    if (lane == 0) {
      auto* counter = p.counters + item.work.batch * p.kv_heads + item.work.kv_head;
      const unsigned last = item.arrivals - 1;
      item.is_last =
          item.splits > 1 && p.counters != nullptr && ptx::count_arrival(counter, last) == last;
      ptx::mbarrier_arrive(&shared.counted[oldest.place]);
    }
    oldest.next();
  }
  // The last block to end leaves zeros behind.
  if (lane == 0 && p.counters != nullptr &&
      ptx::count_arrival(dealt_items(p) + 1, gridDim.x - 1) == gridDim.x - 1)
    *dealt_items(p) = 0;
}

}  // namespace ridgeline::attention_decode
