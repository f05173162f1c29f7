#include <vector>

#include "engine/prefix_cache.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::expect;
using testing::expect_equal;
using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kBlockSize = 2;
const Hash128 kTenant = hash_tenant(7, "");

void chained_hash_depends_on_all_before() {
  HashChain a{kTenant, {}}, b{kTenant, {}}, c{hash_tenant(7, "other"), {}};
  a.extend(Ids{1, 2, 3, 4, 9}, kBlockSize);
  b.extend(Ids{5, 2, 3, 4}, kBlockSize);
  c.extend(Ids{1, 2, 3, 4}, kBlockSize);
  expect_equal(a.hashes.size(), 2u);
  expect(!(a.hashes[1] == b.hashes[1]), "the second block's hash must see the first block");
  expect(!(a.hashes[0] == c.hashes[0]), "tenants must not share hashes");
  expect(!(hash_tenant(7, "") == hash_tenant(8, "")), "the seed must matter");
}

void chain_extends_as_the_sequence_grows() {
  HashChain grown{kTenant, {}}, whole{kTenant, {}};
  grown.extend(Ids{1, 2, 3}, kBlockSize);
  grown.extend(Ids{1, 2, 3, 4, 5, 6}, kBlockSize);
  whole.extend(Ids{1, 2, 3, 4, 5, 6}, kBlockSize);
  expect(grown.hashes == whole.hashes);
}

void equal_hashes_live_side_by_side() {
  PrefixCache cache(8, kBlockSize, /*hash_mask=*/0);
  const Hash128 hash;  // all hashes are equal under the mask
  const PrefixId one = cache.insert(1, hash, kTenant, 0, Ids{1, 2});
  cache.insert(2, hash, kTenant, 0, Ids{3, 4});
  cache.insert(3, hash, kTenant, one, Ids{1, 2});
  const Hash128 other = hash_tenant(7, "other");
  expect_equal(cache.find(hash, kTenant, 0, Ids{1, 2}).value_or(-1), 1);
  expect_equal(cache.find(hash, kTenant, 0, Ids{3, 4}).value_or(-1), 2);
  expect_equal(cache.find(hash, kTenant, one, Ids{1, 2}).value_or(-1), 3);
  expect(!cache.find(hash, kTenant, 0, Ids{1, 3}), "tokens are compared");
  expect(!cache.find(hash, kTenant, one, Ids{3, 4}), "parents are compared");
  expect(!cache.find(hash, other, 0, Ids{1, 2}), "tenants are compared");
  cache.erase(2);
  expect(!cache.find(hash, kTenant, 0, Ids{3, 4}));
  expect_equal(cache.find(hash, kTenant, 0, Ids{1, 2}).value_or(-1), 1);
  expect(cache.consistent());
}

void registration_ids_are_not_reused() {
  PrefixCache cache(4, kBlockSize, ~std::uint64_t{0});
  const Hash128 hash = hash_block(kTenant, Ids{1, 2});
  const PrefixId first = cache.insert(1, hash, kTenant, 0, Ids{1, 2});
  cache.insert(2, hash_block(hash, Ids{3, 4}), kTenant, first, Ids{3, 4});
  cache.evict(1);
  const PrefixId second = cache.insert(1, hash, kTenant, 0, Ids{1, 2});
  expect(first != second);
  expect(!cache.find(hash_block(hash, Ids{3, 4}), kTenant, second, Ids{3, 4}),
         "what followed the evicted block does not follow its successor");
}

void eviction_is_remembered_and_erasing_is_not() {
  PrefixCache cache(4, kBlockSize, ~std::uint64_t{0});
  const Hash128 a = hash_block(kTenant, Ids{1, 2}), b = hash_block(kTenant, Ids{3, 4});
  cache.insert(1, a, kTenant, 0, Ids{1, 2});
  cache.insert(2, b, kTenant, 0, Ids{3, 4});
  cache.evict(1);
  cache.erase(2);
  expect(cache.was_evicted(a) && !cache.was_evicted(b));
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"chained hash depends on all before", chained_hash_depends_on_all_before},
      {"chain extends as the sequence grows", chain_extends_as_the_sequence_grows},
      {"equal hashes live side by side", equal_hashes_live_side_by_side},
      {"registration ids are not reused", registration_ids_are_not_reused},
      {"eviction is remembered and erasing is not", eviction_is_remembered_and_erasing_is_not},
  });
}
