#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "engine/batch.h"
#include "testing.h"

namespace ridgeline::testing {

/// The "key and value" of a token: a digest of it and of everything before it, as attention mixes.
inline std::uint64_t digest(std::uint64_t before, std::int32_t token) {
  std::uint64_t x = (before ^ static_cast<std::uint32_t>(token)) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return x ^ (x >> 27);
}

inline std::uint64_t digest(std::span<const std::int32_t> tokens) {
  std::uint64_t state = 0;
  for (const std::int32_t token : tokens) state = digest(state, token);
  return state;
}

/// The token sampled after contents of this digest; siblings of one prompt differ.
inline std::int32_t sample(std::uint64_t state, std::int32_t seq_id, std::int32_t vocab) {
  return static_cast<std::int32_t>(digest(state, seq_id) % static_cast<std::uint64_t>(vocab));
}

/// Executes batches from their arenas alone, with a digest for each slot of the cache: a slot
/// that is wrong anywhere changes every later sample of those who read it.
class FakeDevice {
 public:
  FakeDevice(std::int32_t num_blocks, std::int32_t block_size, std::int32_t max_num_seqs,
             std::int32_t max_blocks_per_seq, std::int32_t vocab)
      : block_size_(block_size),
        columns_(max_blocks_per_seq),
        vocab_(vocab),
        cache_(static_cast<std::size_t>(num_blocks * block_size), kPoison),
        table_(static_cast<std::size_t>(max_num_seqs * max_blocks_per_seq)) {}

  struct Result {
    std::vector<std::int64_t> tokens;    // a sample for each row
    std::vector<std::uint64_t> digests;  // what the row saw
  };

  Result run(const engine::Batch& batch) {
    const engine::Arena arena = batch.arena();
    const auto at = [&](engine::Section section) {
      const auto [offset, length] = arena.sections[static_cast<std::size_t>(section)];
      expect_equal(offset % 4, 0);
      return std::span(arena.data).subspan(offset, length);
    };
    update_table(at(engine::Section::kTableUpdates));
    swap_blocks(batch);
    copy_blocks(at(engine::Section::kCopies));
    writer_.clear();
    const auto rows_of_table = at(engine::Section::kTableRows);
    for (const std::int32_t row : rows_of_table)
      for (std::int32_t i = 0; i < batch.shared_blocks; ++i)
        expect_equal(table_.at(row * columns_ + i), table_.at(rows_of_table[0] * columns_ + i));
    const auto starts = at(engine::Section::kCuQ);
    for (std::size_t i = 0; i + 1 < starts.size(); ++i)
      compute(at(engine::Section::kTableRows)[i], at(engine::Section::kSeqLens)[i],
              std::pair(starts[i], starts[i + 1]), at(engine::Section::kInputIds),
              at(engine::Section::kPositions), at(engine::Section::kSlots));
    Result result;
    const auto slots = at(engine::Section::kSlots);
    const auto rows = at(engine::Section::kLogitsRows);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      result.digests.push_back(cache_[slots[rows[r]]]);
      expect_equal(at(engine::Section::kRowPositions)[r],
                   at(engine::Section::kPositions)[rows[r]] + 1);
      const std::int32_t seq_id = at(engine::Section::kRowSeqIds)[r];
      result.tokens.push_back(sample(result.digests.back(), seq_id, vocab_));
    }
    last_tokens_ = result.tokens;
    return result;
  }

  /// What a run that broke off may leave behind: anything in the slots it was to write.
  void spoil(const engine::Batch& batch) {
    for (const std::int32_t slot : batch.slots) cache_[slot] = kPoison;
    for (const auto& [block, host] : batch.swap_outs)
      for (std::int32_t o = 0; o < block_size_; ++o) host_[host * block_size_ + o] = kPoison;
  }

 private:
  static constexpr std::uint64_t kPoison = 0xbadbadbadbadbad;

  void update_table(std::span<const std::int32_t> updates) {
    std::set<std::pair<std::int32_t, std::int32_t>> seen;
    for (std::size_t i = 0; i < updates.size(); i += 3) {
      expect(seen.insert({updates[i], updates[i + 1]}).second, "a cell is updated twice");
      expect(updates[i + 1] < columns_, "a column beyond the table");
      table_.at(updates[i] * columns_ + updates[i + 1]) = updates[i + 2];
    }
  }

  /// Out before in: what comes back may have left in the same batch.
  void swap_blocks(const engine::Batch& batch) {
    for (const auto& [block, host] : batch.swap_outs)
      for (std::int32_t o = 0; o < block_size_; ++o)
        host_[host * block_size_ + o] = cache_.at(block * block_size_ + o);
    for (const auto& [host, block] : batch.swap_ins)
      for (std::int32_t o = 0; o < block_size_; ++o)
        cache_.at(block * block_size_ + o) = host_.at(host * block_size_ + o);
  }

  void copy_blocks(std::span<const std::int32_t> copies) {
    std::set<std::int32_t> sources, destinations;
    for (std::size_t i = 0; i < copies.size(); i += 2) {
      sources.insert(copies[i]);
      expect(destinations.insert(copies[i + 1]).second, "two copies into one block");
    }
    for (const std::int32_t block : destinations)
      expect(!sources.contains(block) && block != 0, "copies must not depend on their order");
    for (std::size_t i = 0; i < copies.size(); i += 2)
      for (std::int32_t o = 0; o < block_size_; ++o)
        cache_.at(copies[i + 1] * block_size_ + o) = cache_.at(copies[i] * block_size_ + o);
  }

  void compute(std::int32_t row, std::int32_t length, std::pair<std::int32_t, std::int32_t> range,
               std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
               std::span<const std::int32_t> slots) {
    const auto slot_of = [&](std::int32_t position) {
      const std::int32_t block = table_.at(row * columns_ + position / block_size_);
      expect(block != 0, "the dummy block is in a table");
      return block * block_size_ + position % block_size_;
    };
    expect(range.first < range.second, "a sequence without tokens");
    expect_equal(length, positions[range.second - 1] + 1);
    for (std::int32_t p = 0; p < length; ++p) {
      const auto writer = writer_.find(slot_of(p));
      expect(writer == writer_.end(), "a step reads what it computes for another sequence");
    }
    for (std::int32_t t = range.first; t < range.second; ++t) {
      const std::int32_t position = positions[t];
      expect_equal(slots[t], slot_of(position));
      const std::uint64_t before = position == 0 ? 0 : cache_.at(slot_of(position - 1));
      const std::int32_t id =
          ids[t] >= 0 ? ids[t] : static_cast<std::int32_t>(last_tokens_.at(-1 - ids[t]));
      cache_.at(slots[t]) = digest(before, id);
    }
    for (std::int32_t t = range.first; t < range.second; ++t) writer_[slots[t]] = row;
  }

  std::int32_t block_size_, columns_, vocab_;
  std::vector<std::uint64_t> cache_;  // by slot
  std::map<std::int32_t, std::uint64_t> host_;
  std::vector<std::int32_t> table_;   // [max_num_seqs, columns_]
  std::map<std::int32_t, std::int32_t> writer_;  // slots written in this step
  std::vector<std::int64_t> last_tokens_;        // sampled by the batch before
};

}  // namespace ridgeline::testing
