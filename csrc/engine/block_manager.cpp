#include "engine/block_manager.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/check.h"

namespace ridgeline::engine {
namespace {

BlockManagerConfig checked(const BlockManagerConfig& config) {
  check(config.block_size > 0, "block_size must be positive, got ", config.block_size);
  check(config.num_blocks >= 2, "num_blocks must be at least 2 (block 0 is the dummy), got ",
        config.num_blocks);
  check(config.max_tables > 0, "max_tables must be positive, got ", config.max_tables);
  checked_int32(config.num_blocks, "num_blocks");
  checked_int32(config.block_size, "block_size");
  checked_int32(config.max_tables, "max_tables");
  checked_int32(config.num_blocks * config.block_size, "num_blocks * block_size");
  return config;
}

}  // namespace

BlockManager::BlockManager(const BlockManagerConfig& config)
    : config_(checked(config)),
      prefix_(static_cast<std::int32_t>(config.num_blocks),
              static_cast<std::int32_t>(config.block_size), config.hash_mask),
      blocks_(config.num_blocks),
      tables_(config.max_tables) {
  for (BlockId block = 1; block < num_blocks(); ++block) push_back(free_, block);
  for (TableId table = num_tables(); table-- > 0;) closed_.push_back(table);
}

// ---- Tables ------------------------------------------------------------------------------------

TableId BlockManager::open(const Hash128& tenant) {
  check(!closed_.empty(), "all ", num_tables(), " tables are open");
  const TableId table = closed_.back();
  closed_.pop_back();
  tables_[table].open = true;
  tables_[table].tenant = tenant;
  return table;
}

void BlockManager::close(TableId table) {
  Table& closing = opened(table);
  while (!closing.blocks.empty()) {
    disown(closing.blocks.back());
    closing.blocks.pop_back();
  }
  closing.prefixes.clear();
  closing.open = false;
  closed_.push_back(table);
}

TableId BlockManager::fork(TableId table) {
  opened(table);
  check(!closed_.empty(), "all ", num_tables(), " tables are open");
  const TableId child = closed_.back();
  closed_.pop_back();
  tables_[child] = tables_[table];
  for (const BlockId block : tables_[child].blocks) own(block);
  return child;
}

bool BlockManager::prepare_write(TableId table, std::int64_t start, std::int64_t end) {
  Table& target = opened(table);
  const std::int64_t have = static_cast<std::int64_t>(target.blocks.size());
  check(0 <= start && start < end, "a write needs 0 <= start < end, got ", start, " and ", end);
  check(start <= have * config_.block_size, "start must be at most ", have * config_.block_size,
        " (the table's reach), got ", start);
  checked_int32(end, "end");

  const std::int64_t first = start / config_.block_size, last = blocks_for(end);
  std::int64_t needed = std::max(last - have, std::int64_t{0});
  for (std::int64_t i = first; i < std::min(last, have); ++i)
    needed += writable(target.blocks[i]) ? 0 : 1;
  if (needed > available()) return false;

  for (std::int64_t i = first; i < std::min(last, have); ++i)
    if (!writable(target.blocks[i])) copy_on_write(target, static_cast<std::size_t>(i));
  while (static_cast<std::int64_t>(target.blocks.size()) < last) {
    target.blocks.push_back(take());
    own(target.blocks.back());
  }
  return true;
}

void BlockManager::copy_on_write(Table& table, std::size_t index) {
  const BlockId shared = table.blocks[index];
  // A block that is itself the destination of a copy still owed has its contents elsewhere.
  const auto into = std::ranges::find(owed_, shared, &BlockCopy::destination);
  const BlockId source = into == owed_.end() ? shared : into->source;
  const BlockId destination = take();
  own(destination);
  owed_.push_back({.source = source, .destination = destination});
  ++blocks_[source].copies_owed;
  ++num_copies_;
  table.blocks[index] = destination;
  table.prefixes.resize(std::min(table.prefixes.size(), index));
  disown(shared);
}

std::vector<BlockCopy> BlockManager::take_copies() {
  std::vector<BlockCopy> taken;
  taken.swap(owed_);
  for (const BlockCopy& copy : taken)
    if (--blocks_[copy.source].copies_owed == 0 && refcount(copy.source) == 0) park(copy.source);
  return taken;
}

bool BlockManager::awaits_copy(TableId table) const {
  const std::vector<BlockId>& blocks = opened(table).blocks;
  return std::ranges::any_of(owed_, [&](const BlockCopy& copy) {
    return std::ranges::find(blocks, copy.destination) != blocks.end();
  });
}

const BlockManager::Table& BlockManager::opened(TableId table) const {
  check(0 <= table && table < num_tables() && tables_[table].open, "table ", table,
        " is not open (tables are 0 to ", num_tables() - 1, ")");
  return tables_[table];
}

// ---- Prefix cache ------------------------------------------------------------------------------

PrefixMatch BlockManager::match(HashChain& chain, Tokens tokens) const {
  PrefixMatch match;
  if (!config_.enable_prefix_caching) return match;
  chain.extend(tokens, block_size());
  PrefixId parent = 0;
  const std::size_t size = static_cast<std::size_t>(block_size());
  for (std::size_t i = 0; i < tokens.size() / size; ++i) {
    const auto block =
        prefix_.find(chain.hashes[i], chain.tenant, parent, tokens.subspan(i * size, size));
    if (!block) {
      match.next_evicted = prefix_.was_evicted(chain.hashes[i]);
      break;
    }
    parent = prefix_.id(*block);
    match.blocks.push_back(*block);
    match.unowned += refcount(*block) == 0 && blocks_[*block].copies_owed == 0;
  }
  return match;
}

void BlockManager::adopt(TableId table, const PrefixMatch& match) {
  Table& adopting = opened(table);
  check(adopting.blocks.empty(), "only an empty table can adopt a prefix; table ", table, " has ",
        adopting.blocks.size(), " blocks");
  for (const BlockId block : match.blocks) {
    if (refcount(block) == 0 && blocks_[block].copies_owed == 0) unlink(cached_, block);
    own(block);
    adopting.blocks.push_back(block);
    adopting.prefixes.push_back(prefix_.id(block));
  }
}

void BlockManager::register_full(TableId table, HashChain& chain, Tokens tokens) {
  if (!config_.enable_prefix_caching) return;
  Table& target = opened(table);
  const std::size_t size = static_cast<std::size_t>(block_size());
  const std::size_t full = tokens.size() / size;
  check(full <= target.blocks.size(), "the table has ", target.blocks.size(),
        " blocks, tokens fill ", full);
  chain.extend(tokens, block_size());
  while (target.prefixes.size() < full) {
    const std::size_t i = target.prefixes.size();
    const Tokens contents = tokens.subspan(i * size, size);
    const PrefixId parent = i == 0 ? 0 : target.prefixes.back();
    const auto holder = prefix_.find(chain.hashes[i], target.tenant, parent, contents);
    const BlockId block = target.blocks[i];
    // A fork's full block may be registered already, under a parent that has gone since.
    if (holder) {
      target.prefixes.push_back(prefix_.id(*holder));
    } else if (prefix_.contains(block)) {
      target.prefixes.push_back(prefix_.id(block));
    } else {
      target.prefixes.push_back(
          prefix_.insert(block, chain.hashes[i], target.tenant, parent, contents));
    }
  }
}

void BlockManager::unregister_since(PrefixId first) {
  for (BlockId block = 1; block < num_blocks(); ++block) {
    if (!prefix_.contains(block) || prefix_.id(block) < first) continue;
    prefix_.erase(block);
    if (refcount(block) > 0 || blocks_[block].copies_owed > 0) continue;
    unlink(cached_, block);
    push_front(free_, block);
  }
}

// ---- Blocks ------------------------------------------------------------------------------------

void BlockManager::push_front(List& list, BlockId block) {
  blocks_[block].previous = -1;
  blocks_[block].next = list.head;
  (list.head >= 0 ? blocks_[list.head].previous : list.tail) = block;
  list.head = block;
  ++list.size;
}

void BlockManager::push_back(List& list, BlockId block) {
  blocks_[block].previous = list.tail;
  blocks_[block].next = -1;
  (list.tail >= 0 ? blocks_[list.tail].next : list.head) = block;
  list.tail = block;
  ++list.size;
}

void BlockManager::unlink(List& list, BlockId block) {
  const auto [previous, next] = std::pair(blocks_[block].previous, blocks_[block].next);
  (previous >= 0 ? blocks_[previous].next : list.head) = next;
  (next >= 0 ? blocks_[next].previous : list.tail) = previous;
  --list.size;
}

BlockId BlockManager::take() {
  List& list = free_.size > 0 ? free_ : cached_;
  const BlockId block = list.head;
  unlink(list, block);
  if (prefix_.contains(block)) {
    prefix_.evict(block);
    ++evictions_;
  }
  return block;
}

void BlockManager::own(BlockId block) { ++blocks_[block].refcount; }

void BlockManager::disown(BlockId block) {
  if (--blocks_[block].refcount > 0) return;
  if (!owed_.empty()) drop_copy_into(block);
  if (blocks_[block].copies_owed == 0) park(block);
}

void BlockManager::park(BlockId block) {
  if (prefix_.contains(block)) {
    push_back(cached_, block);
  } else {
    push_front(free_, block);
  }
}

void BlockManager::drop_copy_into(BlockId block) {
  const auto copy = std::ranges::find(owed_, block, &BlockCopy::destination);
  if (copy == owed_.end()) return;
  const BlockId source = copy->source;
  owed_.erase(copy);
  --num_copies_;
  if (--blocks_[source].copies_owed == 0 && refcount(source) == 0) park(source);
}

// ---- Invariants --------------------------------------------------------------------------------

namespace {

void require(bool holds, const char* invariant) {
  if (!holds) throw std::logic_error(std::string("invariant broken: ") + invariant);
}

}  // namespace

void BlockManager::check_invariants() const {
  check_tables();
  check_lists();
  check_copies();
  require(prefix_.consistent(), "the prefix index lists exactly the registered blocks");
}

void BlockManager::check_tables() const {
  std::vector<std::int32_t> owners(blocks_.size());
  std::size_t open = 0;
  for (TableId t = 0; t < num_tables(); ++t) {
    const Table& table = tables_[t];
    open += table.open;
    require(table.open || table.blocks.empty(), "a closed table has no blocks");
    require(table.prefixes.size() <= table.blocks.size(), "prefixes are of the first blocks");
    std::vector<BlockId> sorted = table.blocks;
    std::ranges::sort(sorted);
    require(std::ranges::adjacent_find(sorted) == sorted.end(), "no table lists a block twice");
    for (const BlockId block : sorted) ++owners[block];
  }
  require(open + closed_.size() == tables_.size(), "each table is open or closed");
  require(owners[0] == 0, "the dummy block is in no table");
  for (BlockId block = 0; block < num_blocks(); ++block)
    require(owners[block] == refcount(block), "refcount = owners");
}

void BlockManager::check_lists() const {
  std::vector<bool> seen(blocks_.size());
  for (const List* list : {&free_, &cached_}) {
    std::int32_t length = 0;
    BlockId previous = -1;
    for (BlockId block = list->head; block >= 0; block = blocks_[block].next) {
      require(block != 0 && !seen[block], "a block is in one list, once; the dummy in none");
      seen[block] = true;
      require(blocks_[block].previous == previous, "lists are linked both ways");
      require(refcount(block) == 0 && blocks_[block].copies_owed == 0, "a listed block is unused");
      require(prefix_.contains(block) == (list == &cached_), "cached = registered and unused");
      previous = block;
      ++length;
    }
    require(list->tail == previous && list->size == length, "tail and size of a list");
  }
  std::int32_t used = 0;
  for (BlockId block = 1; block < num_blocks(); ++block)
    used += refcount(block) > 0 || blocks_[block].copies_owed > 0;
  require(free_.size + cached_.size + used == num_blocks() - 1, "free + cached + used = total");
}

void BlockManager::check_copies() const {
  std::vector<std::int32_t> sources(blocks_.size()), destinations(blocks_.size());
  for (const BlockCopy& copy : owed_) {
    ++sources[copy.source];
    ++destinations[copy.destination];
    require(refcount(copy.destination) > 0, "the destination of a copy is used");
  }
  for (BlockId block = 0; block < num_blocks(); ++block) {
    require(sources[block] == blocks_[block].copies_owed, "copies_owed counts a block's copies");
    require(destinations[block] <= 1, "a block is the destination of one copy");
    require(sources[block] == 0 || destinations[block] == 0, "no destination is a source");
  }
}

}  // namespace ridgeline::engine
