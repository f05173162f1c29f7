#include <memory>
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
using testing::expect_error;
using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kEos = 1;

SchedulerConfig config(std::int64_t blocks = 20, std::int64_t budget = 32) {
  return {.num_blocks = blocks, .block_size = 4, .max_model_len = 40, .vocab_size = 100,
          .max_num_seqs = 4, .max_num_batched_tokens = budget, .eos_token_ids = {kEos}};
}

void prompts_and_decodes_share_a_step() {
  Driver driver(config());
  driver.add({0}, count_from(10, 5), 4);
  driver.step();
  driver.add({1}, count_from(50, 6), 4);
  const auto batch = driver.step();
  expect_equal(batch->seq_ids, Ids{0, 1});
  expect_equal(batch->seq_lens, Ids{6, 6});
  expect_equal(batch->cu_q, Ids{0, 1, 7});
  expect_equal(batch->num_decode_tokens, 1);
  expect_equal(batch->max_q, 6);
  expect_equal(batch->input_ids[0], 5);  // the token sampled last
  expect_equal(batch->row_positions, Ids{6, 6});
}

void long_prompts_are_chunked() {
  Driver driver(config(20, 8));
  driver.add({0}, count_from(10, 20), 1);
  const auto first = driver.step();
  expect_equal(first->num_tokens(), 8);
  expect_equal(first->num_rows(), 0);  // no logits before the prompt ends
  driver.step();
  const auto last = driver.step();
  expect_equal(last->positions, Ids{16, 17, 18, 19});
  expect_equal(last->logits_rows, Ids{3});
  expect(driver.decided(0, Reason::kChunked, 8, 12));
  expect(driver.finished.at(0) == FinishReason::kLength);
}

void decodes_go_ahead_of_chunks() {
  Driver driver(config(20, 8));
  driver.add({0}, count_from(10, 20), 4);
  driver.step();
  driver.add({1}, {50}, 4);
  driver.step();
  driver.step();  // the prompt ends here, and sequence 1 gets in beside it
  driver.add({2}, count_from(60, 30), 4);
  driver.step();
  const auto batch = driver.step();
  expect_equal(batch->seq_ids, Ids{0, 1, 2});
  expect_equal(batch->cu_q, Ids{0, 1, 2, 8});
}

void stops() {
  Driver driver(config());
  driver.scheduler.add({.seq_ids = {0}, .prompt = {9}, .max_tokens = 9});
  driver.scheduler.add({.seq_ids = {1}, .prompt = {9}, .max_tokens = 2, .ignore_eos = true});
  driver.scheduler.add({.seq_ids = {2}, .prompt = {9}, .max_tokens = 9, .min_tokens = 3});
  driver.scheduler.add({.seq_ids = {3}, .prompt = {9}, .max_tokens = 9, .stop_token_ids = {1, 7},
                        .ignore_eos = true});
  while (driver.step(kEos)) {}
  const auto outputs = [&](SeqId id) { return driver.outputs.at(id).size(); };
  expect(driver.finished.at(0) == FinishReason::kStop && outputs(0) == 1, "eos");
  expect(driver.finished.at(1) == FinishReason::kLength && outputs(1) == 2, "ignore_eos");
  expect(driver.finished.at(2) == FinishReason::kStop && outputs(2) == 3, "min_tokens");
  expect(driver.finished.at(3) == FinishReason::kStop && outputs(3) == 1, "stop_token_ids");
}

void the_context_ends_a_sequence() {
  Driver driver(config());
  driver.add({0}, count_from(10, 37), 100);
  driver.drain();
  expect_equal(driver.outputs.at(0).size(), 3u);
  expect(driver.finished.at(0) == FinishReason::kLength);
}

void next_step_is_scheduled_while_one_is_in_flight() {
  Driver driver(config());
  driver.add({0}, count_from(10, 5), 3);
  driver.add({1}, count_from(50, 5), 3);
  const auto first = driver.scheduler.schedule();
  const auto second = driver.scheduler.schedule();
  expect_equal(second->input_ids, Ids{-1, -2});  // rows 0 and 1 of the first
  expect_error([&] { driver.scheduler.schedule(); }, "two batches are in flight");
  expect_error([&] { driver.commit(*second); }, "the oldest batch in flight is that of step 0");
  driver.commit(*first);
  const auto third = driver.scheduler.schedule();
  expect_equal(third->input_ids, Ids{-1, -2});
  expect_equal(third->positions, Ids{6, 6});
  driver.commit(*second);
  expect(!driver.scheduler.schedule(), "both end with the step in flight");
  driver.commit(*third);
  expect_equal(driver.outputs.at(0).size(), 3u);
  expect(!driver.scheduler.has_unfinished());
}

void a_stop_is_dropped_from_the_step_in_flight() {
  Driver driver(config());
  driver.add({0}, count_from(10, 5), 9);
  const auto first = driver.scheduler.schedule(), second = driver.scheduler.schedule();
  driver.commit(*first, kEos);
  expect(!driver.scheduler.has_unfinished());
  expect_equal(driver.scheduler.state(0), "finished");
  expect_error([&] { driver.add({0}, {1}, 1); }, "sequence id 0 is in use");
  driver.commit(*second, kEos);
  expect_equal(driver.outputs.at(0), Ids{1});
  driver.add({0}, {1}, 1);
}

void what_the_last_step_fills_is_cached() {
  Driver driver(config());
  driver.add({0}, count_from(10, 6), 3);
  auto last = driver.scheduler.schedule();
  while (const auto next = driver.scheduler.schedule()) {
    driver.commit(*last);
    last = next;
  }
  expect_equal(last->input_ids, Ids{-1});  // it ends the second block, unknown when scheduled
  driver.commit(*last);
  expect_equal(driver.scheduler.stats().cached_blocks, 2);
}

void abort_frees_at_any_time() {
  Driver driver(config());
  driver.add({0}, count_from(10, 9), 9);
  driver.add({1}, count_from(50, 9), 9);
  driver.scheduler.finish(1, FinishReason::kAbort);  // waiting
  const auto batch = driver.scheduler.schedule();
  expect_equal(batch->seq_ids, Ids{0});
  driver.scheduler.finish(0, FinishReason::kStop);  // in flight
  expect_equal(driver.scheduler.stats().used_blocks, 0);
  driver.commit(*batch);
  expect(driver.outputs.empty());
  expect(driver.decided(0, Reason::kFinished, 0, 0) && driver.decided(1, Reason::kFinished, 0, 2));
  expect_error([&] { driver.scheduler.finish(0, FinishReason::kAbort); },
               "sequence id 0 is unknown or finished");
  expect_error([&] { driver.scheduler.finish(-1, FinishReason::kAbort); }, "sequence id -1");
}

void siblings_share_the_prompt_and_copy_its_tail() {
  Driver driver(config());
  driver.add({0, 1, 2}, count_from(10, 6), 4);
  expect_equal(driver.scheduler.state(2), "waiting");
  const auto prompt = driver.step();
  expect_equal(prompt->num_tokens(), 6);
  expect_equal(prompt->logits_rows, Ids{5, 5, 5});
  expect_equal(prompt->row_seq_ids, Ids{0, 1, 2});
  expect_equal(driver.scheduler.stats().used_blocks, 2);
  const auto decode = driver.step();
  expect_equal(decode->copies.size(), 2u);  // two of three: the last writes in place
  expect_equal(driver.scheduler.stats().used_blocks, 4);
  const auto first = driver.scheduler.block_table(0), last = driver.scheduler.block_table(2);
  expect(first[0] == last[0] && first[1] != last[1]);
  driver.drain();
  for (SeqId id = 0; id < 3; ++id) expect_equal(driver.outputs.at(id).size(), 4u);
}

void siblings_survive_the_abort_of_the_first() {
  Driver driver(config(20, 8));
  driver.add({0, 1, 2}, count_from(10, 12), 2);
  driver.step();
  driver.scheduler.finish(0, FinishReason::kAbort);
  expect_equal(driver.scheduler.state(0), "finished");
  driver.scheduler.finish(2, FinishReason::kAbort);
  driver.scheduler.check_invariants();
  expect_equal(driver.step()->row_seq_ids, Ids{1});
  driver.drain();
  expect(!driver.outputs.contains(0) && !driver.outputs.contains(2));
  expect_equal(driver.outputs.at(1).size(), 2u);
  driver.add({0, 1}, count_from(10, 12), 2);
  driver.step();
  driver.scheduler.finish(0, FinishReason::kAbort);
  driver.scheduler.finish(1, FinishReason::kAbort);
  expect(!driver.scheduler.has_unfinished());
  driver.scheduler.check_invariants();
}

void prompt_rows_are_all_computed_once() {
  Driver driver(config(20, 4));
  driver.add({9}, count_from(10, 9), 1);
  driver.drain();
  driver.scheduler.add(
      {.seq_ids = {0}, .prompt = count_from(10, 9), .max_tokens = 2, .prompt_logprobs = true});
  Ids positions;
  while (const auto batch = driver.step())
    positions.insert(positions.end(), batch->row_positions.begin(), batch->row_positions.end());
  expect_equal(positions, Ids{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  expect_equal(driver.scheduler.stats().prefix_hit_tokens, 0);
  expect_equal(driver.outputs.at(0).size(), 2u);
}

void a_failed_step_is_computed_again() {
  Driver driver(config());
  driver.add({0}, count_from(10, 9), 3);
  driver.step();
  driver.add({1, 2}, count_from(50, 9), 3);
  driver.scheduler.schedule();
  driver.scheduler.schedule();
  driver.scheduler.discard();
  driver.scheduler.check_invariants();
  expect_equal(driver.scheduler.num_in_flight(), 0);
  const auto again = driver.step();
  expect_equal(again->seq_ids, Ids{0, 1});
  expect_equal(again->input_ids[0], 18);     // 0: two blocks were computed before the failure
  expect_equal(again->cu_q, Ids{0, 2, 11});  // 1: nothing of the failed steps is trusted
  expect(driver.decision(2, Reason::kHeldPrefixInFlight).has_value());
  driver.drain();
  for (SeqId id = 0; id < 3; ++id) expect_equal(driver.outputs.at(id).size(), 3u);
}

void requests_that_can_never_fit_are_refused() {
  Driver driver(config(6));
  const auto add = [&](Request request) { driver.scheduler.add(request); };
  expect_error([&] { add({.seq_ids = {0}, .prompt = {}, .max_tokens = 1}); }, "prompt is empty");
  expect_error([&] { add({.seq_ids = {0}, .prompt = count_from(0, 40), .max_tokens = 1}); },
               "prompt has 40 tokens, expected fewer than 40 (max_model_len)");
  expect_error([&] { add({.seq_ids = {0}, .prompt = count_from(0, 21), .max_tokens = 1}); },
               "needs 6 blocks of 4 tokens, the cache has 5");
  expect_error([&] { add({.seq_ids = {0}, .prompt = count_from(0, 18), .max_tokens = 4}); },
               "a prompt of 18 tokens with up to 4 outputs needs 6 blocks");
  expect_error([&] { add({.seq_ids = {0}, .prompt = {1, 100}, .max_tokens = 1}); },
               "prompt[1] is 100, expected 0 <= id < 100");
  expect_error([&] { add({.seq_ids = {0}, .prompt = {-1}, .max_tokens = 1}); }, "prompt[0] is -1");
  expect_error([&] { add({.seq_ids = {0}, .prompt = {1}, .max_tokens = 0}); },
               "max_tokens must be positive, got 0");
  expect_error([&] { add({.seq_ids = {0}, .prompt = {1}, .max_tokens = 2, .min_tokens = 3}); },
               "min_tokens must be from 0 to max_tokens (2), got 3");
  expect_error(
      [&] { add({.seq_ids = {0}, .prompt = {1}, .max_tokens = 1, .stop_token_ids = {100}}); },
      "stop_token_ids[0] is 100");
  expect_error([&] { add({.seq_ids = {0, 0}, .prompt = {1}, .max_tokens = 1}); },
               "sequence id 0 is in use");
  expect_error([&] { add({.seq_ids = {}, .prompt = {1}, .max_tokens = 1}); }, "at least one");
  expect_error([&] { add({.seq_ids = count_from(0, 5), .prompt = {1}, .max_tokens = 1}); },
               "at most 4 sequences (max_num_seqs), got 5");
  expect_error([&] { add({.seq_ids = {-3}, .prompt = {1}, .max_tokens = 1}); }, "got -3");
  expect(!driver.scheduler.has_unfinished(), "a refused request leaves nothing behind");
  driver.add({0}, count_from(0, 20), 1);  // exactly the cache: the output takes no place
  driver.drain();
  expect_equal(driver.outputs.at(0).size(), 1u);
}

void bad_commits_change_nothing() {
  Driver driver(config());
  driver.add({0}, {9}, 2);
  const auto batch = driver.scheduler.schedule();
  const auto commit = [&](std::vector<std::int64_t> tokens) {
    driver.scheduler.commit(*batch, tokens);
  };
  expect_error([&] { commit({}); }, "each of the 1 logits rows of step 0, got 0");
  expect_error([&] { commit({100}); }, "tokens[0] (sequence 0) is 100, expected 0 <= id < 100");
  expect_error([&] { commit({-1}); }, "is -1");
  commit({99});
  expect_error([&] { commit({99}); }, "no batch is in flight");
  driver.scheduler.check_invariants();
}

void bad_configurations_are_refused() {
  const auto with = [](auto change) {
    return [change] {
      SchedulerConfig bad = config();
      change(bad);
      Scheduler scheduler(bad);
    };
  };
  expect_error(with([](auto& c) { c.max_num_batched_tokens = 3; }),
               "must be at least max_num_seqs (4)");
  expect_error(with([](auto& c) { c.max_num_seqs = 0; }), "max_num_seqs must be positive");
  expect_error(with([](auto& c) { c.max_model_len = 1; }), "max_model_len must be at least 2");
  expect_error(with([](auto& c) { c.vocab_size = 0; }), "vocab_size must be positive");
  expect_error(with([](auto& c) { c.eos_token_ids = {100}; }), "eos_token_ids");
  expect_error(with([](auto& c) { c.num_blocks = 1; }), "num_blocks must be at least 2");
}

void the_blocks_that_all_have_in_common_are_counted() {
  Driver driver(config());
  driver.add({0}, count_from(10, 14), 9);
  expect_equal(driver.step()->shared_blocks, 0);  // alone
  driver.add({1}, count_from(10, 13), 9);
  auto longer = count_from(10, 8);
  longer.insert(longer.end(), {1, 2, 3, 4, 5, 6});
  driver.add({2}, longer, 6);
  expect_equal(driver.step()->shared_blocks, 2);  // 3 of 0 and 1
  driver.add({3}, {7}, 2);
  expect_equal(driver.step()->shared_blocks, 0);
  while (driver.finished.count(3) == 0) driver.step();
  expect_equal(driver.step()->shared_blocks, 2);
  while (driver.finished.count(2) == 0) driver.step();
  expect_equal(driver.step()->shared_blocks, 3);
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"blocks in common", the_blocks_that_all_have_in_common_are_counted},
      {"prompts and decodes share a step", prompts_and_decodes_share_a_step},
      {"long prompts are chunked", long_prompts_are_chunked},
      {"decodes go ahead of chunks", decodes_go_ahead_of_chunks},
      {"stops", stops},
      {"the context ends a sequence", the_context_ends_a_sequence},
      {"two steps in flight", next_step_is_scheduled_while_one_is_in_flight},
      {"a stop is dropped from the step in flight", a_stop_is_dropped_from_the_step_in_flight},
      {"what the last step fills is cached", what_the_last_step_fills_is_cached},
      {"abort frees at any time", abort_frees_at_any_time},
      {"siblings share the prompt", siblings_share_the_prompt_and_copy_its_tail},
      {"siblings survive the abort of the first", siblings_survive_the_abort_of_the_first},
      {"prompt rows are all computed once", prompt_rows_are_all_computed_once},
      {"a failed step is computed again", a_failed_step_is_computed_again},
      {"requests that can never fit are refused", requests_that_can_never_fit_are_refused},
      {"bad commits change nothing", bad_commits_change_nothing},
      {"bad configurations are refused", bad_configurations_are_refused},
  });
}
