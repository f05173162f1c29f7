#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace ridgeline::engine {

/// Attention of the layers with one window: microseconds a key read, and a (query, key) pair.
struct AttentionCost {
  std::int64_t window = 0;  // 0: none
  double key_us = 0, pair_us = 0;
};

/// What new tokens of one sequence cost attention, in microseconds.
struct AttentionTime {
  double read = 0, compute = 0;
  double bound = 0;  // the larger of both, layer by layer

  AttentionTime& operator+=(const AttentionTime& other) {
    read += other.read;
    compute += other.compute;
    bound += other.bound;
    return *this;
  }
};

/// The least time of a step on a machine, from the bytes it reads and the operations it does. All
/// zero: not known.
struct StepCost {
  double fixed_us = 0;  // reading the weights, once a step
  double token_us = 0;  // the layers' products, a token
  double row_us = 0;    // the head's products, a logits row
  double swap_us = 0;   // a block between device and host, one way
  std::vector<std::int64_t> sizes = {};  // ascending: steps are padded to so many tokens
  std::int64_t sized_seqs = std::numeric_limits<std::int64_t>::max();  // more are not padded
  std::vector<AttentionCost> attention = {};

  /// Token positions [start, end), before which the sequence has `start` keys in the cache.
  AttentionTime attention_time(std::int64_t start, std::int64_t end) const {
    AttentionTime time;
    for (const auto& [window, key_us, pair_us] : attention) {
      const std::int64_t count = end - start;
      const std::int64_t keys = window > 0 ? std::min(end, count + window - 1) : end;
      // Position p sees min(p + 1, window) keys; those below the window are a prefix.
      const std::int64_t full = window > 0 ? std::clamp(window - 1, start, end) : end;
      const double pairs = 0.5 * static_cast<double>(full - start) *
                               static_cast<double>(start + full + 1) +
                           static_cast<double>((end - full) * window);
      const AttentionTime layers{.read = key_us * static_cast<double>(keys),
                                 .compute = pair_us * pairs,
                                 .bound = std::max(key_us * static_cast<double>(keys),
                                                   pair_us * pairs)};
      time += layers;
    }
    return time;
  }

  /// What a step of so many tokens is padded to; 0: beyond the last size, or of more sequences or
  /// logits rows than a padded step has, it is not padded.
  std::int64_t size_of(std::int64_t tokens, std::int64_t seqs, std::int64_t rows) const {
    if (std::max(seqs, rows) > sized_seqs) return 0;
    const auto size = std::ranges::lower_bound(sizes, tokens);
    return size == sizes.end() ? 0 : *size;
  }

  double products_us(std::int64_t tokens, std::int64_t rows) const {
    return token_us * static_cast<double>(tokens) + row_us * static_cast<double>(rows);
  }

  double step_us(std::int64_t tokens, std::int64_t rows, double attention_us) const {
    return std::max(fixed_us, products_us(tokens, rows)) + attention_us;
  }
};

}  // namespace ridgeline::engine
