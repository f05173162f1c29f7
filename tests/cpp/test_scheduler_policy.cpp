// Who goes first, who waits and why: order, reasons, preemption, prefixes, determinism.
#include <map>
#include <random>
#include <string>
#include <vector>

#include "driver.h"
#include "engine/scheduler.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::count_from;
using testing::Driver;
using testing::expect;
using testing::expect_equal;
using Ids = std::vector<std::int32_t>;

SchedulerConfig config(std::int64_t blocks = 40, std::int64_t seqs = 4,
                       std::int64_t budget = 32) {
  return {.num_blocks = blocks, .block_size = 4, .max_model_len = 64, .vocab_size = 1000,
          .max_num_seqs = seqs, .max_num_batched_tokens = budget};
}

void equal_priorities_are_served_in_order() {
  Driver driver(config(40, 2));
  for (std::int64_t id = 0; id < 6; ++id) driver.add({id}, {id}, 1);
  Ids order;
  while (const auto batch = driver.step())
    order.insert(order.end(), batch->seq_ids.begin(), batch->seq_ids.end());
  expect_equal(order, Ids{0, 1, 2, 3, 4, 5});
}

void smaller_priority_goes_first() {
  Driver driver(config(40, 1));
  driver.add({0}, {9}, 1, /*priority=*/5);
  driver.add({1}, {9}, 1, /*priority=*/-1);
  driver.add({2}, {9}, 1, /*priority=*/5);
  Ids order;
  while (const auto batch = driver.step()) order.push_back(batch->seq_ids[0]);
  expect_equal(order, Ids{1, 0, 2});
}

void holds_are_explained() {
  Driver tokens(config(40, 4, 8));
  tokens.add({0}, count_from(10, 8), 1);
  tokens.add({1}, count_from(50, 8), 1);
  tokens.step();
  expect(tokens.decided(1, Reason::kHeldTokens, 8, 0));

  Driver sequences(config(40, 2));
  sequences.add({0}, count_from(10, 8), 4);
  sequences.add({1, 2}, count_from(50, 8), 4);
  sequences.step();
  expect(sequences.decided(1, Reason::kHeldSequences, 2, 1));

  Driver blocks(config(6));
  blocks.add({0}, count_from(10, 8), 4);
  blocks.add({1}, count_from(50, 12), 4);
  blocks.step();
  // Of 5 blocks 0 has 2 and may grow by 1.
  expect(blocks.decided(1, Reason::kHeldBlocks, 3, 2));
  blocks.drain();
  expect_equal(blocks.outputs.at(1).size(), 4u);
}

void a_long_request_is_not_passed_by_short_ones() {
  Driver driver(config(12, 4, 64));
  driver.add({0}, count_from(10, 20), 4);
  driver.add({1}, count_from(100, 36), 2);  // 9 of 11 blocks: waits for 0
  for (std::int64_t id = 2; id < 10; ++id) driver.add({id}, {200 + id}, 2);
  driver.step();
  expect_equal(driver.scheduler.state(1), "waiting");
  expect_equal(driver.scheduler.state(2), "waiting");
  driver.drain();
  const auto admitted = [&](SeqId id) { return driver.decision(id, Reason::kAdmitted)->index; };
  expect(admitted(1) < admitted(2));
}

void a_stream_of_arrivals_starves_nobody() {
  Driver driver(config(14, 4, 16));
  std::mt19937 random(1);
  std::map<SeqId, std::int64_t> arrived;
  SeqId next = 0;
  for (int step = 0; step < 600; ++step) {
    if (step < 400 && step % 2 == 0) {
      const auto length = static_cast<std::int64_t>(1 + random() % 40);
      arrived[next] = step;
      driver.add({next}, count_from(random() % 500, length), 1 + random() % 8);
      ++next;
    }
    driver.step();
  }
  driver.drain();
  expect_equal(driver.finished.size(), static_cast<std::size_t>(next));
  // First come, first served: admissions follow arrivals, but for those that wait for a prefix.
  std::int64_t last = -1;
  for (SeqId id = 0; id < next; ++id) {
    const auto admitted = driver.decision(id, Reason::kAdmitted);
    if (!admitted) continue;  // fallen out of the log
    expect(admitted->index > last || driver.decision(id, Reason::kHeldPrefixInFlight).has_value());
    last = std::max(last, admitted->index);
  }
}

void who_lacks_a_block_takes_it_from_the_last() {
  Driver driver(config(8));
  driver.add({0}, count_from(10, 8), 20);
  driver.add({1}, count_from(50, 8), 20);
  while (!driver.decision(1, Reason::kPreempted)) driver.step();
  const Decision preempted = *driver.decision(1, Reason::kPreempted);
  expect(!driver.decision(0, Reason::kPreempted), "the older one goes on");
  expect_equal(driver.scheduler.state(1), "waiting");
  expect_equal(driver.scheduler.stats().preemptions, 1);
  expect_equal(preempted.a, 3);  // blocks
  driver.drain();
  expect_equal(driver.outputs.at(0).size(), 20u);
  expect_equal(driver.outputs.at(1).size(), 20u);
}

void priority_decides_who_is_preempted() {
  Driver driver(config(8));
  driver.add({0}, count_from(10, 8), 20, /*priority=*/1);
  driver.step();
  driver.add({1}, count_from(50, 8), 20, /*priority=*/0);
  driver.drain();
  expect(driver.decision(0, Reason::kPreempted) && !driver.decision(1, Reason::kPreempted));
}

void a_step_that_preempts_admits_nobody() {
  Driver driver(config(8));
  driver.add({0}, count_from(10, 8), 20, /*priority=*/0);
  driver.add({1}, count_from(50, 8), 20, /*priority=*/1);
  while (driver.scheduler.stats().free_blocks > 1) driver.step();
  driver.add({2}, count_from(90, 6), 4, /*priority=*/0);  // two blocks, when 1 gives back three
  auto batch = driver.step();
  while (!driver.decision(1, Reason::kPreempted)) batch = driver.step();
  expect_equal(batch->seq_ids, Ids{0});
  expect_equal(driver.step()->seq_ids, Ids{0, 2});
}

void a_chunk_may_preempt_who_was_planned_before_it() {
  Driver driver(config(10, 2, 3));  // a decode and two tokens of a prompt a step
  driver.add({0}, count_from(10, 4), 30, /*priority=*/1);
  driver.step();
  driver.step();
  driver.add({1}, count_from(50, 24), 2, /*priority=*/0);
  auto batch = driver.step();
  while (!driver.decision(0, Reason::kPreempted)) batch = driver.step();
  expect_equal(batch->seq_ids, Ids{1});
  driver.drain();
  expect_equal(driver.outputs.at(0).size(), 30u);
}

void a_preempted_sequence_keeps_the_token_in_flight() {
  Driver driver(config(8));
  driver.add({0}, count_from(10, 8), 20);
  driver.add({1}, count_from(50, 8), 20);
  auto last = driver.scheduler.schedule();
  while (!driver.decision(1, Reason::kPreempted)) {
    const auto next = driver.scheduler.schedule();
    driver.commit(*last);
    last = next;
  }
  const std::size_t before = driver.outputs.at(1).size();
  driver.commit(*last);
  while (const auto next = driver.scheduler.schedule()) driver.commit(*next);
  expect(before > 0 && driver.outputs.at(1).size() == 20u);
}

void a_request_waits_for_its_prefix_in_flight() {
  Driver driver(config(40, 4, 64));
  driver.add({0}, count_from(10, 18), 4);
  driver.add({1}, count_from(10, 18), 4);
  driver.add({2}, count_from(90, 18), 4);  // another prefix passes
  expect_equal(driver.step()->seq_ids, Ids{0, 2});
  const auto hold = driver.decision(1, Reason::kHeldPrefixInFlight);
  expect(hold && hold->a == 0);
  expect_equal(driver.step()->seq_ids, Ids{0, 2, 1});
  expect(driver.decided(1, Reason::kAdmitted, 2, 16));
  expect_equal(driver.scheduler.stats().prefix_hit_tokens, 16);
}

void chunks_of_a_shared_prefix_are_waited_for() {
  Driver driver(config(40, 4, 16));
  driver.add({0}, count_from(10, 41), 2);
  driver.add({1}, count_from(10, 41), 2);
  driver.drain();
  expect(driver.decided(1, Reason::kAdmitted, 1, 40));
}

void misses_are_explained() {
  Driver driver(config(12));
  driver.add({0}, count_from(10, 12), 1);
  driver.drain();
  auto other = count_from(10, 12);
  other[5] = 999;
  driver.add({1}, other, 1);
  driver.drain();
  expect(driver.decided(1, Reason::kPrefixDiffers, 1, 2));
  driver.add({2}, count_from(10, 4), 1);
  driver.drain();
  expect(driver.decided(2, Reason::kPrefixShort, 4, 4));
  driver.add({3}, count_from(100, 40), 4);  // 11 blocks: evicts all
  driver.drain();
  driver.add({4}, count_from(10, 12), 1);
  driver.drain();
  expect(driver.decided(4, Reason::kPrefixEvicted, 0, 2));
  expect(driver.scheduler.stats().evictions > 0);
}

void tenants_share_nothing() {
  Driver driver(config());
  for (const std::int64_t id : {0, 1, 2}) {
    driver.scheduler.add({.seq_ids = {id}, .prompt = count_from(10, 12), .max_tokens = 1,
                          .tenant = id == 1 ? "b" : "a"});
    driver.drain();
  }
  expect(driver.decided(1, Reason::kAdmitted, 12, 0));
  expect(driver.decided(2, Reason::kAdmitted, 4, 8));
}

void outputs_are_cached_too() {
  Driver driver(config());
  driver.add({0}, count_from(10, 6), 7);
  driver.drain();
  auto turn = count_from(10, 6);  // the next turn of a conversation
  for (const std::int32_t token : driver.outputs.at(0)) turn.push_back(token);
  turn.push_back(77);
  driver.add({1}, turn, 1);
  driver.drain();
  expect(driver.decided(1, Reason::kAdmitted, 2, 12));
}

struct Transcript {
  std::string arenas, decisions;
};

/// Everything that a run of many requests decided and laid out.
Transcript transcript(std::uint64_t seed) {
  SchedulerConfig small = config(14, 4, 16);
  small.seed = seed;
  small.decision_log_size = 1 << 16;
  Driver driver(small);
  std::mt19937 random(3);
  Transcript text;
  for (int step = 0; step < 400; ++step) {
    const auto length = static_cast<std::int64_t>(1 + random() % 30);
    if (step % 3 == 0) driver.add({step}, count_from(random() % 3, length), 1 + random() % 9);
    if (const auto batch = driver.step(static_cast<std::int64_t>(random() % 4)))
      for (const std::int32_t word : batch->arena().data) text.arenas += std::to_string(word) + ' ';
  }
  for (const Decision& d : driver.scheduler.decisions(0))
    for (const std::int64_t word : {d.index, d.step, static_cast<std::int64_t>(d.seq_id),
                                    static_cast<std::int64_t>(d.reason), d.a, d.b})
      text.decisions += std::to_string(word) + ' ';
  return text;
}

void the_same_requests_make_the_same_decisions() {
  const Transcript once = transcript(0), again = transcript(0), other = transcript(12345);
  expect(once.arenas.size() > 10000 && once.decisions.size() > 1000);
  expect(once.arenas == again.arenas && once.decisions == again.decisions, "two runs differ");
  expect(once.arenas == other.arenas, "the hash seed must not matter to what is computed");
}

void the_log_is_bounded_and_numbered() {
  SchedulerConfig small = config();
  small.decision_log_size = 4;
  Driver driver(small);
  for (std::int64_t id = 0; id < 6; ++id) driver.add({id}, {id}, 1);
  driver.drain();
  const auto decisions = driver.scheduler.decisions(0);
  expect_equal(decisions.size(), 4u);
  expect_equal(decisions[3].index, decisions[0].index + 3);
  expect_equal(driver.scheduler.decisions(decisions[2].index).size(), 2u);
  expect(driver.scheduler.decisions(decisions[3].index + 1).empty());
}

/// Steps look at a bounded number of waiting requests, told apart by the decisions they make.
void a_long_queue_costs_a_step_nothing() {
  SchedulerConfig large = config(1000, 8, 64);
  large.decision_log_size = 1 << 20;
  Driver driver(large);
  for (std::int64_t id = 0; id < 100'000; ++id) driver.add({id}, count_from(10, 18), 2);
  const auto decided = [&] {
    const auto decisions = driver.scheduler.decisions(0);
    return decisions.empty() ? 0 : decisions.back().index + 1;
  };
  for (int step = 0; step < 50; ++step) {
    const auto before = decided();
    if (const auto batch = driver.scheduler.schedule())
      driver.scheduler.commit(*batch, std::vector<std::int64_t>(batch->num_rows(), 5));
    expect(decided() - before < 64, "a step looked at too many requests");
  }
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"equal priorities are served in order", equal_priorities_are_served_in_order},
      {"smaller priority goes first", smaller_priority_goes_first},
      {"holds are explained", holds_are_explained},
      {"a long request is not passed", a_long_request_is_not_passed_by_short_ones},
      {"a stream of arrivals starves nobody", a_stream_of_arrivals_starves_nobody},
      {"preemption takes from the last", who_lacks_a_block_takes_it_from_the_last},
      {"priority decides who is preempted", priority_decides_who_is_preempted},
      {"a step that preempts admits nobody", a_step_that_preempts_admits_nobody},
      {"a chunk preempts a planned decode", a_chunk_may_preempt_who_was_planned_before_it},
      {"preemption keeps the token in flight", a_preempted_sequence_keeps_the_token_in_flight},
      {"a request waits for its prefix", a_request_waits_for_its_prefix_in_flight},
      {"chunks of a shared prefix", chunks_of_a_shared_prefix_are_waited_for},
      {"misses are explained", misses_are_explained},
      {"tenants share nothing", tenants_share_nothing},
      {"outputs are cached too", outputs_are_cached_too},
      {"determinism", the_same_requests_make_the_same_decisions},
      {"the log is bounded and numbered", the_log_is_bounded_and_numbered},
      {"a long queue", a_long_queue_costs_a_step_nothing},
  });
}
