// Scheduler: the arrays of a step, from the tokens each sequence was given.
#include <algorithm>
#include <cstring>

#include "engine/scheduler.h"

namespace ridgeline::engine {

void Scheduler::emit(Step& step, Sequence& seq, std::int32_t count) {
  const std::int32_t start = seq.computed, end = start + count;
  step.attention += config_.cost.attention_time(start, end);
  emit_tokens(*step.batch, seq, count);
  emit_table(*step.batch, seq);
  seq.computed = end;
  step.members.push_back({.seq = &seq, .end = end});
  hold(step, seq);
  blocks_.register_full(seq.table, seq.chain, Tokens(seq.tokens).first(std::min(end, seq.known())));
  emit_prompt_rows(step, seq, start, end);
  if (end == seq.length()) emit_sample(step, seq);
}

void Scheduler::emit_tokens(Batch& batch, const Sequence& seq, std::int32_t count) {
  const std::vector<BlockId>& table = blocks_.blocks(seq.table);
  const std::int32_t start = seq.computed, end = start + count, size = blocks_.block_size();
  for (std::int32_t position = start; position < end; ++position) {
    batch.input_ids.push_back(position < seq.known() ? seq.tokens[position] : -1 - seq.last_row);
    batch.positions.push_back(position);
    batch.slots.push_back(table[position / size] * size + position % size);
  }
  batch.seq_ids.push_back(seq.id);
  batch.seq_lens.push_back(end);
  batch.cu_q.push_back(batch.num_tokens());
  batch.table_rows.push_back(seq.table);
  batch.max_q = std::max(batch.max_q, count);
  batch.num_decode_tokens += count == 1 && start >= seq.prompt_length;
}

/// What the device's row of the block table lacks: new blocks, and the last one it has if a copy
/// replaced that.
void Scheduler::emit_table(Batch& batch, Sequence& seq) {
  const std::vector<BlockId>& table = blocks_.blocks(seq.table);
  if (seq.synced > 0 && table[seq.synced - 1] != seq.synced_last) --seq.synced;
  for (; seq.synced < static_cast<std::int32_t>(table.size()); ++seq.synced)
    batch.table_updates.insert(batch.table_updates.end(),
                               {seq.table, seq.synced, table[seq.synced]});
  seq.synced_last = table.back();
}

/// The logits at a prompt position are those of the next prompt token; each is computed once.
void Scheduler::emit_prompt_rows(Step& step, Sequence& seq, std::int32_t start, std::int32_t end) {
  const std::int32_t first_token = step.batch->num_tokens() - (end - start);
  while (seq.wants_prompt_rows() && seq.prompt_rows < end) {
    const std::int32_t position = seq.prompt_rows++;
    add_row(step, seq, first_token + position - start, position + 1, /*sample=*/false);
  }
}

void Scheduler::emit_sample(Step& step, Sequence& seq) {
  const std::int32_t token = step.batch->num_tokens() - 1;
  const std::vector<Sequence*> children = seq.unborn;
  fork_children(step, seq);
  if (!seq.ghost) add_row(step, seq, token, seq.computed, /*sample=*/true);
  for (Sequence* child : children) add_row(step, *child, token, child->computed, /*sample=*/true);
}

void Scheduler::fork_children(Step& step, Sequence& parent) {
  for (Sequence* child : parent.unborn) {
    const SeqId id = child->id;
    const std::int64_t arrival = child->arrival;
    *child = parent;
    child->id = id;
    child->arrival = arrival;
    child->ghost = false;
    child->unborn.clear();
    child->in_flight = 0;
    child->synced = 0;
    child->prompt_logprobs = false;  // the prompt's rows are the parent's
    child->table = blocks_.fork(parent.table);
    running_.insert(std::ranges::upper_bound(running_, child, ByOrder{}), child);
    hold(step, *child);
    log(id, Reason::kForked, parent.id,
        static_cast<std::int64_t>(blocks_.blocks(parent.table).size()));
  }
  parent.unborn.clear();
}

void Scheduler::add_row(Step& step, Sequence& seq, std::int32_t token, std::int32_t position,
                        bool sample) {
  Batch& batch = *step.batch;
  if (sample) {
    seq.last_row = batch.num_rows();
    ++seq.pending;
  }
  batch.logits_rows.push_back(token);
  batch.row_positions.push_back(position);
  batch.row_seq_ids.push_back(seq.id);
  step.rows.push_back({.seq = &seq, .sample = sample});
}

void Scheduler::hold(Step& step, Sequence& seq) {
  step.held.push_back(&seq);
  ++seq.in_flight;
}

/// A table is compared as a whole first: among sequences of one long prefix nearly all are equal,
/// and memcmp takes 20 ns for 128 blocks.
std::int32_t Scheduler::shared_blocks(const Step& step) const {
  if (step.members.size() < 2) return 0;
  const std::vector<BlockId>& first = blocks_.blocks(step.members[0].seq->table);
  std::size_t shared = first.size();
  for (const Member& member : step.members) {
    const std::vector<BlockId>& table = blocks_.blocks(member.seq->table);
    shared = std::min(shared, table.size());
    if (std::memcmp(first.data(), table.data(), shared * sizeof(BlockId)) == 0) continue;
    const auto end = first.begin() + static_cast<std::ptrdiff_t>(shared);
    shared = static_cast<std::size_t>(
        std::mismatch(first.begin(), end, table.begin()).first - first.begin());
    if (shared == 0) return 0;
  }
  return static_cast<std::int32_t>(shared);
}

}  // namespace ridgeline::engine
