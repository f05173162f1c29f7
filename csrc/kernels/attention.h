#pragma once
#include "common/types.h"

namespace ridgeline {

/// out[i] = sum over visible keys n of softmax(score[i, n]) * v[n], per sequence and query head,
/// score = softcap(scale * q[i] . k[n]); statistics and sums in fp32.
///
/// One op for every layout: a sequence owns a run of query rows and a run of keys, and the layouts
/// differ only in where these runs lie.
///   contiguous  q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D]: cu_q, cu_k and block_tables are null
///   packed      q [Tq, Hq, D], k and v [Tk, Hkv, D]: cu_q and cu_k; the batch strides are 0
///   paged       q packed (or one row a sequence: cu_q null), k and v [num_blocks, block_size,
///               Hkv, D]: block_tables and seq_lens; the batch strides are those of a block
///
/// Query i of a sequence stands at position p = k_len - q_len + i (bottom-right alignment). It sees
/// the keys n with max(k_start, p - window + 1) <= n, and n <= p if causal. A row that sees no key
/// and has no sink is zero with lse -inf.
///
/// Roofline: 4 * D flops a visible pair and query head. Prefill is bound by the tensor cores;
/// decode reads each key and value once, 2 * Hkv * D * size_of(kv_dtype) bytes a key: bandwidth.
struct AttentionParams {
  DType dtype;     // of out, and of q unless q_scale is given
  DType kv_dtype;  // dtype, float8_e4m3fn or int8
  std::int32_t batch;
  std::int32_t heads;     // query heads; query head h reads KV head h / (heads / kv_heads)
  std::int32_t kv_heads;
  std::int32_t head_dim;  // a multiple of 8, at most 256

  std::int32_t max_q;    // no sequence has more queries (cu_q null: each has exactly this many)
  bool leaves_longer;    // or those of more belong to another kernel
  bool takes_few;        // prefill: sequences of few queries too, and it clears rows of none
  bool takes_packed;     // or of these such of more rows than the decode kernel takes
  bool precedes_chunks;  // decode: the kernel of chunks, next, may begin as blocks end, and ...
  bool follows_few;      // ... chunks: finds there what decode has waited for
  bool leaves_few;       // in batch-invariant mode, those of few queries do
  std::int32_t max_k;    // nor more keys (contiguous: each has exactly this many)
  std::int64_t total_q;  // rows of packed q; those outside every sequence become zero
  std::int64_t total_k;  // rows of packed k
  const std::int32_t* cu_q;          // [batch + 1]; or null
  const std::int32_t* cu_k;          // [batch + 1]; or null
  const std::int32_t* seq_lens;      // [batch], keys of each sequence; or null
  const std::int32_t* k_start;       // [batch], the first visible key; or null
  std::int32_t shared_keys;          // leading keys that all sequences have in common, ...
  bool leaves_shared;                // ... which belong to another kernel
  const std::int32_t* block_tables;  // [batch, max_blocks]; or null
  std::int64_t stride_table;         // entries between two rows of block_tables
  std::int32_t max_blocks;
  std::int32_t num_blocks;
  std::int32_t block_size;  // a multiple of 16

  const void* q;  // all strides in elements; the last dimension is contiguous
  std::int64_t stride_q_batch, stride_q_row, stride_q_head;
  const float* q_scale;  // of packed q in float8_e4m3fn: value = q * scale, none negative; or null
  std::int64_t stride_qs_row, stride_qs_head;
  const void* k;
  std::int64_t stride_k_batch, stride_k_row, stride_k_head;
  const void* v;
  std::int64_t stride_v_batch, stride_v_row, stride_v_head;
  const void* k_scale;  // bf16 [num_blocks, block_size, Hkv]: value = k * scale; or null
  std::int64_t stride_ks_batch, stride_ks_row, stride_ks_head;
  const void* v_scale;
  std::int64_t stride_vs_batch, stride_vs_row, stride_vs_head;

  void* out;  // [rows, heads, head_dim], contiguous
  std::int64_t stride_out_batch;
  float* lse;  // natural logarithm of the sum of exp(score), the sink included
  std::int64_t stride_lse_batch, stride_lse_head;

  float scale;
  float softcap;         // score = softcap * tanh(score / softcap); 0: none
  const void* sinks;     // [heads], a logit that joins each row's sum without a value; or null
  DType sinks_dtype;     // dtype or fp32
  std::int32_t window;   // 0: none
  bool causal;
  bool batch_invariant;  // one arithmetic for any number of queries: a row's bits do not depend on
                         // how many its sequence brings; keys are then not split

  void* workspace;       // attention_workspace_bytes() of them, any contents; null if that is 0
  std::int32_t* counters;  // [batch * kv_heads + 2], zero before and after; null: splits are joined
                           // by one kernel more, and items are not dealt
};

/// Throws std::invalid_argument if the shape is not covered. Enqueues one to three kernels;
/// allocates nothing. Lengths and ids are read on the device: ids out of range read block 0,
/// lengths are clamped.
void attention(const AttentionParams& params, Stream stream);

/// Joins two attentions of the same queries over disjoint keys:
/// lse = log(exp(lse_a) + exp(lse_b)), out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse).
/// A side with lse -inf does not count, whatever its out holds.
///
/// Roofline: reads two outs, writes one: bandwidth.
struct MergeAttentionParams {
  DType dtype;
  std::int64_t batch;      // 1 where the rows are packed
  std::int64_t rows;       // of a batch entry
  std::int32_t heads;
  std::int32_t head_dim;
  const void* out_a;       // [batch, rows, heads, head_dim], contiguous
  const float* lse_a;      // [batch, heads, rows], contiguous
  const void* out_b;
  const float* lse_b;
  void* out;
  float* lse;
};

void merge_attention(const MergeAttentionParams& params, Stream stream);

namespace cpu {
/// Both throw std::invalid_argument for ids and lengths out of range; one does no more.
void check_attention(const AttentionParams& params);
void attention(const AttentionParams& params);
void merge_attention(const MergeAttentionParams& params);
}  // namespace cpu

}  // namespace ridgeline
