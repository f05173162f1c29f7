#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/batch.h"
#include "engine/block_manager.h"
#include "engine/decision_log.h"
#include "engine/sequence.h"

namespace ridgeline::engine {

struct SchedulerConfig {
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;
  std::int64_t max_model_len = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_num_seqs = 256;
  std::int64_t max_num_batched_tokens = 8192;
  std::vector<std::int64_t> eos_token_ids = {};
  bool enable_prefix_caching = true;
  std::uint64_t seed = 0;
  std::int64_t decision_log_size = 4096;
};

/// A sampled token that commit accepted.
struct Output {
  SeqId seq_id;
  std::int32_t token;
  std::int32_t row;  // of the batch
  std::optional<FinishReason> finish_reason;
};

struct Stats {
  std::int64_t total_blocks, free_blocks, cached_blocks, used_blocks;
  std::int64_t waiting, running, in_flight;
  std::int64_t steps, prefix_query_tokens, prefix_hit_tokens, preemptions, evictions, copies;
};

/// Decides what each step computes: schedule, run, commit. At most two batches are in flight; they
/// run and are committed in the order in which they were scheduled.
///
/// A step takes, under the token budget: each running sequence's next token, then chunks of
/// running prompts, then waiting requests. In each group the order is priority, then arrival.
/// Who lacks a block takes it from the running sequence last in that order, which goes back to
/// the queue and is computed again. A step that preempted admits nobody.
///
/// Whatever is scheduled counts as done for later steps: the device works in order. So a finished
/// sequence's blocks are free at once, although a step in flight may still write them.
///
/// Invariants (check_invariants), besides those of the blocks:
///   a running sequence owns one table, no other sequence owns any
///   running and queue are in order, and disjoint; the rest is unborn, or finished and in flight
///   computed <= length; a table covers what is computed; pending <= batches in flight
class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  /// Queues the request. Throws std::invalid_argument if it could never run.
  void add(const Request& request);

  /// The next step, or null if nothing can be computed now.
  std::shared_ptr<const Batch> schedule();

  /// Takes one token a logits row. Requires: `batch` is the oldest in flight.
  std::vector<Output> commit(const Batch& batch, std::span<const std::int64_t> tokens);

  /// Ends a sequence, in whatever state it is.
  void finish(std::int64_t seq_id, FinishReason reason);

  /// Forgets the batches in flight; their sequences are computed again.
  void discard();

  bool has_unfinished() const { return !waiting_.empty() || !running_.empty(); }
  std::int32_t num_in_flight() const { return static_cast<std::int32_t>(in_flight_.size()); }
  std::string_view state(std::int64_t seq_id) const;
  std::vector<BlockId> block_table(std::int64_t seq_id) const;
  std::vector<Decision> decisions(std::int64_t since) const { return log_.since(since); }
  Stats stats() const;
  std::int32_t max_blocks_per_seq() const { return blocks_.blocks_for(config_.max_model_len); }

  /// Throws std::logic_error naming the invariant that does not hold.
  void check_invariants() const;

 private:
  using Queue = std::set<Sequence*, ByOrder>;

  struct Member {  // a sequence with new tokens
    Sequence* seq;
    std::int32_t end;  // computed tokens after the step
  };
  struct Row {
    Sequence* seq;
    bool sample;  // else a prompt position
  };
  struct Step {  // a batch and whom it belongs to
    std::shared_ptr<Batch> batch;
    PrefixId first_prefix;  // blocks registered from here on are computed by this step or later
    std::vector<Member> members = {};
    std::vector<Row> rows = {};
    std::vector<Sequence*> held = {};  // each sequence of members and rows once
  };
  struct Planned {
    Sequence* seq;
    std::int32_t count;
  };
  struct Plan {
    std::int64_t budget;
    std::vector<Planned> entries = {};
    bool preempted = false;
  };

  // add
  void check_request(const Request& request) const;

  // schedule: the running
  void plan_running(Plan& plan, bool decode);
  bool make_room(Plan& plan, Sequence& seq, std::int32_t count);
  void preempt(Plan& plan, Sequence& seq);
  void requeue(Sequence& seq);

  // schedule: the waiting
  void admit_waiting(Plan& plan, Step& step);
  bool admit(Plan& plan, Step& step, Sequence& seq, const PrefixMatch& match);
  bool prefix_in_flight(const Step& step, const Sequence& seq, const PrefixMatch& match);
  PrefixMatch match_prefix(Sequence& seq) const;
  void count_prefix(const Sequence& seq, const PrefixMatch& match);
  std::int64_t blocks_spoken_for() const;

  // schedule: the batch
  void emit(Step& step, Sequence& seq, std::int32_t count);
  void emit_tokens(Batch& batch, const Sequence& seq, std::int32_t count);
  void emit_table(Batch& batch, Sequence& seq);
  void emit_prompt_rows(Step& step, Sequence& seq, std::int32_t start, std::int32_t end);
  void emit_sample(Step& step, Sequence& seq);
  void fork_children(Step& step, Sequence& parent);
  void add_row(Step& step, Sequence& seq, std::int32_t token, std::int32_t position, bool sample);
  void hold(Step& step, Sequence& seq);
  std::int32_t shared_blocks(const Step& step) const;

  // commit and finish
  void check_commit(const Batch& batch, std::span<const std::int64_t> tokens) const;
  std::optional<FinishReason> finish_reason(const Sequence& seq) const;
  void end(Sequence& seq, FinishReason reason);
  void release(Sequence& seq);
  void let_go(Sequence& seq);
  void log(SeqId seq_id, Reason reason, std::int64_t a, std::int64_t b);

  const Sequence* find(std::int64_t seq_id) const;
  const Sequence& unfinished(std::int64_t seq_id) const;
  void check_sequence(const Sequence& seq) const;

  SchedulerConfig config_;
  BlockManager blocks_;
  DecisionLog log_;
  std::unordered_map<SeqId, Sequence> sequences_;  // by id; addresses are stable
  Queue waiting_;
  std::vector<Sequence*> running_;  // in order
  std::deque<Step> in_flight_;      // oldest first
  std::int64_t arrivals_ = 0, steps_ = 0;
  std::int64_t prefix_query_tokens_ = 0, prefix_hit_tokens_ = 0, preemptions_ = 0;
};

}  // namespace ridgeline::engine
