#pragma once
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace ridgeline::engine {

using HostBlockId = std::int32_t;

/// Blocks in host memory that preempted sequences wait in. The lowest are taken first, so that
/// what is copied together mostly lies together.
class HostPool {
 public:
  explicit HostPool(std::int64_t size) {
    for (HostBlockId block = 0; block < size; ++block) free_.push(block);
  }

  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }

  /// Requires: count <= num_free().
  std::vector<HostBlockId> take(std::int64_t count) {
    std::vector<HostBlockId> blocks;
    for (; count > 0; --count) {
      blocks.push_back(free_.top());
      free_.pop();
    }
    return blocks;
  }

  void give_back(std::vector<HostBlockId>& blocks) {
    for (const HostBlockId block : blocks) free_.push(block);
    blocks.clear();
  }

 private:
  std::priority_queue<HostBlockId, std::vector<HostBlockId>, std::greater<>> free_;
};

}  // namespace ridgeline::engine
