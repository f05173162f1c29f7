#pragma once
#include "device/ptx/wgmma_registers.cuh"
#include "kernels/attention_chunk_sm90.cuh"

/// How one warpgroup of the Hopper prefill kernel stores a work's rows from its sums.
namespace ridgeline::attention_sm90 {

/// Of row r the four columns from one of two pieces that this lane stores.
template <class T>
__device__ __forceinline__ uint2 traded_pieces(const float (&even)[4], const float (&odd)[4], int r,
                                               float factor) {
  return device::trade_in_pair(
      attention_tile::pack<T>(even[2 * r] * factor, even[2 * r + 1] * factor),
      attention_tile::pack<T>(odd[2 * r] * factor, odd[2 * r + 1] * factor));
}

/// Rows of a packed tile: the result if their keys are one segment, a partial otherwise.
template <class Tile>
__device__ __forceinline__ void store_packed(const AttentionParams& p, const Shared<Tile>& shared,
                                             const Current& of, device::LazySoftmax softmax,
                                             float (&sums)[Tile::kSize / 8][4]) {
  using T = typename Tile::T;
  const PackedWork& work = shared.work[of.work_slot];
  const Partials partials{p};
  const int thread = ptx::thread_index(), column = thread % 4 * 2;
  const bool whole = work.segments == 1;
  softmax.join_quad();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(thread) + 8 * r, query = work.query(row, 0);
    const bool exists = row < work.rows && query < work.sequence.q_len;
    const int head = work.kv_head * work.group + row % work.group;
    const std::int64_t token = work.sequence.q_begin + query;
    const std::int64_t index = partials.index(work.batch, token, head, work.segment);
    const float sink = whole ? attention_tile::sink_of(p, head) : device::kMinusInfinity;
    const device::RowEnd end = softmax.end(r, sink);
    float* lse = p.lse + work.batch * p.stride_lse_batch + head * p.stride_lse_head + token;
    if (!whole) lse = partials.lse(index);
    if (exists && column == 0) *lse = end.lse;
    if (whole) {
      const int first = thread % 2 * 8 + thread % 4 / 2 * 4;
      T* out = static_cast<T*>(p.out) + work.batch * p.stride_out_batch +
               (token * p.heads + head) * p.head_dim + first;
#pragma unroll
      for (int i = 0; i < Tile::kSize / 8; i += 2) {
        const uint2 piece = traded_pieces<T>(sums[i], sums[i + 1], r, end.factor);
        if (exists && 8 * i + first < p.head_dim) *reinterpret_cast<uint2*>(out + 8 * i) = piece;
      }
    } else {
      float* to = partials.sums(index) + column;
#pragma unroll
      for (int i = 0; i < Tile::kSize / 8; ++i)
        if (exists && 8 * i + column < p.head_dim)
          *reinterpret_cast<float2*>(to + 8 * i) =
              make_float2(sums[i][2 * r] * end.factor, sums[i][2 * r + 1] * end.factor);
    }
  }
  ptx::hold_registers(sums);  // or they would be copied in every step, to be cleared here
}

/// The warp's 16 rows from registers: neighbouring lanes trade pieces of two columns, so that a
/// store of the warp fills whole sectors of 32 bytes, and queries need not wait for the output to
/// leave their shared memory. H200, causal, 512 keys, us, through shared memory and so: head size
/// 64 156 and 142, 128 118 and 104, 256 119 and 104; full 187 and 182, 137 and 133, 141 and 140.
template <class Tile>
__device__ __forceinline__ void store_work(const AttentionParams& p, const Shared<Tile>& shared,
                                           const Current& of, device::LazySoftmax softmax,
                                           float (&sums)[Tile::kSize / 8][4]) {
  using T = typename Tile::T;
  if constexpr (Packed<Tile>) return store_packed(p, shared, of, softmax, sums);
  const int thread = ptx::thread_index(), lane = thread % device::kWarpSize, row = row_of(thread);
  const Work& work = shared.work[of.work_slot];
  // Rows from this lane's first on.
  const int left = work.sequence.q_len - work.first_query - row;
  const std::int64_t query = work.sequence.q_begin + work.first_query + row;
  const int batch = work.batch, head = work.head;
  softmax.join_quad();
  const float sink = attention_tile::sink_of(p, head);
  const device::RowEnd ends[2] = {softmax.end(0, sink), softmax.end(1, sink)};
  if (lane % 4 == 0) {
    float* to = p.lse + batch * p.stride_lse_batch + head * p.stride_lse_head + query;
    if (left > 0) to[0] = ends[0].lse;
    if (left > 8) to[8] = ends[1].lse;
  }
  const std::int64_t width = std::int64_t{p.heads} * p.head_dim;
  const int column = lane % 2 * 8 + lane % 4 / 2 * 4;
  T* to = static_cast<T*>(p.out) + batch * p.stride_out_batch + query * width +
          head * p.head_dim + column;
#pragma unroll
  for (int i = 0; i < Tile::kSize / 8; i += 2)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2 piece = traded_pieces<T>(sums[i], sums[i + 1], r, ends[r].factor);
      if (8 * r < left && 8 * i + column < p.head_dim)
        *reinterpret_cast<uint2*>(to + 8 * r * width + 8 * i) = piece;
    }
}

}  // namespace ridgeline::attention_sm90
