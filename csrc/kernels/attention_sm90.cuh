#pragma once
#include "kernels/attention_sm90_order.cuh"

/// What a block of the Hopper prefill kernel works on, and the warps that bring it.
namespace ridgeline::attention_sm90 {

/// kSize columns are computed; a head of fewer is padded with zeros by the copy engine.
template <class T_, int kSize_, int kConsumers_, int kKeys_, int kQuerySlots_, int kSlots_>
struct Tile {
  using T = T_;
  static constexpr int kSize = kSize_;
  static constexpr int kConsumers = kConsumers_;  // warpgroups of 64 queries
  static constexpr int kQueries = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = kKeys_;
  /// With two, the first product of a work runs beside the last of the work before.
  static constexpr int kQuerySlots = kQuerySlots_;
  /// Queries are let go after their last product; the rows of as many works and one more wait for
  /// values then, and the producers are one ahead.
  static constexpr int kWorkSlots = kQuerySlots + 3;
  static constexpr int kSlots = kSlots_;  // of the ring of keys and values
  /// Two warpgroups take turns; of more, each runs as it can and passes over tiles it cannot see.
  static constexpr bool kTurns = kConsumers == 2;
  static constexpr int kColumns = kRowBytes / sizeof(T);  // of a part
  static constexpr int kParts = kSize / kColumns;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kProducerThreads = kWarpgroup;
  /// All who read works, and those who bring them.
  static constexpr int kWorkThreads = kConsumerThreads + kProducerThreads;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
};

constexpr int kAskAhead = 3;  // tiles of keys, in which the queue answers

// ---- Shared memory ------------------------------------------------------------------------------

template <class Tile>
struct Shared {
  using T = typename Tile::T;
  using Queries = T[Tile::kParts][Tile::kQueries][Tile::kColumns];
  using Keys = T[Tile::kParts][Tile::kKeys][Tile::kColumns];

  alignas(1024) Queries q[Tile::kQuerySlots];
  alignas(1024) Keys kv[Tile::kSlots];
  WorkOf<Tile> work[Tile::kWorkSlots];
  alignas(8) std::uint64_t q_full[Tile::kQuerySlots];
  std::uint64_t full[Tile::kSlots], free[Tile::kSlots];
  float anchor[Tile::kConsumerThreads];  // see Consumer::anchor
};

// ---- Rows of a consumer -------------------------------------------------------------------------

/// The first of the two rows of a tile that a thread has; the other is 8 further.
__device__ __forceinline__ int row_of(int thread) {
  return (thread - kWarpgroup) / device::kWarpSize * 16 + thread % device::kWarpSize / 4;
}

/// Hides what this thread's rows do not see of the keys from `key` on: a tile at an edge.
template <class Work, int kPieces>
__device__ __forceinline__ void mask(const AttentionParams& p, const Work& work, int key,
                                     float (&scores)[kPieces][4]) {
  const int thread = ptx::thread_index(), begin = key + thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const config::KeyRange sees =
        config::visible_keys(p, work.sequence, work.query(row_of(thread), 8 * r));
    const int first = sees.begin - begin;
    const int limit = config::lesser(sees.end, work.sequence.k_len) - begin;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < first || 8 * i + c >= limit) scores[i][2 * r + c] = device::kMinusInfinity;
  }
}

// ---- Producer -----------------------------------------------------------------------------------

/// The warps that bring works, queries, keys and values. Four request boxes of each tile: one
/// alone does not keep up where a block of the cache has 16 keys (H200, one sequence of 4096, 32/8
/// heads of 128: 344 us by one warp, 252 by two; 64 keys: 270 and 253; four sequences, blocks of
/// 16: 1001 by two, 980 by four).
template <class Tile>
struct Producer {
  /// Where the box lies that this thread brings.
  struct Place {
    int row, batch;
  };

  const Launch& launch;
  Shared<Tile>& shared;
  Ring<Tile::kSlots> ring{.parity = 1};  // the first wait on a fresh barrier passes
  Ring<Tile::kQuerySlots> queries;
  int fresh = Tile::kQuerySlots;  // slots of queries that nobody has used yet
  Ring<Tile::kWorkSlots> works;
  bool wrote = false;  // this lane: the last work

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / device::kWarpSize; }
  __device__ static int box() {
    return Tile::kProducerThreads / device::kWarpSize * lane() + warp();
  }

  __device__ __forceinline__ Place place_of(const Work& work, int tile) const {
    const AttentionParams& p = launch.attention;
    if (box() >= launch.boxes) return {};
    const attention_tile::Work rows{.sequence = work.sequence, .batch = work.batch};
    const int first = box() / Tile::kParts * launch.box_rows;
    const auto slot = attention_tile::slot_of(p, rows, tile * Tile::kKeys + first);
    return {static_cast<int>(slot.row), p.cu_k != nullptr ? 0 : static_cast<int>(slot.batch)};
  }

  /// One tile of keys or values.
  __device__ __forceinline__ void request(const Place& place, int kv_head, const CUtensorMap& map) {
    std::uint64_t* full = &shared.full[ring.slot];
    auto& target = shared.kv[ring.slot];
    ptx::mbarrier_wait(&shared.free[ring.slot], ring.parity);
    if (threadIdx.x == 0) ptx::mbarrier_expect(full, sizeof(target));
    if (box() < launch.boxes) {
      const int part = box() % Tile::kParts, first = box() / Tile::kParts * launch.box_rows;
      ptx::copy_tensor_4d(target[part][first], &map, full, part * Tile::kColumns, place.row,
                          kv_head, place.batch);
    }
    __syncwarp();  // before the warp waits as one again
    ring.next();
  }

  /// Finds the next work. Its slot is free: the queries of the work before the last were let go.
  __device__ __forceinline__ Work find(Order<Tile>& order, int index) {
    if (warp() == 0) wrote = order.find(index, shared.work[works.slot]);
    ptx::named_barrier_sync(kWorkFound, Tile::kProducerThreads);  // the work is written
    const Work work = shared.work[works.slot];
    works.next();
    return work;
  }

  /// The rows of a tile, whose bytes `full` receives.
  __device__ __forceinline__ void copy_queries(const Work& work, std::uint64_t* full) const {
    const AttentionParams& p = launch.attention;
    const int rows = Packed<Tile> ? launch.tokens * launch.group : Tile::kQueries;
    ptx::mbarrier_expect(full, rows * static_cast<int>(sizeof(shared.q[0]) / Tile::kQueries));
    const int row = static_cast<int>(work.sequence.q_begin) + work.first_query;
    for (int part = 0; part < Tile::kParts; ++part)
      ptx::copy_tensor_4d(shared.q[queries.slot][part], &launch.q, full, part * Tile::kColumns,
                          Packed<Tile> ? work.kv_head * launch.group : row,
                          Packed<Tile> ? row : work.head, p.cu_q != nullptr ? 0 : work.batch);
  }

  /// The queries of a work; with them the work itself becomes visible to the consumers. The lane
  /// that wrote it arrives itself, and all who read it meet at the named barrier: racecheck sees no
  /// order through another thread. H200, 24 shapes of head sizes 64 and 128: 0.4% of their mean
  /// rate.
  __device__ __forceinline__ void request_queries(const Work& work) {
    std::uint64_t* full = &shared.q_full[queries.slot];
    if (fresh-- <= 0)
      ptx::named_barrier_sync(kQueriesFree + queries.slot, Tile::kWorkThreads);
    if (wrote) ptx::mbarrier_arrive(full);
    if (threadIdx.x == 0) {
      if (work.exists) {
        copy_queries(work, full);
      } else {
        ptx::mbarrier_arrive(full);
      }
    }
    __syncwarp();  // before the warp waits as one again
    queries.next();
  }

  /// Waits until block 0 has made the queue ready.
  __device__ __forceinline__ void join_queue() const {
    while (*static_cast<volatile unsigned long long*>(&launch.queue->ticket) != launch.ticket) {
    }
    __threadfence();  // it was made ready before it was signed
  }

  /// The number of a work that nobody has.
  __device__ __forceinline__ int take_index() const {
    return static_cast<int>(gridDim.x) + atomicAdd(&launch.queue->handed_out, 1);
  }

  __device__ __forceinline__ void open_queue() const {
    Queue& queue = *launch.queue;
    queue.handed_out = queue.ended = 0;
    __threadfence();  // before the signature
    *static_cast<volatile unsigned long long*>(&queue.ticket) = launch.ticket;
  }

  __device__ __forceinline__ void close_queue() const {
    Queue& queue = *launch.queue;
    if (atomicAdd(&queue.ended, 1) == static_cast<int>(gridDim.x) - 1) queue.ticket = 0;
  }

  /// Scores of a tile run beside the values of the tile before: keys come one tile ahead of values.
  __device__ __forceinline__ void run() {
    if (blockIdx.x == 0 && threadIdx.x == 0) open_queue();
    Order<Tile> order(launch);
    Work work = find(order, blockIdx.x);
    request_queries(work);
    int tile = work.last_tile - 1;
    Place place;
    if (work.exists) request(place = place_of(work, tile), work.kv_head, launch.k);
    bool joined = false;
    while (work.exists) {
      // The next work is asked for a few tiles before its turn: at the beginning of this one it
      // would be withheld from blocks that end sooner. H200, 32/8 heads of 128, 640 and 1008
      // queries before 32k keys: 1216 us and 833, 1203 and 918; heads of 256, causal, 8k keys: 682
      // TFLOP/s and 761.
      int index = 0;
      const int asks = min(tile, work.first_tile + kAskAhead);
      if (threadIdx.x == 0 && joined && tile == work.first_tile) index = take_index();
      for (; tile > work.first_tile; --tile) {
        if (threadIdx.x == 0 && joined && tile == asks) index = take_index();
        const Place next = place_of(work, tile - 1);
        request(next, work.kv_head, launch.k);
        request(place, work.kv_head, launch.v);
        place = next;
      }
      const Place last = place;
      const int kv_head = work.kv_head;
      if (Tile::kQuerySlots == 1) request(last, kv_head, launch.v);
      if (threadIdx.x == 0 && !joined) {  // not sooner: the fence holds requests up
        join_queue();
        index = take_index();
      }
      joined = true;
      work = find(order, device::from_lane(index, 0));
      tile = work.last_tile - 1;
      if (Tile::kQuerySlots > 1) request_queries(work);
      if (work.exists) request(place = place_of(work, tile), work.kv_head, launch.k);
      if (Tile::kQuerySlots > 1) request(last, kv_head, launch.v);
      if (Tile::kQuerySlots == 1) request_queries(work);
    }
    if (threadIdx.x == 0) {
      if (!joined) join_queue();
      close_queue();
    }
  }
};

}  // namespace ridgeline::attention_sm90
