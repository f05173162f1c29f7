// Scheduler::schedule: who gets how many tokens of a step.
#include <algorithm>
#include <stdexcept>

#include "common/check.h"
#include "engine/scheduler.h"

namespace ridgeline::engine {
namespace {

// A request whose prefix is in flight lets others pass, as it waits for one step only. A step
// looks past at most this many, so that its cost does not grow with the queue.
constexpr int kMaxPassed = 16;

}  // namespace

std::shared_ptr<const Batch> Scheduler::schedule() {
  check(in_flight_.size() < 2, "two batches are in flight: commit or discard one first");
  Plan plan{.budget = config_.max_num_batched_tokens};
  plan_running(plan, /*decode=*/true);
  plan_running(plan, /*decode=*/false);

  Step step{.batch = std::make_shared<Batch>(), .first_prefix = blocks_.next_prefix_id()};
  for (const auto& [seq, count] : plan.entries) emit(step, *seq, count);
  if (!plan.preempted) admit_waiting(plan, step);
  step.batch->shared_blocks = shared_blocks(step);
  // Ghosts leave last: their rows of the device's table are in use until the step has run.
  for (const Member& member : step.members)
    if (member.seq->ghost && member.seq->unborn.empty()) release(*member.seq);
  if (step.members.empty()) return nullptr;

  step.batch->copies = blocks_.take_copies();
  step.batch->step = steps_++;
  in_flight_.push_back(std::move(step));
  return in_flight_.back().batch;
}

// ---- The running -------------------------------------------------------------------------------

void Scheduler::plan_running(Plan& plan, bool decode) {
  // Preemption takes from the end, so an index stays valid as running_ shrinks.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& seq = *running_[i];
    const std::int32_t wanted = seq.length() - seq.computed;
    // At its limit a sequence waits for the commit that ends it.
    if ((wanted == 1) != decode || seq.length() >= seq.limit) continue;
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(wanted, plan.budget));
    if (count == 0) {
      log(seq.id, Reason::kHeldTokens, wanted, 0);
      continue;
    }
    if (!make_room(plan, seq, count)) break;
    plan.entries.push_back({&seq, count});
    plan.budget -= count;
    if (count < wanted) log(seq.id, Reason::kChunked, count, wanted - count);
  }
}

/// Gets the blocks for the sequence's next tokens from those after it, or preempts itself.
bool Scheduler::make_room(Plan& plan, Sequence& seq, std::int32_t count) {
  while (!blocks_.prepare_write(seq.table, seq.computed, seq.computed + count)) {
    Sequence& last = *running_.back();
    preempt(plan, last);
    if (&last == &seq) return false;
  }
  return true;
}

void Scheduler::preempt(Plan& plan, Sequence& seq) {
  std::erase_if(plan.entries, [&](const Planned& entry) { return entry.seq == &seq; });
  plan.preempted = true;
  ++preemptions_;
  requeue(seq);
}

void Scheduler::requeue(Sequence& seq) {
  log(seq.id, Reason::kPreempted, static_cast<std::int64_t>(blocks_.blocks(seq.table).size()),
      seq.computed);
  blocks_.close(seq.table);
  std::erase(running_, &seq);
  seq.table = -1;
  seq.computed = 0;
  seq.synced = 0;
  seq.state = SeqState::kWaiting;
  waiting_.insert(&seq);
}

// ---- The waiting -------------------------------------------------------------------------------

void Scheduler::admit_waiting(Plan& plan, Step& step) {
  int passed = 0;
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    Sequence& seq = **next++;
    if (plan.budget == 0) return log(seq.id, Reason::kHeldTokens, seq.length(), 0);
    const auto places = static_cast<std::int64_t>(1 + seq.unborn.size());
    // The running need none for children: a prompt still in chunks has used up the budget.
    if (const std::int64_t left = blocks_.num_tables_left(); places > left)
      return log(seq.id, Reason::kHeldSequences, places, left);
    const PrefixMatch match = match_prefix(seq);
    if (prefix_in_flight(step, seq, match)) {
      if (++passed == kMaxPassed) return;
    } else if (!admit(plan, step, seq, match)) {
      return;
    }
  }
}

bool Scheduler::admit(Plan& plan, Step& step, Sequence& seq, const PrefixMatch& match) {
  const auto matched = static_cast<std::int32_t>(match.blocks.size());
  const std::int64_t wanted = blocks_.blocks_for(seq.length()) - matched;
  const std::int64_t available = blocks_.available() - match.unowned - blocks_spoken_for();
  if (!running_.empty() && wanted > available) {
    log(seq.id, Reason::kHeldBlocks, wanted, std::max(available, std::int64_t{0}));
    return false;
  }
  const std::int32_t hit = matched * blocks_.block_size();
  const std::int32_t left = seq.length() - hit;
  const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(left, plan.budget));
  seq.table = blocks_.open(seq.chain.tenant);
  blocks_.adopt(seq.table, match);
  if (!blocks_.prepare_write(seq.table, hit, hit + count))
    throw std::logic_error("an admitted sequence lacks blocks");
  seq.computed = hit;
  seq.state = SeqState::kRunning;
  waiting_.erase(&seq);
  running_.insert(std::ranges::upper_bound(running_, &seq, ByOrder{}), &seq);

  log(seq.id, Reason::kAdmitted, count, hit);
  count_prefix(seq, match);
  if (count < left) log(seq.id, Reason::kChunked, count, left - count);
  plan.budget -= count;
  emit(step, seq, count);
  return true;
}

/// The prefix that spares work: at least the last token is computed, for its logits.
PrefixMatch Scheduler::match_prefix(Sequence& seq) const {
  if (seq.wants_prompt_rows()) return {};
  return blocks_.match(seq.chain, Tokens(seq.tokens).first(seq.tokens.size() - 1));
}

bool Scheduler::prefix_in_flight(const Step& step, const Sequence& seq, const PrefixMatch& match) {
  for (std::size_t i = 0; i < match.blocks.size(); ++i)
    if (blocks_.prefix_id(match.blocks[i]) >= step.first_prefix) {
      log(seq.id, Reason::kHeldPrefixInFlight, static_cast<std::int64_t>(i), match.blocks[i]);
      return true;
    }
  return false;
}

void Scheduler::count_prefix(const Sequence& seq, const PrefixMatch& match) {
  if (!config_.enable_prefix_caching || seq.wants_prompt_rows()) return;
  const auto matched = static_cast<std::int64_t>(match.blocks.size());
  const std::int64_t full = (seq.known() - 1) / blocks_.block_size();
  prefix_query_tokens_ += seq.known();
  prefix_hit_tokens_ += matched * blocks_.block_size();
  if (full == 0) {
    log(seq.id, Reason::kPrefixShort, seq.known(), blocks_.block_size());
  } else if (matched < full) {
    log(seq.id, match.next_evicted ? Reason::kPrefixEvicted : Reason::kPrefixDiffers, matched,
        full);
  }
}

/// Blocks that the running will want soon, for as many tokens more as a block holds: so that an
/// admission is not followed by a preemption at once.
std::int64_t Scheduler::blocks_spoken_for() const {
  std::int64_t blocks = 0;
  for (const Sequence* seq : running_) {
    const std::int64_t soon = std::min(seq->length() + blocks_.block_size(), seq->limit - 1);
    blocks += blocks_.blocks_for(soon) - blocks_.blocks_for(seq->computed);
  }
  return blocks;
}

}  // namespace ridgeline::engine
