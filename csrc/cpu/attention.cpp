#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/attention_tile.h"
#include "cpu/math.h"
#include "cpu/parallel.h"
#include "kernels/attention_config.h"

/// Flash attention on the CPU. One task owns up to kRows rows of one sequence and KV head, a row
/// being one query of one head of the group, and walks the visible keys in tiles cut at multiples
/// of kKeyTile: a row's bits depend neither on the rows beside it nor on where its keys are stored.
namespace ridgeline::cpu {
namespace {

namespace config = attention_config;
constexpr int kRows = 32;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

void check_offsets(const std::int32_t* cu, const char* name, const AttentionParams& p,
                   std::int64_t total, std::int32_t longest, const char* longest_name) {
  if (cu == nullptr) return;
  check(cu[0] >= 0, name, ": expected offsets from 0, got ", cu[0], " at 0");
  for (std::int32_t b = 0; b < p.batch; ++b) {
    check(cu[b + 1] >= cu[b] && cu[b + 1] <= total, name,
          ": expected ascending offsets of at most ", total, ", got ", cu[b + 1], " at ", b + 1,
          " after ", cu[b]);
    check(cu[b + 1] - cu[b] <= longest, name, ": expected no more than ", longest_name, " = ",
          longest, " rows a sequence, got ", cu[b + 1] - cu[b], " in sequence ", b);
  }
}

void check_contents(const AttentionParams& p) {
  check_offsets(p.cu_q, "cu_q", p, p.total_q, p.max_q, "max_q");
  check_offsets(p.cu_k, "cu_k", p, p.total_k, p.max_k, "max_k");
  for (std::int32_t b = 0; b < p.batch; ++b) {
    if (p.k_start != nullptr)
      check(p.k_start[b] >= 0, "k_start: expected positions from 0, got ", p.k_start[b], " at ", b);
    if (p.seq_lens == nullptr) continue;
    const std::int32_t length = p.seq_lens[b];
    check(length >= 0 && length <= p.max_k, "seq_lens: expected 0 to ", p.max_k,
          " (the block table's reach), got ", length, " at ", b);
    for (std::int32_t i = 0; i < ceil_div(length, p.block_size); ++i) {
      const std::int32_t block = p.block_tables[b * p.stride_table + i];
      check(block >= 0 && block < p.num_blocks, "block_tables: expected ids in [0, ", p.num_blocks,
            "), got ", block, " at [", b, ", ", i, "]");
      check((i + 1) * p.block_size > p.shared_keys || block == p.block_tables[i],
            "block_tables: expected the first row's blocks where they are shared, got ", block,
            " at [", b, ", ", i, "] and ", p.block_tables[i], " at [0, ", i, "]");
    }
  }
}

/// The rows of one task and what they have gathered so far.
template <class T>
class RowBlock {
 public:
  RowBlock(const AttentionParams& p, TileBuffers& buffers)
      : p_(p), group_(p.heads / p.kv_heads), buffers_(buffers) {}

  void run(std::int32_t b, std::int32_t kv_head, std::int32_t first_row) {
    b_ = b, kv_head_ = kv_head, first_row_ = first_row;
    sequence_ = config::sequence_of(p_, b);
    rows_ = std::min(sequence_.q_len * group_ - first_row, kRows);
    if (rows_ <= 0) return;
    load_queries();
    const KeyTiles tiles(p_, sequence_, b, kv_head);
    const std::int32_t end = visible(rows_ - 1).end;
    std::int32_t n0 = visible(0).begin / config::kKeyTile * config::kKeyTile;
    for (; n0 < end; n0 += config::kKeyTile) {
      const std::int32_t begin = std::max(n0, visible(0).begin);
      tiles.load(n0, begin, std::min(end, n0 + config::kKeyTile), buffers_);
      product(buffers_.q.data(), buffers_.k.data(), buffers_.s.data(), rows_, p_.head_dim,
              {p_.head_dim, config::kKeyTile, config::kKeyTile}, false);
      for (std::int32_t r = 0; r < rows_; ++r) softmax_step(r, n0);
      product(buffers_.s.data(), buffers_.v.data(), buffers_.o.data(), rows_, config::kKeyTile,
              {config::kKeyTile, p_.head_dim, p_.head_dim}, true);
    }
    for (std::int32_t r = 0; r < rows_; ++r) store_row(r);
  }

 private:
  std::int32_t query(std::int32_t r) const { return (first_row_ + r) / group_; }
  std::int32_t head(std::int32_t r) const { return kv_head_ * group_ + (first_row_ + r) % group_; }

  config::KeyRange visible(std::int32_t r) const {
    return config::visible_keys(p_, sequence_, query(r));
  }

  void load_queries() {
    for (std::int32_t r = 0; r < rows_; ++r) {
      const std::int64_t token = sequence_.q_begin + query(r);
      const std::int64_t at =
          b_ * p_.stride_q_batch + token * p_.stride_q_row + head(r) * p_.stride_q_head;
      float* to = buffers_.q.data() + r * p_.head_dim;
      float* o = buffers_.o.data() + r * p_.head_dim;
      if (p_.q_scale != nullptr) {
        const auto* row = static_cast<const std::uint8_t*>(p_.q) + at;
        const float scale = p_.q_scale[(p_.cu_q != nullptr ? token : b_) * p_.stride_qs_row +
                                       head(r) * p_.stride_qs_head];
#pragma omp simd
        for (int d = 0; d < p_.head_dim; ++d) to[d] = e4m3_to_float(row[d]) * scale;
      } else {
        const T* row = static_cast<const T*>(p_.q) + at;
#pragma omp simd
        for (int d = 0; d < p_.head_dim; ++d) to[d] = static_cast<float>(row[d]);
      }
      for (int d = 0; d < p_.head_dim; ++d) o[d] = 0.0f;
      max_[r] = kMinusInfinity;
      sum_[r] = 0.0f;
    }
  }

  /// Scores become weights relative to the largest score so far; what was gathered is scaled to it.
  void softmax_step(std::int32_t r, std::int32_t n0) {
    float* s = buffers_.s.data() + r * config::kKeyTile;
    const config::KeyRange range = visible(r);
    const int first = std::clamp(range.begin - n0, 0, config::kKeyTile);
    const int last = std::clamp(range.end - n0, first, config::kKeyTile);
    float largest = max_[r];
    for (int n = first; n < last; ++n) s[n] *= p_.scale;
    if (p_.softcap > 0.0f)
      for (int n = first; n < last; ++n) s[n] = p_.softcap * std::tanh(s[n] / p_.softcap);
#pragma omp simd reduction(max : largest)
    for (int n = first; n < last; ++n) largest = s[n] > largest ? s[n] : largest;
    const float base = largest == kMinusInfinity ? 0.0f : largest;
    const float keep = exp(max_[r] - base);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int n = 0; n < config::kKeyTile; ++n) {
      const float weight = n >= first && n < last ? exp(s[n] - base) : 0.0f;
      s[n] = weight;
      sum += weight;
    }
    max_[r] = largest;
    sum_[r] = sum_[r] * keep + sum;
    float* o = buffers_.o.data() + r * p_.head_dim;
#pragma omp simd
    for (int d = 0; d < p_.head_dim; ++d) o[d] *= keep;
  }

  void store_row(std::int32_t r) {
    const float sink = p_.sinks == nullptr ? kMinusInfinity
                                           : load_float(p_.sinks, p_.sinks_dtype, head(r));
    const float largest = std::max(max_[r], sink);
    const float base = largest == kMinusInfinity ? 0.0f : largest;
    const float keep = std::exp(max_[r] - base);
    const float sum = sum_[r] * keep + std::exp(sink - base);
    const float factor = sum == 0.0f ? 0.0f : keep / sum;
    const std::int64_t row = sequence_.q_begin + query(r);
    T* out = static_cast<T*>(p_.out) + b_ * p_.stride_out_batch +
             (row * p_.heads + head(r)) * p_.head_dim;
    const float* o = buffers_.o.data() + r * p_.head_dim;
#pragma omp simd
    for (int d = 0; d < p_.head_dim; ++d) out[d] = static_cast<T>(o[d] * factor);
    p_.lse[b_ * p_.stride_lse_batch + head(r) * p_.stride_lse_head + row] = base + std::log(sum);
  }

  const AttentionParams& p_;
  const std::int32_t group_;
  TileBuffers& buffers_;
  config::Sequence sequence_{};
  std::int32_t b_ = 0, kv_head_ = 0, first_row_ = 0, rows_ = 0;
  float max_[kRows], sum_[kRows];
};

/// Of any sequence: max_q may be far more, and is no number of tasks.
std::int64_t longest_queries(const AttentionParams& p) {
  if (p.cu_q == nullptr) return p.max_q;
  std::int32_t longest = 0;
  for (std::int32_t b = 0; b < p.batch; ++b) longest = std::max(longest, p.cu_q[b + 1] - p.cu_q[b]);
  return longest;
}

/// Rows of a packed q that belong to no sequence.
template <class T>
void clear_rows(const AttentionParams& p, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = std::int64_t{p.heads} * p.head_dim;
  std::fill(static_cast<T*>(p.out) + begin * width, static_cast<T*>(p.out) + end * width, T(0.0f));
  for (std::int32_t h = 0; h < p.heads; ++h)
    for (std::int64_t row = begin; row < end; ++row)
      p.lse[h * p.stride_lse_head + row] = kMinusInfinity;
}

}  // namespace

void check_attention(const AttentionParams& p) { check_contents(p); }

void attention(const AttentionParams& p) {
  check_contents(p);
  dispatch_float(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const std::int64_t blocks =
        ceil_div<std::int64_t>(longest_queries(p) * (p.heads / p.kv_heads), kRows);
    const std::int64_t tasks = blocks * p.batch * p.kv_heads;
    parallel_ranges(tasks, kRows * 1024, [&](std::int64_t begin, std::int64_t end) {
      TileBuffers buffers(kRows, p.head_dim);
      RowBlock<T> rows(p, buffers);
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t pair = task / blocks;
        rows.run(static_cast<std::int32_t>(pair / p.kv_heads),
                 static_cast<std::int32_t>(pair % p.kv_heads),
                 static_cast<std::int32_t>(task % blocks) * kRows);
      }
    });
    if (p.cu_q == nullptr) return;
    clear_rows<T>(p, 0, p.cu_q[0]);
    clear_rows<T>(p, p.cu_q[p.batch], p.total_q);
  });
}

void merge_attention(const MergeAttentionParams& p) {
  dispatch_float(p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const std::int64_t rows = p.batch * p.rows * p.heads;
    parallel_for_each(rows, 4 * p.head_dim, [&](std::int64_t i) {
      const std::int64_t h = i % p.heads, row = i / p.heads;
      const std::int64_t at = (row / p.rows * p.heads + h) * p.rows + row % p.rows;
      const float a = p.lse_a[at], b = p.lse_b[at];
      const float largest = std::max(a, b);
      const float base = largest == kMinusInfinity ? 0.0f : largest;
      const float sum = std::exp(a - base) + std::exp(b - base);
      const float weight_a = a == kMinusInfinity ? 0.0f : std::exp(a - base) / sum;
      const float weight_b = b == kMinusInfinity ? 0.0f : std::exp(b - base) / sum;
      const T* from_a = static_cast<const T*>(p.out_a) + i * p.head_dim;
      const T* from_b = static_cast<const T*>(p.out_b) + i * p.head_dim;
      T* out = static_cast<T*>(p.out) + i * p.head_dim;
      for (int d = 0; d < p.head_dim; ++d) {
        // A side without weight may hold anything, NaN too.
        const float x = weight_a == 0.0f ? 0.0f : weight_a * static_cast<float>(from_a[d]);
        const float y = weight_b == 0.0f ? 0.0f : weight_b * static_cast<float>(from_b[d]);
        out[d] = static_cast<T>(x + y);
      }
      p.lse[at] = base + std::log(sum);
    });
  });
}

}  // namespace ridgeline::cpu
