#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/hash.h"

namespace ridgeline::engine {

using BlockId = std::int32_t;
using Tokens = std::span<const std::int32_t>;

/// A name for one registration of one block, never used twice. 0 stands before a first block.
using PrefixId = std::uint64_t;

/// The hashes of a sequence's full blocks, computed once and extended as it grows.
struct HashChain {
  Hash128 tenant;               // the root
  std::vector<Hash128> hashes;  // one for each full block hashed so far

  void extend(Tokens tokens, std::int32_t block_size);
};

/// Which block holds which tokens after which prefix.
///
/// The hash only finds candidates: a block matches if its tenant, its parent and its tokens are
/// equal. The parent is compared as a PrefixId, so by induction the whole prefix is equal whatever
/// the hash does. Blocks of equal hash live side by side in one bucket. Nothing allocates after
/// construction.
class PrefixCache {
 public:
  /// `hash_mask` keeps that many bits of a hash; tests narrow it to force collisions.
  PrefixCache(std::int32_t num_blocks, std::int32_t block_size, std::uint64_t hash_mask);

  std::optional<BlockId> find(const Hash128& hash, const Hash128& tenant, PrefixId parent,
                              Tokens tokens) const;

  /// Requires: the block is not registered, and find() of the same contents has nothing.
  PrefixId insert(BlockId block, const Hash128& hash, const Hash128& tenant, PrefixId parent,
                  Tokens tokens);

  /// Requires: the block is registered.
  void erase(BlockId block);

  /// As erase, and remembers the hash so that a later miss can be explained.
  void evict(BlockId block);

  /// Whether contents of this hash were evicted, as far as a table of fixed size remembers.
  bool was_evicted(const Hash128& hash) const;

  bool contains(BlockId block) const { return entries_[block].id != 0; }
  PrefixId id(BlockId block) const { return entries_[block].id; }
  PrefixId next_id() const { return next_id_; }

  /// Whether the index lists exactly the registered blocks.
  bool consistent() const;

 private:
  struct Entry {
    PrefixId id = 0;  // 0: not registered
    PrefixId parent = 0;
    Hash128 hash, tenant;
    BlockId next = -1;  // in its bucket
  };

  std::size_t bucket(const Hash128& hash) const {
    return hash.lo & hash_mask_ & (heads_.size() - 1);
  }
  bool same_hash(const Hash128& a, const Hash128& b) const {
    return ((a.lo ^ b.lo) & hash_mask_) == 0 && ((a.hi ^ b.hi) & hash_mask_) == 0;
  }
  std::span<std::int32_t> tokens_of(BlockId block);
  Tokens tokens_of(BlockId block) const;

  std::int32_t block_size_;
  std::uint64_t hash_mask_;
  PrefixId next_id_ = 1;
  std::vector<Entry> entries_;         // by block
  std::vector<std::int32_t> tokens_;   // by block, block_size each
  std::vector<BlockId> heads_;         // by bucket; a power of two of them
  std::vector<Hash128> evicted_;       // by bucket, the last one evicted
};

}  // namespace ridgeline::engine
