#pragma once
#include "kernels/attention_config.h"

/// What lies where in the workspace, by what the host knows of a call.
namespace ridgeline::attention_config {

/// Floats of the partial rows of `splits` splits, one of which would write the result itself.
constexpr std::int64_t partial_floats(const AttentionParams& p, std::int64_t splits,
                                      std::int32_t rows, std::int32_t columns) {
  return splits == 1 ? 0 : splits * p.batch * p.kv_heads * rows * (columns + 1);
}

/// Of the Hopper decode kernel, for sequences of at most `rows` rows.
constexpr std::int64_t decode_floats(const AttentionParams& p, std::int32_t rows) {
  return partial_floats(p, max_decode_splits(p), round_up(rows, 2), decode_columns(p) + 1);
}

/// Enough for either kernel of few queries: a row is its sums and, apart, one lse; the Hopper
/// kernel pads the sums to its tile and the rows to pairs.
constexpr std::int64_t split_bytes(const AttentionParams& p) {
  if (p.dtype == DType::kFloat32 || p.batch_invariant) return 0;  // these run unsplit
  const std::int32_t kv_bytes = static_cast<std::int32_t>(size_of(p.kv_dtype));
  const std::int32_t rows = max_split_rows(p.max_q, p.heads / p.kv_heads);
  const std::int64_t general =
      partial_floats(p, max_split_count(p.head_dim, kv_bytes, p.max_k), rows, p.head_dim);
  const std::int64_t decode = decode_floats(p, rows);
  const std::int64_t packed =
      has_packed_rows(p) || reads_common(p)
          ? partial_floats(p, max_row_splits(p.head_dim, p.max_k), rows, p.head_dim)
          : 0;
  const std::int64_t floats = general > decode ? general : decode;
  return (floats > packed ? floats : packed) * static_cast<std::int64_t>(sizeof(float));
}

/// Behind these: the partial rows of common keys, which wait for the rest.
constexpr std::int64_t common_offset(const AttentionParams& p) {
  return round_up(split_bytes(p), std::int64_t{16});
}
constexpr std::int64_t common_bytes(const AttentionParams& p) {
  if (!reads_common(p)) return 0;
  const std::int64_t splits = ceil_div(p.shared_keys, common_split_keys(p.shared_keys));
  return splits * tokens(p) * p.heads * (p.head_dim + 1) *
         static_cast<std::int64_t>(sizeof(float));
}

/// The partial rows of chunks, each its sums and its lse; behind them those of the decode kernel
/// that runs beside.
constexpr std::int64_t chunk_rows_bytes(const AttentionParams& p) {
  return round_up(kChunkSegments * all_queries(p) * p.heads * (p.head_dim + 1) *
                      static_cast<std::int64_t>(sizeof(float)),
                  std::int64_t{16});
}
constexpr std::int64_t chunk_bytes(const AttentionParams& p) {
  if (!cuts_chunks(p)) return 0;
  return chunk_rows_bytes(p) +
         decode_floats(p, kMmaRows) * static_cast<std::int64_t>(sizeof(float));
}

/// Behind the partial rows, those of chunks in the place of the others, since a call has either:
/// the queue of the Hopper prefill kernel.
constexpr std::int64_t kQueueBytes = 16;
constexpr std::int64_t queue_offset(const AttentionParams& p) {
  const std::int64_t split = split_bytes(p), chunks = chunk_bytes(p);
  return round_up(split > chunks ? split : chunks, kQueueBytes);
}

/// Behind all this: quantised queries in the dtype of out, for kernels that multiply in 16 bits.
constexpr std::int64_t queries_offset(const AttentionParams& p) {
  std::int64_t bytes = queue_offset(p) + kQueueBytes;
  if (reads_common(p)) {
    bytes = common_offset(p) + common_bytes(p);
  } else if (p.dtype == DType::kFloat32 || is_split(p, p.max_q)) {
    bytes = split_bytes(p);
  }
  return round_up(bytes, std::int64_t{16});
}

constexpr std::int64_t workspace_bytes(const AttentionParams& p, bool quantised_queries) {
  const std::int64_t row = std::int64_t{p.heads} * p.head_dim;
  const auto element = static_cast<std::int64_t>(size_of(p.dtype));
  return queries_offset(p) + (quantised_queries ? tokens(p) * row * element : 0);
}

}  // namespace ridgeline::attention_config
