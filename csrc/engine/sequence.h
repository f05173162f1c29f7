#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/block_manager.h"
#include "engine/host_pool.h"

namespace ridgeline::engine {

using SeqId = std::int32_t;

enum class FinishReason : std::uint8_t { kStop, kLength, kAbort, kDeadline };

// The order of service is that of due times, in microseconds of the caller's clock: arrival, plus a
// patience that all have, plus the priority in units of ten seconds; but no later than the
// deadline. Who arrives after a request's due time cannot overtake it, so nobody starves unless
// priorities below -6 keep coming.
inline constexpr std::int64_t kPatience = 60'000'000, kPriorityUnit = 10'000'000;
inline constexpr std::int64_t kNoDeadline = std::numeric_limits<std::int64_t>::max();

/// A prompt and the sequences that continue it, as the user gives them: checked by Scheduler::add.
struct Request {
  std::vector<std::int64_t> seq_ids = {};  // n of them; the caller's names
  std::vector<std::int64_t> prompt = {};
  std::int64_t max_tokens = 0;
  std::int64_t min_tokens = 0;
  std::vector<std::int64_t> stop_token_ids = {};
  bool ignore_eos = false;
  std::int64_t priority = 0;  // smaller runs earlier
  std::int64_t now = 0;       // microseconds; never falls from request to request
  std::int64_t deadline = kNoDeadline;  // on the same clock
  std::string tenant = {};
  bool prompt_logprobs = false;
};

enum class SeqState : std::uint8_t { kUnborn, kWaiting, kRunning, kFinished };

/// One sequence of tokens. Its life: (unborn until its parent's prompt is computed) -> waiting ->
/// running -> finished, and back from running to waiting when preempted.
struct Sequence {
  SeqId id = -1;
  SeqState state = SeqState::kWaiting;
  std::int64_t due = 0, arrival = 0;  // the order of the queue; arrival is unique
  std::int64_t deadline = kNoDeadline;

  std::vector<std::int32_t> tokens;  // the prompt, then the outputs committed
  std::int32_t prompt_length = 0;
  std::int32_t limit = 0;    // the length at which it ends
  std::int32_t min_length = 0;  // the length below which no stop token counts
  std::vector<std::int32_t> stop_tokens;  // sorted
  HashChain chain;

  // What is scheduled, whether or not it has run.
  std::int32_t computed = 0;   // tokens with a key and value in the cache
  std::int32_t pending = 0;    // samples in flight: tokens that exist on the device only
  std::int32_t last_row = -1;  // the row of the last batch that samples the pending token
  std::int32_t in_flight = 0;  // batches that hold rows or tokens of it

  TableId table = -1;             // while running; also its row of the device's table tensor
  std::int32_t synced = 0;        // blocks of the table that the device's row has
  BlockId synced_last = -1;       // the last of them: the only one that may be replaced

  // While it waits, preempted: the tokens whose keys and values are in host memory, and where.
  std::int32_t saved = 0;
  std::vector<HostBlockId> host;

  bool prompt_logprobs = false;
  std::int32_t prompt_rows = 0;            // prompt positions with a logits row scheduled
  std::int32_t prompt_rows_committed = 0;

  // n > 1: the prompt is computed once, by the first sequence.
  Sequence* parent = nullptr;     // while unborn
  std::vector<Sequence*> unborn;
  bool ghost = false;  // finished for the user; computes the prompt for its unborn children

  std::int32_t known() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t length() const { return known() + pending; }
  std::int32_t outputs() const { return known() - prompt_length; }
  bool wants_prompt_rows() const { return prompt_logprobs && prompt_rows < prompt_length - 1; }
  /// Logits rows of a step that computes the tokens up to `end`: of prompt positions that lack
  /// one, and of outputs, those of unborn children too.
  std::int64_t rows_of_step(std::int32_t end) const {
    const std::int32_t last = wants_prompt_rows() ? std::min(end, prompt_length - 1) : 0;
    const auto outputs = (ghost ? 0 : 1) + static_cast<std::int64_t>(unborn.size());
    return std::max(last - prompt_rows, 0) + (end == length() ? outputs : 0);
  }
  bool stops_at(std::int32_t token) const {
    return std::ranges::binary_search(stop_tokens, token);
  }
};

/// The order of service: due time, then arrival.
struct ByOrder {
  bool operator()(const Sequence* a, const Sequence* b) const {
    return a->due != b->due ? a->due < b->due : a->arrival < b->arrival;
  }
};

}  // namespace ridgeline::engine
