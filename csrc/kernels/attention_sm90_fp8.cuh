#pragma once
#include "device/ptx/stmatrix.cuh"
#include "kernels/attention_sm90.cuh"

/// Prefill in fp8 on Hopper: the tile, its shared memory, and the warps that turn values.
namespace ridgeline::attention_sm90 {

constexpr int kTurned = 10;  // named barrier of the warps that turn values

/// Queries, keys and values are e4m3 codes; a head of fewer columns is padded with zeros by the
/// copy engine.
struct Fp8Tile {
  using T = std::uint8_t;
  static constexpr int kSize = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kQueries = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = 128;
  static constexpr int kQuerySlots = 2;
  static constexpr int kWorkSlots = kQuerySlots + 3;  // as in Tile
  static constexpr int kSlots = 6;
  static constexpr int kTurnedSlots = 4;
  static constexpr int kColumns = kRowBytes;
  static constexpr int kParts = 1;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + 2 * kWarpgroup;
  static constexpr int kWorkThreads = kConsumerThreads + kWarpgroup + kProducers;
  static constexpr int kConsumerRegisters = 208;
  static constexpr int kTurnerRegisters = 56;
  static constexpr int kProducerRegisters = 40;
};

/// A tile of values with keys contiguous, as wgmma takes e4m3, and the scales of its keys. Row n
/// holds column 16 * (n / 16) + 2 * (n % 8) + n / 8 % 2 of the values; of each 16 keys, byte 4 * t
/// + 2 * h + c holds key 8 * h + 2 * t + c: the order in which a thread has the weights of its
/// rows.
struct TurnedValues {
  alignas(1024) std::uint8_t data[128][kRowBytes];
};
/// Of each 16 keys, 4 * t + 2 * h + c is of key 8 * h + 2 * t + c as well.
struct Scales {
  float key[128], value[128];
  float above[4];  // values' scales of a warp's 32 keys are at most 2^above
};

template <>
struct Shared<Fp8Tile> {
  using Tile = Fp8Tile;
  using Rows = std::uint8_t[1][Tile::kKeys][kRowBytes];

  alignas(1024) Rows q[Tile::kQuerySlots];
  alignas(1024) Rows kv[Tile::kSlots];
  TurnedValues turned[Tile::kTurnedSlots];
  Scales scales[Tile::kTurnedSlots];
  Work work[Tile::kWorkSlots];
  alignas(8) std::uint64_t q_full[Tile::kQuerySlots];
  std::uint64_t full[Tile::kSlots], free[Tile::kSlots];
  std::uint64_t turned_full[Tile::kTurnedSlots], turned_free[Tile::kTurnedSlots];
  float anchor[Tile::kConsumerThreads];  // see Consumer::anchor
};

/// Four warps: each turns 32 keys of every tile of values, and a thread reads the scales of one
/// key.
struct Turner {
  using Tile = Fp8Tile;
  struct Pair {
    float key, value;
  };

  const AttentionParams& p;
  Shared<Tile>& shared;
  Ring<Tile::kSlots> ring;
  Ring<Tile::kTurnedSlots> turned{.parity = 1};  // the first wait on a fresh barrier passes
  Ring<Tile::kQuerySlots> queries;
  Ring<Tile::kWorkSlots> works;
  Pair next;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }
  __device__ static int warp() { return thread() / device::kWarpSize; }

  /// Zeros for keys outside the sequence, whose slots may hold anything.
  __device__ __forceinline__ Pair load_scales(const Work& work, int tile) const {
    const int key = tile * Tile::kKeys + thread();
    if (key < work.sequence.k_start || key >= work.sequence.k_len) return {};
    const attention_tile::Work rows{.sequence = work.sequence, .batch = work.batch};
    const attention_tile::Slot slot = attention_tile::slot_of(p, rows, key);
    const auto* k = static_cast<const __nv_bfloat16*>(p.k_scale) + slot.batch * p.stride_ks_batch +
                    slot.row * p.stride_ks_row + work.kv_head * p.stride_ks_head;
    const auto* v = static_cast<const __nv_bfloat16*>(p.v_scale) + slot.batch * p.stride_vs_batch +
                    slot.row * p.stride_vs_row + work.kv_head * p.stride_vs_head;
    return {device::to_float(*k), device::to_float(*v)};
  }

  __device__ __forceinline__ void store_scales(const Pair& pair) {
    Scales& to = shared.scales[turned.slot];
    const int n = thread(), at = n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;
    to.key[at] = pair.key;
    to.value[at] = pair.value;
    const int largest = device::warp_max(__float_as_int(fabsf(pair.value)));
    const int exponent = (largest >> 23) - 126;
    if (lane() == 0) to.above[warp()] = static_cast<float>(max(min(exponent, 100), -100));
  }

  /// The bits of the two keys from `key` on that belong to the sequence.
  __device__ __forceinline__ static std::uint32_t kept(const config::Sequence& s, int key) {
    return (key >= s.k_start && key < s.k_len ? 0xffffu : 0u) |
           (key + 1 >= s.k_start && key + 1 < s.k_len ? 0xffff0000u : 0u);
  }

  template <bool kWhole>
  __device__ __forceinline__ void turn(const config::Sequence& s, int tile) {
    const auto& from = shared.kv[ring.slot][0];
    auto& to = shared.turned[turned.slot].data;
    const int l = lane(), w = warp(), row = l % 8, matrix = l / 8;
    std::uint32_t keep[4];
    if (!kWhole)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        keep[i] = kept(s, tile * Tile::kKeys + 32 * w + 8 * i + 2 * (l % 4));
    const int key = 32 * w + l, n = 8 * (matrix % 2) + row;
#pragma unroll
    for (int c = 0; c < Tile::kSize / 16; ++c) {
      std::uint32_t m[4];
      ptx::ldmatrix_transposed(m, &from[key][(c ^ row) * 16]);
      if (!kWhole)
#pragma unroll
        for (int i = 0; i < 4; ++i) m[i] &= keep[i];
      const std::uint32_t rows[4] = {
          __byte_perm(m[0], m[1], 0x6420), __byte_perm(m[0], m[1], 0x7531),
          __byte_perm(m[2], m[3], 0x6420), __byte_perm(m[2], m[3], 0x7531)};
      ptx::stmatrix(&to[16 * c + n][((2 * w + matrix / 2) ^ row) * 16], rows);
    }
  }

  /// A tile of values from its ring into the next turned slot.
  __device__ __forceinline__ void take(const Work& work, int tile) {
    const config::Sequence& s = work.sequence;
    const int begin = tile * Tile::kKeys;
    ptx::mbarrier_wait(&shared.turned_free[turned.slot], turned.parity);
    store_scales(next);
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    if (begin >= s.k_start && begin + Tile::kKeys <= s.k_len) {
      turn<true>(s, tile);
    } else {
      turn<false>(s, tile);
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(&shared.turned_full[turned.slot]);
    // Not before the fence, which would wait for it.
    if (tile > work.first_tile) next = load_scales(work, tile - 1);
    ptx::named_barrier_sync(kTurned, kWarpgroup);  // each has read the values
    if (thread() < Tile::kConsumers) ptx::mbarrier_arrive(&shared.free[ring.slot]);
    ring.next();
    turned.next();
  }

  __device__ __forceinline__ Work begin_work() {
    ptx::mbarrier_wait(&shared.q_full[queries.slot], queries.parity);
    const Work work = shared.work[works.slot];
    works.next();
    return work;
  }

  /// Before the values of a tile lie the keys of the one after it in the ring, if there is one.
  __device__ __forceinline__ void run() {
    Work work = begin_work();
    if (work.exists) {
      ring.next();
      next = load_scales(work, work.last_tile - 1);
    }
    while (work.exists) {
      for (int tile = work.last_tile - 1; tile > work.first_tile; --tile) {
        ring.next();
        take(work, tile);
      }
      const Work last = work;
      const int slot = queries.slot;
      queries.next();
      work = begin_work();
      ptx::named_barrier_arrive(kQueriesFree + slot, Tile::kWorkThreads);
      Pair after{};
      if (work.exists) {
        ring.next();
        after = load_scales(work, work.last_tile - 1);
      }
      take(last, last.first_tile);
      next = after;
    }
  }
};

}  // namespace ridgeline::attention_sm90
