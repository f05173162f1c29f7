#pragma once
#include "device/ptx/convert.cuh"
#include "device/ptx/stmatrix.cuh"
#include "kernels/attention_sm90.cuh"

/// Prefill in fp8 on Hopper: the tile, its shared memory, and the warps that turn values.
namespace ridgeline::attention_sm90 {

constexpr int kTurned = 11;  // named barrier of the warps that turn values

/// Queries, keys and values are e4m3 codes; a head of fewer columns is padded with zeros by the
/// copy engine. Three warpgroups fill each other's gaps better than two: H200, causal, 16k keys,
/// 738 TFLOP/s and 800. Four warps do all else: one copies, one brings scales, two turn values.
struct Fp8Tile {
  using T = std::uint8_t;
  static constexpr int kSize = 128;
  static constexpr int kConsumers = 3;
  static constexpr int kQueries = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = 128;
  static constexpr int kQuerySlots = 2;
  static constexpr int kWorkSlots = kQuerySlots + 3;  // as in Tile
  static constexpr int kSlots = 6;
  static constexpr int kTurnedSlots = 4;
  static constexpr int kColumns = kRowBytes;
  static constexpr int kParts = 1;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kWorkThreads = kThreads;
  static constexpr int kProducerThreads = device::kWarpSize;
  static constexpr int kTurnerThreads = 2 * device::kWarpSize;
  static constexpr int kConsumerRegisters = 152;
  static constexpr int kProducerRegisters = 56;
};

/// A tile of values with keys contiguous, as wgmma takes e4m3. Row n holds column 16 * (n / 16) +
/// 2 * (n % 8) + n / 8 % 2 of the values; of each 16 keys, byte 4 * t + 2 * h + c holds key
/// 8 * h + 2 * t + c: the order in which a thread has the weights of its rows.
struct TurnedValues {
  alignas(1024) std::uint8_t data[128][kRowBytes];
};
/// The scales of a tile's keys are key_unit times `key`, their values' 2^value_exponent times
/// `value`: both at most 1. Of each 32 keys, 8 * t + 2 * i + c is of key 8 * i + 2 * t + c. In a
/// work value_exponent never falls from tile to tile.
struct Scales {
  alignas(16) __half key[128];
  __half value[128];
  float key_unit;
  int value_exponent;
};

template <>
struct Shared<Fp8Tile> {
  using Tile = Fp8Tile;
  alignas(1024) std::uint8_t q[Tile::kQuerySlots][1][Tile::kQueries][kRowBytes];
  alignas(1024) std::uint8_t kv[Tile::kSlots][1][Tile::kKeys][kRowBytes];
  TurnedValues turned[Tile::kTurnedSlots];
  Scales scales[Tile::kTurnedSlots];
  Work work[Tile::kWorkSlots];
  alignas(8) std::uint64_t q_full[Tile::kQuerySlots];
  std::uint64_t full[Tile::kSlots], free[Tile::kSlots];
  std::uint64_t turned_full[Tile::kTurnedSlots], turned_free[Tile::kTurnedSlots];
  std::uint64_t turn[Tile::kConsumers];  // to take exponentials
};

/// Divides rows `row` and `row` + 8 of the queries, each by the power of two that makes its codes
/// less than 1, and at least half of one: no sum of products with 128 codes of keys exceeds fp16
/// then. A code below 2^-6 of its row's largest may lose 2^-9 of that. A quad of lanes has a row.
__device__ __forceinline__ void normalise_queries(
    std::uint8_t (&rows)[Fp8Tile::kQueries][kRowBytes], int row, float (&factors)[2]) {
  const int lane = ptx::thread_index() % device::kWarpSize;
  // Rows of odd and even number meet no bank twice.
  const auto codes = [&](int r, int i) -> uint4& {
    return *reinterpret_cast<uint4*>(
        &rows[row + 8 * r][16 * (lane % 4 + 4 * (i ^ (row & 1)))]);
  };
  __half2 most[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 sixteen = codes(i / 2, i % 2);
    const auto* words = reinterpret_cast<const std::uint16_t*>(&sixteen);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      most[i / 2] = __hmax2(most[i / 2], __habs2(ptx::e4m3x2_to_half2(words[j])));
  }
  const __half2 both = device::warp_reduce<device::LargerOfPairs, device::kQuad>(
      __hmax2(__lows2half2(most[0], most[1]), __highs2half2(most[0], most[1])));
  __half2 factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int exponent = __half_as_ushort(r == 0 ? __low2half(both) : __high2half(both)) >> 10;
    factor[r] = __half2half2(__ushort_as_half(static_cast<unsigned short>(29 - exponent) << 10));
    factors[r] = __int_as_float((exponent + 127 - 14) << 23);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 sixteen = codes(i / 2, i % 2);
    auto* words = reinterpret_cast<std::uint32_t*>(&sixteen);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words[j] = ptx::pack_e4m3(
          __hmul2(ptx::e4m3x2_to_half2(static_cast<std::uint16_t>(words[j])), factor[i / 2]),
          __hmul2(ptx::e4m3x2_to_half2(static_cast<std::uint16_t>(words[j] >> 16)),
                  factor[i / 2]));
    codes(i / 2, i % 2) = sixteen;
  }
}

/// Hides what this thread's rows do not see: mask() for pairs.
__device__ __forceinline__ void mask_pairs(const AttentionParams& p, const Work& work, int key,
                                           std::uint32_t (&scores)[16][2]) {
  const int thread = ptx::thread_index(), begin = key + thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const config::KeyRange sees =
        config::visible_keys(p, work.sequence, work.first_query + row_of(thread) + 8 * r);
    const int first = sees.begin - begin;
    const int limit = config::lesser(sees.end, work.sequence.k_len) - begin;
    const auto hidden = [&](int column) { return column < first || column >= limit; };
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (hidden(8 * i)) scores[i][r] = (scores[i][r] & 0xffff0000u) | 0xfc00u;
      if (hidden(8 * i + 1)) scores[i][r] = (scores[i][r] & 0xffffu) | 0xfc000000u;
    }
  }
}

/// Two warps: each turns half of the keys of every tile of values.
struct Turner {
  using Tile = Fp8Tile;

  Shared<Tile>& shared;
  Ring<Tile::kSlots> ring;
  Ring<Tile::kTurnedSlots> turned{.parity = 1};  // the first wait on a fresh barrier passes
  Ring<Tile::kQuerySlots> queries;
  Ring<Tile::kWorkSlots> works;

  __device__ static int thread() { return static_cast<int>(threadIdx.x) % Tile::kTurnerThreads; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  /// The bits of the two keys from `key` on that belong to the sequence.
  __device__ __forceinline__ static std::uint32_t kept(const config::Sequence& s, int key) {
    return (key >= s.k_start && key < s.k_len ? 0xffffu : 0u) |
           (key + 1 >= s.k_start && key + 1 < s.k_len ? 0xffff0000u : 0u);
  }

  /// Keys 32 * w to the last of 32 of a tile.
  template <bool kWhole>
  __device__ __forceinline__ void turn(const config::Sequence& s, int tile, int w) {
    const auto& from = shared.kv[ring.slot][0];
    auto& to = shared.turned[turned.slot].data;
    const int l = lane(), row = l % 8, matrix = l / 8;
    std::uint32_t keep[4];
    if (!kWhole)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        keep[i] = kept(s, tile * Tile::kKeys + 32 * w + 8 * i + 2 * (l % 4));
    const int key = 32 * w + l, n = 8 * (matrix % 2) + row;
    constexpr int kLoads = 4;  // on their way together
#pragma unroll
    for (int first = 0; first < Tile::kSize / 16; first += kLoads) {
      std::uint32_t loaded[kLoads][4];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        ptx::ldmatrix_transposed(loaded[i], &from[key][((first + i) ^ row) * 16]);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        auto& m = loaded[i];
        if (!kWhole)
#pragma unroll
          for (int j = 0; j < 4; ++j) m[j] &= keep[j];
        const std::uint32_t rows[4] = {
            __byte_perm(m[0], m[1], 0x6420), __byte_perm(m[0], m[1], 0x7531),
            __byte_perm(m[2], m[3], 0x6420), __byte_perm(m[2], m[3], 0x7531)};
        ptx::stmatrix(&to[16 * (first + i) + n][((2 * w + matrix / 2) ^ row) * 16], rows);
      }
    }
  }

  /// A tile of values from its ring into the next turned slot.
  __device__ __forceinline__ void take(const Work& work, int tile) {
    const config::Sequence& s = work.sequence;
    const int begin = tile * Tile::kKeys;
    ptx::mbarrier_wait(&shared.turned_free[turned.slot], turned.parity);
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    constexpr int kStep = Tile::kTurnerThreads / 32;
    if (begin >= s.k_start && begin + Tile::kKeys <= s.k_len) {
#pragma unroll 1
      for (int w = thread() / 32; w < Tile::kKeys / 32; w += kStep) turn<true>(s, tile, w);
    } else {
#pragma unroll 1
      for (int w = thread() / 32; w < Tile::kKeys / 32; w += kStep) turn<false>(s, tile, w);
    }
    ptx::fence_async_shared();
    ptx::mbarrier_arrive(&shared.turned_full[turned.slot]);
    ptx::named_barrier_sync(kTurned, Tile::kTurnerThreads);  // each has read the values
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
    if (work.exists) ring.next();
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
      if (work.exists) ring.next();
      take(last, last.first_tile);
    }
  }
};

}  // namespace ridgeline::attention_sm90
