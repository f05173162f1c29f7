// What users ask of service: priorities without starvation, deadlines, a latency target; and
// preemption to host memory.
#include <algorithm>
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

constexpr std::int64_t kSecond = 1'000'000;

/// Steps a second long, each with one more urgent request than it can serve.
void urgent_arrivals_starve_nobody() {
  Driver driver(config(40, 1));
  driver.add({0}, {9}, 2, /*priority=*/3);
  std::int64_t served = -1;
  for (std::int64_t t = 0; t < 80 && served < 0; ++t) {
    driver.scheduler.add({.seq_ids = {t + 1}, .prompt = {7}, .max_tokens = 1,
                          .now = t * kSecond});
    const auto batch = driver.scheduler.schedule(t * kSecond);
    if (batch->seq_ids[0] == 0) served = t;
    driver.commit(*batch);
  }
  expect_equal(served, 30);  // three units of ten seconds, then arrival decides
}

void a_near_deadline_goes_first() {
  Driver driver(config(40, 1));
  driver.add({0}, {9}, 1);
  driver.scheduler.add({.seq_ids = {1}, .prompt = {9}, .max_tokens = 1, .deadline = 5 * kSecond});
  expect_equal(driver.step()->seq_ids, Ids{1});
}

void a_deadline_ends_a_request_in_any_state() {
  Driver driver(config(40, 3));
  const auto add = [&](std::vector<std::int64_t> ids, std::int64_t deadline) {
    driver.scheduler.add({.seq_ids = std::move(ids), .prompt = count_from(10, 8),
                          .max_tokens = 20, .deadline = deadline});
  };
  add({0}, 10);
  add({1, 2}, 20);  // waits for its prefix, then for places
  add({3}, kNoDeadline);
  driver.step();
  const auto in_flight = driver.scheduler.schedule(10);
  expect_equal(driver.scheduler.take_expired(), Ids{0});
  expect(driver.scheduler.take_expired().empty());
  driver.commit(*in_flight);
  driver.commit(*driver.scheduler.schedule(20));
  expect_equal(driver.scheduler.take_expired(), Ids{1, 2});
  expect(driver.decided(1, Reason::kFinished, 1, 3));
  driver.drain();
  expect_equal(driver.outputs.at(3).size(), 20u);
  expect_equal(driver.scheduler.stats().used_blocks, 0);
}

SchedulerConfig timed(std::int64_t target) {
  SchedulerConfig timed = config(200, 8, 512);
  timed.max_model_len = 400;
  timed.latency_target_us = target;
  timed.cost = {.fixed_us = 20, .token_us = 1,
                .attention = {{.window = 0, .key_us = 0.1, .pair_us = 0.01}}};
  return timed;
}

void chunks_beside_decodes_keep_to_the_latency_target() {
  Driver driver(timed(100));
  driver.add({0}, {1, 2, 3}, 300);
  driver.step();
  driver.add({1}, count_from(10, 300), 2);
  std::int64_t left = 300;
  std::vector<std::int32_t> chunks;
  while (left > 0) {
    const auto batch = driver.step();
    chunks.push_back(batch->num_tokens() - 1);
    left -= chunks.back();
    expect(batch->predicted_us <= 100 || chunks.back() == 16, "a step longer than the target");
  }
  expect(std::ranges::is_sorted(chunks, std::greater<>{}), "later chunks read more keys");
  expect(chunks.front() > 40 && chunks.size() > 5);
  expect(driver.decision(1, Reason::kChunkedLatency).has_value());
}

void slow_steps_shorten_chunks_and_prompts_advance_nevertheless() {
  Driver driver(timed(100));
  const auto steps_take = [&](double ratio) {
    for (int i = 0; i < 8; ++i) driver.scheduler.add_time_ratio(0, ratio);
  };
  steps_take(2);
  driver.add({0}, {1, 2, 3}, 300);
  driver.step();
  driver.add({1}, count_from(10, 100), 2);
  const std::int32_t slower = driver.step()->num_tokens() - 1;
  expect(slower < 45 && slower > 16);
  steps_take(50);
  driver.add({2}, count_from(300, 100), 2);
  expect_equal(driver.step()->num_tokens() - 1, 16);
  expect(driver.decided(2, Reason::kHeldLatency, 100, 0));
  testing::expect_error([&] { steps_take(0); }, "ratio must be positive, got 0");
  testing::expect_error([&] { driver.scheduler.add_time_ratio(-1, 1); }, "padded_tokens must not");
}

void chunks_fill_the_size_that_their_step_is_padded_to() {
  SchedulerConfig padded = timed(100);
  padded.cost.attention.clear();
  padded.cost.sizes = {32, 64, 128};  // of which 64 tokens take 64 us, and 128 more than the target
  Driver driver(padded);
  driver.add({0}, {1, 2, 3}, 300);
  driver.step();
  driver.add({1}, count_from(10, 100), 2);
  expect_equal(driver.step()->num_tokens(), 64);
  expect_equal(driver.step()->num_tokens(), 1 + 37);
  // 64 seem to take 256 us, then 128 to take 64.
  const auto steps_take = [&](std::int64_t size, double ratio) {
    for (int i = 0; i < 8; ++i) driver.scheduler.add_time_ratio(size, ratio);
  };
  steps_take(64, 4);
  steps_take(32, 1);
  driver.add({2}, count_from(300, 200), 2);
  expect_equal(driver.step()->num_tokens(), 32);
  steps_take(0, 1);
  steps_take(128, 0.5);
  expect_equal(driver.step()->num_tokens(), 128);
  padded.cost.sizes = {64, 32};
  testing::expect_error([&] { Driver{padded}; }, "cost.sizes must ascend");
}

void chunks_of_more_sequences_than_are_padded_fill_the_target() {
  SchedulerConfig padded = timed(100);
  padded.cost.attention.clear();
  padded.cost.sizes = {32, 64, 128};
  padded.cost.sized_seqs = 2;
  Driver driver(padded);
  driver.add({0}, {1, 2, 3}, 300);
  driver.step();
  driver.add({1}, count_from(10, 4), 300);
  driver.step();
  driver.add({2}, count_from(100, 200), 2);
  const auto cut = driver.step();
  expect_equal(cut->num_tokens(), 100);
  expect_equal(cut->predicted_us, 100.0);
  driver.scheduler.finish(1, FinishReason::kAbort);
  const auto sized = driver.step();
  expect_equal(sized->num_tokens(), 64);
  expect_equal(sized->predicted_us, 64.0);
}

void a_prompt_alone_is_not_cut() {
  Driver driver(timed(100));
  driver.add({0}, count_from(10, 300), 2);
  expect_equal(driver.step()->num_tokens(), 300);
}

/// Two requests that outgrow the cache: the second waits.
SchedulerConfig swapping(double swap_us, std::int64_t host_blocks) {
  SchedulerConfig scarce = config(8);
  scarce.num_host_blocks = host_blocks;
  scarce.cost = {.token_us = 1, .swap_us = swap_us};
  return scarce;
}

void drain_two(Driver& driver) {
  driver.add({0}, count_from(10, 8), 20);
  driver.add({1}, count_from(50, 8), 20);
  driver.drain();
  expect_equal(driver.outputs.at(0).size(), 20u);
  expect_equal(driver.outputs.at(1).size(), 20u);
}

void a_preempted_sequence_waits_on_the_host_if_that_is_faster() {
  Driver driver(swapping(/*swap_us=*/0.5, 8));
  drain_two(driver);
  const auto out = driver.decision(1, Reason::kSwappedOut), in =
      driver.decision(1, Reason::kSwappedIn);
  expect(out && in && !driver.decision(1, Reason::kPreempted));
  expect_equal(out->a, 3);
  expect_equal(out->b, in->b);
  expect(in->a <= out->a);
  expect_equal(driver.scheduler.stats().swaps, driver.scheduler.stats().preemptions);
}

void it_is_computed_again_if_copying_is_slower_or_the_host_is_full() {
  for (const auto& [swap_us, host_blocks] : {std::pair(5.0, 8), std::pair(0.5, 2)}) {
    Driver driver(swapping(swap_us, host_blocks));
    drain_two(driver);
    expect(driver.decision(1, Reason::kPreempted) && !driver.decision(1, Reason::kSwappedOut));
  }
}

void what_ends_on_the_host_gives_its_blocks_back() {
  Driver driver(swapping(0.5, 8));
  driver.add({0}, count_from(10, 8), 20);
  driver.add({1}, count_from(50, 8), 20);
  while (!driver.decision(1, Reason::kSwappedOut)) driver.step();
  driver.scheduler.finish(1, FinishReason::kAbort);
  driver.scheduler.check_invariants();
  driver.drain();
}

void evictions_name_who_caused_them() {
  Driver driver(config(6, 4));
  driver.add({0}, count_from(10, 16), 1);
  driver.drain();
  driver.add({1}, count_from(100, 12), 1);
  driver.drain();
  expect(driver.decided(1, Reason::kEvicted, 2, 2));
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"urgent arrivals starve nobody", urgent_arrivals_starve_nobody},
      {"a near deadline goes first", a_near_deadline_goes_first},
      {"a deadline ends a request", a_deadline_ends_a_request_in_any_state},
      {"latency target", chunks_beside_decodes_keep_to_the_latency_target},
      {"padded sizes", chunks_fill_the_size_that_their_step_is_padded_to},
      {"sizes and sequences", chunks_of_more_sequences_than_are_padded_fill_the_target},
      {"slow steps", slow_steps_shorten_chunks_and_prompts_advance_nevertheless},
      {"a prompt alone", a_prompt_alone_is_not_cut},
      {"swapping", a_preempted_sequence_waits_on_the_host_if_that_is_faster},
      {"not swapping", it_is_computed_again_if_copying_is_slower_or_the_host_is_full},
      {"an end on the host", what_ends_on_the_host_gives_its_blocks_back},
      {"evictions", evictions_name_who_caused_them},
  });
}
