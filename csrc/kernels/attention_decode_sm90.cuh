#pragma once
#include <cuda.h>

#include <type_traits>

#include "common/math.h"
#include "device/divisor.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/global_order.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/reduce.cuh"
#include "kernels/attention_fresh.h"
#include "kernels/attention_tile.cuh"

/// What a block of the Hopper decode kernel works on: tiles, shared memory, and the warp that
/// counts the items that are done.
namespace ridgeline::attention_decode {

namespace config = attention_config;
using attention_tile::Work;
using device::Divisor;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarps =
    4;  // that multiply; then one brings tiles and one keeps the order of the work
constexpr int kConsumerThreads = kWarps * device::kWarpSize;
constexpr int kThreads = kConsumerThreads + 2 * device::kWarpSize;
constexpr int kBlockBytes = 113 * 1024;  // of shared memory: two blocks an SM
constexpr int kFlightBytes = 48 * 1024;  // that a block has asked for and not got
constexpr int kAskedAhead = 3;  // tiles before an item's end, its block asks for another
constexpr int kStep = 16;                // keys of one MMA
// Keys of a box of a sequence's last tile, most of which may be none of its keys; blocks are
// multiples of it. H200, 128 sequences of 160 keys: 34.2 us with whole tiles, 31.5 so.
constexpr int kEndRows = 16, kEndShift = 4;
constexpr int kItems = 4;  // items in the making: read ahead, worked on, waiting to be joined
constexpr int kTableEntries = 256;  // block tables of fewer in all are copied to shared memory
constexpr int kMaxSequences = 256;  // of one launch
constexpr int kOtherBytes = 4096;   // of shared memory: items, tables, barriers

/// A tile of keys in the cache's type and the type that multiplies it. fp8 and int8 are exact in
/// fp16. kSize columns are computed; a head of fewer is padded with zeros by the copy engine.
template <DType kCache_, int kSize_, int kQueryTiles_>
struct Tile {
  static constexpr DType kCache = kCache_;
  using T = std::conditional_t<kCache == DType::kBFloat16, __nv_bfloat16, __half>;
  static constexpr bool kQuantised = size_of(kCache) == 1;
  static constexpr int kSize = kSize_;
  static constexpr int kSums = kSize / kWarps / 16;  // MMAs that a step's values take a warp
  static constexpr int kQueryTiles = kQueryTiles_;   // of 8 rows
  static constexpr int kRows = 8 * kQueryTiles;
  static constexpr int kRowBytes = kSize * static_cast<int>(size_of(kCache));
  static constexpr int kPartBytes = kRowBytes < 128 ? kRowBytes : 128;  // of a swizzled row
  static constexpr int kParts = kRowBytes / kPartBytes;
  static constexpr int kKeys = kRowBytes < 256 ? 128 : 64;
  static constexpr int kBytes = kKeys * kRowBytes;
  static constexpr int kPartSpan = kKeys * kPartBytes;
  static constexpr int kPairUnits = kSize / 2;  // float4 of the sums of two rows
  // An item is up to 1 << kLevels leaves: so many parts of a tree of them wait.
  static constexpr int kLevels = kQueryTiles > 1 ? 0 : kSize > 128 ? 3 : 5;
  static constexpr int kNearLevels = kLevels > 0 && kSize <= 128 ? 2 : 0;  // in registers
  // Keys of a leaf of a short sequence, at most: alone, each is a block's. H200, bf16, one sequence
  // of 384 keys: 6.7 us in one leaf, 4.9 in leaves of 128, 4.2 of 64; but 128 of them 51.6 in those
  // of 128 and 52.9 of 64. fp8 in leaves of 256 and of 128: one of 160 keys 6.6, 5.35, of 512 7.0,
  // 5.6; but 128 of 160 28.4, 29.7, of 500 47.2, 48.2.
  static constexpr int kShortLeaf =
      kLevels == 0 ? config::kDecodeWhole : kQuantised ? 128 : config::kKeyTile;
  // Where a sequence has at most 8 rows, they wait in shared memory; the pitch keeps them apart by
  // 4 banks.
  static constexpr bool kSharesQueries = kQueryTiles == 1 && kSize <= 128;
  static constexpr int kQueryPitch = kSize + 8;
  static constexpr int kWeightPitch = kKeys + 8;
  // Tiles on their way: what else a block holds leaves room for so many.
  static constexpr int kStages =
      (kBlockBytes - kOtherBytes - (kSharesQueries ? kItems * 8 * kQueryPitch * 2 : 0) -
       2 * kRows * kWeightPitch * 2) /
      (kBytes + (kQuantised ? kKeys * 4 : 0));
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

/// One split of a sequence's keys for one KV head and at most kRows of its rows.
struct Item {
  Work work;
  config::KeyRange keys;  // begins at a multiple of kKeyTile
  int leaf;               // keys of each of its leaves but the last
  int split, splits;      // splits 0: there are no more items
  int arrivals;           // items that the rows of this sequence and KV head are made of
  bool is_last;           // to arrive of them: this block joins them
};

/// Where a row's result goes; null past the last.
struct RowEnds {
  void* out;
  float* lse;
};

template <class Tile>
struct Shared {
  struct None {};
  static constexpr int kStages = Tile::kStages;
  using Scales = std::uint32_t[Tile::kKeys];              // the 4 bytes that hold a key's scale
  using Queries = std::uint16_t[8][Tile::kQueryPitch];  // of q's type

  alignas(1024) char stages[kStages][Tile::kBytes];  // keys and values take turns
  std::conditional_t<Tile::kQuantised, Scales, None> scales[kStages];
  alignas(16) std::conditional_t<Tile::kSharesQueries, Queries, None> queries[kItems];
  Item items[kItems];
  RowEnds ends[kItems][Tile::kRows];
  union {
    std::int32_t tables[kTableEntries];
    alignas(16) std::uint16_t fresh[2][kTableEntries];  // a fresh key and its value
    std::int32_t lengths[kMaxSequences];  // that items are planned for (plans_ahead)
  };
  int first_items[kMaxSequences + 1];  // of each sequence
  alignas(16) std::uint16_t weights[2][Tile::kRows][Tile::kWeightPitch];  // of every other tile
  alignas(16) float bases[2][Tile::kRows][kWarps];  // the warps', of these
  alignas(16) int exponents[2][kWarps];
  // Of every other tile, of 16-bit caches: of leaves that end with it; else of every other leaf.
  alignas(16) float totals[2][Tile::kRows][kWarps];
  alignas(8) std::uint64_t full[kStages], free[kStages];
  // Of an item: it is described; its queries are there; its partials are stored; is_last is known;
  // its place is free.
  std::uint64_t described[kItems], fetched[kItems], stored[kItems], counted[kItems],
      released[kItems];

  __device__ __forceinline__ void make_barriers() {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], Tile::kQuantised ? 1 + device::kWarpSize : 1);
      ptx::mbarrier_init(&free[i], kWarps);
    }
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(&described[i], 1);
      ptx::mbarrier_init(&fetched[i], device::kWarpSize);
      ptx::mbarrier_init(&stored[i], kWarps);
      ptx::mbarrier_init(&counted[i], 1);
      ptx::mbarrier_init(&released[i], kWarps + 2);  // both other warps, too
    }
    ptx::fence_mbarrier_init();
  }
};

struct Launch {
  AttentionParams attention;
  FreshKey fresh;  // k null: all keys are in the cache
  CUtensorMap k, v;            // boxes of box_rows keys, ...
  CUtensorMap end_k, end_v;    // ... and of kEndRows
  Divisor block_size, kv_heads, group, max_blocks;
  Divisor one, half;  // the splits of kDecodeItems, and of twice as many items
  int group_size;     // query heads a KV head
  int first_sequence, sequences;
  int blocks;              // of the grid, ...
  Divisor blocks_divisor;  // ... and what divides by them
  int box_rows, box_shift;  // keys that one copy brings, 1 << box_shift: they lie in one block
  int max_splits;           // of a sequence, ...
  int row_pairs;            // ... and pairs of rows: the shape of the workspace
  bool copies_tables;
  bool guesses;  // what the first tiles will be
  bool plans_ahead;  // one query a sequence: items are planned for lengths that may yet change
};

/// Where row `row` of a sequence and KV head lies.
struct Row {
  std::int64_t query;  // of all
  int head;
};

__device__ __forceinline__ Row row_of(const Launch& launch, const Work& work, int row) {
  const int query = launch.group.divide(row);
  return {work.sequence.q_begin + query,
          work.kv_head * launch.group_size + row - query * launch.group_size};
}

__device__ __forceinline__ RowEnds ends_of_row(const Launch& launch, const Work& work, int row) {
  const AttentionParams& p = launch.attention;
  if (row >= work.rows) return {};
  const Row at = row_of(launch, work, row);
  return {static_cast<std::uint16_t*>(p.out) + work.batch * p.stride_out_batch +
              (at.query * p.heads + at.head) * p.head_dim,
          p.lse + work.batch * p.stride_lse_batch + at.head * p.stride_lse_head + at.query};
}

/// First element of the row in q.
__device__ __forceinline__ const std::uint16_t* query_at(const Launch& launch, const Work& work,
                                                         int row) {
  const AttentionParams& p = launch.attention;
  const Row at = row_of(launch, work, row);
  return static_cast<const std::uint16_t*>(p.q) + work.batch * p.stride_q_batch +
         at.query * p.stride_q_row + at.head * p.stride_q_head;
}

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

// ---- Queries and arrivals -----------------------------------------------------------------------

/// The rows of an item to shared memory, zeros past the last.
template <class Tile>
__device__ __forceinline__ void request_queries(const Launch& launch, const Work& work,
                                                typename Shared<Tile>::Queries& to) {
  constexpr int kChunks = Tile::kSize / 8;
  const AttentionParams& p = launch.attention;
#pragma unroll
  for (int first = 0; first < 8 * kChunks; first += device::kWarpSize) {
    const int i = first + static_cast<int>(threadIdx.x) % device::kWarpSize;
    const int row = i / kChunks, column = i % kChunks * 8;
    const bool valid = row < work.rows && column < p.head_dim;
    const auto* from =
        valid ? query_at(launch, work, row) + column : static_cast<const std::uint16_t*>(p.q);
    ptx::copy_async_16(&to[row][column], from, valid);
  }
}

/// How many items blocks have asked for; and, next to it, how many blocks have ended.
__device__ __forceinline__ std::int32_t* dealt_items(const AttentionParams& p) {
  return p.counters + p.batch * p.kv_heads;
}

/// The warp beside the producer counts the arrival of each item that is stored. No other warp waits
/// for these trips to memory.
template <class Tile>
__device__ __forceinline__ void count_items(const Launch& launch, Shared<Tile>& shared) {
  const AttentionParams& p = launch.attention;
  for (Ring<kItems> ring;; ring.next()) {
    ptx::mbarrier_wait(&shared.described[ring.place], ring.parity);
    Item& item = shared.items[ring.place];
    if (item.splits == 0) break;
    ptx::mbarrier_wait(&shared.stored[ring.place], ring.parity);
    if (threadIdx.x % device::kWarpSize > 0) continue;
    auto* counter = p.counters + item.work.batch * p.kv_heads + item.work.kv_head;
    const unsigned last = item.arrivals - 1;
    item.is_last =
        item.splits > 1 && p.counters != nullptr && ptx::count_arrival(counter, last) == last;
    ptx::mbarrier_arrive(&shared.counted[ring.place]);
    ptx::mbarrier_arrive(&shared.released[ring.place]);
  }
}

}  // namespace ridgeline::attention_decode
