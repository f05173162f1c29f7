#pragma once
#include "device/ptx/wgmma_registers.cuh"
#include "device/ptx/wgmma_shared.cuh"
#include "kernels/attention_rows_cluster.cuh"

/// What a warpgroup of the Hopper kernel of packed rows does: products, softmax, results.
namespace ridgeline::attention_rows {

constexpr int kStepBytes = 32;  // 16 columns of an operand, the depth of one wgmma

// ---- Consumer -----------------------------------------------------------------------------------

template <class Tile>
struct Consumer {
  using T = typename Tile::T;

  const Launch& launch;
  Shared<Tile>& shared;
  const int warpgroup;
  SlotRing ring{launch.slots};
  device::LazySoftmax softmax;
  config::KeyRange sees[2];  // this thread's two rows
  float sums[Tile::kSize / 8][4];
  float scores[Tile::kStepKeys / 8][4];
  std::uint32_t weights[Tile::kStepKeys / 16][4];  // of the tile before, or of this step

  /// The first of a thread's two rows of the tile; the other is 8 further.
  __device__ static int row_of(int thread) {
    return thread / device::kWarpSize * 16 + thread % device::kWarpSize / 4;
  }

  __device__ __forceinline__ static void release(std::uint64_t* barrier) {
    if (threadIdx.x % kWarpgroup == 0) ptx::mbarrier_arrive(barrier);
  }

  /// What a row of the item sees. Before common keys it may be of any sequence, or of none.
  __device__ __forceinline__ config::KeyRange range_of(const Item& item, int row) const {
    const AttentionParams& p = launch.attention;
    const Work& work = item.work;
    config::Sequence s = work.sequence;
    int query = work.query(min(row, work.rows - 1));
    if constexpr (Tile::kCommon) {
      const int token = static_cast<int>(s.q_begin) + query;
      const int batch = config::sequence_at(p, token);
      if (batch < 0) return {};
      s = config::sequence_of(p, batch);
      if (!config::is_split(p, s.q_len)) return {};
      query = p.cu_q != nullptr ? token - static_cast<int>(s.q_begin) : 0;
    }
    const config::KeyRange range = config::visible_keys(p, s, query);
    return {range.begin, config::lesser(range.end, s.k_len)};
  }

  /// Scores of tile `tile` of a step.
  __device__ __forceinline__ void issue_keys(int slot, int tile = 0) {
    const std::uint64_t q =
        ptx::swizzled_operand(shared.q[0][warpgroup * kWarpgroupRows], 16, 8 * kRowBytes);
    const std::uint64_t k = ptx::swizzled_operand(shared.kv[slot], 16, 8 * kRowBytes);
    constexpr int kSteps = kRowBytes / kStepBytes, kPieces = kKeys / 8;
    auto& of_tile = reinterpret_cast<float(&)[kPieces][4]>(scores[tile * kPieces]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i) {
      const int part = i / kSteps, within = i % kSteps * kStepBytes;
      ptx::WgmmaShared<kKeys, T>::mma(of_tile, q + (part * Tile::kRows * kRowBytes + within) / 16,
                                      k + (part * kKeys * kRowBytes + within) / 16, i != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(int slot, int tile = 0) {
    const std::uint64_t v =
        ptx::swizzled_operand(shared.kv[slot], kKeys * kRowBytes, 8 * kRowBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      ptx::WgmmaRegisters<Tile::kSize, T, ptx::Contiguous::kColumns>::mma(
          sums, weights[tile * kKeys / 16 + i], v + i * 16 * kRowBytes / 16);
    ptx::wgmma_commit();
  }

  /// Products of the step at n0 become weights, those before other keys than these 0; what was
  /// gathered before is to be multiplied with keep[].
  __device__ __forceinline__ void take_softmax(int n0, const config::KeyRange& keys,
                                               float (&keep)[2]) {
    const AttentionParams& p = launch.attention;
    float unit = p.scale * device::kLog2E;
    if (p.softcap > 0.0f) {
      unit = device::kLog2E;
#pragma unroll
      for (auto& piece : scores)
#pragma unroll
        for (float& score : piece) score = device::capped(score * p.scale, p.softcap);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = max(sees[r].begin, keys.begin), end = min(sees[r].end, keys.end);
      if (n0 >= begin && n0 + Tile::kStepKeys <= end) continue;
      const int first = begin - n0 - ptx::thread_index() % 4 * 2;
      const int limit = end - n0 - ptx::thread_index() % 4 * 2;
#pragma unroll
      for (int i = 0; i < Tile::kStepKeys / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * i + c < first || 8 * i + c >= limit)
            scores[i][2 * r + c] = device::kMinusInfinity;
    }
    softmax.weigh(scores, keep, unit);
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < Tile::kStepKeys / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&piece)[4] = scores[2 * i + j / 2];
        weights[i][j] = attention_tile::pack<T>(piece[j % 2 * 2], piece[j % 2 * 2 + 1]);
      }
  }

  /// Values of slots that no sequence owns may be NaN, and 0 * NaN must not reach the sums.
  __device__ __forceinline__ void clear_unused_values(const Item& item, int n0, int slot) {
    // A vote, so that the compiler knows the way to the products to be the warp's.
    if (!device::any_lane(n0 < item.live.begin || n0 + kKeys > item.live.end)) return;
    constexpr int kChunks = Tile::kSize / 8;
#pragma unroll 1
    for (int i = ptx::thread_index(); i < kKeys * kChunks; i += Tile::kConsumerThreads) {
      const int n = i / kChunks, chunk = i % kChunks;
      if (n0 + n >= item.live.begin && n0 + n < item.live.end) continue;
      *reinterpret_cast<uint4*>(&shared.kv[slot][chunk / 8][n][chunk % 8 * 8]) = uint4{};
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kConsumersMeet, Tile::kConsumerThreads);  // all zeros are written
  }

  /// The values of the last tile, the one at n0.
  __device__ __forceinline__ void finish(const Item& item, int n0) {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    clear_unused_values(item, n0, ring.slot);
    issue_values(ring.slot);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(sums);
    release(&shared.free[ring.slot]);
    ring.next();
  }

  /// The scores of the first tile.
  __device__ __forceinline__ void start(int n0, int end) {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    issue_keys(ring.slot);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(scores);
    release(&shared.free[ring.slot]);
    ring.next();
    if (n0 + kKeys >= end) release(&shared.q_free);
    float keep[2];
    take_softmax(n0, {n0, end}, keep);
    softmax.add(scores, keep);
    round_weights();
  }

  /// The scores of the tile at n0 and beside them, on the tensor cores, the values before.
  __device__ __forceinline__ void step(const Item& item, int n0, int end) {
    const SlotRing keys = ring;
    ring.next();
    const SlotRing values = ring;
    ring.next();
    ptx::mbarrier_wait(&shared.full[keys.slot], keys.parity);
    issue_keys(keys.slot);
    ptx::mbarrier_wait(&shared.full[values.slot], values.parity);
    clear_unused_values(item, n0 - kKeys, values.slot);
    issue_values(values.slot);
    ptx::wgmma_wait<1>();
    ptx::hold_registers(scores);
    release(&shared.free[keys.slot]);
    if (n0 + kKeys >= end) release(&shared.q_free);
    float keep[2];
    take_softmax(n0, {n0, end}, keep);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(sums);
    release(&shared.free[values.slot]);
    if (device::any_lane(keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (auto& piece : sums)
#pragma unroll
        for (int c = 0; c < 4; ++c) piece[c] *= keep[c / 2];
    }
    softmax.add(scores, keep);
    round_weights();
  }

  /// The item's tiles in their order.
  __device__ __forceinline__ void gather_tiles(const Item& item) {
    const int begin = item.keys.begin, end = item.keys.end;
    start(begin, end);
    int n = begin + kKeys;
#pragma unroll 1
    for (; n < end; n += kKeys) step(item, n, end);
    finish(item, n - kKeys);
  }

  /// The item's steps, the last first: the prefill kernel's arithmetic. Scores do not run beside
  /// values, for which a step of so many keys leaves no registers; the other block's do.
  __device__ __forceinline__ void gather_steps(const Item& item) {
#pragma unroll 1
    for (int n0 = last_step<Tile>(item.keys); n0 + Tile::kStepKeys > item.keys.begin;
         n0 -= Tile::kStepKeys) {
      score_step(item.keys, n0);
      if (n0 <= item.keys.begin) release(&shared.q_free);
      float keep[2];
      take_softmax(n0, item.keys, keep);
#pragma unroll
      for (auto& piece : sums)
#pragma unroll
        for (int c = 0; c < 4; ++c) piece[c] *= keep[c / 2];
      softmax.add(scores, keep);
      round_weights();
      add_step(item, n0);
    }
  }

  /// Calls fn(tile) for those of the step at n0 that are among `keys`.
  template <class Fn>
  __device__ __forceinline__ static void for_tiles(const config::KeyRange& keys, int n0, Fn&& fn) {
#pragma unroll
    for (int i = 0; i < Tile::kStepTiles; ++i)
      // A vote, so that the compiler knows the way to the products to be the warp's.
      if (device::any_lane(has_tile(keys, n0 + i * kKeys))) fn(i);
  }

  __device__ __forceinline__ void score_step(const config::KeyRange& keys, int n0) {
    const SlotRing first = ring;
    int slots[Tile::kStepTiles];
    // A tile that is not there has the scores of the other until they are hidden.
#pragma unroll
    for (int& slot : slots) slot = first.slot;
    for_tiles(keys, n0, [&](int i) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
      slots[i] = ring.slot;
      ring.next();
    });
#pragma unroll
    for (int i = 0; i < Tile::kStepTiles; ++i) issue_keys(slots[i], i);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(scores);
    for_tiles(keys, n0, [&](int i) { release(&shared.free[slots[i]]); });
  }

  __device__ __forceinline__ void add_step(const Item& item, int n0) {
    SlotRing held = ring;
    for_tiles(item.keys, n0, [&](int i) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
      clear_unused_values(item, n0 + i * kKeys, ring.slot);
      issue_values(ring.slot, i);
      ring.next();
    });
    ptx::wgmma_wait<0>();
    ptx::hold_registers(sums);
    for_tiles(item.keys, n0, [&](int) {
      release(&shared.free[held.slot]);
      held.next();
    });
  }

  /// The item's rows: the result if there is one split of a sequence's keys, a partial otherwise.
  __device__ __forceinline__ void store(const Item& item) {
    const AttentionParams& p = launch.attention;
    const Work& work = item.work;
    const Partials partials{launch};
    const bool whole = !Tile::kCommon && item.splits == 1;
    if constexpr (Tile::kJoins)
      if (launch.cluster > 1 && !whole)
        return send_rows(launch, shared, item, row_of(ptx::thread_index()), softmax, sums);
    const int lane = ptx::thread_index() % device::kWarpSize;
    softmax.join_quad();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(ptx::thread_index()) + 8 * r;
      if (row >= work.rows) break;
      const float sink =
          whole ? attention_tile::sink_of(p, work.head(row)) : device::kMinusInfinity;
      const device::RowEnd end = softmax.end(r, sink);
      const std::int64_t index = partials.index(work, row, item.split);
      if (lane % 4 == 0) {
        if (whole) {
          attention_tile::store_lse(p, work, row, end.lse);
        } else {
          *partials.lse(index, Tile::kCommon ? 1 : p.batch) = end.lse;
        }
      }
      T* out = static_cast<T*>(p.out) + (whole ? attention_tile::out_offset(p, work, row) : 0);
      float* partial = partials.sums(whole ? 0 : index);
#pragma unroll
      for (int i = 0; i < Tile::kSize / 8; ++i) {
        const int column = 8 * i + lane % 4 * 2;
        const float2 pair =
            make_float2(sums[i][2 * r] * end.factor, sums[i][2 * r + 1] * end.factor);
        if (column >= p.head_dim) break;
        if (whole) {
          *reinterpret_cast<std::uint32_t*>(out + column) = attention_tile::pack<T>(pair.x, pair.y);
        } else {
          *reinterpret_cast<float2*>(partial + column) = pair;
        }
      }
    }
  }

  __device__ __forceinline__ void take_item(const Item& item, int queries_parity) {
    const int row = warpgroup * kWarpgroupRows + row_of(ptx::thread_index() % kWarpgroup);
    sees[0] = range_of(item, row), sees[1] = range_of(item, row + 8);
    softmax = {};
#pragma unroll
    for (auto& piece : sums)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
    ptx::mbarrier_wait(&shared.q_full, queries_parity);
    if (item.keys.begin >= item.keys.end) {
      release(&shared.q_free);
    } else if constexpr (Tile::kUnsplit) {
      gather_steps(item);
    } else {
      gather_tiles(item);
    }
    store(item);
  }

  __device__ __forceinline__ void run() {
    int queries_parity = 0;
    for (Ring<kItems> items;; items.next()) {
      ptx::mbarrier_wait(&shared.described[items.slot], items.parity);
      const Item& item = shared.items[items.slot];
      if (item.splits == 0) break;
      if constexpr (Tile::kJoins)
        if (launch.cluster > 1) ring.parity = queries_parity = shared.wasted;
      if (item.split < item.splits) take_item(item, queries_parity);
      queries_parity ^= 1;
      if constexpr (Tile::kJoins)
        if (launch.cluster > 1) return join_cluster<Tile>(launch, shared, item);
      ptx::mbarrier_arrive(&shared.released[items.slot]);
    }
  }
};

}  // namespace ridgeline::attention_rows
