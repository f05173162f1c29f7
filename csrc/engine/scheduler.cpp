#include "engine/scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "common/check.h"

namespace ridgeline::engine {
namespace {

SchedulerConfig checked(const SchedulerConfig& config) {
  const auto positive = [](std::int64_t value, const char* name) {
    check(value > 0, name, " must be positive, got ", value);
    checked_int32(value, name);
  };
  positive(config.max_num_seqs, "max_num_seqs");
  positive(config.max_num_batched_tokens, "max_num_batched_tokens");
  positive(config.vocab_size, "vocab_size");
  positive(config.decision_log_size, "decision_log_size");
  checked_int32(config.max_model_len, "max_model_len");
  checked_int32(config.num_host_blocks, "num_host_blocks");
  check(config.num_host_blocks >= 0, "num_host_blocks must not be negative, got ",
        config.num_host_blocks);
  check(config.latency_target_us >= 0, "latency_target_us must not be negative, got ",
        config.latency_target_us);
  check(std::ranges::is_sorted(config.cost.sizes), "cost.sizes must ascend");
  check(config.max_model_len >= 2, "max_model_len must be at least 2, got ", config.max_model_len);
  check(config.max_num_batched_tokens >= config.max_num_seqs,
        "max_num_batched_tokens must be at least max_num_seqs (", config.max_num_seqs,
        "), so that each live sequence can have a token a step; got ",
        config.max_num_batched_tokens);
  for (const std::int64_t id : config.eos_token_ids)
    check(0 <= id && id < config.vocab_size, "eos_token_ids: expected 0 <= id < ",
          config.vocab_size, " (vocab_size), got ", id);
  return config;
}

void check_ids(std::span<const std::int64_t> ids, std::int64_t vocab_size, const char* name) {
  for (std::size_t i = 0; i < ids.size(); ++i)
    check(0 <= ids[i] && ids[i] < vocab_size, name, "[", i, "] is ", ids[i],
          ", expected 0 <= id < ", vocab_size, " (vocab_size)");
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(checked(config)),
      blocks_({.num_blocks = config.num_blocks,
               .block_size = config.block_size,
               .max_tables = config.max_num_seqs,
               .enable_prefix_caching = config.enable_prefix_caching,
               .seed = config.seed}),
      log_(static_cast<std::size_t>(config.decision_log_size)),
      host_(config.num_host_blocks) {}

// ---- Requests ----------------------------------------------------------------------------------

void Scheduler::check_request(const Request& request) const {
  const auto n = static_cast<std::int64_t>(request.seq_ids.size());
  check(n > 0, "seq_ids must name at least one sequence, got none");
  check(n <= config_.max_num_seqs, "a request may have at most ", config_.max_num_seqs,
        " sequences (max_num_seqs), got ", n);
  std::unordered_set<std::int64_t> ids;
  for (const std::int64_t id : request.seq_ids) {
    checked_int32(id, "seq_ids");
    check(ids.insert(id).second && !sequences_.contains(static_cast<SeqId>(id)), "sequence id ",
          id, " is in use");
  }
  const auto length = static_cast<std::int64_t>(request.prompt.size());
  check(length > 0, "prompt is empty, expected at least one token");
  check(length < config_.max_model_len, "prompt has ", length, " tokens, expected fewer than ",
        config_.max_model_len, " (max_model_len)");
  check_ids(request.prompt, config_.vocab_size, "prompt");
  check_ids(request.stop_token_ids, config_.vocab_size, "stop_token_ids");
  constexpr std::int64_t kMostPriority = 1'000'000;  // so that due times do not overflow
  check(std::abs(request.priority) <= kMostPriority, "priority must be from ", -kMostPriority,
        " to ", kMostPriority, ", got ", request.priority);
  check(request.max_tokens > 0, "max_tokens must be positive, got ", request.max_tokens);
  check(0 <= request.min_tokens && request.min_tokens <= request.max_tokens,
        "min_tokens must be from 0 to max_tokens (", request.max_tokens, "), got ",
        request.min_tokens);
  // The last token is sampled and never computed, so it needs no place.
  const std::int64_t outputs = std::min(request.max_tokens, config_.max_model_len - length);
  const std::int64_t needed = blocks_.blocks_for(length + outputs - 1);
  check(needed <= blocks_.num_blocks() - 1, "a prompt of ", length, " tokens with up to ", outputs,
        " outputs needs ", needed, " blocks of ", blocks_.block_size(), " tokens, the cache has ",
        blocks_.num_blocks() - 1);
}

void Scheduler::add(const Request& request) {
  check_request(request);
  Sequence first;
  first.due = std::min(request.now + kPatience + request.priority * kPriorityUnit,
                       request.deadline);
  first.deadline = request.deadline;
  first.tokens.assign(request.prompt.begin(), request.prompt.end());
  first.prompt_length = first.known();
  const std::int64_t room = config_.max_model_len - first.prompt_length;
  first.limit =
      first.prompt_length + static_cast<std::int32_t>(std::min(request.max_tokens, room));
  first.min_length =  // beyond the limit if min_tokens is beyond the room
      first.prompt_length + static_cast<std::int32_t>(std::min(request.min_tokens, room + 1));
  first.stop_tokens.assign(request.stop_token_ids.begin(), request.stop_token_ids.end());
  if (!request.ignore_eos)
    first.stop_tokens.insert(first.stop_tokens.end(), config_.eos_token_ids.begin(),
                             config_.eos_token_ids.end());
  std::ranges::sort(first.stop_tokens);
  first.chain = blocks_.chain(request.tenant);
  first.prompt_logprobs = request.prompt_logprobs;

  Sequence* parent = nullptr;
  for (const std::int64_t id : request.seq_ids) {
    Sequence& seq = sequences_[static_cast<SeqId>(id)];
    if (!parent) {
      seq = std::move(first);
      parent = &seq;
    } else {
      seq.state = SeqState::kUnborn;
      seq.parent = parent;
      parent->unborn.push_back(&seq);
    }
    seq.id = static_cast<SeqId>(id);
    seq.arrival = arrivals_++;
    seq.deadline = request.deadline;
    if (request.deadline != kNoDeadline) deadlines_.insert({request.deadline, seq.id});
  }
  waiting_.insert(parent);
}

const Sequence* Scheduler::find(std::int64_t seq_id) const {
  if (seq_id < 0 || seq_id > std::numeric_limits<SeqId>::max()) return nullptr;
  const auto found = sequences_.find(static_cast<SeqId>(seq_id));
  return found == sequences_.end() ? nullptr : &found->second;
}

const Sequence& Scheduler::unfinished(std::int64_t seq_id) const {
  const Sequence* seq = find(seq_id);
  check(seq && seq->state != SeqState::kFinished && !seq->ghost, "sequence id ", seq_id,
        " is unknown or finished");
  return *seq;
}

// ---- Ending ------------------------------------------------------------------------------------

void Scheduler::finish(std::int64_t seq_id, FinishReason reason) {
  Sequence& seq = sequences_.at(unfinished(seq_id).id);
  if (!seq.unborn.empty()) {  // its children still need the prompt
    seq.ghost = true;
    deadlines_.erase({seq.deadline, seq.id});
    log(seq.id, Reason::kFinished, seq.outputs(), static_cast<std::int64_t>(reason));
    return;
  }
  Sequence* const parent = seq.parent;
  if (parent) std::erase(parent->unborn, &seq);
  end(seq, reason);
  if (parent && parent->ghost && parent->unborn.empty()) release(*parent);
}

void Scheduler::end(Sequence& seq, FinishReason reason) {
  deadlines_.erase({seq.deadline, seq.id});
  log(seq.id, Reason::kFinished, seq.outputs(), static_cast<std::int64_t>(reason));
  release(seq);
}

void Scheduler::release(Sequence& seq) {
  if (seq.state == SeqState::kWaiting) waiting_.erase(&seq);
  forget_saved(seq);
  if (seq.state == SeqState::kRunning) {
    blocks_.close(seq.table);
    std::erase(running_, &seq);
  }
  seq.table = -1;
  seq.state = SeqState::kFinished;
  if (seq.in_flight == 0) sequences_.erase(seq.id);
}

void Scheduler::expire(std::int64_t now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const SeqId id = deadlines_.begin()->second;
    finish(id, FinishReason::kDeadline);
    expired_.push_back(id);
  }
}

void Scheduler::let_go(Sequence& seq) {
  if (--seq.in_flight == 0 && seq.state == SeqState::kFinished) sequences_.erase(seq.id);
}

// ---- Queries -----------------------------------------------------------------------------------

void Scheduler::log(SeqId seq_id, Reason reason, std::int64_t a, std::int64_t b) {
  log_.add(steps_, seq_id, reason, a, b);
}

void Scheduler::log_evictions(SeqId seq_id, std::int64_t before) {
  if (const std::int64_t evicted = blocks_.evictions() - before; evicted > 0)
    log(seq_id, Reason::kEvicted, evicted, blocks_.num_cached());
}

std::string_view Scheduler::state(std::int64_t seq_id) const {
  const Sequence* seq = find(seq_id);
  check(seq, "sequence id ", seq_id, " is unknown");
  if (seq->ghost || seq->state == SeqState::kFinished) return "finished";
  return seq->state == SeqState::kRunning ? "running" : "waiting";
}

std::vector<BlockId> Scheduler::block_table(std::int64_t seq_id) const {
  const Sequence& seq = unfinished(seq_id);
  return seq.table < 0 ? std::vector<BlockId>{} : blocks_.blocks(seq.table);
}

Stats Scheduler::stats() const {
  return {.total_blocks = blocks_.num_blocks() - 1,
          .free_blocks = blocks_.num_free(),
          .cached_blocks = blocks_.num_cached(),
          .used_blocks = blocks_.num_used(),
          .waiting = static_cast<std::int64_t>(waiting_.size()),
          .running = static_cast<std::int64_t>(running_.size()),
          .in_flight = num_in_flight(),
          .steps = steps_,
          .prefix_query_tokens = prefix_query_tokens_,
          .prefix_hit_tokens = prefix_hit_tokens_,
          .preemptions = preemptions_,
          .swaps = swaps_,
          .evictions = blocks_.evictions(),
          .copies = blocks_.copies()};
}

// ---- Invariants --------------------------------------------------------------------------------

namespace {

void require(bool holds, SeqId seq_id, const char* invariant) {
  if (!holds)
    throw std::logic_error("invariant broken at sequence " + std::to_string(seq_id) + ": " +
                           invariant);
}

}  // namespace

void Scheduler::check_invariants() const {
  blocks_.check_invariants();
  require(std::ranges::is_sorted(running_, ByOrder{}), -1, "the running are in order");
  require(running_.size() + blocks_.num_tables_left() == static_cast<std::size_t>(
              config_.max_num_seqs), -1, "each running sequence owns one table");
  std::size_t waiting = 0, running = 0, unborn = 0;
  std::int64_t host = host_.num_free();
  for (const auto& [id, seq] : sequences_) {
    check_sequence(seq);
    host += static_cast<std::int64_t>(seq.host.size());
    waiting += seq.state == SeqState::kWaiting;
    running += seq.state == SeqState::kRunning;
    unborn += seq.parent && seq.parent->state == SeqState::kRunning;
  }
  require(unborn <= static_cast<std::size_t>(blocks_.num_tables_left()), -1,
          "each child of a running prompt has a table to be born to");
  require(host == config_.num_host_blocks, -1, "host blocks are free or of one sequence");
  require(waiting == waiting_.size() && running == running_.size(), -1,
          "queue and running hold exactly the sequences in those states");
  std::unordered_map<const Sequence*, std::int32_t> holds;
  for (const Step& step : in_flight_)
    for (const Sequence* seq : step.held) ++holds[seq];
  for (const auto& [id, seq] : sequences_)
    require(seq.in_flight == holds[&seq], id, "in_flight counts the batches that hold it");
}

void Scheduler::check_sequence(const Sequence& seq) const {
  require((seq.table >= 0) == (seq.state == SeqState::kRunning), seq.id, "running = has a table");
  require(seq.state != SeqState::kFinished || seq.in_flight > 0, seq.id,
          "finished sequences are kept while in flight only");
  require((seq.state == SeqState::kUnborn) == (seq.parent != nullptr), seq.id,
          "unborn = has a parent");
  require(!seq.ghost || !seq.unborn.empty() || seq.state == SeqState::kFinished, seq.id,
          "a ghost has unborn children");
  require(seq.computed <= seq.length() && seq.pending <= seq.in_flight, seq.id,
          "computed <= length, pending <= batches in flight");
  require(seq.host.empty() || seq.state == SeqState::kWaiting, seq.id,
          "only the waiting have host blocks");
  require(static_cast<std::int32_t>(seq.host.size()) == blocks_.blocks_for(seq.saved), seq.id,
          "host blocks cover exactly what is saved");
  if (seq.state == SeqState::kWaiting)
    require(seq.computed == 0 && waiting_.contains(const_cast<Sequence*>(&seq)), seq.id,
            "the waiting have nothing computed and are in the queue");
  if (seq.state != SeqState::kRunning) return;
  require(seq.length() <= seq.limit, seq.id, "length <= limit");
  require(static_cast<std::int32_t>(blocks_.blocks(seq.table).size()) ==
              blocks_.blocks_for(seq.computed),
          seq.id, "the table covers exactly what is computed");
}

}  // namespace ridgeline::engine
