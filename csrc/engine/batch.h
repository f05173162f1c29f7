#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "engine/block_manager.h"

namespace ridgeline::engine {

/// The sections of an arena in order. T, B and R are the padded counts of tokens, sequences and
/// logits rows; the offsets of all but the last two sections depend on these alone.
enum class Section : std::uint8_t {
  kInputIds,      // [T]     -1 - r: the token sampled in row r of the previous batch
  kPositions,     // [T]     index of the token in its sequence
  kSlots,         // [T]     block * block_size + offset
  kSeqLens,       // [B]     KV length with the new tokens
  kCuQ,           // [B + 1] first token of each sequence
  kTableRows,     // [B]     row of the device's block-table tensor
  kLogitsRows,    // [R]     token whose logits the row takes
  kRowPositions,  // [R]     index in its sequence of the token the row predicts
  kRowSeqIds,     // [R]
  kTableUpdates,  // [U, 3]  row, column, block
  kCopies,        // [C, 2]  source, destination
};
inline constexpr std::array kSectionNames = {
    "input_ids",   "positions",     "slots",       "seq_lens",      "cu_q",  "table_rows",
    "logits_rows", "row_positions", "row_seq_ids", "table_updates", "copies"};
inline constexpr std::size_t kSections = kSectionNames.size();

/// Every index array of a step in one buffer. Each section starts on 16 bytes.
struct Arena {
  struct Range {
    std::int32_t offset, length;  // int32 units
  };
  std::vector<std::int32_t> data;
  std::array<Range, kSections> sections;
  std::int32_t num_tokens, num_seqs, num_rows;  // padded
};

/// What one step computes: plain arrays, one element a token, a sequence or a logits row.
struct Batch {
  std::int64_t step = 0;
  std::vector<std::int32_t> input_ids, positions, slots;                   // tokens
  std::vector<std::int32_t> seq_ids, seq_lens, table_rows, cu_q = {0};     // sequences
  std::vector<std::int32_t> logits_rows, row_positions, row_seq_ids;       // rows
  std::vector<std::int32_t> table_updates;  // row, column, block; no (row, column) twice
  std::vector<BlockCopy> copies;
  // Before the copies, in this order: device block to host block, host block to device block.
  std::vector<BlockCopy> swap_outs, swap_ins;
  std::int32_t num_decode_tokens = 0, max_q = 0;
  std::int64_t padded_tokens = 0;  // by the step's cost; 0: it is not padded
  std::int32_t shared_blocks = 0;  // leading blocks that all sequences' tables have in common
  // The least time of the step, of its reads alone, of its operations alone; 0: not known.
  double predicted_us = 0, read_us = 0, compute_us = 0;

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(input_ids.size()); }
  std::int32_t num_seqs() const { return static_cast<std::int32_t>(seq_ids.size()); }
  std::int32_t num_rows() const { return static_cast<std::int32_t>(logits_rows.size()); }
  std::int32_t max_seq_len() const {
    return seq_lens.empty() ? 0 : *std::ranges::max_element(seq_lens);
  }

  /// The arena, padded to these counts; 0 is no padding. Padding tokens go to slot 0 of the dummy
  /// block; padding sequences have length 0 and take a padding token each while there are some, the
  /// last one all that are left.
  Arena arena(std::int64_t tokens = 0, std::int64_t seqs = 0, std::int64_t rows = 0) const;

  /// A hash of everything that the step computes.
  std::uint64_t digest() const;
};

}  // namespace ridgeline::engine
