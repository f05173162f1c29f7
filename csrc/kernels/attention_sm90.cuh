#pragma once
#include <type_traits>

#include "common/math.h"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tensor_copy.cuh"
#include "kernels/attention_tile.cuh"

/// What a block of the Hopper prefill kernel works on, and the warp that brings it: tiles, shared
/// memory, the order of the work, the copies.
namespace ridgeline::attention_sm90 {

namespace config = attention_config;

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kColumns = 64;    // of one swizzled part of a tile: 128 bytes
constexpr int kRowBytes = 128;  // of a part
constexpr int kWarpgroupRows = 64;
constexpr int kStages = 2;      // of keys and of values: one in use, one on its way

/// kSize columns are computed; a head of fewer is padded with zeros by the copy engine.
template <class T_, int kSize_, int kConsumers_, int kKeys_, bool kOwnOut_>
struct Tile {
  using T = T_;
  static constexpr int kSize = kSize_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups of 64 queries
  static constexpr int kQueries = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = kKeys_;
  static constexpr int kParts = kSize / kColumns;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr bool kOwnOut = kOwnOut_;  // the output has memory of its own: q may be refilled early
};

// ---- Shared memory ------------------------------------------------------------------------------

template <class Tile>
struct Shared {
  using T = typename Tile::T;
  using Queries = T[Tile::kParts][Tile::kQueries][kColumns];
  using Keys = T[Tile::kParts][Tile::kKeys][kColumns];
  struct None {};

  alignas(1024) Queries q;
  alignas(1024) Keys k[kStages];
  alignas(1024) Keys v[kStages];
  alignas(1024) std::conditional_t<Tile::kOwnOut, Queries, T[1]> own_out;
  alignas(8) std::uint64_t q_full, q_free;
  std::uint64_t k_full[kStages], k_free[kStages], v_full[kStages], v_free[kStages];

  __device__ T* out(int part, int row, int column) {
    if constexpr (Tile::kOwnOut) {
      return &own_out[part][row][column];
    } else {
      return &q[part][row][column];
    }
  }
};

struct Launch {
  AttentionParams attention;
  CUtensorMap q, k, v;
  int box_rows;  // keys that one copy brings: they lie in one block
  int boxes;     // copies of a tile of keys
  int tiles;     // of queries, of the longest sequence
  int together;  // heads whose keys and values fit in the L2 cache side by side
  int works;
};

/// Which slot of the rings comes next, and the parity of its use.
struct Ring {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- Work ---------------------------------------------------------------------------------------

/// A tile of queries of one head, and the tiles of keys it sees.
struct Work {
  config::Sequence sequence;
  int batch, head, kv_head, first_query;
  int first_tile, last_tile;  // of keys; the last is not included
};

/// Work number `index`; false: there is nothing in it. Heads that fit in the L2 cache run side by
/// side, and among them the last rows first: when causal they are the longest.
template <class Tile>
__device__ __forceinline__ bool find_work(const Launch& launch, int index, Work& work) {
  const AttentionParams& p = launch.attention;
  const int per_group = launch.tiles * launch.together;
  const int first_pair = index / per_group * launch.together;
  const int side_by_side = min(launch.together, p.heads * p.batch - first_pair);
  const int rest = index % per_group, pair = first_pair + rest % side_by_side;
  work.batch = pair / p.heads;
  work.head = pair % p.heads;
  work.kv_head = work.head / (p.heads / p.kv_heads);
  work.first_query = (launch.tiles - 1 - rest / side_by_side) * Tile::kQueries;
  work.sequence = config::sequence_of(p, work.batch);
  const int q_len = work.sequence.q_len;
  if (work.first_query >= q_len || config::is_split(p, q_len)) return false;
  const int last_query = min(work.first_query + Tile::kQueries, q_len) - 1;
  const int begin = config::visible_keys(p, work.sequence, work.first_query).begin;
  const int end = config::visible_keys(p, work.sequence, last_query).end;
  work.first_tile = begin / Tile::kKeys;
  work.last_tile = max(ceil_div(end, Tile::kKeys), work.first_tile);
  return true;
}

/// Calls fn(work) for each work of this block. Every other round runs backwards, so that no block
/// always gets the longest.
template <class Tile, class Fn>
__device__ __forceinline__ void for_each_work(const Launch& launch, Fn&& fn) {
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  bool backwards = false;
  for (int first = 0; first < launch.works; first += blocks, backwards = !backwards) {
    const int index = first + (backwards ? blocks - 1 - block : block);
    Work work;
    if (index < launch.works && find_work<Tile>(launch, index, work)) fn(work);
  }
}

// ---- Producer -----------------------------------------------------------------------------------

/// One tile of keys or values, by one warp.
template <class Tile>
__device__ __forceinline__ void request_tile(const Launch& launch, const Work& work, int tile,
                                             typename Shared<Tile>::Keys& target,
                                             const CUtensorMap& map, std::uint64_t* full) {
  const AttentionParams& p = launch.attention;
  const int lane = threadIdx.x % device::kWarpSize;
  if (lane == 0) ptx::mbarrier_expect(full, sizeof(target));
  __syncwarp();  // the bytes are expected before the first can come
  // No division here: two tiles are all that is ahead, and what this warp spends is waited for.
  for (int i = lane; i < launch.boxes; i += device::kWarpSize) {
    const int part = i % Tile::kParts, first = i / Tile::kParts * launch.box_rows;
    const attention_tile::Work place{.sequence = work.sequence, .batch = work.batch};
    const attention_tile::Slot slot =
        attention_tile::slot_of(p, place, tile * Tile::kKeys + first);
    ptx::copy_tensor_4d(target[part][first], &map, full, part * kColumns,
                        static_cast<int>(slot.row), work.kv_head,
                        p.cu_k != nullptr ? 0 : static_cast<int>(slot.batch));
  }
}

template <class Tile>
__device__ __forceinline__ void produce(const Launch& launch, Shared<Tile>& shared) {
  const AttentionParams& p = launch.attention;
  Ring ring{.parity = 1};  // the first wait on a fresh barrier passes
  int q_parity = 1;
  for_each_work<Tile>(launch, [&](const Work& work) {
    ptx::mbarrier_wait(&shared.q_free, q_parity);
    q_parity ^= 1;
    if (threadIdx.x == 0) {
      ptx::mbarrier_expect(&shared.q_full, sizeof(shared.q));
      const int row = static_cast<int>(work.sequence.q_begin) + work.first_query;
      for (int part = 0; part < Tile::kParts; ++part)
        ptx::copy_tensor_4d(shared.q[part], &launch.q, &shared.q_full, part * kColumns, row,
                            work.head, p.cu_q != nullptr ? 0 : work.batch);
    }
    for (int tile = work.last_tile - 1; tile >= work.first_tile; --tile, ring.next()) {
      ptx::mbarrier_wait(&shared.k_free[ring.stage], ring.parity);
      request_tile<Tile>(launch, work, tile, shared.k[ring.stage], launch.k,
                         &shared.k_full[ring.stage]);
      ptx::mbarrier_wait(&shared.v_free[ring.stage], ring.parity);
      request_tile<Tile>(launch, work, tile, shared.v[ring.stage], launch.v,
                         &shared.v_full[ring.stage]);
    }
  });
}

}  // namespace ridgeline::attention_sm90
