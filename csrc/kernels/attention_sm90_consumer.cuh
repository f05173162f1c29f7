#pragma once
#include "device/ptx/wgmma_registers.cuh"
#include "device/ptx/wgmma_shared.cuh"
#include "kernels/attention_sm90_store.cuh"

/// What one warpgroup of the Hopper prefill kernel does with the tiles: products, softmax.
namespace ridgeline::attention_sm90 {

constexpr int kStepBytes = 32;  // 16 columns of an operand, the depth of one wgmma

/// Keeps in registers 64 rows of sums, one tile of scores, and the weights of the tile before.
/// Scores of a tile are on the tensor cores together with the values of the tile before, also where
/// that ends the work before: the pipeline does not drain between works.
template <class Tile>
struct Consumer {
  using T = typename Tile::T;

  const AttentionParams& p;
  Shared<Tile>& shared;
  const int warpgroup;  // the compiler must know that a warp shares it: descriptors are made of it
  Ring<Tile::kSlots> ring;
  Ring<Tile::kQuerySlots> queries;  // of the next work
  Ring<Tile::kWorkSlots> works;
  Current now;
  device::LazySoftmax softmax;
  float sums[Tile::kSize / 8][4];
  float scores[Tile::kKeys / 8][4];
  std::uint32_t weights[Tile::kKeys / 16][4];

  /// While one warpgroup feeds the tensor cores, the other takes its softmax.
  __device__ __forceinline__ void await_turn() const {
    if constexpr (Tile::kTurns) ptx::named_barrier_sync(kFirstTurn + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Tile::kTurns)
      ptx::named_barrier_arrive(kFirstTurn + (warpgroup ^ 1), 2 * kWarpgroup);
  }

  __device__ __forceinline__ static void release(std::uint64_t* barrier) {
    if (threadIdx.x % kWarpgroup == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Lets the queries of a work go after the scores of its last tile.
  __device__ __forceinline__ void release_queries() const {
    if (now.tile == now.first_tile)
      ptx::named_barrier_arrive(kQueriesFree + now.slot, Tile::kWorkThreads);
  }

  /// Waits for the next work and its queries; false: there is none.
  __device__ __forceinline__ bool begin_work() {
    ptx::mbarrier_wait(&shared.q_full[queries.slot], queries.parity);
    const auto& work = shared.work[works.slot];
    if (!work.exists) return false;
    const config::Sequence& s = work.sequence;
    const int first_row = warpgroup * kWarpgroupRows, first = work.query(first_row, 0);
    const int last = min(work.query(first_row, kWarpgroupRows - 1) + 1, s.q_len) - 1;
    const config::KeyRange latest = config::visible_keys(p, s, last);
    const int end = config::lesser(config::visible_keys(p, s, first).end, s.k_len);
    now = {.slot = queries.slot,
           .work_slot = works.slot,
           .tile = work.last_tile - 1,
           .first_tile = work.first_tile,
           .whole_begin = ceil_div(latest.begin, Tile::kKeys),
           .whole_end = end / Tile::kKeys,
           .skip = 0};
    if constexpr (!Tile::kTurns) {
      const int seen = first > last ? 0 : ceil_div(latest.end, Tile::kKeys);  // tiles
      now.skip = max(now.tile - max(seen - 1, now.first_tile), 0);  // a segment may end before
      now.tile -= now.skip;
    }
    queries.next();
    works.next();
    return true;
  }

  __device__ __forceinline__ void issue_scores(int k_slot) {
    const std::uint64_t q = ptx::swizzled_operand(
        shared.q[now.slot][0][warpgroup * kWarpgroupRows], 16, 8 * kRowBytes);
    const std::uint64_t k = ptx::swizzled_operand(shared.kv[k_slot], 16, 8 * kRowBytes);
    constexpr int kSteps = kRowBytes / kStepBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i) {
      const int part = i / kSteps, within = i % kSteps * kStepBytes;
      ptx::WgmmaShared<Tile::kKeys, T>::mma(scores,
                                            q + (part * Tile::kQueries * kRowBytes + within) / 16,
                                            k + (part * Tile::kKeys * kRowBytes + within) / 16,
                                            i != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(int v_slot) {
    const std::uint64_t v =
        ptx::swizzled_operand(shared.kv[v_slot], Tile::kKeys * kRowBytes, 8 * kRowBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i)
      ptx::WgmmaRegisters<Tile::kSize, T, ptx::Contiguous::kColumns>::mma(
          sums, weights[i], v + i * 16 * kRowBytes / 16);
    ptx::wgmma_commit();
  }

  /// Products become weights; what was gathered before is to be multiplied with keep[].
  __device__ __forceinline__ void take_softmax(float (&keep)[2]) {
    float unit = p.scale * device::kLog2E;
    if (p.softcap > 0.0f) {
      unit = device::kLog2E;
#pragma unroll
      for (auto& piece : scores)
#pragma unroll
        for (float& score : piece) score = device::capped(score * p.scale, p.softcap);
    }
    if (now.tile < now.whole_begin || now.tile >= now.whole_end)
      mask(p, shared.work[now.work_slot], now.tile * Tile::kKeys, scores);
    softmax.weigh(scores, keep, unit);
  }

  /// ptxas moves arithmetic behind a wait for the tensor cores wherever nothing stops it, and then
  /// the softmax does not run beside them. This store needs some of the weights, and stays before
  /// the wait. H200, head size 128, 16k keys, full: 576 TFLOP/s without it, 595 with it.
  __device__ __forceinline__ void anchor() {
    constexpr int kLast = Tile::kKeys / 8 - 1;
    volatile float* to = &shared.anchor[threadIdx.x - kWarpgroup];
    *to = scores[kLast][0] + scores[kLast][1] + scores[kLast][2] + scores[kLast][3];
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&piece)[4] = scores[2 * i + j / 2];
        weights[i][j] = attention_tile::pack<T>(piece[j % 2 * 2], piece[j % 2 * 2 + 1]);
      }
  }

  /// Values of slots outside the sequence may be NaN, and 0 * NaN must not reach the sums: they
  /// become zero. All consumers meet here, so none may be holding the turn.
  __device__ __forceinline__ void clear_unused_values(const Current& of, int tile,
                                                      const Ring<Tile::kSlots>& values) {
    const config::Sequence& s = shared.work[of.work_slot].sequence;
    const int begin = tile * Tile::kKeys;
    const bool ends_tensor = p.cu_k == nullptr && p.block_tables == nullptr;  // zeros come past it
    if (begin >= s.k_start && (ends_tensor || begin + Tile::kKeys <= s.k_len)) return;
    ptx::mbarrier_wait(&shared.full[values.slot], values.parity);
    constexpr int kChunks = Tile::kSize / 8;
#pragma unroll 1
    for (int i = ptx::thread_index() - kWarpgroup; i < Tile::kKeys * kChunks;
         i += Tile::kConsumerThreads) {
      const int n = i / kChunks, chunk = i % kChunks;
      if (begin + n >= s.k_start && begin + n < s.k_len) continue;
      auto* piece = &shared.kv[values.slot][chunk / 8][n][chunk % 8 * 8];
      *reinterpret_cast<uint4*>(piece) = uint4{};
    }
    ptx::fence_async_shared();
    // All zeros are written; one warpgroup may drop a tile that another multiplies.
    ptx::unaligned_barrier_sync(kValuesCleared, Tile::kConsumerThreads);
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (auto& piece : sums)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
  }

  __device__ __forceinline__ void gather_warps() const {
    ptx::named_barrier_sync(kTogether + warpgroup, kWarpgroup);
  }

  /// Lets a tile go that no row of this warpgroup sees.
  __device__ __forceinline__ void drop() {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    gather_warps();  // each has seen it come: after the release the slot may be filled again
    release(&shared.free[ring.slot]);
    ring.next();
  }

  /// The scores of a work's first tile, with no values to multiply beside them. `dropped`: the keys
  /// of the first tile to skip are gone already.
  __device__ __forceinline__ void start_work(bool dropped) {
    if (now.skip > 0 && !dropped) drop();
#pragma unroll 1
    for (int tile = now.tile + now.skip; tile > now.tile + 1; --tile) {
      drop();
      clear_unused_values(now, tile, ring);
      drop();
    }
    softmax = {};
    clear_sums();
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    await_turn();
    issue_scores(ring.slot);
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(scores);
    release(&shared.free[ring.slot]);
    release_queries();
    ring.next();
    if (now.skip > 0) {
      clear_unused_values(now, now.tile + 1, ring);
      drop();
    }
    float keep[2];
    take_softmax(keep);
    softmax.add(scores, keep);
    round_weights();
  }

  /// The scores of this tile and beside them, on the tensor cores, the values of the one before.
  /// `ended`: that was the last of its work, `before`.
  __device__ __forceinline__ void step(bool ended, const Current& before) {
    const Ring<Tile::kSlots> keys = ring;
    ring.next();
    const Ring<Tile::kSlots> values = ring;
    ring.next();
    clear_unused_values(before, before.tile, values);
    ptx::mbarrier_wait(&shared.full[keys.slot], keys.parity);
    await_turn();
    issue_scores(keys.slot);
    ptx::mbarrier_wait(&shared.full[values.slot], values.parity);
    issue_values(values.slot);
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::hold_registers(scores);
    release(&shared.free[keys.slot]);
    release_queries();
    const device::LazySoftmax old = softmax;
    if (ended) softmax = {};
    float keep[2];
    take_softmax(keep);
    anchor();
    ptx::wgmma_wait<0>();
    ptx::hold_registers(sums);
    release(&shared.free[values.slot]);
    if (ended) {
      store_work(p, shared, before, old, sums);
      clear_sums();
    } else if (device::any_lane(keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (auto& piece : sums)
#pragma unroll
        for (int c = 0; c < 4; ++c) piece[c] *= keep[c / 2];
    }
    // Not before: beside the exponentials each addition would wait for its own, three at a time.
    softmax.add(scores, keep);
    round_weights();
  }

  /// The values of a work's last tile, with no scores beside them.
  __device__ __forceinline__ void finish_work(const Current& of) {
    clear_unused_values(of, of.tile, ring);
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    issue_values(ring.slot);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(sums);
    release(&shared.free[ring.slot]);
    ring.next();
    store_work(p, shared, of, softmax, sums);
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == Tile::kConsumers - 1) pass_turn();  // warpgroup 0 begins
    bool more = begin_work(), dropped = false;
    while (more) {
      start_work(dropped);
      dropped = false;
      Current before;
      for (;;) {
        before = now;
        const bool ends = now.tile == now.first_tile;
        if (!ends) {
          --now.tile;
        } else {
          if (Tile::kQuerySlots == 1 || !(more = begin_work())) break;
          if (now.skip > 0) {  // the next work's first keys lie before this one's last values
            drop();
            dropped = true;
            break;
          }
        }
        step(Tile::kQuerySlots > 1 && ends, before);
      }
      finish_work(before);
      if (Tile::kQuerySlots == 1) more = begin_work();
    }
  }
};

}  // namespace ridgeline::attention_sm90
