// Scheduler: preemption, by computing again later or by waiting in host memory.
#include <algorithm>

#include "engine/scheduler.h"

namespace ridgeline::engine {

void Scheduler::preempt(Plan& plan, Sequence& seq) {
  std::erase_if(plan.entries, [&](const Planned& entry) { return entry.seq == &seq; });
  plan.preempted = true;
  ++preemptions_;
  if (swapping_pays(seq)) {
    swap_out(seq);
    requeue(seq);
  } else {
    log(seq.id, Reason::kPreempted, static_cast<std::int64_t>(blocks_.blocks(seq.table).size()),
        seq.computed);
    requeue(seq);
  }
}

void Scheduler::requeue(Sequence& seq) {
  blocks_.close(seq.table);
  std::erase(running_, &seq);
  seq.table = -1;
  seq.computed = 0;
  seq.synced = 0;
  seq.state = SeqState::kWaiting;
  waiting_.insert(&seq);
}

bool Scheduler::swapping_pays(const Sequence& seq) const {
  const StepCost& cost = config_.cost;
  const std::int64_t blocks = blocks_.blocks_for(seq.computed);
  // What a copy is still owed into is not there yet.
  if (blocks > host_.num_free() || blocks_.awaits_copy(seq.table)) return false;
  const double again =
      cost.step_us(seq.computed, 0, cost.attention_time(0, seq.computed).bound);
  return 2 * cost.swap_us * static_cast<double>(blocks) < again;
}

void Scheduler::swap_out(Sequence& seq) {
  const std::int32_t count = blocks_.blocks_for(seq.computed);
  seq.saved = seq.computed;
  seq.host = host_.take(count);
  for (std::int32_t i = 0; i < count; ++i)
    swap_outs_.push_back({.seq = &seq, .block = blocks_.blocks(seq.table)[i], .host = seq.host[i]});
  ++swaps_;
  log(seq.id, Reason::kSwappedOut, count, seq.saved);
}

/// The blocks behind the `matched` ones, which the prefix cache has, come back from the host.
void Scheduler::swap_in(Step& step, Sequence& seq, std::int32_t matched) {
  const std::vector<BlockId>& table = blocks_.blocks(seq.table);
  const auto count = static_cast<std::int32_t>(seq.host.size());
  for (std::int32_t i = matched; i < count; ++i)
    step.batch->swap_ins.push_back({.source = seq.host[i], .destination = table[i]});
  log(seq.id, Reason::kSwappedIn, std::max(count - matched, 0), seq.saved);
  host_.give_back(seq.host);
  seq.saved = 0;
}

void Scheduler::forget_saved(Sequence& seq) {
  std::erase_if(swap_outs_, [&](const SwapOut& out) { return out.seq == &seq; });
  host_.give_back(seq.host);
  seq.saved = 0;
}

/// What was swapped out since the last batch is copied before this one writes anything.
void Scheduler::emit_swap_outs(Step& step) {
  for (const auto& [seq, block, host] : swap_outs_) {
    step.batch->swap_outs.push_back({.source = block, .destination = host});
    if (step.held.empty() || step.held.back() != seq) hold(step, *seq);
  }
  swap_outs_.clear();
}

}  // namespace ridgeline::engine
