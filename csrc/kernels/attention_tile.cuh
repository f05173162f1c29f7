#pragma once
#include "device/dequant.cuh"
#include "device/ptx/async_copy.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma.cuh"
#include "device/softmax.cuh"
#include "device/vec.cuh"
#include "kernels/attention_config.h"

/// What the attention kernels share: where a tile's rows lie, how they come to shared memory, and
/// the two products of one warp over 16 rows. A row is one query of one head of the group that
/// shares a KV head: row r is query r / group of head r % group.
namespace ridgeline::attention_tile {

namespace config = attention_config;

constexpr int kWarpRows = 16;  // rows of one MMA
constexpr int kGroup = 16;     // keys side by side in every layout: blocks are multiples of it
constexpr int kChunk = 8;      // elements moved at once: 16 bytes, or 8 of a quantised cache

/// Elements from one row of a tile to the next: an odd number of 16-byte chunks, so that the eight
/// rows an ldmatrix reads lie in different banks.
template <int kDim>
constexpr int kPitch = kDim + kChunk;

// ---- Where rows lie -----------------------------------------------------------------------------

/// One block's sequence, KV head and first row.
struct Work {
  config::Sequence sequence;
  int batch;
  int kv_head;
  int group;
  int first_row;
  int rows;  // of the sequence and KV head in all

  // A single query, the usual one of decode, needs no division.
  __device__ int query(int row) const { return row < group ? 0 : row / group; }
  __device__ int head(int row) const { return kv_head * group + (row < group ? row : row % group); }
};

/// Batch and row strides meet here: the layouts differ in nothing else.
struct Slot {
  std::int64_t batch, row;
};

/// Where key n lies; the keys up to the next multiple of kGroup follow it row by row.
__device__ __forceinline__ Slot slot_of(const AttentionParams& p, const Work& work, int n) {
  if (p.block_tables == nullptr) return {work.batch, work.sequence.k_begin + n};
  const int index = n / p.block_size;
  int block = 0;  // block 0 stands in for ids out of range
  if (index < p.max_blocks) block = p.block_tables[work.batch * p.stride_table + index];
  if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.num_blocks)) block = 0;
  return {block, n - index * p.block_size};
}

/// K or V of the cache with its strides.
struct Keys {
  const char* data;
  std::int64_t stride_batch, stride_row;  // bytes
  const __nv_bfloat16* scale;             // null unless quantised
  std::int64_t stride_scale_batch, stride_scale_row;
};

enum class Part { kKeys, kValues };

/// Made anew where it is used: the Params lie in constant memory, and a copy would hold twelve
/// registers.
template <Part kPart>
__device__ __forceinline__ Keys cache_of(const AttentionParams& p, int kv_head, int bytes) {
  if constexpr (kPart == Part::kKeys) {
    return {static_cast<const char*>(p.k) + kv_head * p.stride_k_head * bytes,
            p.stride_k_batch * bytes,
            p.stride_k_row * bytes,
            p.k_scale ? static_cast<const __nv_bfloat16*>(p.k_scale) + kv_head * p.stride_ks_head
                      : nullptr,
            p.stride_ks_batch,
            p.stride_ks_row};
  } else {
    return {static_cast<const char*>(p.v) + kv_head * p.stride_v_head * bytes,
            p.stride_v_batch * bytes,
            p.stride_v_row * bytes,
            p.v_scale ? static_cast<const __nv_bfloat16*>(p.v_scale) + kv_head * p.stride_vs_head
                      : nullptr,
            p.stride_vs_batch,
            p.stride_vs_row};
  }
}

// ---- Loads --------------------------------------------------------------------------------------

/// Requests rows [first_row, first_row + kRows) of q, zeros past the last; `thread` of kThreads.
template <class T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void request_queries(const AttentionParams& p, const Work& work, T* tile,
                                                int thread) {
  constexpr int kChunks = kDim / kChunk;
  const T* q = static_cast<const T*>(p.q) + work.batch * p.stride_q_batch;
#pragma unroll 1
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, column = i % kChunks * kChunk;
    const int row = work.first_row + r;
    const bool valid = row < work.rows && column < p.head_dim;
    const T* from = q;
    if (valid)
      from += (work.sequence.q_begin + work.query(row)) * p.stride_q_row +
              work.head(row) * p.stride_q_head + column;
    ptx::copy_async_16(tile + r * kPitch<kDim> + column, from, valid);
  }
}

/// Requests the kGroup keys from n0 on (a multiple of kGroup); zeros outside `live`, whose slots
/// may hold anything, and past the head size. In the cache's dtype: `tile` has kPitch elements a
/// row, and of a quantised cache kDim bytes.
template <Part kPart, int kDim, int kThreads>
__device__ __forceinline__ void request_group(const AttentionParams& p, const Work& work,
                                              void* tile, int n0, config::KeyRange live,
                                              int thread) {
  constexpr int kChunks = kDim / kChunk;
  const Keys keys = cache_of<kPart>(p, work.kv_head, p.k_scale ? 1 : 2);
  const Slot slot = slot_of(p, work, n0);
  const char* rows = keys.data + slot.batch * keys.stride_batch + slot.row * keys.stride_row;
#pragma unroll 4
  for (int first = 0; first < kGroup * kChunks; first += kThreads) {
    const int i = first + thread;
    if (kGroup * kChunks % kThreads != 0 && i >= kGroup * kChunks) break;
    const int r = i / kChunks, column = i % kChunks * kChunk;
    const bool valid = n0 + r >= live.begin && n0 + r < live.end && column < p.head_dim;
    if (keys.scale == nullptr) {
      const char* from = valid ? rows + r * keys.stride_row + column * 2 : keys.data;
      ptx::copy_async_16(static_cast<char*>(tile) + (r * kPitch<kDim> + column) * 2, from, valid);
    } else {
      const char* from = valid ? rows + r * keys.stride_row + column : keys.data;
      ptx::copy_async_8(static_cast<char*>(tile) + r * kDim + column, from, valid);
    }
  }
}

/// The scale of key n; 0 outside `live`.
template <Part kPart>
__device__ __forceinline__ float load_scale(const AttentionParams& p, const Work& work, int n,
                                            config::KeyRange live) {
  if (n < live.begin || n >= live.end) return 0.0f;
  const Keys keys = cache_of<kPart>(p, work.kv_head, 1);
  const Slot slot = slot_of(p, work, n);
  return device::to_float(
      keys.scale[slot.batch * keys.stride_scale_batch + slot.row * keys.stride_scale_row]);
}

/// kRows quantised rows into a tile of T.
template <class T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void dequantise_tile(const char* raw, const float* scales, DType dtype,
                                                T* tile, int thread) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 4
  for (int i = thread; i < kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, column = i % kChunks * kChunk;
    const uint2 bytes = *reinterpret_cast<const uint2*>(raw + r * kDim + column);
    device::store(tile + r * kPitch<kDim> + column,
                  device::dequantise8<T>(bytes, dtype, scales[r]));
  }
}

// ---- Products of one warp -----------------------------------------------------------------------

/// scores [16, kKeys] = q [16, kDim] . k [kKeys, kDim].
template <class T, int kDim, int kKeys>
__device__ __forceinline__ void score_tile(const T* q, const T* k, float (&scores)[kKeys / 8][4]) {
  const int lane = threadIdx.x % device::kWarpSize;
  const T* q_row = q + lane % 16 * kPitch<kDim> + lane / 16 * kChunk;
  const T* k_row = k + (lane / 16 * 8 + lane % 8) * kPitch<kDim> + lane / 8 % 2 * kChunk;
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[i][c] = 0.0f;
#pragma unroll
  for (int d = 0; d < kDim; d += 16) {
    std::uint32_t a[4];
    ptx::ldmatrix(a, q_row + d);
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
      std::uint32_t b[4];
      ptx::ldmatrix(b, k_row + n * kPitch<kDim> + d);
      ptx::mma_m16n8k16<T>(scores[n / 8], a, b[0], b[1]);
      ptx::mma_m16n8k16<T>(scores[n / 8 + 1], a, b[2], b[3]);
    }
  }
}

template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  device::Vec<T, 2> pair{{device::from_float<T>(low), device::from_float<T>(high)}};
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// sums [16, kDim] += weights [16, kKeys] . v [kKeys, kDim]; the weights are rounded to T.
template <class T, int kDim, int kKeys>
__device__ __forceinline__ void value_tile(const float (&weights)[kKeys / 8][4], const T* v,
                                           float (&sums)[kDim / 8][4]) {
  const int lane = threadIdx.x % device::kWarpSize;
  const T* v_row = v + (lane / 8 % 2 * 8 + lane % 8) * kPitch<kDim> + lane / 16 * kChunk;
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
    const float(&left)[4] = weights[n / 8];
    const float(&right)[4] = weights[n / 8 + 1];
    const std::uint32_t a[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]),
                                pack<T>(right[0], right[1]), pack<T>(right[2], right[3])};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      std::uint32_t b[4];
      ptx::ldmatrix_transposed(b, v_row + n * kPitch<kDim> + d);
      ptx::mma_m16n8k16<T>(sums[d / 8], a, b[0], b[1]);
      ptx::mma_m16n8k16<T>(sums[d / 8 + 1], a, b[2], b[3]);
    }
  }
}

// ---- Rows of one thread -------------------------------------------------------------------------

/// What each row of a block sees, by `threads` threads; rows past the last see what the last sees.
/// Kept in shared memory because only tiles at an edge ask for it.
template <int kRows>
__device__ __forceinline__ void describe_rows(const AttentionParams& p, const Work& work,
                                              config::KeyRange* visible) {
  if (threadIdx.x >= kRows) return;
  const int row = min(work.first_row + static_cast<int>(threadIdx.x), work.rows - 1);
  visible[threadIdx.x] = config::visible_keys(p, work.sequence, work.query(row));
}

/// This thread's share of its warp's 16 rows: rows lane / 4 and lane / 4 + 8 of the accumulators.
template <int kDim>
struct WarpRows {
  const config::KeyRange* visible;  // of the warp's rows
  device::OnlineSoftmax softmax;
  float sums[kDim / 8][4] = {};

  /// Products become scores in units of log2, -inf where hidden. `whole`: no row hides a key of
  /// this tile.
  template <int kTiles>
  __device__ __forceinline__ void finish_scores(const AttentionParams& p,
                                                float (&scores)[kTiles][4], int n0,
                                                bool whole) const {
    const bool caps = p.softcap > 0.0f;
    const float scale = caps ? p.scale : p.scale * device::kLog2E;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[i][c] *= scale;
    if (caps) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          scores[i][c] = device::capped(scores[i][c], p.softcap) * device::kLog2E;
    }
    if (whole) return;
    const int lane = threadIdx.x % device::kWarpSize, first = n0 + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const config::KeyRange seen = visible[lane / 4 + 8 * r];
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int n = first + 8 * i + c;
          if (n < seen.begin || n >= seen.end) scores[i][2 * r + c] = device::kMinusInfinity;
        }
    }
  }

  /// One tile of weights and values; the scores are finished.
  template <class T, int kKeys>
  __device__ __forceinline__ void gather(float (&scores)[kKeys / 8][4], const T* v) {
    float keep[2];
    softmax.step(scores, keep);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] *= keep[c / 2];
    value_tile<T, kDim, kKeys>(scores, v, sums);
  }
};

// ---- Results ------------------------------------------------------------------------------------

/// The sink of a head in units of log2, or -inf.
__device__ __forceinline__ float sink_of(const AttentionParams& p, int head) {
  if (p.sinks == nullptr) return device::kMinusInfinity;
  float sink;
  switch (p.sinks_dtype) {
    case DType::kFloat16: sink = device::to_float(static_cast<const __half*>(p.sinks)[head]); break;
    case DType::kBFloat16:
      sink = device::to_float(static_cast<const __nv_bfloat16*>(p.sinks)[head]);
      break;
    default: sink = static_cast<const float*>(p.sinks)[head];
  }
  return sink * device::kLog2E;
}

/// First element of a row's output.
__device__ __forceinline__ std::int64_t out_offset(const AttentionParams& p, const Work& work,
                                                   int row) {
  const std::int64_t query = work.sequence.q_begin + work.query(row);
  return work.batch * p.stride_out_batch + (query * p.heads + work.head(row)) * p.head_dim;
}

/// Four columns of a row of the result.
template <class T>
__device__ __forceinline__ void store_scaled(T* to, float4 sum, float factor) {
  const device::Vec<T, 4> out{
      {device::from_float<T>(sum.x * factor), device::from_float<T>(sum.y * factor),
       device::from_float<T>(sum.z * factor), device::from_float<T>(sum.w * factor)}};
  device::store(to, out);
}

__device__ __forceinline__ void store_lse(const AttentionParams& p, const Work& work, int row,
                                          float lse) {
  const std::int64_t query = work.sequence.q_begin + work.query(row);
  p.lse[work.batch * p.stride_lse_batch + work.head(row) * p.stride_lse_head + query] = lse;
}

/// Zeros and -inf in rows [begin, end) of a packed q, by `threads` of which this is `thread`.
template <class T>
__device__ __forceinline__ void clear_rows(const AttentionParams& p, std::int64_t begin,
                                           std::int64_t end, std::int64_t thread,
                                           std::int64_t threads) {
  const std::int64_t width = std::int64_t{p.heads} * p.head_dim;
  T* out = static_cast<T*>(p.out);
  for (std::int64_t i = begin * width + thread; i < end * width; i += threads)
    out[i] = device::from_float<T>(0.0f);
  for (std::int64_t i = thread; i < (end - begin) * p.heads; i += threads)
    p.lse[i % p.heads * p.stride_lse_head + begin + i / p.heads] = device::kMinusInfinity;
}

/// The rows of a packed q that belong to no sequence.
template <class T>
__device__ __forceinline__ void clear_unowned_rows_by(const AttentionParams& p,
                                                      std::int64_t thread, std::int64_t threads) {
  const std::int64_t first = min(max(std::int64_t{p.cu_q[0]}, std::int64_t{0}), p.total_q);
  const std::int64_t last = min(max(std::int64_t{p.cu_q[p.batch]}, first), p.total_q);
  clear_rows<T>(p, 0, first, thread, threads);
  clear_rows<T>(p, last, p.total_q, thread, threads);
}

template <class T>  // the same by all threads of `of` blocks, of which this is `block`
__device__ __forceinline__ void clear_unowned_rows(const AttentionParams& p, int block, int of) {
  clear_unowned_rows_by<T>(p, block * std::int64_t{blockDim.x} + threadIdx.x,
                           of * std::int64_t{blockDim.x});
}

}  // namespace ridgeline::attention_tile
