#pragma once
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/prefix_cache.h"

namespace ridgeline::engine {

using TableId = std::int32_t;

struct BlockCopy {
  BlockId source, destination;
  bool operator==(const BlockCopy&) const = default;
};

struct BlockManagerConfig {
  std::int64_t num_blocks = 0;  // with the dummy block 0
  std::int64_t block_size = 0;  // tokens
  std::int64_t max_tables = 256;
  bool enable_prefix_caching = true;
  std::uint64_t seed = 0;       // of the prefix hash
  std::uint64_t hash_mask = ~std::uint64_t{0};  // see PrefixCache
};

/// The prefix of a sequence that registered blocks hold.
struct PrefixMatch {
  std::vector<BlockId> blocks;
  std::int32_t unowned = 0;   // of them are cached, not used: adopting takes them from available()
  bool next_evicted = false;  // the first block missed was registered once and evicted
};

/// Owns the blocks of the KV cache and the tables that list each sequence's blocks in order.
///
/// A block is in one of three states:
///   free    no owner, no contents worth keeping
///   cached  no owner, registered in the prefix cache, evictable; least recently used goes first
///   used    owned by tables, or the source of a copy not yet taken
/// Free and cached blocks are index-linked lists: each move is O(1).
///
/// Invariants (check_invariants):
///   free + cached + used = num_blocks - 1; block 0, the dummy, is in no state and no table
///   refcount of a block = the tables that list it; no table lists a block twice
///   a free block is not registered, a cached one is
///   copies owed: no destination is a source, none appears twice, each is used
///   a block that is shared or registered is never written: prepare_write replaces it by a copy
/// An operation that fails changes nothing.
class BlockManager {
 public:
  explicit BlockManager(const BlockManagerConfig& config);

  // ---- Tables ----

  /// An empty table. Requires: num_tables_left() > 0.
  /// The tenant is that of its chain: see chain().
  TableId open(const Hash128& tenant);

  /// Gives the blocks back, the last first, so that a prefix is evicted after what follows it.
  void close(TableId table);

  /// A new table of the same blocks. Requires: num_tables_left() > 0.
  TableId fork(TableId table);

  /// Makes token positions [start, end) writable, or returns false if blocks are lacking.
  /// Missing blocks are appended; what may not be written is replaced by a copy, which is owed.
  /// Requires: start < end, and the table reaches up to start.
  [[nodiscard]] bool prepare_write(TableId table, std::int64_t start, std::int64_t end);

  /// The copies owed since the last call, to be made before anything else writes the cache. Until
  /// then a source that lost its owners is not handed out.
  std::vector<BlockCopy> take_copies();

  /// Whether a copy into one of the table's blocks is owed.
  bool awaits_copy(TableId table) const;

  // ---- Prefix cache ----

  /// A chain for the tenant's sequences; its hashes are added by the calls below.
  HashChain chain(std::string_view tenant) const { return {hash_tenant(config_.seed, tenant), {}}; }
  HashChain chain(TableId table) const { return {opened(table).tenant, {}}; }

  /// The registered blocks that hold the first full blocks of `tokens`. Extends `chain`.
  PrefixMatch match(HashChain& chain, Tokens tokens) const;

  /// Requires: the table is empty, the match is current and of the table's tenant.
  void adopt(TableId table, const PrefixMatch& match);

  /// Registers the table's blocks that `tokens`, its contents from the start, fill. Blocks whose
  /// contents another block already holds stay private. Extends `chain`.
  void register_full(TableId table, HashChain& chain, Tokens tokens);

  /// Takes back every registration with an id from `first` on.
  void unregister_since(PrefixId first);

  PrefixId next_prefix_id() const { return prefix_.next_id(); }
  PrefixId prefix_id(BlockId block) const { return prefix_.id(block); }

  // ---- Queries ----

  const std::vector<BlockId>& blocks(TableId table) const { return opened(table).blocks; }
  std::int32_t refcount(BlockId block) const { return blocks_[block].refcount; }
  std::int32_t num_blocks() const { return static_cast<std::int32_t>(blocks_.size()); }
  std::int32_t block_size() const { return static_cast<std::int32_t>(config_.block_size); }
  std::int32_t num_free() const { return free_.size; }
  std::int32_t num_cached() const { return cached_.size; }
  std::int32_t num_used() const { return num_blocks() - 1 - available(); }
  std::int32_t available() const { return free_.size + cached_.size; }
  std::int32_t num_tables_left() const { return static_cast<std::int32_t>(closed_.size()); }
  std::int32_t num_tables() const { return static_cast<std::int32_t>(tables_.size()); }
  std::int64_t evictions() const { return evictions_; }
  std::int64_t copies() const { return num_copies_; }
  std::int32_t blocks_for(std::int64_t tokens) const {
    return static_cast<std::int32_t>((tokens + config_.block_size - 1) / config_.block_size);
  }

  /// Throws std::logic_error naming the invariant that does not hold.
  void check_invariants() const;

 private:
  struct Block {
    std::int32_t refcount = 0;
    std::int32_t copies_owed = 0;    // of which it is the source
    BlockId previous = -1, next = -1;  // in its list
  };
  struct List {  // of blocks, linked through Block
    BlockId head = -1, tail = -1;
    std::int32_t size = 0;
  };
  struct Table {
    bool open = false;
    Hash128 tenant;
    std::vector<BlockId> blocks;
    std::vector<PrefixId> prefixes;  // of its first blocks: what holds these contents for finders
  };

  const Table& opened(TableId table) const;
  Table& opened(TableId table) { return const_cast<Table&>(std::as_const(*this).opened(table)); }
  bool writable(BlockId block) const {
    return blocks_[block].refcount == 1 && !prefix_.contains(block);
  }

  void push_front(List& list, BlockId block);
  void push_back(List& list, BlockId block);
  void unlink(List& list, BlockId block);
  BlockId take();                     // Requires: available() > 0
  void own(BlockId block);            // one more table lists it
  void disown(BlockId block);         // one fewer
  void park(BlockId block);           // it became free or cached
  void drop_copy_into(BlockId block);
  void copy_on_write(Table& table, std::size_t index);
  void check_tables() const;
  void check_lists() const;
  void check_copies() const;

  BlockManagerConfig config_;
  PrefixCache prefix_;
  std::vector<Block> blocks_;
  List free_, cached_;
  std::vector<Table> tables_;
  std::vector<TableId> closed_;    // a stack
  std::vector<BlockCopy> owed_;
  std::int64_t evictions_ = 0, num_copies_ = 0;
};

}  // namespace ridgeline::engine
