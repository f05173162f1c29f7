#include <vector>

#include "engine/block_manager.h"
#include "testing.h"

namespace ridgeline::engine {
namespace {

using testing::expect;
using testing::expect_equal;
using testing::expect_error;
using Ids = std::vector<std::int32_t>;
using Blocks = std::vector<BlockId>;

constexpr std::int64_t kSize = 4;  // tokens a block

BlockManager manager_of(std::int64_t blocks, bool caching = true) {
  return BlockManager({.num_blocks = blocks, .block_size = kSize, .max_tables = 8,
                       .enable_prefix_caching = caching});
}

Ids count_from(std::int32_t first, std::int32_t n) {
  Ids ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back(first + i);
  return ids;
}

TableId open(BlockManager& manager, const char* tenant = "") {
  return manager.open(manager.chain(tenant).tenant);
}

/// A table with `tokens` written and registered.
TableId fill(BlockManager& manager, const Ids& tokens, const char* tenant = "") {
  const TableId table = open(manager, tenant);
  expect(manager.prepare_write(table, 0, static_cast<std::int64_t>(tokens.size())));
  HashChain chain = manager.chain(tenant);
  manager.register_full(table, chain, tokens);
  return table;
}

Blocks match(BlockManager& manager, const Ids& tokens, const char* tenant = "") {
  HashChain chain = manager.chain(tenant);
  return manager.match(chain, tokens).blocks;
}

void dummy_block_is_never_handed_out() {
  BlockManager manager = manager_of(4);
  const TableId table = open(manager);
  expect(manager.prepare_write(table, 0, 3 * kSize));
  expect_equal(manager.blocks(table), Blocks{1, 2, 3});
  expect_equal(manager.available(), 0);
  manager.check_invariants();
}

void allocation_is_lazy_and_all_or_nothing() {
  BlockManager manager = manager_of(4);
  const TableId table = open(manager);
  expect(manager.prepare_write(table, 0, 1));
  expect(manager.prepare_write(table, 1, kSize));
  expect_equal(manager.blocks(table).size(), 1u);
  expect(!manager.prepare_write(table, kSize, 4 * kSize + 1), "four blocks of three");
  expect_equal(manager.blocks(table).size(), 1u);
  expect_equal(manager.num_free(), 2);
  manager.check_invariants();
}

void registered_blocks_stay_cached_and_are_found() {
  BlockManager manager = manager_of(8);
  const Ids tokens = count_from(10, 10);
  const TableId table = fill(manager, tokens);
  const Blocks blocks = manager.blocks(table);
  manager.close(table);
  expect_equal(manager.num_cached(), 2);
  expect_equal(manager.num_free(), 5);
  expect_equal(match(manager, tokens), Blocks{blocks[0], blocks[1]});
  expect_equal(match(manager, count_from(10, 7)), Blocks{blocks[0]});
  expect_equal(match(manager, tokens, "other"), Blocks{});
  HashChain chain = manager.chain("");
  const PrefixMatch found = manager.match(chain, tokens);
  expect_equal(found.unowned, 2);
  const TableId again = open(manager);
  manager.adopt(again, found);
  expect_equal(manager.num_cached(), 0);
  expect_equal(manager.refcount(blocks[0]), 1);
  manager.check_invariants();
}

void without_caching_nothing_is_found() {
  BlockManager manager = manager_of(8, /*caching=*/false);
  manager.close(fill(manager, count_from(0, 8)));
  expect_equal(match(manager, count_from(0, 8)), Blocks{});
  expect_equal(manager.num_free(), 7);
}

void eviction_takes_the_least_recent_and_tails_first() {
  BlockManager manager = manager_of(5);
  const TableId old = fill(manager, count_from(0, 8)), young = fill(manager, count_from(50, 8));
  manager.close(old);
  manager.close(young);
  const TableId table = open(manager);
  expect(manager.prepare_write(table, 0, kSize));
  expect_equal(manager.evictions(), 1);
  expect_equal(match(manager, count_from(0, 8)).size(), 1u);  // its tail went, not its head
  expect_equal(match(manager, count_from(50, 8)).size(), 2u);
  HashChain chain = manager.chain("");
  expect(manager.match(chain, count_from(0, 8)).next_evicted);
  manager.check_invariants();
}

void adopting_makes_a_block_recent() {
  BlockManager manager = manager_of(3);
  manager.close(fill(manager, count_from(0, 4)));
  manager.close(fill(manager, count_from(50, 4)));
  const TableId user = open(manager);
  HashChain chain = manager.chain("");
  manager.adopt(user, manager.match(chain, count_from(0, 4)));
  manager.close(user);
  expect(manager.prepare_write(open(manager), 0, kSize));
  expect_equal(match(manager, count_from(0, 4)).size(), 1u);
  expect_equal(match(manager, count_from(50, 4)).size(), 0u);
}

void shared_blocks_are_copied_before_a_write() {
  BlockManager manager = manager_of(8);
  const TableId parent = fill(manager, count_from(0, 6));  // one full block, one half
  const TableId child = manager.fork(parent);
  const Blocks shared = manager.blocks(parent);
  expect_equal(manager.refcount(shared[1]), 2);
  expect(manager.prepare_write(child, 6, 7));
  const Blocks own = manager.blocks(child);
  expect_equal(own[0], shared[0]);
  expect(own[1] != shared[1], "the half block is shared, so the writer gets a copy");
  expect(manager.prepare_write(parent, 6, 7));
  expect_equal(manager.blocks(parent), shared);  // the last owner writes in place
  expect(manager.take_copies() == std::vector<BlockCopy>{{shared[1], own[1]}});
  expect(manager.take_copies().empty());
  manager.check_invariants();
}

void a_registered_block_is_copied_before_a_write() {
  BlockManager manager = manager_of(4);
  const TableId table = fill(manager, count_from(0, 4));
  const BlockId before = manager.blocks(table)[0];
  expect(manager.prepare_write(table, 2, 3));
  expect(manager.blocks(table)[0] != before, "what finders read must not change");
  manager.check_invariants();
  manager.take_copies();
  expect_equal(match(manager, count_from(0, 4)), Blocks{before});
  manager.check_invariants();
}

void a_source_waits_for_its_copy() {
  BlockManager manager = manager_of(4, /*caching=*/false);
  const TableId parent = open(manager);
  expect(manager.prepare_write(parent, 0, 2));
  const TableId child = manager.fork(parent);
  expect(manager.prepare_write(child, 2, 3));
  manager.close(parent);
  expect_equal(manager.num_free(), 1);  // the source has no owner, but is still to be read
  manager.check_invariants();
  expect_equal(manager.take_copies().size(), 1u);
  expect_equal(manager.num_free(), 2);
  manager.check_invariants();
}

void closing_the_writer_drops_its_copy() {
  BlockManager manager = manager_of(4, /*caching=*/false);
  const TableId parent = open(manager);
  expect(manager.prepare_write(parent, 0, 2));
  const TableId child = manager.fork(parent);
  expect(manager.prepare_write(child, 2, 3));
  manager.close(child);
  expect(manager.take_copies().empty(), "nobody wants the copy");
  expect_equal(manager.copies(), 0);
  expect_equal(manager.num_free(), 2);
}

void a_copy_of_an_owed_copy_reads_the_original() {
  BlockManager manager = manager_of(8, /*caching=*/false);
  const TableId a = open(manager);
  expect(manager.prepare_write(a, 0, 2));
  const TableId b = manager.fork(a);
  expect(manager.prepare_write(b, 2, 3));
  const TableId c = manager.fork(b);
  expect(manager.prepare_write(c, 2, 3));
  manager.check_invariants();
  const BlockId original = manager.blocks(a)[0];
  expect(manager.take_copies() == std::vector<BlockCopy>{{original, manager.blocks(b)[0]},
                                                         {original, manager.blocks(c)[0]}});
}

void equal_contents_are_registered_once() {
  BlockManager manager = manager_of(8);
  const TableId a = fill(manager, count_from(0, 8)), b = fill(manager, count_from(0, 8));
  expect_equal(match(manager, count_from(0, 8)), manager.blocks(a));
  HashChain chain = manager.chain("");
  expect(manager.prepare_write(b, 8, 12));
  manager.register_full(b, chain, count_from(0, 12));
  const Blocks found = match(manager, count_from(0, 12));
  expect_equal(found, Blocks{manager.blocks(a)[0], manager.blocks(a)[1], manager.blocks(b)[2]});
  manager.close(b);
  expect_equal(manager.num_cached(), 1);  // the duplicates were private
  manager.check_invariants();
}

void unregistering_frees_cached_blocks() {
  BlockManager manager = manager_of(8);
  manager.close(fill(manager, count_from(0, 4)));
  const PrefixId since = manager.next_prefix_id();
  const TableId live = fill(manager, count_from(50, 4));
  manager.close(fill(manager, count_from(70, 4)));
  manager.unregister_since(since);
  manager.check_invariants();
  expect_equal(manager.num_cached(), 1);
  expect_equal(match(manager, count_from(0, 4)).size(), 1u);
  expect_equal(match(manager, count_from(50, 4)).size(), 0u);
  manager.close(live);
  expect_equal(manager.num_free(), 6);
}

void unregistering_spares_the_source_of_a_copy() {
  BlockManager manager = manager_of(4);
  const TableId table = fill(manager, count_from(0, 4));
  expect(manager.prepare_write(table, 2, 3));
  manager.unregister_since(1);
  manager.check_invariants();
  expect_equal(manager.num_used(), 2);
  manager.take_copies();
  expect_equal(manager.num_free(), 2);
  manager.check_invariants();
}

void errors_name_the_numbers() {
  expect_error([] { manager_of(1); }, "num_blocks must be at least 2");
  expect_error([] { BlockManager({.num_blocks = 4, .block_size = 0}); }, "block_size must be");
  expect_error([] { BlockManager({.num_blocks = 1 << 20, .block_size = 1 << 12}); },
               "num_blocks * block_size must fit in 31 bits");
  BlockManager manager = manager_of(4);
  expect_error([&] { manager.close(3); }, "table 3 is not open");
  expect_error([&] { manager.fork(-1); }, "table -1 is not open");
  const TableId table = open(manager);
  expect_error([&] { (void)manager.prepare_write(table, 1, 2); }, "start must be at most 0");
  expect_error([&] { (void)manager.prepare_write(table, 0, 0); }, "0 <= start < end");
  HashChain chain = manager.chain("");
  expect_error([&] { manager.register_full(table, chain, count_from(0, 4)); }, "0 blocks");
  for (int i = 1; i < 8; ++i) open(manager);
  expect_error([&] { open(manager); }, "all 8 tables are open");
  expect_error([&] { manager.fork(table); }, "all 8 tables are open");
  manager.check_invariants();
}

}  // namespace
}  // namespace ridgeline::engine

int main() {
  using namespace ridgeline::engine;
  return ridgeline::testing::run({
      {"dummy block is never handed out", dummy_block_is_never_handed_out},
      {"allocation is lazy and all or nothing", allocation_is_lazy_and_all_or_nothing},
      {"registered blocks stay cached", registered_blocks_stay_cached_and_are_found},
      {"without caching nothing is found", without_caching_nothing_is_found},
      {"eviction order", eviction_takes_the_least_recent_and_tails_first},
      {"adopting makes a block recent", adopting_makes_a_block_recent},
      {"shared blocks are copied before a write", shared_blocks_are_copied_before_a_write},
      {"a registered block is copied", a_registered_block_is_copied_before_a_write},
      {"a source waits for its copy", a_source_waits_for_its_copy},
      {"closing the writer drops its copy", closing_the_writer_drops_its_copy},
      {"a copy of an owed copy", a_copy_of_an_owed_copy_reads_the_original},
      {"equal contents are registered once", equal_contents_are_registered_once},
      {"unregistering frees cached blocks", unregistering_frees_cached_blocks},
      {"unregistering spares a source", unregistering_spares_the_source_of_a_copy},
      {"errors name the numbers", errors_name_the_numbers},
  });
}
