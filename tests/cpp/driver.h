#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/scheduler.h"

namespace ridgeline::testing {

/// A scheduler whose every sample is the token 5, unless told otherwise, and what came of it.
class Driver {
 public:
  static constexpr std::int64_t kToken = 5;

  explicit Driver(const engine::SchedulerConfig& config) : scheduler(config) {}

  void add(std::vector<std::int64_t> seq_ids, std::vector<std::int64_t> prompt,
           std::int64_t max_tokens, std::int64_t priority = 0) {
    scheduler.add({.seq_ids = std::move(seq_ids), .prompt = std::move(prompt),
                   .max_tokens = max_tokens, .priority = priority});
  }

  void commit(const engine::Batch& batch, std::int64_t token = kToken) {
    const std::vector<std::int64_t> tokens(static_cast<std::size_t>(batch.num_rows()), token);
    for (const engine::Output& output : scheduler.commit(batch, tokens)) {
      outputs[output.seq_id].push_back(output.token);
      if (output.finish_reason) finished[output.seq_id] = *output.finish_reason;
    }
    scheduler.check_invariants();
  }

  /// One whole step; null if there was nothing to do.
  std::shared_ptr<const engine::Batch> step(std::int64_t token = kToken) {
    auto batch = scheduler.schedule();
    if (batch) commit(*batch, token);
    return batch;
  }

  /// Steps until nothing is left; how many it took.
  int drain() {
    int steps = 0;
    while (step()) ++steps;
    return steps;
  }

  /// The first decision of this reason about this sequence.
  std::optional<engine::Decision> decision(engine::SeqId seq_id, engine::Reason reason) const {
    for (const engine::Decision& decision : scheduler.decisions(0))
      if (decision.seq_id == seq_id && decision.reason == reason) return decision;
    return std::nullopt;
  }

  /// Whether there is one, with these numbers.
  bool decided(engine::SeqId seq_id, engine::Reason reason, std::int64_t a, std::int64_t b) const {
    for (const engine::Decision& d : scheduler.decisions(0))
      if (d.seq_id == seq_id && d.reason == reason && d.a == a && d.b == b) return true;
    return false;
  }

  engine::Scheduler scheduler;
  std::map<engine::SeqId, std::vector<std::int32_t>> outputs;
  std::map<engine::SeqId, engine::FinishReason> finished;
};

inline std::vector<std::int64_t> count_from(std::int64_t first, std::int64_t n) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < n; ++i) ids.push_back(first + i);
  return ids;
}

}  // namespace ridgeline::testing
