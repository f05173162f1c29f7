#pragma once
#include "kernels/attention_sm90_fp8.cuh"

/// The warp of the Hopper prefill kernel in fp8 that brings scales.
namespace ridgeline::attention_sm90 {

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
