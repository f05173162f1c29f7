#pragma once
#include "common/math.h"
#include "kernels/attention.h"

/// What the host, the kernels and the CPU op must agree on, as pure functions: where a sequence
/// lies, what a query sees, and how the work is cut. What depends on a neighbour in the batch is which
/// kernel takes a row, by how many rows the call has (cuts_chunks, expects_many), and never in
/// batch-invariant mode; nothing else does, so neither does a row's result.
namespace ridgeline::attention_config {

constexpr int kKeyTile = 64;     // keys of one softmax step, cut at multiples of this position
constexpr int kFewQueries = 16;  // at most so many queries, and ...
constexpr int kFewRows = 64;     // ... rows (queries x group) are cut along the keys
constexpr int kMaxSplits = 64;

/// By value: std::clamp's references put a kernel's integers into local memory.
constexpr std::int64_t clamped(std::int64_t value, std::int64_t low, std::int64_t high) {
  return value < low ? low : value > high ? high : value;
}

constexpr std::int32_t lesser(std::int32_t a, std::int32_t b) { return a < b ? a : b; }
constexpr std::int32_t greater(std::int32_t a, std::int32_t b) { return a > b ? a : b; }

/// The runs of one sequence.
struct Sequence {
  std::int64_t q_begin, k_begin;  // first row of a packed q and k; 0 otherwise
  std::int32_t q_len, k_len, k_start;
};

/// The runs of sequence `b`, clamped to what q, k and the block table hold; read(p) reads *p.
template <class Read>
constexpr Sequence sequence_of(const AttentionParams& p, std::int32_t b, Read&& read) {
  Sequence s{.q_begin = 0, .k_begin = 0, .q_len = p.max_q, .k_len = p.max_k, .k_start = 0};
  if (p.cu_q != nullptr) {
    s.q_begin = clamped(read(p.cu_q + b), 0, p.total_q);
    const std::int64_t end = clamped(read(p.cu_q + b + 1), s.q_begin, p.total_q);
    s.q_len = static_cast<std::int32_t>(clamped(end - s.q_begin, 0, p.max_q));
    if (p.leaves_longer && end - s.q_begin > p.max_q) s.q_len = 0;
  }
  if (p.cu_k != nullptr) {
    s.k_begin = clamped(read(p.cu_k + b), 0, p.total_k);
    const std::int64_t end = clamped(read(p.cu_k + b + 1), s.k_begin, p.total_k);
    s.k_len = static_cast<std::int32_t>(clamped(end - s.k_begin, 0, p.max_k));
  }
  if (p.seq_lens != nullptr)
    s.k_len = static_cast<std::int32_t>(clamped(read(p.seq_lens + b), 0, p.max_k));
  if (p.k_start != nullptr)
    s.k_start = static_cast<std::int32_t>(clamped(read(p.k_start + b), 0, s.k_len));
  if (p.leaves_shared) s.k_start = greater(s.k_start, lesser(p.shared_keys, s.k_len));
  return s;
}

constexpr Sequence sequence_of(const AttentionParams& p, std::int32_t b) {
  return sequence_of(p, b, [](const std::int32_t* from) { return *from; });
}

/// Keys begin <= n < end; both ends never fall as the query moves on.
struct KeyRange {
  std::int32_t begin, end;
};

/// What query `i` of the sequence sees.
constexpr KeyRange visible_keys(const AttentionParams& p, const Sequence& s, std::int32_t i) {
  const std::int32_t position = s.k_len - s.q_len + i;
  KeyRange range{.begin = s.k_start, .end = s.k_len};
  if (p.window > 0) range.begin = greater(range.begin, position - p.window + 1);
  if (p.causal) range.end = greater(position + 1, 0);
  return range;
}

/// Few queries: the keys are cut into splits of a fixed size, so that few sequences fill the GPU.
constexpr bool is_split(std::int32_t q_len, std::int32_t group) {
  return q_len == 1 || (q_len <= kFewQueries && q_len * group <= kFewRows);
}

/// Sequences of few queries and yet more rows than one MMA of the Hopper decode kernel takes belong
/// to the kernel of packed rows; beside a chunk, to the one of chunks.
constexpr std::int32_t kMmaRows = 8;

constexpr bool is_split(const AttentionParams& p, std::int32_t q_len) {
  const std::int32_t group = p.heads / p.kv_heads;
  return (!p.batch_invariant || p.leaves_few) && !p.takes_few && is_split(q_len, group) &&
         !(p.takes_packed && q_len * group > kMmaRows);
}

/// Whether prefill is given all sequences: packed rows are enough for each to have as many queries
/// as any may, so that none is expected to have few. The kernels for few would be launched in vain,
/// each after the end of the one before. H200, 32/8 heads of 128, one sequence of 4096 tokens: 230
/// us a call, of which its own kernel 222.
constexpr bool expects_many(const AttentionParams& p) {
  return p.cu_q != nullptr && p.batch > 0 && !is_split(p, p.max_q) &&
         !p.batch_invariant && std::int64_t{p.batch} * p.max_q <= p.total_q;
}

/// Keys a split: 128 KB of keys and values, so that writing and reading a partial result of up to
/// 8 rows stays a few per cent of it; doubled where a sequence would need more than kMaxSplits.
constexpr std::int32_t split_keys(std::int32_t head_dim, std::int32_t kv_bytes,
                                  std::int32_t k_len) {
  std::int32_t keys = 65536 / (greater(round_up(head_dim, 64), 64) * kv_bytes);
  keys = keys / kKeyTile * kKeyTile;
  while (ceil_div(k_len, keys) > kMaxSplits) keys *= 2;
  return keys;
}

constexpr std::int32_t split_count(std::int32_t head_dim, std::int32_t kv_bytes,
                                   std::int32_t k_len) {
  return greater(ceil_div(k_len, split_keys(head_dim, kv_bytes, k_len)), 1);
}

/// No sequence of at most max_k keys has more splits.
constexpr std::int32_t max_split_count(std::int32_t head_dim, std::int32_t kv_bytes,
                                       std::int32_t max_k) {
  return lesser(greater(ceil_div(max_k, split_keys(head_dim, kv_bytes, 0)), 1), kMaxSplits);
}

/// The Hopper decode kernel: one sequence alone has an item for nearly every SM, and two of at
/// least kDecodeKeys keys where it is long enough (H200, us with 512 and 1024: one of 9000 17.0 and
/// 14.1, 32 of 10000 297 and 300). Runs have at least kDecodeLeast keys (32 of 1k: 36.4 with 64,
/// 35.9 with 128). A sequence of at most kDecodeWhole has shorter ones, and in a batch is one item.
constexpr std::int32_t kDecodeItems = 128;
constexpr std::int32_t kDecodeKeys = 1024;
constexpr std::int32_t kDecodeLeast = 128;
constexpr std::int32_t kDecodeWhole = 512;
constexpr std::int32_t kShortItems = 4;  // of one, at most, however many heads there are

constexpr std::int32_t decode_splits(std::int32_t kv_heads, std::int32_t items) {
  return lesser(greater(items / kv_heads, 1), kMaxSplits);
}

/// Keys of a split, where kDecodeItems items would have `one` each and twice as many `half`. A
/// partial row is as many bytes as a key and its value of bf16: an eighth of the item at most.
constexpr std::int32_t decode_keys(std::int32_t one, std::int32_t half, std::int32_t rows) {
  const std::int32_t keys = greater(greater(lesser(one, kDecodeKeys), half), 8 * rows);
  return round_up(greater(keys, kDecodeLeast), kKeyTile);
}

/// The columns of its tile. 8-bit caches have the one of 128: H200, fp8, heads of 64, 32 sequences
/// of 4k keys: 219 us by the general kernel, and 87 so.
constexpr std::int32_t decode_columns(const AttentionParams& p) {
  const bool is_least = p.head_dim <= 64 && size_of(p.kv_dtype) > 1;
  return is_least ? 64 : p.head_dim <= 128 ? 128 : 256;
}

/// The most rows of one KV head that a sequence of few queries has.
constexpr std::int32_t max_split_rows(std::int32_t max_q, std::int32_t group) {
  std::int32_t rows = 0;
  for (std::int32_t q = 1; q <= lesser(max_q, kFewQueries); ++q)
    if (is_split(q, group)) rows = q * group;
  return rows;
}

/// Whether the decode kernel has a tile for the cache.
constexpr bool has_decode_tile(const AttentionParams& p) {
  if (size_of(p.kv_dtype) == 1) return decode_columns(p) == 128;
  return max_split_rows(p.max_q, p.heads / p.kv_heads) <= kMmaRows;
}

constexpr bool is_packed(const AttentionParams& p, std::int32_t q_len, std::int32_t least_rows) {
  const std::int32_t rows = q_len * (p.heads / p.kv_heads);
  return is_split(q_len, p.heads / p.kv_heads) && rows >= least_rows && rows <= kFewRows;
}

/// Whether a sequence of the call may have such rows.
constexpr bool has_packed_rows(const AttentionParams& p) {
  const std::int32_t rows = max_split_rows(p.max_q, p.heads / p.kv_heads);
  return rows > kMmaRows && p.heads / p.kv_heads <= kFewRows;
}

/// Whether that kernel takes every sequence of the call, so that no other is launched: all bring
/// few queries, and some may have such rows or shared keys are read apart.
constexpr bool packs_all(const AttentionParams& p) {
  return is_split(p, p.max_q) && (p.leaves_shared || has_packed_rows(p));
}

/// Whether, in batch-invariant mode, that kernel may take sequences of the call, each unsplit: all
/// bring few queries, or some may.
constexpr bool packs_unsplit(const AttentionParams& p) {
  const std::int32_t group = p.heads / p.kv_heads;
  return p.batch_invariant && p.batch > 1 && p.max_q > 0 && group <= kFewRows &&
         (p.cu_q != nullptr || is_split(p.max_q, group));
}

/// Keys of a tile, and so of one step of the softmax, of the Hopper prefill kernel in
/// batch-invariant mode: unsplit packed rows have the same, and so the same bits.
constexpr std::int32_t prefill_keys(std::int32_t columns) { return columns <= 128 ? 128 : 64; }

/// Keys a split before packed rows. Up to kRowClusterKeys make at most row_cluster() splits, each a
/// block's of one cluster: with two blocks an SM, 32 clusters of 8 do not fit on every H200. One KV
/// head, 4k keys, 16, 32, 64 sequences by 6 and 7: 12.6 20.6 39.6 us and 13.7 19.5 38.6.
constexpr std::int32_t kRowSplitKeys = 512;
constexpr std::int32_t kRowClusterKeys = 4608;
constexpr std::int32_t row_cluster(std::int32_t dim) { return dim > 64 && dim <= 128 ? 7 : 6; }
constexpr std::int32_t row_split_keys(std::int32_t head_dim, std::int32_t span) {
  std::int32_t keys = kRowSplitKeys;
  if (span <= kRowClusterKeys)
    return greater(keys, round_up(ceil_div(span, row_cluster(head_dim)), kKeyTile));
  while ((span - 1) / kMaxSplits >= keys) keys *= 2;
  return keys;
}
constexpr std::int32_t max_row_splits(std::int32_t head_dim, std::int32_t max_k) {
  const std::int32_t most = max_k <= kRowClusterKeys ? row_cluster(head_dim) : kMaxSplits;
  return lesser(greater(ceil_div(max_k, kRowSplitKeys), 1), most);
}

/// Blocks of packed rows that an SM holds.
constexpr std::int32_t row_blocks(std::int32_t columns) { return columns <= 128 ? 2 : 1; }

/// Whether these splits are joined in clusters: all of them run side by side, or half where blocks
/// share an SM, so that the start and end of one lie beside another's keys. Small ones, which fill
/// the SMs, may follow each other (256 sequences of 1k keys 50 us and 41), but not where other
/// kernels take most: 512 empty clusters take 6 us more than blocks that stay.
constexpr std::int32_t kSmallCluster = 4;
constexpr bool joins_clusters(const AttentionParams& p, std::int32_t multiprocessors) {
  const std::int32_t splits = max_row_splits(p.head_dim, p.max_k);
  const std::int64_t blocks = std::int64_t{p.batch} * p.kv_heads * lesser(splits, 6);
  const std::int32_t sharing = row_blocks(p.head_dim);
  return !p.batch_invariant && !p.leaves_shared && splits > 1 && p.max_k <= kRowClusterKeys &&
         ((sharing > 1 && splits <= kSmallCluster && packs_all(p)) ||
          4 * blocks <= 3 * std::int64_t{sharing} * sharing * multiprocessors);
}

/// Rows of q: packed, or one a sequence.
constexpr std::int64_t tokens(const AttentionParams& p) {
  return p.total_q > 0 ? p.total_q : p.batch;
}

/// The sequence that owns row `token` of q, or -1.
constexpr std::int32_t sequence_at(const AttentionParams& p, std::int32_t token) {
  if (p.cu_q == nullptr) return token;
  std::int32_t low = 0, high = p.batch;  // the last offset at most `token` lies in [low, high]
  while (low < high) {
    const std::int32_t middle = (low + high + 1) / 2;
    if (p.cu_q[middle] <= token) low = middle; else high = middle - 1;
  }
  return low < p.batch && p.cu_q[low] <= token ? low : -1;
}

/// The Hopper kernel of chunks: before many keys few tokens make too few tiles to fill the GPU, so
/// their keys are cut into segments. Which calls it takes depends on what the host knows of them.
constexpr std::int32_t kChunkTokens = 512;   // of a call, at most
constexpr std::int32_t kChunkKeys = 2048;    // that a sequence may have, at least
constexpr std::int32_t kChunkRows = 128;     // of a tile, and keys
constexpr std::int32_t kChunkSegments = 16;  // at most

/// Rows of q and of out.
constexpr std::int64_t all_queries(const AttentionParams& p) {
  return p.cu_q != nullptr || p.total_q > 0 ? p.total_q : std::int64_t{p.batch} * p.max_q;
}

constexpr bool cuts_chunks(const AttentionParams& p) {
  return p.dtype != DType::kFloat32 && p.kv_dtype == p.dtype && p.head_dim <= 128 &&
         p.heads / p.kv_heads <= kChunkRows && p.max_k >= kChunkKeys &&
         all_queries(p) <= kChunkTokens && !p.batch_invariant && !is_split(p, p.max_q);
}

/// Keys common to all sequences are read once, if they are many and the queries few.
constexpr std::int32_t kCommonKeys = 512;
constexpr std::int32_t kCommonColumns = 128;
constexpr bool reads_common(const AttentionParams& p) {
  return p.shared_keys >= kCommonKeys && p.batch > 1 && p.kv_dtype == p.dtype &&
         p.dtype != DType::kFloat32 && is_split(p, p.max_q) &&
         tokens(p) <= std::int64_t{p.batch} * p.max_q && p.heads / p.kv_heads <= kFewRows &&
         p.head_dim <= kCommonColumns && p.window == 0;
}

constexpr std::int32_t kCommonSplits = 16;  // at most

/// Keys of a split of these: by their number alone, so that a row's bits do not depend on how many
/// others there are. H200, 2048 of them, us in splits of 1024 and of 512: 8, 64 and 128 sequences
/// 28.2 and 21.1, 44.9 and 37.7, 58.7 and 56.4, but 256 92.0 and 99.4. Before 4096 keys 64 take
/// 45.3 and 42.7, 128 64.4 and 71.0.
constexpr std::int32_t common_split_keys(std::int32_t shared_keys) {
  std::int32_t keys = shared_keys <= 2048 ? 512 : 1024;
  while (ceil_div(shared_keys, keys) > kCommonSplits) keys *= 2;
  return keys;
}

/// No sequence has more.
constexpr std::int32_t max_decode_splits(const AttentionParams& p) {
  const std::int32_t tiles = ceil_div(p.max_k, kKeyTile);
  const std::int32_t splits = decode_splits(p.kv_heads, 2 * kDecodeItems);
  return lesser(greater(tiles, 1), greater(splits, kShortItems));
}

}  // namespace ridgeline::attention_config
