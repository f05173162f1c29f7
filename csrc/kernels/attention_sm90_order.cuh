#pragma once
#include <type_traits>

#include "common/math.h"
#include "device/divisor.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "device/ptx/warpgroup.cuh"
#include "kernels/attention_tile.cuh"

/// The order of the work of the Hopper prefill kernels, and how blocks share it.
namespace ridgeline::attention_sm90 {

namespace config = attention_config;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kRowBytes = 128;  // of one swizzled part of a tile, ...
constexpr int kColumns = 64;    // ... which are so many columns of 16 bits
constexpr int kWarpgroupRows = 64;

constexpr int kWorkFound = 1;      // named barriers: between the warps that bring tiles, ...
constexpr int kFirstTurn = 2;      // ... the turns of two warpgroups, ...
constexpr int kTogether = 4;       // ... the four warps of a warpgroup, of up to four, ...
constexpr int kValuesCleared = 8;  // ... all that clear unused values, ...
constexpr int kQueriesFree = 9;  // ... and, of each slot, those who use queries and who bring them

/// Hands out works to the blocks of one launch. It lies in the workspace, which may hold anything:
/// block 0 makes it ready and signs it with the launch's ticket, and the last block takes the
/// signature away, since a captured launch runs again with the same ticket. Zeroing it by a launch
/// of its own would cost about 1.5 us.
struct Queue {
  unsigned long long ticket;
  int handed_out;
  int ended;  // blocks
};

struct Launch {
  AttentionParams attention;
  CUtensorMap q, k, v;
  int box_rows;  // keys that one copy brings: they lie in one block
  int boxes;     // copies of a tile of keys
  int blocks;    // ids from here on are out of range
  device::Divisor block_size;
  int heads_together, batches_together;  // whose works run side by side
  Queue* queue;
  unsigned long long ticket;
  int group;   // of packed tiles: query heads a KV head, ...
  int tokens;  // ... and tokens a tile
};

/// A tile of queries of one head, and the tiles of keys it sees: at least one.
struct Work {
  config::Sequence sequence;
  int batch, head, kv_head;
  int first_query;
  int first_tile, last_tile;  // of keys; the last is not included
  bool exists;                // false: this block has nothing more to do

  __device__ __forceinline__ int query(int row, int further) const {
    return first_query + row + further;
  }
};

/// The rows of a packed tile are the queries of a few tokens, in all heads that read one KV head:
/// row r is the token r / group of head r % group. The work is one segment of the keys they see.
struct PackedWork : Work {
  int group, rows;
  int segment, segments;

  __device__ __forceinline__ int query(int row, int further) const {
    return first_query + (row + further) / group;
  }
};

template <class Tile>
concept Packed = requires { Tile::kPackedRows; };

template <class Tile>
using WorkOf = std::conditional_t<Packed<Tile>, PackedWork, Work>;

/// A work as one warpgroup sees it.
struct Current {
  int slot, work_slot;         // of its queries, of its description
  int tile, first_tile;        // of keys: the tile whose scores are at hand, and the last to come
  int whole_begin, whole_end;  // tiles of keys that each row sees whole
  int skip;                    // tiles at the end that no row sees
};

/// Which slot of a ring comes next, and the parity of its use.
template <int kCount>
struct Ring {
  int slot = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == kCount) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ---- Order --------------------------------------------------------------------------------------

/// The order of the works, as one warp walks it: lane i keeps sequence i of those side by side, and
/// among these the tiles that see most keys come first, so that no long work is left for the end.
/// Level n holds, of each sequence, the tile whose queries end within the n-th kQueries positions.
template <class Tile>
struct Order {
  const Launch& launch;
  int first_batch, first_head, heads;  // side by side
  int level, before;                   // works before this level
  config::Sequence sequence;           // of this lane
  int top, tiles;                      // its highest level, its tiles

  __device__ explicit Order(const Launch& launch) : launch(launch), before(0) { begin(0, 0); }

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  __device__ __forceinline__ void begin(int batch, int head) {
    const AttentionParams& p = launch.attention;
    first_batch = batch;
    first_head = head;
    heads = min(launch.heads_together, p.heads - head);
    tiles = top = 0;
    if (lane() < launch.batches_together && batch + lane() < p.batch) {
      sequence = config::sequence_of(p, batch + lane());
      if (!config::is_split(p, sequence.q_len)) {
        tiles = ceil_div(sequence.q_len, Tile::kQueries);
        top = max(ceil_div(sequence.k_len, Tile::kQueries), tiles);
      }
    }
    level = device::warp_max(top);
  }

  /// Goes to the next sequences and heads; false: there are none.
  __device__ __forceinline__ bool advance() {
    const AttentionParams& p = launch.attention;
    if (first_head + heads < p.heads) {
      begin(first_batch, first_head + heads);
    } else if (first_batch + launch.batches_together < p.batch) {
      begin(first_batch + launch.batches_together, 0);
    } else {
      return false;
    }
    return true;
  }

  __device__ __forceinline__ Work work_of(int head) const {
    const AttentionParams& p = launch.attention;
    const int first_query = (tiles - 1 - (top - level)) * Tile::kQueries;
    const int last_query = min(first_query + Tile::kQueries, sequence.q_len) - 1;
    const int begin = config::visible_keys(p, sequence, first_query).begin;
    const int end = config::visible_keys(p, sequence, last_query).end;
    const int first_tile = begin / Tile::kKeys;
    return {.sequence = sequence,
            .batch = first_batch + lane(),
            .head = head,
            .kv_head = head / (p.heads / p.kv_heads),
            .first_query = first_query,
            .first_tile = first_tile,
            .last_tile = max(ceil_div(end, Tile::kKeys), first_tile + 1),
            .exists = true};
  }

  /// Writes work number `index` to `work`; from call to call indices grow. True in the lane that
  /// did.
  __device__ __forceinline__ bool find(int index, Work& work) {
    for (;;) {
      const bool mine = level <= top && level > top - tiles;
      const unsigned all = __ballot_sync(0xffffffffu, mine);
      const int works = __popc(all) * heads;
      if (index < before + works) {
        const int nth = (index - before) / heads, head = first_head + (index - before) % heads;
        const bool owns = mine && __popc(all & ((1u << lane()) - 1)) == nth;
        if (owns) work = work_of(head);
        return owns;
      }
      before += works;
      --level;
      if (device::any_lane(tiles > 0 && level > top - tiles)) continue;
      if (!advance()) {
        tiles = 0;
        if (lane() == 0) work.exists = false;
        return lane() == 0;
      }
    }
  }
};

/// The rows of no sequence, by each block's first warpgroup.
template <class T>
__device__ __forceinline__ void clear_unowned_rows(const AttentionParams& p) {
  attention_tile::clear_unowned_rows_by<T>(p, std::int64_t{blockIdx.x} * kWarpgroup + threadIdx.x,
                                           std::int64_t{gridDim.x} * kWarpgroup);
}

}  // namespace ridgeline::attention_sm90
