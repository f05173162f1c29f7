#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace ridgeline::engine {

/// Why the scheduler did what it did; the numbers a and b of the Decision in brackets.
enum class Reason : std::uint8_t {
  kAdmitted,            // tokens scheduled, tokens found in the prefix cache
  kChunked,             // tokens scheduled, tokens left for later steps: by the budget of tokens
  kChunkedLatency,      // the same, by the latency target
  kHeldTokens,          // tokens wanted, budget left
  kHeldLatency,         // tokens wanted, tokens that the latency target allows
  kHeldBlocks,          // blocks wanted, blocks available
  kHeldSequences,       // sequences wanted, places left
  kHeldPrefixInFlight,  // block index, the block that this step computes
  kPreempted,           // blocks given back, tokens to compute again
  kSwappedOut,          // blocks copied to the host, tokens kept there
  kSwappedIn,           // blocks copied back, tokens kept
  kEvicted,             // cached blocks that it took from the prefix cache, cached blocks left
  kPrefixDiffers,       // first differing block index, full blocks looked for
  kPrefixEvicted,       // first missing block index, full blocks looked for
  kPrefixShort,         // tokens, block size: no full block ahead of the last token
  kForked,              // the parent's id, blocks shared
  kFinished,            // output tokens, FinishReason
};

struct Decision {
  std::int64_t index, step;
  std::int32_t seq_id;
  Reason reason;
  std::int64_t a, b;
};

/// The last `capacity` decisions, numbered from 0 since the start.
class DecisionLog {
 public:
  explicit DecisionLog(std::size_t capacity) : ring_(capacity) {}

  void add(std::int64_t step, std::int32_t seq_id, Reason reason, std::int64_t a, std::int64_t b) {
    ring_[static_cast<std::size_t>(count_) % ring_.size()] = {count_, step, seq_id, reason, a, b};
    ++count_;
  }

  /// Those kept with index >= since, oldest first.
  std::vector<Decision> since(std::int64_t since) const {
    const std::int64_t oldest = count_ - static_cast<std::int64_t>(ring_.size());
    std::vector<Decision> decisions;
    for (std::int64_t i = std::max({since, oldest, std::int64_t{0}}); i < count_; ++i)
      decisions.push_back(ring_[static_cast<std::size_t>(i) % ring_.size()]);
    return decisions;
  }

 private:
  std::vector<Decision> ring_;
  std::int64_t count_ = 0;
};

}  // namespace ridgeline::engine
