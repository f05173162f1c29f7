#pragma once
#include "common/types.h"

namespace ridgeline {

/// What a model's first layer reads: row `ids[i]` of a table for each token, times `scale`, plus a
/// row of a second table by position. Each step is rounded to dtype, so that the sum has the bits
/// of the same operations one by one; with neither, rows keep their bits.
///
/// An id of -1 - r stands for the token that `last_tokens[r]` holds. An id, a token or a position
/// outside its table is an error on the CPU and reads row 0 on CUDA.
///
/// Roofline: reads a row and writes one for each token, no flops: bandwidth at many tokens, at few
/// the latency of one load behind another.
struct EmbedParams {
  DType dtype;                      // of tables and out: float32, float16, bfloat16; int32: copies
  DType index_dtype;                // of ids and positions: int32 or int64
  std::int64_t tokens;              // 0 is legal
  std::int64_t width;               // elements of a row
  const void* ids;                  // [tokens]
  const std::int32_t* last_tokens;  // [last_count], or null
  std::int64_t last_count;
  const void* weight;               // [rows, width]
  std::int64_t rows;
  std::int64_t stride;              // elements
  float scale;                      // 1: none
  const void* positions;            // [tokens], or null
  const void* position_weight;      // [position_rows, width]
  std::int64_t position_rows;
  std::int64_t position_stride;     // elements
  void* out;                        // [tokens, width] contiguous
  bool inputs_ready;                // no kernel of the stream still writes what is read
};

/// Enqueues one kernel; allocates nothing.
void embed(const EmbedParams& params, Stream stream);

namespace cpu {
void embed(const EmbedParams& params);
}  // namespace cpu

}  // namespace ridgeline
