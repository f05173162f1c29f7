#pragma once
#include "kernels/attention.h"

/// The kernels behind attention(). A sequence belongs to exactly one of split and prefill, by its
/// own number of queries (attention_config::is_split), so both may be launched for one batch.
namespace ridgeline::attention_launch {

/// Sequences of few queries, keys cut into splits; a second kernel joins them. Also clears the rows
/// of no sequence. fp16 and bf16.
void split(const AttentionParams& params, Stream stream);

/// The same on Hopper, where covers_decode_sm90() is true: keys by the copy engine, splits joined
/// in the same launch if there are counters. fp8 and int8 caches have a file of their own.
void decode_sm90(const AttentionParams& params, Stream stream);
void decode_quantised_sm90(const AttentionParams& params, Stream stream);
bool covers_decode_sm90(const AttentionParams& params);

/// Of the sequences of few queries those of more than config::kMmaRows rows, on wgmma, where
/// rows_obstacle() is null: else it says what is in the way. In batch-invariant mode all sequences,
/// whose bits are then those of prefill_sm90().
void rows_sm90(const AttentionParams& params, Stream stream);
const char* rows_obstacle(const AttentionParams& params);

/// All rows before the keys that all sequences have in common, into the workspace; and those joined
/// with the result of the other keys. Where config::reads_common() and rows_sm90() covers them.
void common_sm90(const AttentionParams& params, Stream stream);
void join_common_sm90(const AttentionParams& params, Stream stream);

/// Sequences of many queries. fp16 and bf16.
void prefill(const AttentionParams& params, Stream stream);

/// The same sequences as prefill on wgmma and the copy engine, where prefill_obstacle() is null.
void prefill_sm90(const AttentionParams& params, Stream stream);
const char* prefill_obstacle(const AttentionParams& params);

/// The same where config::cuts_chunks(), the keys cut into segments; a second kernel joins them.
void chunks_sm90(const AttentionParams& params, Stream stream);

/// The same with queries, keys, values and weights in e4m3, where prefill_fp8_obstacle() is null.
void prefill_fp8_sm90(const AttentionParams& params, Stream stream);
const char* prefill_fp8_obstacle(const AttentionParams& params);

/// Quantised queries in bf16, in the workspace, and params that read these. `few_only`: only those
/// of sequences of few queries.
AttentionParams expand_queries(const AttentionParams& params, bool few_only, Stream stream);

/// All sequences, on the CUDA cores in fp32.
void plain(const AttentionParams& params, Stream stream);

}  // namespace ridgeline::attention_launch
