#include "engine/prefix_cache.h"

#include <algorithm>
#include <bit>

namespace ridgeline::engine {

void HashChain::extend(Tokens tokens, std::int32_t block_size) {
  const std::size_t size = static_cast<std::size_t>(block_size);
  const std::size_t full = tokens.size() / size;
  while (hashes.size() < full) {
    const Hash128& parent = hashes.empty() ? tenant : hashes.back();
    hashes.push_back(hash_block(parent, tokens.subspan(hashes.size() * size, size)));
  }
}

PrefixCache::PrefixCache(std::int32_t num_blocks, std::int32_t block_size, std::uint64_t hash_mask)
    : block_size_(block_size),
      hash_mask_(hash_mask),
      entries_(num_blocks),
      tokens_(static_cast<std::size_t>(num_blocks) * block_size),
      heads_(std::bit_ceil(2 * static_cast<std::size_t>(num_blocks)), -1),
      evicted_(heads_.size()) {}

std::optional<BlockId> PrefixCache::find(const Hash128& hash, const Hash128& tenant,
                                         PrefixId parent, Tokens tokens) const {
  for (BlockId block = heads_[bucket(hash)]; block >= 0; block = entries_[block].next) {
    const Entry& entry = entries_[block];
    if (same_hash(entry.hash, hash) && entry.parent == parent && entry.tenant == tenant &&
        std::ranges::equal(tokens_of(block), tokens))
      return block;
  }
  return std::nullopt;
}

PrefixId PrefixCache::insert(BlockId block, const Hash128& hash, const Hash128& tenant,
                             PrefixId parent, Tokens tokens) {
  BlockId& head = heads_[bucket(hash)];
  entries_[block] = {
      .id = next_id_++, .parent = parent, .hash = hash, .tenant = tenant, .next = head};
  head = block;
  std::ranges::copy(tokens, tokens_of(block).begin());
  return entries_[block].id;
}

void PrefixCache::erase(BlockId block) {
  BlockId* link = &heads_[bucket(entries_[block].hash)];
  while (*link != block) link = &entries_[*link].next;
  *link = entries_[block].next;
  entries_[block] = {};
}

void PrefixCache::evict(BlockId block) {
  const Hash128 hash = entries_[block].hash;
  evicted_[bucket(hash)] = hash;
  erase(block);
}

bool PrefixCache::was_evicted(const Hash128& hash) const {
  return evicted_[bucket(hash)] == hash;
}

bool PrefixCache::consistent() const {
  std::size_t listed = 0;
  for (std::size_t b = 0; b < heads_.size(); ++b)
    for (BlockId block = heads_[b]; block >= 0; block = entries_[block].next) {
      if (++listed > entries_.size()) return false;  // a cycle
      if (!contains(block) || bucket(entries_[block].hash) != b) return false;
    }
  return listed == static_cast<std::size_t>(std::ranges::count_if(
                       entries_, [](const Entry& entry) { return entry.id != 0; }));
}

std::span<std::int32_t> PrefixCache::tokens_of(BlockId block) {
  return {tokens_.data() + static_cast<std::size_t>(block) * block_size_,
          static_cast<std::size_t>(block_size_)};
}

Tokens PrefixCache::tokens_of(BlockId block) const {
  return {tokens_.data() + static_cast<std::size_t>(block) * block_size_,
          static_cast<std::size_t>(block_size_)};
}

}  // namespace ridgeline::engine
