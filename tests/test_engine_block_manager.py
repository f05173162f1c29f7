"""Random operations on the block manager beside a plain model and a simulated memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from ridgeline._C import engine

BLOCKS, SIZE, TABLES = 10, 2, 5
TOKENS = st.lists(st.integers(0, 1), max_size=8)
TENANTS = st.sampled_from(["", "other"])


@dataclass
class Table:
    tenant: str
    tokens: list[int] = field(default_factory=list)
    fresh: bool = True
    """Nothing in it was adopted or registered: registering makes all of it findable."""


class BlockManagerMachine(RuleBasedStateMachine):
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = engine.BlockManager(num_blocks=BLOCKS, block_size=SIZE, max_tables=TABLES)
        self.model: dict[int, Table] = {}
        self.memory: list[list[int | None]] = [[None] * SIZE for _ in range(BLOCKS)]

    def write(self, table: int, start: int) -> None:
        """Does what a step does: the copies owed, then the new tokens."""
        for source, destination in self.manager.take_copies():
            self.memory[destination] = list(self.memory[source])
        blocks, tokens = self.manager.blocks(table), self.model[table].tokens
        for position in range(start, len(tokens)):
            assert self.manager.refcount(blocks[position // SIZE]) == 1, "a shared block is written"
            self.memory[blocks[position // SIZE]][position % SIZE] = tokens[position]

    @precondition(lambda self: len(self.model) < TABLES)
    @rule(target=tables, tenant=TENANTS, tokens=TOKENS)
    def open(self, tenant: str, tokens: list[int]) -> int:
        table = self.manager.open(tenant)
        assert table not in self.model
        found = self.manager.match(tokens, tenant)
        hit = self.manager.adopt(table, tokens)
        assert self.manager.blocks(table) == found
        assert hit == len(found) * SIZE
        self.model[table] = Table(tenant, tokens[:hit], fresh=hit == 0)
        return table

    @rule(table=consumes(tables))
    def close(self, table: int) -> None:
        self.manager.close(table)
        del self.model[table]

    @precondition(lambda self: len(self.model) < TABLES)
    @rule(target=tables, table=tables)
    def fork(self, table: int) -> int:
        child = self.manager.fork(table)
        assert child not in self.model
        assert self.manager.blocks(child) == self.manager.blocks(table)
        parent = self.model[table]
        self.model[child] = Table(parent.tenant, list(parent.tokens), fresh=False)
        return child

    @rule(table=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def append(self, table: int, tokens: list[int]) -> None:
        model, before = self.model[table], self.manager.blocks(table)
        start, end = len(model.tokens), len(model.tokens) + len(tokens)
        needed = -(-end // SIZE) - len(before)
        if start % SIZE and self.manager.refcount(before[-1]) > 1:
            needed += 1
        available = self.manager.num_free + self.manager.num_cached
        assert self.manager.prepare_write(table, start, end) == (needed <= available)
        if needed > available:
            assert self.manager.blocks(table) == before
            assert self.manager.num_free + self.manager.num_cached == available
            return
        assert len(self.manager.blocks(table)) == -(-end // SIZE)
        model.tokens += tokens
        self.write(table, start)

    @rule(table=tables)
    def register(self, table: int) -> None:
        model = self.model[table]
        self.manager.register(table, model.tokens)
        found = self.manager.match(model.tokens, model.tenant)
        assert not model.fresh or len(found) == len(model.tokens) // SIZE
        model.fresh = False

    @rule(tokens=TOKENS, tenant=TENANTS)
    def match(self, tokens: list[int], tenant: str) -> None:
        found = self.manager.match(tokens, tenant)
        contents = [token for block in found for token in self.memory[block]]
        assert contents == tokens[: len(contents)]

    @invariant()
    def holds(self) -> None:
        manager = self.manager
        manager.check_invariants()
        assert manager.num_free + manager.num_cached + manager.num_used == BLOCKS - 1
        owners = Counter(block for table in self.model for block in manager.blocks(table))
        assert all(manager.refcount(block) == owners[block] for block in range(BLOCKS))
        for table, model in self.model.items():
            blocks = manager.blocks(table)
            read = [token for block in blocks for token in self.memory[block]]
            assert read[: len(model.tokens)] == model.tokens


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"block_size": 0}, "block_size must be positive, got 0"),
        ({"max_tables": -1}, "max_tables must be positive, got -1"),
        ({"num_blocks": 2**40}, "num_blocks must fit in 31 bits, got 1099511627776"),
    ],
)
def test_bad_sizes_are_refused(arguments: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_blocks": 4, "block_size": 4}
    with pytest.raises(ValueError, match=message):
        engine.BlockManager(**sizes | arguments)


def test_bad_arguments_are_refused() -> None:
    manager = engine.BlockManager(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="table 0 is not open"):
        manager.blocks(0)
    with pytest.raises(ValueError, match=r"block must be from 0 to 3, got 4"):
        manager.refcount(4)
    with pytest.raises(ValueError, match=r"tokens must fit in 31 bits, got -1"):
        manager.match([-1])
    manager.check_invariants()
