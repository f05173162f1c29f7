// Random requests, commits, aborts and failed runs. The model of a scheduler is that it does not
// matter: every sequence gets the tokens that it would get alone, in one piece, without a cache.
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "engine/scheduler.h"
#include "fake_device.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::digest;
using testing::expect;
using testing::expect_equal;
using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kVocab = 7, kEos = 3;

struct Expected {
  Request request;
  Ids tokens;                    // the prompt and the outputs so far
  std::vector<int> prompt_rows;  // times that each prompt position was computed
  bool first = false;            // of its request: the prompt's rows are its
};

struct Shape {
  std::int32_t blocks, block_size, max_len, seqs, budget, host_blocks = 0;
};

class Machine {
 public:
  Machine(unsigned seed, const Shape& shape)
      : random_(seed),
        shape_(shape),
        scheduler_({.num_blocks = shape.blocks, .block_size = shape.block_size,
                    .max_model_len = shape.max_len, .vocab_size = kVocab,
                    .max_num_seqs = shape.seqs, .max_num_batched_tokens = shape.budget,
                    .eos_token_ids = {kEos}, .enable_prefix_caching = seed % 4 != 0,
                    .num_host_blocks = shape.host_blocks,
                    .latency_target_us = seed % 3 == 0 ? 30 : 0,
                    // Swapping three blocks of four costs less than computing ten tokens again.
                    .cost = {.fixed_us = 5, .token_us = 1, .swap_us = 1.5,
                             .attention = {{.window = 0, .key_us = 0.01, .pair_us = 0.02},
                                           {.window = 8, .key_us = 0.01, .pair_us = 0.02}}}}),
        device_(shape.blocks, shape.block_size, shape.seqs, scheduler_.max_blocks_per_seq(),
                kVocab) {}

  void step() {
    const int choice = below(20);
    if (choice < 5) add();
    else if (choice == 5) abort();
    else if (choice == 6 && below(4) == 0) discard();
    else if (choice < 13 && scheduler_.num_in_flight() < 2) schedule();
    else if (scheduler_.num_in_flight() > 0) commit();
    scheduler_.check_invariants();
  }

  /// No request is left behind.
  void drain() {
    draining_ = true;
    for (int i = 0; scheduler_.has_unfinished() || scheduler_.num_in_flight() > 0; ++i) {
      expect(i < 5000, "the scheduler makes no progress");
      const bool scheduled = scheduler_.num_in_flight() < 2 && schedule();
      if (!scheduled && scheduler_.num_in_flight() == 0) {
        expect(!scheduler_.has_unfinished(), "nothing to run and nothing in flight");
        break;  // a deadline ended the last one
      }
      if (!scheduled || below(2) == 0) commit();
      scheduler_.check_invariants();
    }
    expect(live_.empty(), "a sequence never finished");
    const Stats stats = scheduler_.stats();
    expect_equal(stats.used_blocks, 0);
    preemptions += stats.preemptions;
    hits += stats.prefix_hit_tokens;
    copies += stats.copies;
    swaps += stats.swaps;
  }

  static inline std::int64_t preemptions = 0, hits = 0, copies = 0, swaps = 0, expired = 0;

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  void add() {
    Request request;
    const int n = below(4) == 0 ? 1 + below(std::min(4, shape_.seqs)) : 1;
    for (int i = 0; i < n; ++i) request.seq_ids.push_back(next_id_++);
    // Few distinct prompts, so that prefixes meet.
    const int length = 1 + below(shape_.max_len - 1);
    const int variant = below(3);
    for (int i = 0; i < length; ++i) request.prompt.push_back((i * variant + i / 5) % kVocab);
    request.max_tokens = 1 + below(12);
    request.min_tokens = below(3) == 0 ? below(static_cast<int>(request.max_tokens) + 1) : 0;
    request.ignore_eos = below(2) == 0;
    if (below(4) == 0) request.stop_token_ids = {below(kVocab)};
    request.priority = below(3);
    request.tenant = below(4) == 0 ? "other" : "";
    request.prompt_logprobs = below(5) == 0;
    request.now = now_;
    if (below(8) == 0) request.deadline = now_ + below(400);
    const std::int64_t total =
        std::min<std::int64_t>(length + request.max_tokens, shape_.max_len) - 1;
    if ((total + shape_.block_size - 1) / shape_.block_size > shape_.blocks - 1) {
      testing::expect_error([&] { scheduler_.add(request); }, "the cache has");
      return;
    }
    scheduler_.add(request);
    for (const std::int64_t id : request.seq_ids)
      live_[static_cast<SeqId>(id)] = {request,
                                       Ids(request.prompt.begin(), request.prompt.end()),
                                       std::vector<int>(request.prompt.size()),
                                       id == request.seq_ids[0]};
  }

  void abort() {
    if (live_.empty()) return;
    const auto victim = std::next(live_.begin(), below(static_cast<int>(live_.size())));
    scheduler_.finish(victim->first, FinishReason::kAbort);
    testing::expect_error([&] { scheduler_.finish(victim->first, FinishReason::kAbort); },
                          "unknown or finished");
    live_.erase(victim);
  }

  /// Now and then for one sequence alone.
  bool schedule() {
    now_ += below(20);
    std::vector<std::int64_t> only;
    if (!draining_ && !live_.empty() && below(8) == 0)
      only = {std::next(live_.begin(), below(static_cast<int>(live_.size())))->first};
    const std::shared_ptr<const Batch> batch = scheduler_.schedule(now_, only);
    for (const SeqId id : scheduler_.take_expired()) {
      expect(live_.at(id).request.deadline <= now_, "ended before its deadline");
      live_.erase(id);
      ++expired;
    }
    for (const auto& [id, expected] : live_)
      expect(expected.request.deadline > now_, "alive beyond its deadline");
    if (!batch) return false;
    for (const SeqId id : batch->seq_ids)
      expect(only.empty() || id == only[0] || !live_.contains(id), "of the named one alone");
    expect(0 < batch->num_tokens() && batch->num_tokens() <= shape_.budget, "token budget");
    expect(batch->num_seqs() <= shape_.seqs, "max_num_seqs");
    batches_.push_back(batch);
    return true;
  }

  void discard() {
    for (const auto& batch : batches_) device_.spoil(*batch);
    batches_.clear();
    scheduler_.discard();
  }

  void commit() {
    const std::shared_ptr<const Batch> batch = batches_.front();
    batches_.pop_front();
    const auto [tokens, digests] = device_.run(*batch);
    for (std::size_t r = 0; r < tokens.size(); ++r) check_row(*batch, r, digests[r]);
    for (const Output& output : scheduler_.commit(*batch, tokens)) {
      expect_equal(output.seq_id, batch->row_seq_ids[output.row]);
      expect_equal(output.token, tokens[output.row]);
      accept(output);
    }
  }

  void check_row(const Batch& batch, std::size_t row, std::uint64_t seen) {
    const auto found = live_.find(batch.row_seq_ids[row]);
    if (found == live_.end()) return;  // ended while in flight
    Expected& expected = found->second;
    const auto position = static_cast<std::size_t>(batch.row_positions[row]);
    expect(position <= expected.tokens.size(), "a row ahead of the known tokens");
    expect_equal(seen, digest(std::span(expected.tokens).first(position)));
    if (position < expected.prompt_rows.size()) ++expected.prompt_rows[position];
  }

  void accept(const Output& output) {
    const auto found = live_.find(output.seq_id);
    expect(found != live_.end(), "an output of a sequence that has ended");
    Expected& expected = found->second;
    const Request& request = expected.request;
    expect_equal(output.token, testing::sample(digest(expected.tokens), output.seq_id, kVocab));
    expected.tokens.push_back(output.token);

    const std::size_t outputs = expected.tokens.size() - request.prompt.size();
    const bool stops = (output.token == kEos && !request.ignore_eos) ||
                       std::ranges::count(request.stop_token_ids, output.token) > 0;
    std::optional<FinishReason> reason;
    if (static_cast<std::int64_t>(outputs) == request.max_tokens ||
        static_cast<std::int32_t>(expected.tokens.size()) == shape_.max_len)
      reason = FinishReason::kLength;
    if (stops && static_cast<std::int64_t>(outputs) >= request.min_tokens)
      reason = FinishReason::kStop;
    expect(output.finish_reason == reason, "finish reason");
    if (!reason) return;
    for (std::size_t p = 1; p < expected.prompt_rows.size(); ++p)
      expect_equal(expected.prompt_rows[p], request.prompt_logprobs && expected.first ? 1 : 0);
    live_.erase(found);
  }

  std::mt19937 random_;
  Shape shape_;
  Scheduler scheduler_;
  testing::FakeDevice device_;
  std::deque<std::shared_ptr<const Batch>> batches_;
  std::map<SeqId, Expected> live_;
  std::int32_t next_id_ = 0;
  std::int64_t now_ = 0;
  bool draining_ = false;
};

void random_requests(const Shape& shape) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(seed, shape);
    for (int i = 0; i < 400; ++i) machine.step();
    machine.drain();
  }
}

void scarce_blocks() {
  random_requests({.blocks = 9, .block_size = 4, .max_len = 30, .seqs = 5, .budget = 16});
  expect(Machine::preemptions > 100 && Machine::hits > 100 && Machine::copies > 20,
         "the shape no longer makes blocks scarce");
}
void scarce_blocks_and_room_on_the_host() {
  random_requests({.blocks = 9, .block_size = 4, .max_len = 30, .seqs = 5, .budget = 16,
                   .host_blocks = 7});
  expect(Machine::swaps > 50 && Machine::expired > 50,
         "the shape no longer makes sequences wait on the host");
}
void scarce_tokens() {
  random_requests({.blocks = 64, .block_size = 4, .max_len = 40, .seqs = 6, .budget = 6});
}
void scarce_blocks_and_tokens() {
  random_requests({.blocks = 14, .block_size = 4, .max_len = 60, .seqs = 4, .budget = 5});
}
void one_sequence() {
  random_requests({.blocks = 12, .block_size = 4, .max_len = 40, .seqs = 1, .budget = 8});
}
void blocks_of_one_token() {
  random_requests({.blocks = 40, .block_size = 1, .max_len = 30, .seqs = 4, .budget = 32});
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"scarce blocks", scarce_blocks},
      {"scarce blocks, room on the host", scarce_blocks_and_room_on_the_host},
      {"scarce tokens", scarce_tokens},
      {"scarce blocks and tokens", scarce_blocks_and_tokens},
      {"one sequence", one_sequence},
      {"blocks of one token", blocks_of_one_token},
  });
}
