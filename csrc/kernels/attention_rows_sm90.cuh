#pragma once
#include <type_traits>

#include "device/divisor.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/global_order.cuh"
#include "kernels/attention_sm90.cuh"

/// What a block of the Hopper kernel of packed rows works on: a tile of rows, which are the queries
/// of several heads and tokens that read the same keys, and one split of those keys. Tiles, shared
/// memory, items.
namespace ridgeline::attention_rows {

namespace config = attention_config;
using attention_sm90::kColumns;
using attention_sm90::kRowBytes;
using attention_sm90::kWarpgroup;
using attention_sm90::kWarpgroupRows;
using attention_sm90::Ring;
using attention_tile::Work;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kKeys = config::kKeyTile;
constexpr int kItems = 3;           // worked on, and described ahead
constexpr int kConsumersMeet = 1;   // named barrier

/// kSize columns are computed; a head of fewer is padded with zeros by the copy engine. One
/// warpgroup takes the rows of one sequence and KV head; two take the rows that all sequences have
/// before the keys common to all, so that these come to shared memory half as often.
template <class T_, int kSize_, int kConsumers_, int kSlots_, bool kUnsplit_ = false>
struct Tile {
  using T = T_;
  static constexpr int kSize = kSize_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr bool kCommon = kConsumers == 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kSlots = kSlots_;  // of keys, or of values
  // That a cluster's block uses where some share an SM. H200, 32 sequences of 4k keys, one KV head:
  // 20.1 us with all, 19.5 so, heads of 64 14.0 and 13.3; but 8 of them 11.2 and 12.1.
  static constexpr int kSharedSlots = kSize == 64 ? 6 : kSize == 128 ? 3 : kSlots;
  // Where small clusters follow each other: 256 sequences of 2k keys 79.4 and, with all, 76.8; 128
  // of them, heads of 64, 24.6 and 27.1.
  static constexpr int kFollowingSlots = kSize == 64 ? 6 : kSlots;
  /// Batch-invariant mode: a sequence is one item, a step of the softmax the prefill kernel's.
  static constexpr bool kUnsplit = kUnsplit_;
  static constexpr bool kJoins = !kCommon && !kUnsplit;  // splits, where there are clusters
  static constexpr int kCluster = config::row_cluster(kSize);  // blocks of one, at most
  static constexpr int kStepTiles = kUnsplit ? config::prefill_keys(kSize) / kKeys : 1;
  static constexpr int kStepKeys = kStepTiles * kKeys;
  static constexpr int kParts = kSize / kColumns;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + 2 * device::kWarpSize;
  static constexpr int kBlocks = kCommon ? 1 : config::row_blocks(kSize);  // an SM
};

/// One split of the keys that a tile of rows sees. Own keys: the rows are those of one sequence and
/// KV head, work.first_row is 0. Common keys: those of the KV head from work.first_row on, over all
/// tokens.
struct Item {
  Work work;
  config::KeyRange keys;  // begins at a multiple of kKeys
  config::KeyRange live;  // slots outside may hold anything
  int split, splits;      // splits 0: there are no more items
};

struct Launch {
  AttentionParams attention;
  CUtensorMap q, k, v;
  device::Divisor kv_heads, block_size;
  int box_rows, boxes;  // keys that one copy brings, and the copies of a tile of keys
  int group;            // query heads a KV head
  int queries;          // tokens of a tile of rows
  int max_splits;       // the workspace has so many splits, ...
  int max_rows;         // ... each of so many rows, of every sequence and KV head
  int tiles;            // of rows, before common keys
  int least_rows;       // of a sequence that is not left to the kernel of few rows
  int slots;            // of keys, or of values, that a block uses
  int cluster;          // blocks that have a split each of a sequence and KV head; 1: no clusters
  device::Divisor of_cluster;  // divides by them
  bool deals;           // items, as blocks come to the end of theirs; else every n-th is a block's
  bool clears;          // rows of no sequence, since no kernel of few rows does
  bool follows_common;  // which has waited for the kernels ahead, and whose end is awaited last
  void* workspace;
};

// ---- Shared memory ------------------------------------------------------------------------------

/// A row of a split, for the block of a cluster that joins it: sums divided by its total.
template <class Tile>
struct SplitRow {
  float sums[Tile::kSize], lse;
  float pad[7];  // a warp's rows lie in different banks
};

/// That the others send a block, which joins an equal share of up to 64, an even number.
constexpr int kSentRows = 60;  // six others send ten each, five twelve, four fourteen

template <class Tile>
struct Shared {
  using T = typename Tile::T;
  struct None {};

  alignas(1024) T q[Tile::kParts][Tile::kRows][kColumns];
  alignas(1024) T kv[Tile::kSlots][Tile::kParts][kKeys][kColumns];
  Item items[kItems];
  int wasted;  // 1: the ring was filled, and queries were brought, by a guess that was wrong
  alignas(16) std::conditional_t<Tile::kJoins, SplitRow<Tile>[kSentRows], None> sent;
  alignas(8) std::uint64_t arrived;  // all that is sent
  std::uint64_t q_full, q_free;
  std::uint64_t asked;  // for the next item, since the last keys of this one are on their way
  std::uint64_t full[Tile::kSlots], free[Tile::kSlots];
  std::uint64_t described[kItems], released[kItems];  // of an item

  /// Each barrier that stands for ordinary memory is arrived at by every thread that touched it.
  __device__ __forceinline__ void make_barriers() {
    ptx::mbarrier_init(&arrived, 1);
    ptx::mbarrier_init(&q_full, 1);
    ptx::mbarrier_init(&asked, 1);
    ptx::mbarrier_init(&q_free, Tile::kConsumers);
    for (int i = 0; i < Tile::kSlots; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&free[i], Tile::kConsumers);
    }
    for (int i = 0; i < kItems; ++i) {
      ptx::mbarrier_init(&described[i], device::kWarpSize);
      ptx::mbarrier_init(&released[i], Tile::kConsumerThreads + device::kWarpSize);
    }
    ptx::fence_mbarrier_init();
  }
};

/// Which slot of keys or values comes next of those that a launch uses, and the parity of its use.
struct SlotRing {
  const int& slots;
  int slot = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- Items --------------------------------------------------------------------------------------

/// The keys that a sequence's queries see, from a multiple of kKeys on: a function of the sequence.
struct Cut {
  std::int32_t begin, end, keys, splits;
};

template <bool kUnsplit = false>
__device__ __forceinline__ Cut cut_of(const AttentionParams& p, const config::Sequence& s) {
  const config::KeyRange first = config::visible_keys(p, s, 0);
  const config::KeyRange last = config::visible_keys(p, s, s.q_len - 1);
  Cut cut{.begin = first.begin / kKeys * kKeys, .end = config::lesser(last.end, s.k_len)};
  const int span = config::greater(cut.end - cut.begin, 1);
  if constexpr (kUnsplit) {
    cut.keys = span, cut.splits = 1;
  } else {
    cut.keys = config::row_split_keys(p.head_dim, span);
    cut.splits = ceil_div(span, cut.keys);
  }
  return cut;
}

/// What a block of a cluster takes.
struct Share {
  int batch, kv_head, split;

  __device__ __forceinline__ explicit Share(const Launch& launch) {
    const int pair = launch.of_cluster.divide(static_cast<int>(blockIdx.x));
    split = static_cast<int>(blockIdx.x) - pair * launch.cluster;
    batch = launch.kv_heads.divide(pair);
    kv_head = pair - batch * launch.attention.kv_heads;
  }
};

/// Where the last step before these keys begins.
template <class Tile>
__device__ __forceinline__ int last_step(const config::KeyRange& keys) {
  return (keys.end - 1) / Tile::kStepKeys * Tile::kStepKeys;
}
__device__ __forceinline__ bool has_tile(const config::KeyRange& keys, int n) {
  return n >= keys.begin && n < keys.end;
}

template <class Tile>
__device__ __forceinline__ void expect_queries(const Launch& launch, Shared<Tile>& shared) {
  ptx::mbarrier_expect(&shared.q_full, launch.queries * launch.group * kRowBytes * Tile::kParts);
}

/// By a warp. Its lanes meet again behind it.
template <class Tile>
__device__ __forceinline__ void request_queries(const Launch& launch, Shared<Tile>& shared,
                                                const Work& work) {
  if (threadIdx.x % device::kWarpSize == 0) {
    const AttentionParams& p = launch.attention;
    expect_queries<Tile>(launch, shared);
    for (int part = 0; part < Tile::kParts; ++part)
      ptx::copy_tensor_4d(shared.q[part], &launch.q, &shared.q_full, part * kColumns,
                          work.kv_head * launch.group,
                          static_cast<int>(work.sequence.q_begin),
                          Tile::kCommon || p.cu_q != nullptr ? 0 : work.batch);
  }
  __syncwarp();
}

}  // namespace ridgeline::attention_rows
