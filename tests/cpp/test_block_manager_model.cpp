// Random operations beside a model with the simplest containers that can say which block each
// operation takes, and beside a simulated memory that says whether the contents are right.
#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/block_manager.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::expect;
using testing::expect_equal;
using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kBlocks = 12, kSize = 2, kTables = 5, kVocab = 2;

struct Registration {
  BlockId block;
  int serial, parent;  // of the model's own numbering
  std::string tenant;
  Ids tokens;
};

struct ModelTable {
  std::string tenant;
  Ids contents;
  std::vector<BlockId> blocks;
  std::vector<int> serials;  // of the registrations that stand for its first blocks
};

struct Model {
  std::map<TableId, ModelTable> tables;
  std::deque<BlockId> free, cached;
  std::vector<Registration> registrations;
  std::vector<BlockCopy> owed;
  int serials = 0;

  int owners(BlockId block) const {
    int count = 0;
    for (const auto& [id, table] : tables) count += std::ranges::count(table.blocks, block);
    return count;
  }
  int sources(BlockId block) const { return std::ranges::count(owed, block, &BlockCopy::source); }
  auto registration(BlockId block) {
    return std::ranges::find(registrations, block, &Registration::block);
  }
  bool registered(BlockId block) { return registration(block) != registrations.end(); }
  const Registration* find(const std::string& tenant, int parent, const Ids& tokens) const {
    for (const Registration& r : registrations)
      if (r.tenant == tenant && r.parent == parent && r.tokens == tokens) return &r;
    return nullptr;
  }

  BlockId take() {
    std::deque<BlockId>& list = free.empty() ? cached : free;
    const BlockId block = list.front();
    list.pop_front();
    if (registered(block)) registrations.erase(registration(block));
    return block;
  }
  /// The block goes to its list if nothing holds it any more.
  void settle(BlockId block) {
    if (owners(block) > 0 || sources(block) > 0) return;
    if (registered(block)) {
      cached.push_back(block);
    } else {
      free.push_front(block);
    }
  }
  /// An owner of the block has just gone.
  void disowned(BlockId block) {
    if (owners(block) > 0) return;
    const auto into = std::ranges::find(owed, block, &BlockCopy::destination);
    if (into != owed.end()) {
      const BlockId source = into->source;
      owed.erase(into);
      settle(source);
    }
    settle(block);
  }
};

/// The manager, its model and a memory, under one random operation after another.
class Machine {
 public:
  Machine(unsigned seed, std::uint64_t hash_mask)
      : random_(seed),
        manager_({.num_blocks = kBlocks, .block_size = kSize, .max_tables = kTables, .seed = seed,
                  .hash_mask = hash_mask}),
        memory_(kBlocks * kSize, -1) {
    for (BlockId block = 1; block < kBlocks; ++block) model_.free.push_back(block);
  }

  void step() {
    switch (below(8)) {
      case 0: open(); break;
      case 1: close(); break;
      case 2: fork(); break;
      case 3:
      case 4: write(); break;
      case 5: flush(); break;
      case 6: register_full(); break;
      case 7: below(20) == 0 ? unregister() : match(); break;
    }
    compare();
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  Ids random_tokens(int n) {
    Ids tokens(static_cast<std::size_t>(n));
    for (auto& token : tokens) token = below(kVocab);
    return tokens;
  }
  std::optional<TableId> any_table() {
    if (model_.tables.empty()) return std::nullopt;
    return std::next(model_.tables.begin(), below(static_cast<int>(model_.tables.size())))->first;
  }

  void open() {
    if (manager_.num_tables_left() == 0) return;
    const std::string tenant = below(4) == 0 ? "other" : "";
    const TableId table = manager_.open(manager_.chain(tenant).tenant);
    expect(!model_.tables.contains(table), "an open table was handed out");
    ModelTable& model = model_.tables[table];
    model.tenant = tenant;
    if (below(4) > 0) adopt(table, model);
  }

  void adopt(TableId table, ModelTable& model) {
    const Ids tokens = random_tokens(below(8));
    HashChain chain = manager_.chain(model.tenant);
    manager_.adopt(table, manager_.match(chain, tokens));
    for (const Registration& r : expected_match(model.tenant, tokens)) {
      if (model_.owners(r.block) == 0) std::erase(model_.cached, r.block);
      model.blocks.push_back(r.block);
      model.serials.push_back(r.serial);
      model.contents.insert(model.contents.end(), r.tokens.begin(), r.tokens.end());
    }
  }

  void close() {
    const auto table = any_table();
    if (!table) return;
    manager_.close(*table);
    ModelTable& model = model_.tables[*table];
    while (!model.blocks.empty()) {
      const BlockId block = model.blocks.back();
      model.blocks.pop_back();
      model_.disowned(block);
    }
    model_.tables.erase(*table);
    std::erase_if(unwritten_, [&](TableId t) { return t == *table; });
  }

  void fork() {
    const auto table = any_table();
    if (!table || manager_.num_tables_left() == 0) return;
    if (std::ranges::count(unwritten_, *table)) flush();
    const TableId child = manager_.fork(*table);
    expect(!model_.tables.contains(child), "an open table was handed out");
    model_.tables[child] = model_.tables[*table];
  }

  void write() {
    const auto table = any_table();
    if (!table) return;
    if (std::ranges::count(unwritten_, *table)) flush();
    ModelTable& model = model_.tables[*table];
    const int have = static_cast<int>(model.contents.size());
    const int start = below(3) == 0 ? below(have + 1) : have;
    const int end = std::max(have, start) + 1 + below(5);
    const int last = (end + kSize - 1) / kSize;

    int needed = std::max(0, last - static_cast<int>(model.blocks.size()));
    for (int i = start / kSize; i < static_cast<int>(model.blocks.size()); ++i)
      needed += !writable(model.blocks[i]);
    const int available = static_cast<int>(model_.free.size() + model_.cached.size());
    expect_equal(manager_.prepare_write(*table, start, end), needed <= available);
    if (needed > available) return;

    for (int i = start / kSize; i < static_cast<int>(model.blocks.size()); ++i)
      if (!writable(model.blocks[i])) copy(model, static_cast<std::size_t>(i));
    while (static_cast<int>(model.blocks.size()) < last) model.blocks.push_back(model_.take());
    model.contents.resize(static_cast<std::size_t>(start));
    for (const std::int32_t token : random_tokens(end - start)) model.contents.push_back(token);
    unwritten_.push_back(*table);
  }

  bool writable(BlockId block) { return model_.owners(block) == 1 && !model_.registered(block); }

  void copy(ModelTable& table, std::size_t index) {
    const BlockId shared = table.blocks[index];
    const auto into = std::ranges::find(model_.owed, shared, &BlockCopy::destination);
    const BlockId source = into == model_.owed.end() ? shared : into->source;
    const BlockId destination = model_.take();
    model_.owed.push_back({source, destination});
    table.blocks[index] = destination;
    table.serials.resize(std::min(table.serials.size(), index));
    model_.disowned(shared);
  }

  /// Copies, then writes, as a step does: each owed copy must find its source as it was.
  void flush() {
    const std::vector<BlockCopy> copies = manager_.take_copies();
    expect(copies == model_.owed, "copies owed");
    model_.owed.clear();
    for (const auto& [source, destination] : copies) {
      std::copy_n(memory_.begin() + source * kSize, kSize, memory_.begin() + destination * kSize);
    }
    for (const BlockCopy& copy : copies)
      if (model_.owners(copy.source) == 0 && !in_a_list(copy.source)) model_.settle(copy.source);
    for (const TableId id : unwritten_) {
      const ModelTable& table = model_.tables[id];
      for (std::size_t p = 0; p < table.contents.size(); ++p) {
        const BlockId block = table.blocks[p / kSize];
        if (writable(block)) memory_[block * kSize + p % kSize] = table.contents[p];
      }
    }
    unwritten_.clear();
  }

  bool in_a_list(BlockId block) {
    return std::ranges::count(model_.free, block) + std::ranges::count(model_.cached, block) > 0;
  }

  std::vector<Registration> expected_match(const std::string& tenant, const Ids& tokens) const {
    std::vector<Registration> match;
    for (std::size_t i = 0; (i + 1) * kSize <= tokens.size(); ++i) {
      const Ids block(tokens.begin() + i * kSize, tokens.begin() + (i + 1) * kSize);
      const Registration* r = model_.find(tenant, match.empty() ? 0 : match.back().serial, block);
      if (!r) break;
      match.push_back(*r);
    }
    return match;
  }

  void register_full() {
    const auto id = any_table();
    if (!id) return;
    flush();
    ModelTable& table = model_.tables[*id];
    HashChain chain = manager_.chain(table.tenant);
    manager_.register_full(*id, chain, table.contents);
    for (std::size_t i = table.serials.size(); (i + 1) * kSize <= table.contents.size(); ++i) {
      const Ids tokens(table.contents.begin() + i * kSize,
                       table.contents.begin() + (i + 1) * kSize);
      const int parent = i == 0 ? 0 : table.serials[i - 1];
      const Registration* r = model_.find(table.tenant, parent, tokens);
      if (!r && model_.registered(table.blocks[i])) r = &*model_.registration(table.blocks[i]);
      if (!r) {
        model_.registrations.push_back(
            {table.blocks[i], ++model_.serials, parent, table.tenant, tokens});
        r = &model_.registrations.back();
      }
      table.serials.push_back(r->serial);
    }
  }

  void match() {
    const std::string tenant = below(4) == 0 ? "other" : "";
    const Ids tokens = random_tokens(below(10));
    HashChain chain = manager_.chain(tenant);
    std::vector<BlockId> expected;
    for (const Registration& r : expected_match(tenant, tokens)) expected.push_back(r.block);
    const PrefixMatch match = manager_.match(chain, tokens);
    expect_equal(match.blocks, expected);
    for (std::size_t p = 0; p < expected.size() * kSize; ++p)
      expect_equal(memory_[match.blocks[p / kSize] * kSize + p % kSize], tokens[p]);
  }

  void unregister() {
    const int recent = std::min(below(4), model_.serials);  // the last so many registrations
    manager_.unregister_since(manager_.next_prefix_id() - static_cast<PrefixId>(recent));
    for (BlockId block = 1; block < kBlocks; ++block) {
      const auto r = model_.registration(block);
      if (r == model_.registrations.end() || r->serial <= model_.serials - recent) continue;
      model_.registrations.erase(r);
      if (std::erase(model_.cached, block)) model_.free.push_front(block);
    }
  }

  void compare() {
    manager_.check_invariants();
    expect_equal(manager_.num_free(), static_cast<int>(model_.free.size()));
    expect_equal(manager_.num_cached(), static_cast<int>(model_.cached.size()));
    for (const auto& [id, table] : model_.tables) expect_equal(manager_.blocks(id), table.blocks);
    for (BlockId block = 1; block < kBlocks; ++block)
      expect_equal(manager_.refcount(block), model_.owners(block));
    if (!unwritten_.empty() || !model_.owed.empty()) return;
    for (const auto& [id, table] : model_.tables)
      for (std::size_t p = 0; p < table.contents.size(); ++p)
        expect_equal(memory_[table.blocks[p / kSize] * kSize + p % kSize], table.contents[p]);
  }

  std::mt19937 random_;
  BlockManager manager_;
  Model model_;
  std::vector<std::int32_t> memory_;
  std::vector<TableId> unwritten_;  // tables whose contents are not in memory yet
};

template <std::uint64_t kMask>
void random_operations_agree_with_the_model() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Machine machine(seed, kMask);
    for (int i = 0; i < 1000; ++i) machine.step();
  }
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"random operations", random_operations_agree_with_the_model<~std::uint64_t{0}>},
      {"random operations, hashes of one bit", random_operations_agree_with_the_model<1>},
      {"random operations, all hashes equal", random_operations_agree_with_the_model<0>},
  });
}
