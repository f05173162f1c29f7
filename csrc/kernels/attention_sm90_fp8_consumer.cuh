#pragma once
#include "device/ptx/convert.cuh"
#include "device/ptx/wgmma_fp8.cuh"
#include "kernels/attention_sm90_fp8.cuh"

/// What one warpgroup of the Hopper prefill kernel in fp8 does with the tiles.
namespace ridgeline::attention_sm90 {

/// As Consumer, without turns (H200, causal, 16k keys: 639 TFLOP/s without, 621 with them). Scores
/// are scaled by key and query on their way to weights; a weight times its value's scale is rounded
/// to e4m3, and the base of a row's exponents lies under the largest score and the tile's largest
/// scale together, so that these products fill e4m3's range whatever the scales are. Sums of a tile
/// begin anew and are added in fp32: one sum of 16k values of mean 1 and deviation 1 came out 12%
/// too small.
struct Fp8Consumer {
  using Tile = Fp8Tile;
  using Softmax = device::LazySoftmaxBelow<6>;  // rows' largest products between 2^6 and 2^8

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
  Softmax softmax;
  float sums[Tile::kSize / 8][4];
  float parts[Tile::kSize / 8][4];  // of one tile
  float scores[Tile::kKeys / 8][4];
  std::uint32_t weights[Tile::kKeys / 32][4];

  __device__ __forceinline__ bool begin_work() {
    ptx::mbarrier_wait(&shared.q_full[queries.slot], queries.parity);
    const Work& work = shared.work[works.slot];
    if (!work.exists) return false;
    const config::Sequence& s = work.sequence;
    const int first = work.first_query + warpgroup * kWarpgroupRows;
    const int last = min(first + kWarpgroupRows, s.q_len) - 1;
    const int end = config::lesser(config::visible_keys(p, s, first).end, s.k_len);
    now = {.slot = queries.slot,
           .work_slot = works.slot,
           .tile = work.last_tile - 1,
           .first_tile = work.first_tile,
           .whole_begin = ceil_div(config::visible_keys(p, s, last).begin, Tile::kKeys),
           .whole_end = end / Tile::kKeys,
           .skip = 0};
    const float* scale = p.q_scale + work.head * p.stride_qs_head;
    const int row = work.first_query + row_of(ptx::thread_index());
#pragma unroll
    for (int r = 0; r < 2; ++r)  // never 0, which a hidden score of -inf would make NaN
      unit[r] = fmaxf(scale[(s.q_begin + min(row + 8 * r, s.q_len - 1)) * p.stride_qs_row] *
                          (p.scale * device::kLog2E), 1e-30f);
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
      ptx::WgmmaFp8<Tile::kKeys>::mma(scores, q + 2 * i, k + 2 * i, i != 0);
    ptx::wgmma_commit();
  }

  /// Half of the values of a tile; the first half begins new sums.
  template <int kHalf>
  __device__ __forceinline__ void issue_values() {
    const std::uint64_t v =
        ptx::swizzled_operand(shared.turned[turned.slot].data, 16, 8 * kRowBytes);
    constexpr int kSteps = Tile::kKeys / 32 / 2;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = kHalf * kSteps; i < (kHalf + 1) * kSteps; ++i)
      ptx::WgmmaFp8Registers<Tile::kSize>::mma(parts, weights[i], v + 2 * i, i != 0);
    ptx::wgmma_commit();
  }

  /// This thread's columns of pieces i and i + 1.
  __device__ __forceinline__ static float4 scales_of(const float (&row)[128], int i) {
    return *reinterpret_cast<const float4*>(&row[8 * i + ptx::thread_index() % 4 * 4]);
  }

  /// Products with the keys become scores, of which `factor` are units of log2.
  __device__ __forceinline__ void finish_scores(float (&factor)[2]) {
    const Scales& scales = shared.scales[turned.slot];
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 8; i += 2) {
      const float4 key = scales_of(scales.key, i);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[i][c] *= c % 2 ? key.y : key.x;
        scores[i + 1][c] *= c % 2 ? key.w : key.z;
      }
    }
    factor[0] = unit[0], factor[1] = unit[1];
    if (p.softcap > 0.0f) {
#pragma unroll
      for (auto& piece : scores)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          piece[c] = device::capped(piece[c] * (unit[c / 2] * device::kLn2), p.softcap);
      factor[0] = factor[1] = device::kLog2E;
    }
    if (now.tile < now.whole_begin || now.tile >= now.whole_end)
      mask(p, shared.work[now.work_slot], now.tile * Tile::kKeys, scores);
  }

  /// Weights of half a tile times their values' scales, as codes.
  template <int kHalf>
  __device__ __forceinline__ void round_weights() {
    const Scales& scales = shared.scales[turned.slot];
    constexpr int kPieces = Tile::kKeys / 8 / 2;
#pragma unroll
    for (int i = kHalf * kPieces; i < (kHalf + 1) * kPieces; i += 2) {
      const float4 value = scales_of(scales.value, i);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        weights[i / 4][i % 4 + r] = ptx::pack_e4m3(
            scores[i][2 * r] * value.x, scores[i][2 * r + 1] * value.y,
            scores[i + 1][2 * r] * value.z, scores[i + 1][2 * r + 1] * value.w);
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

  /// Asks the tensor cores for the scores of a tile.
  __device__ __forceinline__ void begin_tile() {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    issue_scores(keys = ring.slot);
    ring.next();
  }

  /// From its scores to its values. These are multiplied in two halves, the first beside the
  /// exponentials of the second.
  __device__ __forceinline__ void finish_tile() {
    ptx::mbarrier_wait(&shared.turned_full[turned.slot], turned.parity);
    ptx::wgmma_wait<0>();
    ptx::hold_registers(scores);
    release(&shared.free[keys]);
    release_queries();
    float factor[2], keep[2];
    finish_scores(factor);
    const float4 above = *reinterpret_cast<const float4*>(shared.scales[turned.slot].above);
    softmax.raise(scores, keep, factor,
                  fmaxf(fmaxf(above.x, above.y), fmaxf(above.z, above.w)));
    constexpr int kPieces = Tile::kKeys / 8;
    softmax.weigh<0, kPieces / 2>(scores, factor);
    softmax.add<0, kPieces / 2>(scores, keep);
    round_weights<0>();
    issue_values<0>();
    softmax.weigh<kPieces / 2, kPieces>(scores, factor);
    softmax.add<kPieces / 2, kPieces>(scores, {1.0f, 1.0f});
    round_weights<1>();
    issue_values<1>();
    if (device::any_lane(keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (auto& piece : sums)
#pragma unroll
        for (int c = 0; c < 4; ++c) piece[c] *= keep[c / 2];
    }
    ptx::wgmma_wait<0>();
    ptx::hold_registers(parts);
    ptx::mbarrier_arrive(&shared.turned_free[turned.slot]);
    turned.next();
#pragma unroll
    for (int i = 0; i < Tile::kSize / 8; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] += parts[i][c];
  }

  /// Four columns of a thread lie side by side, see TurnedValues: a store of the warp fills whole
  /// sectors of 32 bytes.
  __device__ __forceinline__ void store(const Current& of) {
    const int thread = ptx::thread_index(), lane = thread % device::kWarpSize, row = row_of(thread);
    const Work& work = shared.work[of.work_slot];
    // Rows from this lane's first on.
    const int left = work.sequence.q_len - work.first_query - row;
    const std::int64_t query = work.sequence.q_begin + work.first_query + row;
    softmax.join_quad();
    const float sink = attention_tile::sink_of(p, work.head);
    const device::RowEnd ends[2] = {softmax.end(0, sink), softmax.end(1, sink)};
    if (lane % 4 == 0) {
      float* to = p.lse + work.head * p.stride_lse_head + query;
      if (left > 0) to[0] = ends[0].lse;
      if (left > 8) to[8] = ends[1].lse;
    }
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
        attention_tile::store_scaled(to + 8 * r * width + 8 * i, sum, ends[r].factor);
      }
  }

  __device__ __forceinline__ void run() {
    bool first = true;
    while (begin_work()) {
      softmax = {};
      clear_sums();
      for (;; --now.tile) {
        begin_tile();
        if (!first) ring.next();  // values of the tile before, which others turn
        first = false;
        finish_tile();
        if (now.tile == now.first_tile) break;
      }
      store(now);
    }
  }
};

}  // namespace ridgeline::attention_sm90
