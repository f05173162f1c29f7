#include "engine/batch.h"

#include <span>

#include "common/check.h"
#include "engine/hash.h"

namespace ridgeline::engine {
namespace {

constexpr std::int32_t kAlign = 4;  // int32: sections start on 16 bytes

std::int32_t padded(std::int64_t wanted, std::int32_t have, const char* name) {
  check(wanted == 0 || wanted >= have, name, " must be 0 or at least ", have,
        " (the batch's own count), got ", wanted);
  return wanted == 0 ? have : checked_int32(wanted, name);
}

/// Lays sections one after another; what a section does not fill keeps its padding value.
class Layout {
 public:
  explicit Layout(Arena& arena) : arena_(arena) {}

  std::span<std::int32_t> place(Section section, std::int32_t length, std::int32_t padding,
                                std::span<const std::int32_t> contents) {
    const auto offset = static_cast<std::int32_t>(arena_.data.size());
    arena_.sections[static_cast<std::size_t>(section)] = {.offset = offset, .length = length};
    arena_.data.insert(arena_.data.end(), contents.begin(), contents.end());
    arena_.data.resize(offset + length, padding);
    arena_.data.resize((offset + length + kAlign - 1) / kAlign * kAlign, 0);
    return std::span(arena_.data).subspan(offset, length);
  }

 private:
  Arena& arena_;
};

}  // namespace

Arena Batch::arena(std::int64_t tokens, std::int64_t seqs, std::int64_t rows) const {
  const std::int32_t t = padded(tokens, num_tokens(), "tokens");
  const std::int32_t b = padded(seqs, num_seqs(), "seqs");
  const std::int32_t r = padded(rows, num_rows(), "rows");
  std::vector<std::int32_t> pairs;
  for (const BlockCopy& copy : copies) pairs.insert(pairs.end(), {copy.source, copy.destination});

  Arena arena{.data = {}, .sections = {}, .num_tokens = t, .num_seqs = b, .num_rows = r};
  arena.data.reserve(3 * t + 3 * b + 3 * r + table_updates.size() + pairs.size() +
                     kAlign * kSections + 1);
  Layout layout(arena);
  layout.place(Section::kInputIds, t, 0, input_ids);
  layout.place(Section::kPositions, t, 0, positions);
  layout.place(Section::kSlots, t, 0, slots);
  layout.place(Section::kSeqLens, b, 0, seq_lens);
  const std::span<std::int32_t> starts = layout.place(Section::kCuQ, b + 1, 0, cu_q);
  for (std::int32_t i = num_seqs(); i < b; ++i)
    starts[i + 1] = i + 1 == b ? t : std::min(starts[i] + 1, t);
  layout.place(Section::kTableRows, b, 0, table_rows);
  layout.place(Section::kLogitsRows, r, 0, logits_rows);
  layout.place(Section::kRowPositions, r, 0, row_positions);
  layout.place(Section::kRowSeqIds, r, -1, row_seq_ids);
  layout.place(Section::kTableUpdates, static_cast<std::int32_t>(table_updates.size()), 0,
               table_updates);
  layout.place(Section::kCopies, static_cast<std::int32_t>(pairs.size()), 0, pairs);
  return arena;
}

std::uint64_t Batch::digest() const {
  std::vector<std::int32_t> words = arena().data;
  words.insert(words.end(), seq_ids.begin(), seq_ids.end());
  words.insert(words.end(), {num_decode_tokens, max_q, shared_blocks});
  for (const std::vector<BlockCopy>* list : {&swap_outs, &swap_ins}) {
    words.push_back(static_cast<std::int32_t>(list->size()));
    for (const BlockCopy& copy : *list)
      words.insert(words.end(), {copy.source, copy.destination});
  }
  return hash_block({}, words).lo;
}

}  // namespace ridgeline::engine
