#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/batch.h"
#include "engine/block_manager.h"
#include "engine/decision_log.h"
#include "engine/host_pool.h"
#include "engine/sequence.h"
#include "engine/step_cost.h"
#include "engine/time_scale.h"

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
  std::int64_t num_host_blocks = 0;    // where preempted sequences may wait
  std::int64_t latency_target_us = 0;  // of steps in which others decode; 0: none
  StepCost cost = {};
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
  std::int64_t steps, prefix_query_tokens, prefix_hit_tokens;
  std::int64_t preemptions, swaps, evictions, copies;
};

/// Decides what each step computes: schedule, run, commit. At most two batches are in flight; they
/// run and are committed in the order in which they were scheduled.
///
/// A step takes, under the token budget: each running sequence's next token, then chunks of
/// running prompts, then waiting requests. In each group the order is due time, then arrival.
/// Who lacks a block takes it from the running sequence last in that order, which goes back to
/// the queue: it is computed again, or waits in host memory if copying it there and back costs
/// less. A step that preempted admits nobody. Chunks beside decodes keep to the latency target,
/// as far as the step's time can be predicted.
///
/// Whatever is scheduled counts as done for later steps: the device works in order. So a finished
/// sequence's blocks are free at once, although a step in flight may still write them.
///
/// Invariants (check_invariants), besides those of the blocks:
///   a running sequence owns one table, no other sequence owns any
///   running and queue are in order, and disjoint; the rest is unborn, or finished and in flight
///   computed <= length; a table covers what is computed; pending <= batches in flight
///   a host block is free, or of one waiting sequence, whose saved tokens they cover
class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  /// Queues the request. Throws std::invalid_argument if it could never run.
  void add(const Request& request);

  /// The next step, or null if nothing can be computed now. Ends first what is past its deadline.
  /// `now`: microseconds, never falling. `only`: of these sequences alone; empty: of all.
  std::shared_ptr<const Batch> schedule(std::int64_t now = 0,
                                        std::span<const std::int64_t> only = {});

  /// The sequences that deadlines ended since the last call.
  std::vector<SeqId> take_expired() { return std::exchange(expired_, {}); }

  /// A step of prompt tokens beside decodes, with these padded_tokens, took so many times as long
  /// as predicted: for the latency target.
  void add_time_ratio(std::int64_t padded_tokens, double ratio) {
    time_scale_.add(padded_tokens, ratio);
  }

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
    std::vector<Sequence*> held = {};  // sequences of members, rows and swaps; may repeat
    AttentionTime attention = {};
  };
  struct Planned {
    Sequence* seq;
    std::int32_t count;
  };
  struct Plan {
    std::int64_t budget;
    std::span<const std::int64_t> only;
    std::vector<Planned> entries = {};
    bool preempted = false;
    // For the latency target; who is preempted after being planned still counts.
    std::int64_t decodes = 0, tokens = 0, seqs = 0, rows = 0;
    double attention_us = 0;

    bool excludes(const Sequence& seq) const {
      return !only.empty() && std::ranges::find(only, seq.id) == only.end();
    }
  };
  struct SwapOut {
    Sequence* seq;
    BlockId block;
    HostBlockId host;
  };

  // add
  void check_request(const Request& request) const;

  // schedule: the running
  void expire(std::int64_t now);
  void plan_running(Plan& plan, bool decode);
  std::int32_t chunk(const Plan& plan, const Sequence& seq, std::int32_t start,
                     std::int32_t wanted) const;
  void log_chunk(const Plan& plan, SeqId seq_id, std::int32_t count, std::int32_t wanted);
  void count_planned(Plan& plan, const Sequence& seq, std::int32_t start,
                     std::int32_t count) const;
  bool make_room(Plan& plan, Sequence& seq, std::int32_t count);

  // preemption
  void preempt(Plan& plan, Sequence& seq);
  void requeue(Sequence& seq);
  bool swapping_pays(const Sequence& seq) const;
  void swap_out(Sequence& seq);
  void swap_in(Step& step, Sequence& seq, std::int32_t matched);
  void forget_saved(Sequence& seq);
  void emit_swap_outs(Step& step);

  // schedule: the waiting
  void admit_waiting(Plan& plan, Step& step);
  bool admit(Plan& plan, Step& step, Sequence& seq, const PrefixMatch& match);
  bool prefix_in_flight(const Step& step, const Sequence& seq, const PrefixMatch& match);
  PrefixMatch match_prefix(Sequence& seq) const;
  void count_prefix(const Sequence& seq, const PrefixMatch& match);
  std::int64_t places_left() const;
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
  void log_evictions(SeqId seq_id, std::int64_t before);

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
  HostPool host_;
  std::vector<SwapOut> swap_outs_;  // not yet part of a batch
  std::set<std::pair<std::int64_t, SeqId>> deadlines_;
  std::vector<SeqId> expired_;
  TimeScale time_scale_;
  std::int64_t arrivals_ = 0, steps_ = 0;
  std::int64_t prefix_query_tokens_ = 0, prefix_hit_tokens_ = 0, preemptions_ = 0, swaps_ = 0;
};

}  // namespace ridgeline::engine
