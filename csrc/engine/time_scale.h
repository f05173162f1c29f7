#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "common/check.h"

namespace ridgeline::engine {

/// How many times longer than predicted cut steps take. Each size that steps are padded to has its
/// own distance from the roof: on an H200, 128 tokens beside 32k keys take 1.6 times as long as
/// predicted, 192 take 1.9. With one scale for all, a change of size was a step of 14.8 ms where
/// 12.5 were wanted.
class TimeScale {
 public:
  /// A step padded to `size` tokens (0: to none) took `ratio` times as long as predicted.
  void add(std::int64_t size, double ratio) {
    check(size >= 0, "padded_tokens must not be negative, got ", size);
    check(ratio > 0, "ratio must be positive, got ", ratio);
    const double expected = of(size);
    Ratios& own = sizes_[size];
    if (own.values.empty() || is_old(own)) own.values.assign(kPrior, expected);
    if (own.values.size() == kKept) own.values.erase(own.values.begin());
    own.values.push_back(std::clamp(ratio, kLeast, kMost));
    own.added = ++added_;
    latest_ = own.median();
  }

  /// Of a size that no step had lately: what the last step's size has. So one that seemed too slow
  /// is tried again.
  double of(std::int64_t size) const {
    const auto own = sizes_.find(size);
    return own == sizes_.end() || is_old(own->second) ? latest_ : own->second.median();
  }

 private:
  static constexpr std::size_t kKept = 8, kPrior = 2;
  static constexpr std::int64_t kLately = 256;
  static constexpr double kLeast = 0.1, kMost = 100;

  struct Ratios {
    std::vector<double> values;  // oldest first
    std::int64_t added = 0;      // when the last was, by count

    /// A step that waited for something else, a capture say, counts for nothing.
    double median() const {
      std::vector<double> sorted = values;
      std::ranges::sort(sorted);
      return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
    }
  };

  bool is_old(const Ratios& ratios) const { return added_ - ratios.added > kLately; }

  std::map<std::int64_t, Ratios> sizes_;
  std::int64_t added_ = 0;
  double latest_ = 1;
};

}  // namespace ridgeline::engine
