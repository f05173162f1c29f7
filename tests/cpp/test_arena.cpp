#include <vector>

#include "driver.h"
#include "engine/batch.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::expect;
using testing::expect_equal;
using testing::expect_error;
using Ids = std::vector<std::int32_t>;

Ids section(const Arena& arena, Section which) {
  const auto [offset, length] = arena.sections[static_cast<std::size_t>(which)];
  return {arena.data.begin() + offset, arena.data.begin() + offset + length};
}

/// Two sequences of 3 and 1 tokens, two rows, one table update, one copy.
Batch small_batch() {
  return {.step = 4, .input_ids = {10, 11, 12, -1}, .positions = {4, 5, 6, 9},
          .slots = {8, 9, 10, 33}, .seq_ids = {7, 3}, .seq_lens = {7, 10}, .table_rows = {1, 0},
          .cu_q = {0, 3, 4}, .logits_rows = {2, 3}, .row_positions = {7, 10},
          .row_seq_ids = {7, 3}, .table_updates = {1, 1, 2}, .copies = {{5, 6}},
          .swap_outs = {}, .swap_ins = {}, .num_decode_tokens = 1,
          .max_q = 3};
}

void unpadded_sections_hold_the_batch() {
  const Batch batch = small_batch();
  const Arena arena = batch.arena();
  expect_equal(section(arena, Section::kInputIds), batch.input_ids);
  expect_equal(section(arena, Section::kPositions), batch.positions);
  expect_equal(section(arena, Section::kSlots), batch.slots);
  expect_equal(section(arena, Section::kSeqLens), batch.seq_lens);
  expect_equal(section(arena, Section::kCuQ), batch.cu_q);
  expect_equal(section(arena, Section::kTableRows), batch.table_rows);
  expect_equal(section(arena, Section::kLogitsRows), batch.logits_rows);
  expect_equal(section(arena, Section::kRowPositions), batch.row_positions);
  expect_equal(section(arena, Section::kRowSeqIds), batch.row_seq_ids);
  expect_equal(section(arena, Section::kTableUpdates), batch.table_updates);
  expect_equal(section(arena, Section::kCopies), Ids{5, 6});
  expect_equal(batch.max_seq_len(), 10);
}

void sections_are_aligned_and_disjoint() {
  const Arena arena = small_batch().arena(7, 3, 5);
  std::int32_t end = 0;
  for (const auto& [offset, length] : arena.sections) {
    expect_equal(offset % 4, 0);
    expect(offset >= end, "sections overlap");
    end = offset + length;
  }
  expect(end <= static_cast<std::int32_t>(arena.data.size()));
}

void padding_is_harmless() {
  const Arena arena = small_batch().arena(8, 4, 3);
  expect_equal(section(arena, Section::kInputIds), Ids{10, 11, 12, -1, 0, 0, 0, 0});
  expect_equal(section(arena, Section::kSlots), Ids{8, 9, 10, 33, 0, 0, 0, 0});
  expect_equal(section(arena, Section::kSeqLens), Ids{7, 10, 0, 0});
  expect_equal(section(arena, Section::kCuQ), Ids{0, 3, 4, 5, 8});
  expect_equal(section(arena, Section::kTableRows), Ids{1, 0, 0, 0});
  expect_equal(section(arena, Section::kLogitsRows), Ids{2, 3, 0});
  expect_equal(section(arena, Section::kRowSeqIds), Ids{7, 3, -1});
}

void padding_sequences_may_outnumber_padding_tokens() {
  const Arena arena = small_batch().arena(5, 5, 0);
  expect_equal(section(arena, Section::kCuQ), Ids{0, 3, 4, 5, 5, 5});
}

void fixed_offsets_depend_on_the_bucket_alone() {
  Batch other = small_batch();
  other.input_ids.pop_back(), other.positions.pop_back(), other.slots.pop_back();
  other.cu_q = {0, 2, 3};
  other.table_updates.clear();
  const Arena a = small_batch().arena(16, 4, 4), b = other.arena(16, 4, 4);
  for (std::size_t i = 0; i <= static_cast<std::size_t>(Section::kTableUpdates); ++i)
    expect_equal(a.sections[i].offset, b.sections[i].offset);
}

void a_bucket_too_small_is_an_error() {
  expect_error([] { small_batch().arena(3); }, "tokens must be 0 or at least 4");
  expect_error([] { small_batch().arena(0, 1); }, "seqs must be 0 or at least 2");
  expect_error([] { small_batch().arena(0, 0, -1); }, "rows must be 0 or at least 2");
}

void only_table_changes_are_carried() {
  testing::Driver driver({.num_blocks = 20, .block_size = 4, .max_model_len = 32,
                          .vocab_size = 100, .max_num_seqs = 4, .max_num_batched_tokens = 32});
  driver.add({0}, testing::count_from(10, 6), 8);
  expect_equal(section(driver.step()->arena(), Section::kTableUpdates), Ids{0, 0, 1, 0, 1, 2});
  expect_equal(section(driver.step()->arena(), Section::kTableUpdates), Ids{});
  expect_equal(section(driver.step()->arena(), Section::kTableUpdates), Ids{});
  expect_equal(section(driver.step()->arena(), Section::kTableUpdates), Ids{0, 2, 3});
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"unpadded sections hold the batch", unpadded_sections_hold_the_batch},
      {"sections are aligned and disjoint", sections_are_aligned_and_disjoint},
      {"padding is harmless", padding_is_harmless},
      {"more padding sequences than tokens", padding_sequences_may_outnumber_padding_tokens},
      {"fixed offsets depend on the bucket alone", fixed_offsets_depend_on_the_bucket_alone},
      {"a bucket too small is an error", a_bucket_too_small_is_an_error},
      {"only table changes are carried", only_table_changes_are_carried},
  });
}
