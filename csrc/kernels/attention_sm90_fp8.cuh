#pragma once
#include "device/ptx/convert.cuh"
#include "device/ptx/stmatrix.cuh"
#include "kernels/attention_sm90.cuh"

/// Prefill in fp8 on Hopper: the tile, its shared memory, and the warps that turn values and bring
/// scales.
namespace ridgeline::attention_sm90 {

constexpr int kTurned = 10;  // named barrier of the warps that turn values

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

/// One warp: brings the scales of every tile. A lane has four keys side by side, which lie in one
/// block: one to look up, without a division. A tile's blocks are looked up two tiles ahead and its
/// scales read one ahead: both wait for memory. H200, causal, 16k keys: 721 TFLOP/s with two blocks
/// a lane and divisions, 735 to 747 so.
struct Scaler {
  using Tile = Fp8Tile;

  /// Where a tile's scales lie. The block is as the table has it.
  struct Place {
    int block, row;
    int kv_head;
    unsigned seen;  // bit i: key i of this lane belongs to the sequence
    bool first;     // of its work
    bool exists;
  };
  /// bf16 scales of this lane's keys, zeros for keys outside the sequence, whose slots may hold
  /// anything.
  struct Quad {
    std::uint16_t key[4], value[4];
    bool first, exists;
  };

  const Launch& launch;
  Shared<Tile>& shared;
  Ring<Tile::kTurnedSlots> turned{.parity = 1};  // the first wait on a fresh barrier passes
  Ring<Tile::kQuerySlots> queries;
  Ring<Tile::kWorkSlots> works;
  Work work;  // whose tiles are looked up: `tile` is the next
  int tile;
  int value_exponent;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

  __device__ __forceinline__ void begin_work() {
    ptx::mbarrier_wait(&shared.q_full[queries.slot], queries.parity);
    work = shared.work[works.slot];
    works.next();
    tile = work.last_tile - 1;
  }

  __device__ __forceinline__ Place find() {
    if (work.exists && tile < work.first_tile) {
      const int slot = queries.slot;
      queries.next();
      begin_work();
      ptx::named_barrier_arrive(kQueriesFree + slot, Tile::kWorkThreads);
    }
    Place place{};
    if (!work.exists) return place;
    place.exists = true;
    place.first = tile == work.last_tile - 1;
    place.kv_head = work.kv_head;
    const AttentionParams& p = launch.attention;
    const int key = tile * Tile::kKeys + 4 * lane();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (key + i >= work.sequence.k_start && key + i < work.sequence.k_len) place.seen |= 1u << i;
    if (p.block_tables == nullptr) {
      place.block = work.batch;
      place.row = static_cast<int>(work.sequence.k_begin) + key;
    } else {
      const int index = launch.block_size.divide(key);
      if (index < p.max_blocks) place.block = p.block_tables[work.batch * p.stride_table + index];
      place.row = key - index * p.block_size;
    }
    --tile;
    return place;
  }

  __device__ __forceinline__ Quad load(const Place& place) const {
    const AttentionParams& p = launch.attention;
    Quad quad{.first = place.first, .exists = place.exists};
    // Block 0 stands in for ids out of range.
    const bool known = static_cast<unsigned>(place.block) < static_cast<unsigned>(launch.blocks);
    const std::int64_t batch = known ? place.block : 0;
    const auto* k = static_cast<const std::uint16_t*>(p.k_scale) + batch * p.stride_ks_batch +
                    place.row * p.stride_ks_row + place.kv_head * p.stride_ks_head;
    const auto* v = static_cast<const std::uint16_t*>(p.v_scale) + batch * p.stride_vs_batch +
                    place.row * p.stride_vs_row + place.kv_head * p.stride_vs_head;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((place.seen >> i & 1) == 0) continue;
      quad.key[i] = k[i * p.stride_ks_row];
      quad.value[i] = v[i * p.stride_vs_row];
    }
    return quad;
  }

  __device__ __forceinline__ static float power(int exponent) {
    return __int_as_float((exponent + 127) << 23);
  }

  /// All lanes' numbers are less than 2^exponent in magnitude, unless they are beyond 2^100.
  __device__ __forceinline__ static int exponent_of(const float (&numbers)[4]) {
    const float largest = fmaxf(fmaxf(fabsf(numbers[0]), fabsf(numbers[1])),
                                fmaxf(fabsf(numbers[2]), fabsf(numbers[3])));
    const int exponent = (device::warp_max(__float_as_int(largest)) >> 23) - 126;
    return max(min(exponent, 100), -100);
  }

  __device__ __forceinline__ void store(const Quad& quad) {
    float key[4], value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      key[i] = __int_as_float(quad.key[i] << 16);
      value[i] = __int_as_float(quad.value[i] << 16);
    }
    const int key_exponent = exponent_of(key), exponent = exponent_of(value);
    value_exponent = quad.first ? exponent : max(value_exponent, exponent);
    const float key_factor = power(-key_exponent), value_factor = power(-value_exponent);
    ptx::mbarrier_wait(&shared.turned_free[turned.slot], turned.parity);
    Scales& to = shared.scales[turned.slot];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = 4 * lane() + 2 * h, at = n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2;
      *reinterpret_cast<__half2*>(&to.key[at]) =
          __floats2half2_rn(key[2 * h] * key_factor, key[2 * h + 1] * key_factor);
      *reinterpret_cast<__half2*>(&to.value[at]) =
          __floats2half2_rn(value[2 * h] * value_factor, value[2 * h + 1] * value_factor);
    }
    if (lane() == 0) {
      to.key_unit = power(key_exponent);
      to.value_exponent = value_exponent;
    }
    ptx::mbarrier_arrive(&shared.turned_full[turned.slot]);
    turned.next();
  }

  __device__ __forceinline__ void run() {
    begin_work();
    Quad quad = load(find());
    Place place = find();
    while (quad.exists) {
      const Quad next = load(place);
      store(quad);
      place = find();  // not sooner: the queries of the next work wait for those of this one
      quad = next;
    }
  }
};

}  // namespace ridgeline::attention_sm90
