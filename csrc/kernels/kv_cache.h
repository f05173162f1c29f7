#pragma once
#include "common/rotation.h"
#include "common/types.h"

namespace ridgeline {

/// One head vector is what these kernels handle at a time; its length is at most this.
constexpr std::int32_t kMaxKvHeadDim = 256;

/// [tokens, heads, D] with D contiguous.
struct HeadsView {
  void* data;
  std::int32_t heads;          // 0: absent
  std::int64_t stride_token;   // elements
  std::int64_t stride_head;
};

/// [num_blocks, block_size, heads, D] with D contiguous, and its scales [num_blocks, block_size,
/// heads] if the cache is quantised.
struct CacheView {
  void* data;
  std::int64_t stride_block;   // elements
  std::int64_t stride_slot;
  std::int64_t stride_head;
  void* scale;                 // bf16, or null
  std::int64_t scale_stride_block;
  std::int64_t scale_stride_slot;
  std::int64_t scale_stride_head;
};

/// rope, write_kv and rope_write_kv in one: rotates q and k by the token's position, and writes k
/// and v to the token's slot.
///
/// Rotation, in fp32, of the first rotary_dim elements of a head vector, half = rotary_dim / 2:
///   y[i]        = x[i] * cos[i] - x[i + half] * sin[i]
///   y[i + half] = x[i + half] * cos[i] + x[i] * sin[i]         i < half
/// interleaved: the pairs are (2 i, 2 i + 1). The result is rounded to dtype before it is
/// quantised, so that rope_write_kv equals rope followed by write_kv bit for bit.
///
/// Quantised: scale = bf16(max |x| / largest code), code = x / scale, saturated; the scale is 0 for
/// a vector of zeros and not finite (every value then reads as NaN) where x has inf or NaN.
///
/// A slot outside the cache is an error on the CPU and writes nothing on CUDA; a position outside
/// the table is an error on the CPU and reads row 0 on CUDA.
///
/// Roofline: reads q, k, v and the table rows once, writes q and the cache entries once, about 6
/// flops an element: bandwidth at many tokens, launch latency at few.
struct KvWriteParams {
  DType dtype;                 // of q, k and v
  DType cache_dtype;           // dtype, float8_e4m3fn or int8
  DType index_dtype;           // of positions and slots: int32 or int64
  DType table_dtype;           // of cos_sin: dtype or float32
  std::int64_t tokens;         // 0 is legal
  std::int32_t head_dim;
  std::int32_t rotary_dim;     // even, at most head_dim; 0: no rotation
  bool interleaved;
  std::int64_t max_position;   // rows of the table
  HeadsView q;                 // rotated in place
  HeadsView k;                 // rotated in place if there is no cache, else only read
  HeadsView v;
  const void* positions;       // [tokens], or null without rotation
  const void* cos_sin;         // [max_position, rotary_dim]: cosines, then sines
  std::int64_t stride_cos_sin; // elements
  bool table_ready;            // no kernel of the stream still writes cos_sin
  const void* slots;           // [tokens]: block * block_size + offset; null: no cache
  std::int32_t block_size;
  std::int64_t num_slots;      // num_blocks * block_size
  CacheView k_cache;
  CacheView v_cache;
};

/// Enqueues one kernel; allocates nothing.
void write_kv(const KvWriteParams& params, Stream stream);

/// The bytes of one block of a cache or of its scales: rows of contiguous bytes under two strides,
/// of which a dense block needs none.
struct BlockCopy {
  char* data;                  // null: absent
  std::int64_t stride_block;   // bytes, as all of these
  std::int64_t stride_outer;
  std::int64_t stride_inner;
  std::int32_t outer;
  std::int32_t inner;
  std::int32_t row_bytes;
};

/// Copies whole blocks of up to four tensors: for each pair, block source to block destination.
/// A pair with destination 0 (the dummy block) is padding and does nothing. A block outside the
/// cache is an error on the CPU and skips the pair on CUDA; so is, on the CPU, a destination that
/// is also a source or that is given twice: then the result would depend on the order.
///
/// Roofline: reads and writes each copied block once; no flops.
struct CopyBlocksParams {
  std::int64_t pairs;          // 0 is legal
  const std::int32_t* pair;    // [pairs, 2] contiguous: source, destination
  std::int64_t num_blocks;
  BlockCopy tensors[4];        // K, V, scales of K, scales of V
};

/// Enqueues one kernel; allocates nothing.
void copy_blocks(const CopyBlocksParams& params, Stream stream);

namespace cpu {
void write_kv(const KvWriteParams& params);
void copy_blocks(const CopyBlocksParams& params);
}  // namespace cpu

}  // namespace ridgeline
