"""A device that executes batches on digests instead of keys and values, from the arena alone."""

from __future__ import annotations

import numpy as np

from ridgeline._C import engine


def digest(before: int, token: int) -> int:
    """Stands for what a layer computes of a token and of everything before it."""
    return hash((before, token))


def digest_all(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = digest(state, token)
    return state


def sample(state: int, seq_id: int, vocab_size: int) -> int:
    return digest(state, seq_id) % vocab_size


class Device:
    def __init__(self, scheduler: engine.Scheduler, *, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.cache: dict[int, int] = {}  # slot -> digest
        self.table: dict[tuple[int, int], int] = {}
        self.columns = scheduler.max_blocks_per_seq
        self.last: list[int] = []
        self.host: dict[int, int] = {}

    def slot(self, row: int, position: int) -> int:
        block = self.table[row, position // self.block_size]
        return block * self.block_size + position % self.block_size

    def run(self, batch: engine.Batch, arena: engine.Arena) -> list[int]:
        flat = np.frombuffer(memoryview(arena), dtype=np.int32)
        part = {name: flat[o : o + n].tolist() for name, (o, n) in arena.offsets.items()}
        self.swap(batch)
        self.prepare(part["table_updates"], part["copies"])
        for i in range(batch.num_seqs):
            row, start, end = part["table_rows"][i], part["cu_q"][i], part["cu_q"][i + 1]
            assert part["seq_lens"][i] == part["positions"][end - 1] + 1
            for t in range(start, end):
                position, token = part["positions"][t], part["input_ids"][t]
                assert part["slots"][t] == self.slot(row, position)
                before = self.cache[self.slot(row, position - 1)] if position else 0
                token = token if token >= 0 else self.last[-1 - token]
                self.cache[part["slots"][t]] = digest(before, token)
        assert part["seq_lens"][batch.num_seqs :] == [0] * (arena.num_seqs - batch.num_seqs)
        assert part["slots"][batch.num_tokens :] == [0] * (arena.num_tokens - batch.num_tokens)
        states = [self.cache[part["slots"][t]] for t in part["logits_rows"][: batch.num_rows]]
        ids = part["row_seq_ids"]
        self.last = [self.sample(s, i) for s, i in zip(states, ids, strict=False)]
        return self.last

    def sample(self, state: int, seq_id: int) -> int:
        return sample(state, seq_id, self.vocab_size)

    def swap(self, batch: engine.Batch) -> None:
        """Out before in: what comes back may have left in the same batch."""
        size = self.block_size
        for block, host in batch.swap_outs:
            for offset in range(size):
                self.host[host * size + offset] = self.cache.get(block * size + offset, -1)
        for host, block in batch.swap_ins:
            for offset in range(size):
                self.cache[block * size + offset] = self.host[host * size + offset]

    def prepare(self, updates: list[int], copies: list[int]) -> None:
        for row, column, block in zip(updates[::3], updates[1::3], updates[2::3], strict=True):
            assert 0 < block
            assert column < self.columns
            self.table[row, column] = block
        assert not set(copies[::2]) & set(copies[1::2]), "copies depend on their order"
        for source, destination in zip(copies[::2], copies[1::2], strict=True):
            for offset in range(self.block_size):
                state = self.cache.get(source * self.block_size + offset, -1)
                self.cache[destination * self.block_size + offset] = state
