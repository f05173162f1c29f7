// Scheduler::commit and discard: what becomes of a step that was run, or was not.
#include <algorithm>

#include "common/check.h"
#include "engine/scheduler.h"

namespace ridgeline::engine {

void Scheduler::check_commit(const Batch& batch, std::span<const std::int64_t> tokens) const {
  check(!in_flight_.empty(), "commit of step ", batch.step, ": no batch is in flight");
  const Step& oldest = in_flight_.front();
  check(oldest.batch.get() == &batch, "commit of step ", batch.step,
        ": the oldest batch in flight is that of step ", oldest.batch->step);
  check(tokens.size() == oldest.rows.size(), "tokens must have one id for each of the ",
        oldest.rows.size(), " logits rows of step ", batch.step, ", got ", tokens.size());
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    const auto& [seq, sample] = oldest.rows[row];
    if (sample && seq->state != SeqState::kFinished)
      check(0 <= tokens[row] && tokens[row] < config_.vocab_size, "tokens[", row, "] (sequence ",
            seq->id, ") is ", tokens[row], ", expected 0 <= id < ", config_.vocab_size,
            " (vocab_size)");
  }
}

std::vector<Output> Scheduler::commit(const Batch& batch, std::span<const std::int64_t> tokens) {
  check_commit(batch, tokens);
  const Step step = std::move(in_flight_.front());
  in_flight_.pop_front();

  std::vector<Output> outputs;
  for (std::size_t r = 0; r < step.rows.size(); ++r) {
    const auto& [seq, sample] = step.rows[r];
    if (!sample) {
      seq->prompt_rows_committed = batch.row_positions[r];
      continue;
    }
    --seq->pending;
    if (seq->state == SeqState::kFinished) continue;
    const auto token = static_cast<std::int32_t>(tokens[r]);
    seq->tokens.push_back(token);
    outputs.push_back({.seq_id = seq->id, .token = token, .row = static_cast<std::int32_t>(r),
                       .finish_reason = finish_reason(*seq)});
  }
  for (const auto& [seq, end] : step.members)
    if (seq->state == SeqState::kRunning)
      blocks_.register_full(seq->table, seq->chain, Tokens(seq->tokens).first(end));
  // After the registrations, so that what the finished computed stays cached.
  for (const Output& output : outputs)
    if (output.finish_reason) end(sequences_.at(output.seq_id), *output.finish_reason);
  for (Sequence* seq : step.held) let_go(*seq);
  return outputs;
}

std::optional<FinishReason> Scheduler::finish_reason(const Sequence& seq) const {
  if (seq.known() >= seq.min_length && seq.stops_at(seq.tokens.back())) return FinishReason::kStop;
  if (seq.known() >= seq.limit) return FinishReason::kLength;
  return std::nullopt;
}

void Scheduler::discard() {
  if (in_flight_.empty()) return;
  // No device wrote what these steps registered.
  blocks_.unregister_since(in_flight_.front().first_prefix);
  while (!in_flight_.empty()) {
    const Step step = std::move(in_flight_.front());
    in_flight_.pop_front();
    for (Sequence* seq : step.held) {
      seq->pending = 0;
      seq->prompt_rows = seq->prompt_rows_committed;
      forget_saved(*seq);  // or what was saved depends on these steps
      if (seq->state == SeqState::kRunning) {
        log(seq->id, Reason::kPreempted,
            static_cast<std::int64_t>(blocks_.blocks(seq->table).size()), seq->computed);
        requeue(*seq);
      }
      let_go(*seq);
    }
  }
}

}  // namespace ridgeline::engine
