#pragma once
#include "device/paired_softmax.cuh"
#include "device/ptx/convert.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/attention_sm90_fp8.cuh"

/// What one warpgroup of the Hopper prefill kernel in fp8 does with the tiles.
namespace ridgeline::attention_sm90 {

/// Scores are products in fp16, two in a register: scales of keys and exponents take half the
/// instructions of fp32, the maximum a quarter. A weight times its value's scale is rounded to
/// e4m3, and the base of a row's exponents lies under its largest score, so that these products
/// fill e4m3's range. Sums of a tile begin anew and are added in fp32: one sum of 16k values of
/// mean 1 and deviation 1 came out 12% too small. They are taken in two halves of the columns, in
/// the same registers: so a warpgroup needs 152, and there can be three.
struct Fp8Consumer {
  using Tile = Fp8Tile;

  const AttentionParams& p;
  Shared<Tile>& shared;
  const int warpgroup;  // the compiler must know that a warp shares it: descriptors are made of it
  Ring<Tile::kSlots> ring;
  int keys;  // slot of the tile whose scores are asked for
  Ring<Tile::kTurnedSlots> turned;  // of the next tile
  Ring<Tile::kQuerySlots> queries;
  Ring<Tile::kWorkSlots> works;
  Current now;
  float unit[2];  // of this thread's rows
  int exponent;   // sums are in units of 2^exponent
  const int quad_lane = threadIdx.x % 4;  // kept: read anew it is waited for
  device::PairedSoftmax softmax;
  float sums[Tile::kSize / 8][4];
  float parts[Tile::kSize / 16][4];  // of one tile, half of the columns
  std::uint32_t scores[Tile::kKeys / 8][2];  // two columns of fp16 each
  std::uint32_t weights[Tile::kKeys / 32][4];

  __device__ __forceinline__ __half2 (&pairs())[Tile::kKeys / 8][2] {
    return reinterpret_cast<__half2 (&)[Tile::kKeys / 8][2]>(scores);
  }

  /// One warpgroup at a time takes exponentials: at them together, all would wait for the tensor
  /// cores together. By mbarriers, since ptxas moves exponentials over named barriers; `done` are
  /// bits of what the turn is for, never all ones. H200, 16k keys, TFLOP/s without turns and so, in
  /// two runs: causal 797, 806 and 787, 794; full 816, 825 and 811, 819.
  __device__ __forceinline__ void await_turn() const {
    static_assert(Tile::kTurnedSlots % 2 == 0);  // a turn a tile
    ptx::mbarrier_wait(&shared.turn[warpgroup], (turned.slot & 1) ^ (warpgroup == 0 ? 1 : 0));
  }
  __device__ __forceinline__ void pass_turn(std::uint32_t done) const {
    if (threadIdx.x % device::kWarpSize == 0 && done != 0xffffffffu)
      ptx::mbarrier_arrive(&shared.turn[warpgroup == Tile::kConsumers - 1 ? 0 : warpgroup + 1]);
  }

  __device__ __forceinline__ bool begin_work() {
    ptx::mbarrier_wait(&shared.q_full[queries.slot], queries.parity);
    const Work& work = shared.work[works.slot];
    if (!work.exists) return false;
    const config::Sequence& s = work.sequence;
    const int first = work.first_query + warpgroup * kWarpgroupRows;
    const int last = min(first + kWarpgroupRows, s.q_len) - 1;
    const int end = config::lesser(config::visible_keys(p, s, first).end, s.k_len);
    const config::KeyRange latest = config::visible_keys(p, s, last);
    const int seen = first > last ? 0 : ceil_div(latest.end, Tile::kKeys);  // tiles
    now = {.slot = queries.slot,
           .work_slot = works.slot,
           .tile = max(seen - 1, work.first_tile),
           .first_tile = work.first_tile,
           .whole_begin = ceil_div(latest.begin, Tile::kKeys),
           .whole_end = end / Tile::kKeys,
           .skip = 0};
    now.skip = work.last_tile - 1 - now.tile;
    const float* scale = p.q_scale + work.head * p.stride_qs_head;
    float largest[2];
    const int thread = ptx::thread_index();
    normalise_queries(shared.q[queries.slot][0], row_of(thread), largest);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kTogether + warpgroup, kWarpgroup);  // all its rows are written
    const int row = work.first_query + row_of(thread);
#pragma unroll
    for (int r = 0; r < 2; ++r)  // never 0, which a hidden score of -inf would make NaN
      unit[r] = fmaxf(scale[(s.q_begin + min(row + 8 * r, s.q_len - 1)) * p.stride_qs_row] *
                          (largest[r] * p.scale * device::kLog2E), 1e-30f);
    queries.next();
    works.next();
    return true;
  }

  __device__ __forceinline__ void release_queries() const {
    if (now.tile == now.first_tile)
      ptx::named_barrier_arrive(kQueriesFree + now.slot, Tile::kWorkThreads);
  }

  __device__ __forceinline__ void issue_scores(int k_slot) {
    const std::uint64_t q = ptx::swizzled_operand(
        shared.q[now.slot][0][warpgroup * kWarpgroupRows], 16, 8 * kRowBytes);
    const std::uint64_t k = ptx::swizzled_operand(shared.kv[k_slot], 16, 8 * kRowBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kSize / 32; ++i)
      ptx::WgmmaFp8Half<Tile::kKeys>::mma(scores, q + 2 * i, k + 2 * i, i != 0);
    ptx::wgmma_commit();
  }

  /// New sums of a tile's values, of half of the columns.
  template <int kHalf>
  __device__ __forceinline__ void issue_values() {
    const std::uint64_t v = ptx::swizzled_operand(
        shared.turned[turned.slot].data[kHalf * Tile::kSize / 2], 16, 8 * kRowBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 32; ++i)
      ptx::WgmmaFp8Registers<Tile::kSize / 2>::mma(parts, weights[i], v + 2 * i, i != 0);
    ptx::wgmma_commit();
  }

  /// This thread's columns of pieces i to i + 3.
  __device__ __forceinline__ void load_scales(__half2 (&scales)[4], const __half (&row)[128],
                                              int i) const {
    *reinterpret_cast<uint4*>(scales) =
        *reinterpret_cast<const uint4*>(&row[8 * i + quad_lane * 8]);
  }

  /// Products with the keys times key[] become scores, of which `factor` are units of log2.
  __device__ __forceinline__ void finish_scores(const __half2 (&key)[Tile::kKeys / 32][4],
                                                const float (&units)[2], __half2 (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 8; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) pairs()[i][r] = __hmul2(pairs()[i][r], key[i / 4][i % 4]);
    const bool is_capped = p.softcap > 0.0f;
    if (is_capped) {
#pragma unroll
      for (auto& piece : pairs())
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 score = __half22float2(piece[r]);
          const float natural = units[r] * device::kLn2;
          piece[r] = __floats2half2_rn(device::capped(score.x * natural, p.softcap),
                                       device::capped(score.y * natural, p.softcap));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)  // neither 0 nor inf, which a hidden score or 0 would make NaN
      factor[r] = __float2half2_rn(
          fminf(fmaxf(is_capped ? device::kLog2E : units[r], 0x1p-24f), 65504.0f));
    if (now.tile < now.whole_begin || now.tile >= now.whole_end)
      mask_pairs(p, shared.work[now.work_slot], now.tile * Tile::kKeys, scores);
  }

  /// Weights of half a tile times their values' scales, as codes.
  template <int kHalf>
  __device__ __forceinline__ void round_weights() {
    const Scales& scales = shared.scales[turned.slot];
    constexpr int kPieces = Tile::kKeys / 8 / 2;
#pragma unroll
    for (int i = kHalf * kPieces; i < (kHalf + 1) * kPieces; i += 4) {
      __half2 value[4];
      load_scales(value, scales.value, i);
#pragma unroll
      for (int j = 0; j < 4; j += 2)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          weights[i / 4][j + r] = ptx::pack_e4m3(__hmul2(pairs()[i + j][r], value[j]),
                                                 __hmul2(pairs()[i + j + 1][r], value[j + 1]));
    }
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (auto& piece : sums)
#pragma unroll
      for (float& sum : piece) sum = 0.0f;
  }

  __device__ __forceinline__ static void release(std::uint64_t* barrier) {
    if (threadIdx.x % kWarpgroup == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Waits for the keys of a tile.
  __device__ __forceinline__ void begin_tile(bool has_come) {
    if (!has_come) ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    keys = ring.slot;
    ring.next();
  }

  /// Lets the next tile of values, its scales and its turn go.
  __device__ __forceinline__ void drop_values() {
    ptx::mbarrier_wait(&shared.turned_full[turned.slot], turned.parity);
    await_turn();
    pass_turn(0);
    ptx::mbarrier_arrive(&shared.turned_free[turned.slot]);
    turned.next();
  }

  /// Waits for the first tile of keys that a row of this warpgroup sees. Those before it go, and
  /// their values too but for the last of them, which come behind that tile. H200, causal, TFLOP/s
  /// with all tiles multiplied and so: 16 x 1k 418, 479; 4 x 4k 660, 692; 1 x 16k 791, 801.
  __device__ __forceinline__ void begin_sight(bool is_first_work) {
#pragma unroll 1
    for (int i = 0; i < now.skip; ++i) {
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
      // Each warp has seen it come: after the release the slot may be filled again.
      ptx::named_barrier_sync(kTogether + warpgroup, kWarpgroup);
      release(&shared.free[ring.slot]);
      ring.next();
      if (i > 0 || !is_first_work) ring.next();  // values of the tile before
      if (i > 0) drop_values();
    }
    begin_tile(false);
    if (now.skip > 0 || !is_first_work) ring.next();
  }

  /// From a tile's scores to the first half of its values' products.
  __device__ __forceinline__ void multiply_values(bool has_come) {
    if (!has_come) ptx::mbarrier_wait(&shared.turned_full[turned.slot], turned.parity);
    const Scales& scales = shared.scales[turned.slot];
    __half2 key[Tile::kKeys / 32][4];
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 32; ++i) load_scales(key[i], scales.key, 4 * i);
    const float units[2] = {unit[0] * scales.key_unit, unit[1] * scales.key_unit};
    ptx::wgmma_wait<0>();
    ptx::hold_registers(scores);
    release(&shared.free[keys]);
    release_queries();
    __half2 factor[2];
    float keep[2];
    finish_scores(key, units, factor);
    const bool raised = softmax.raise(pairs(), keep, factor);
    await_turn();
    ptx::hold_registers(scores);
    softmax.weigh<0, 8>(pairs(), factor);
    // Not later: when these are added the others are on their way, behind which the next
    // warpgroup's come. H200, causal, 16k keys: 813 TFLOP/s after three quarters, 821 so.
    pass_turn(softmax.add<0, 8>(pairs()));
    softmax.weigh<8, 12>(pairs(), factor);
    softmax.add<8, 12>(pairs());
    softmax.weigh<12, 16>(pairs(), factor);
    softmax.add<12, 16>(pairs());
    round_weights<0>();
    round_weights<1>();
    issue_values<0>();
    const int above = shared.scales[turned.slot].value_exponent;
    if (raised || above != exponent) {
      const float shift = ptx::exp2_approx(static_cast<float>(exponent - above));
      exponent = above;
#pragma unroll
      for (auto& piece : sums)
#pragma unroll
        for (int c = 0; c < 4; ++c) piece[c] *= keep[c / 2] * shift;
    }
  }

  template <int kHalf>
  __device__ __forceinline__ void add_parts() {
#pragma unroll
    for (int i = 0; i < Tile::kSize / 16; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[kHalf * Tile::kSize / 16 + i][c] += parts[i][c];
  }

  /// Four columns of a thread lie side by side, see TurnedValues: a store of the warp fills whole
  /// sectors of 32 bytes.
  __device__ __forceinline__ void store(const Current& of) {
    const int thread = ptx::thread_index(), lane = thread % device::kWarpSize, row = row_of(thread);
    const Work& work = shared.work[of.work_slot];
    // Rows from this lane's first on.
    const int left = work.sequence.q_len - work.first_query - row;
    const std::int64_t query = work.sequence.q_begin + work.first_query + row;
    const float sink = attention_tile::sink_of(p, work.head);
    softmax.join_quad();
    const device::RowEnd ends[2] = {softmax.end(0, sink), softmax.end(1, sink)};
    if (lane % 4 == 0) {
      float* to = p.lse + work.head * p.stride_lse_head + query;
      if (left > 0) to[0] = ends[0].lse;
      if (left > 8) to[8] = ends[1].lse;
    }
    const float unit_of_sums = ptx::exp2_approx(static_cast<float>(exponent));
    const float factors[2] = {ends[0].factor * unit_of_sums, ends[1].factor * unit_of_sums};
    const std::int64_t width = std::int64_t{p.heads} * p.head_dim;
    const int column = lane % 4 * 4;
    auto* to = static_cast<__nv_bfloat16*>(p.out) + query * width + work.head * p.head_dim + column;
#pragma unroll
    for (int i = 0; i < Tile::kSize / 8; i += 2)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (8 * r >= left || 8 * i + column >= p.head_dim) continue;
        const float4 sum = {sums[i][2 * r], sums[i + 1][2 * r], sums[i][2 * r + 1],
                            sums[i + 1][2 * r + 1]};
        attention_tile::store_scaled(to + 8 * r * width + 8 * i, sum, factors[r]);
      }
  }

  __device__ __forceinline__ void run() {
    if (!begin_work()) return;
    begin_sight(true);
    issue_scores(keys);
    for (bool more = true; more;) {
      if (now.skip > 0) drop_values();
      softmax = {};
      exponent = -100;
      clear_sums();
      bool values_have_come = false;
      const Current work = now;
      for (bool last = false; !last;) {
        multiply_values(values_have_come);
        last = now.tile == now.first_tile;
        if (last) {
          more = begin_work();
        } else {
          --now.tile;
        }
        const bool keys_have_come = ptx::mbarrier_test(&shared.full[ring.slot], ring.parity);
        ptx::wgmma_wait<0>();
        ptx::hold_registers(parts);
        add_parts<0>();
        issue_values<1>();
        const bool skips = last && more && now.skip > 0;
        if (more && !skips) {
          begin_tile(keys_have_come);
          ring.next();  // values of the tile before, which others turn
        }
        ptx::wgmma_wait<0>();
        ptx::hold_registers(parts);
        ptx::mbarrier_arrive(&shared.turned_free[turned.slot]);
        turned.next();
        if (skips) begin_sight(false);  // not sooner: ring and turned slots may be full
        // Once too often: under a condition, the compiler would have the values wait for them.
        issue_scores(keys);
        // Here, since ptxas puts additions between the products, but not over a branch. H200,
        // causal, 16k keys: 804 and 813 TFLOP/s.
        if (more) ptx::mbarrier_wait(&shared.turned_full[turned.slot], turned.parity);
        values_have_come = true;
        add_parts<1>();
      }
      store(work);
    }
    ptx::wgmma_wait<0>();
  }
};

}  // namespace ridgeline::attention_sm90
