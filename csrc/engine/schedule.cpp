// Scheduler::schedule: who gets how many tokens of a step.
#include <algorithm>
#include <ranges>
#include <stdexcept>

#include "common/check.h"
#include "engine/scheduler.h"

namespace ridgeline::engine {
namespace {

// A request whose prefix is in flight lets others pass, as it waits for one step only. A step
// looks past at most this many, so that its cost does not grow with the queue.
constexpr int kMaxPassed = 16;

// Under a latency target a step computes at least so much of one prompt: however slow the steps
// are, prompts advance.
constexpr std::int32_t kLeastChunk = 16;

}  // namespace

std::shared_ptr<const Batch> Scheduler::schedule(std::int64_t now,
                                                 std::span<const std::int64_t> only) {
  check(in_flight_.size() < 2, "two batches are in flight: commit or discard one first");
  expire(now);
  Plan plan{.budget = config_.max_num_batched_tokens, .only = only};
  plan_running(plan, /*decode=*/true);
  plan.decodes = plan.tokens;
  plan_running(plan, /*decode=*/false);

  Step step{.batch = std::make_shared<Batch>(), .first_prefix = blocks_.next_prefix_id()};
  for (const auto& [seq, count] : plan.entries) emit(step, *seq, count);
  if (!plan.preempted) admit_waiting(plan, step);
  step.batch->shared_blocks = shared_blocks(step);
  // Ghosts leave last: their rows of the device's table are in use until the step has run.
  for (const Member& member : step.members)
    if (member.seq->ghost && member.seq->unborn.empty()) release(*member.seq);
  if (step.members.empty()) return nullptr;

  Batch& batch = *step.batch;
  emit_swap_outs(step);
  batch.copies = blocks_.take_copies();
  const StepCost& cost = config_.cost;
  const double products = cost.products_us(batch.num_tokens(), batch.num_rows());
  batch.read_us = cost.fixed_us + step.attention.read;
  batch.compute_us = products + step.attention.compute;
  const std::int64_t tokens = batch.num_tokens(), rows = batch.num_rows();
  if (batch.max_q > 1) batch.padded_tokens = cost.size_of(tokens, batch.num_seqs(), rows);
  batch.predicted_us =
      cost.step_us(std::max(tokens, batch.padded_tokens), rows, step.attention.bound);
  batch.step = steps_++;
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
    if ((wanted == 1) != decode || seq.length() >= seq.limit || plan.excludes(seq)) continue;
    const std::int32_t count = chunk(plan, seq, seq.computed, wanted);
    if (count < wanted) log_chunk(plan, seq.id, count, wanted);
    if (count == 0) continue;
    if (!make_room(plan, seq, count)) break;
    plan.entries.push_back({&seq, count});
    count_planned(plan, seq, seq.computed, count);
  }
}

/// How many of the wanted tokens from `start` on the step takes.
std::int32_t Scheduler::chunk(const Plan& plan, const Sequence& seq, std::int32_t start,
                              std::int32_t wanted) const {
  const auto most = static_cast<std::int32_t>(std::min<std::int64_t>(wanted, plan.budget));
  if (config_.latency_target_us == 0 || plan.decodes == 0) return most;
  const StepCost& cost = config_.cost;
  const auto fits = [&](std::int32_t count) {
    const double attention =
        plan.attention_us + cost.attention_time(start, start + count).bound;
    const std::int64_t rows = plan.rows + seq.rows_of_step(start + count);
    const std::int64_t tokens = plan.tokens + count;
    const std::int64_t size = cost.size_of(tokens, plan.seqs + 1, rows);
    return time_scale_.of(size) * cost.step_us(std::max(tokens, size), rows, attention) <=
           static_cast<double>(config_.latency_target_us);
  };
  // With its last token a prompt brings rows, maybe more than a padded step has: then all fit, and
  // some fewer do not.
  if (most > 0 && fits(most)) return most;
  // A larger size may be the faster one, for each has its scale: the largest of which some fits.
  std::int32_t fitting = 0;
  for (std::int32_t end = most; fitting == 0 && end > 0;) {
    const auto size = std::ranges::lower_bound(cost.sizes, plan.tokens + end);
    const std::int64_t smaller = size == cost.sizes.begin() ? 0 : *std::prev(size);
    const auto begin = static_cast<std::int32_t>(std::max<std::int64_t>(smaller - plan.tokens, 0));
    const auto counts = std::views::iota(begin + 1, end + 1);
    const auto fit = std::ranges::partition_point(counts, fits) - counts.begin();
    if (fit > 0) fitting = begin + static_cast<std::int32_t>(fit);
    end = begin;
  }
  const bool first = plan.tokens == plan.decodes;
  return std::max(fitting, first ? std::min(most, kLeastChunk) : 0);
}

void Scheduler::log_chunk(const Plan& plan, SeqId seq_id, std::int32_t count,
                          std::int32_t wanted) {
  const bool by_budget = count == plan.budget;
  if (count == 0)
    log(seq_id, by_budget ? Reason::kHeldTokens : Reason::kHeldLatency, wanted, 0);
  else
    log(seq_id, by_budget ? Reason::kChunked : Reason::kChunkedLatency, count, wanted - count);
}

void Scheduler::count_planned(Plan& plan, const Sequence& seq, std::int32_t start,
                              std::int32_t count) const {
  plan.budget -= count;
  plan.tokens += count;
  plan.rows += seq.rows_of_step(start + count);
  ++plan.seqs;
  if (config_.latency_target_us > 0)
    plan.attention_us += config_.cost.attention_time(start, start + count).bound;
}

/// Gets the blocks for the sequence's next tokens from those after it, or preempts itself.
bool Scheduler::make_room(Plan& plan, Sequence& seq, std::int32_t count) {
  const std::int64_t evictions = blocks_.evictions();
  while (!blocks_.prepare_write(seq.table, seq.computed, seq.computed + count)) {
    Sequence& last = *running_.back();
    preempt(plan, last);
    if (&last == &seq) return false;
  }
  log_evictions(seq.id, evictions);
  return true;
}

// ---- The waiting -------------------------------------------------------------------------------

void Scheduler::admit_waiting(Plan& plan, Step& step) {
  int passed = 0;
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    Sequence& seq = **next++;
    if (plan.excludes(seq)) continue;
    if (plan.budget == 0) return log(seq.id, Reason::kHeldTokens, seq.length(), 0);
    const auto places = static_cast<std::int64_t>(1 + seq.unborn.size());
    if (const std::int64_t left = places_left(); places > left)
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
  const std::int32_t kept = std::max(hit, seq.saved), left = seq.length() - kept;
  const std::int32_t count = chunk(plan, seq, kept, left);
  if (count == 0) {
    log_chunk(plan, seq.id, 0, left);
    return false;
  }
  const std::int64_t evictions = blocks_.evictions();
  seq.table = blocks_.open(seq.chain.tenant);
  blocks_.adopt(seq.table, match);
  if (!blocks_.prepare_write(seq.table, hit, kept + count))
    throw std::logic_error("an admitted sequence lacks blocks");
  seq.computed = kept;
  seq.state = SeqState::kRunning;
  waiting_.erase(&seq);
  running_.insert(std::ranges::upper_bound(running_, &seq, ByOrder{}), &seq);

  log(seq.id, Reason::kAdmitted, count, hit);
  if (seq.saved > 0) swap_in(step, seq, matched);
  log_evictions(seq.id, evictions);
  count_prefix(seq, match);
  if (count < left) log_chunk(plan, seq.id, count, left);
  count_planned(plan, seq, kept, count);
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

/// Those that children of running prompts will take are taken.
std::int64_t Scheduler::places_left() const {
  std::int64_t left = blocks_.num_tables_left();
  for (const Sequence* seq : running_) left -= static_cast<std::int64_t>(seq->unborn.size());
  return left;
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
