"""Random requests on the scheduler: every sequence gets the tokens that it would get alone."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_device import Device, digest_all, sample
from ridgeline._C import engine

VOCAB, EOS, MAX_LEN, SIZE = 5, 3, 24, 4


@dataclass
class Live:
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    min_tokens: int
    stops: set[int]

    def reason(self) -> str | None:
        outputs = len(self.tokens) - self.prompt_len
        if outputs >= self.min_tokens and self.tokens[-1] in self.stops:
            return "stop"
        if outputs == self.max_tokens or len(self.tokens) == MAX_LEN:
            return "length"
        return None


def make_scheduler(**changes: Any) -> engine.Scheduler:
    settings: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": SIZE,
        "max_model_len": MAX_LEN,
        "vocab_size": VOCAB,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "eos_token_ids": [EOS],
    }
    return engine.Scheduler(**settings | changes)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.device = Device(self.scheduler, block_size=SIZE, vocab_size=VOCAB)
        self.live: dict[int, Live] = {}
        self.flying: deque[engine.Batch] = deque()
        self.next_id = 0

    @rule(
        prompt=st.tuples(st.integers(0, 1), st.integers(1, MAX_LEN - 1)),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 8),
        min_tokens=st.integers(0, 2),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 1),
        prompt_logprobs=st.sampled_from([False, False, True]),
    )
    def add(
        self, prompt: tuple[int, int], n: int, max_tokens: int, min_tokens: int, **options: Any
    ) -> None:
        step, length = prompt
        tokens = [i * step % VOCAB for i in range(length)]
        ids = list(range(self.next_id, self.next_id + n))
        self.next_id += n
        min_tokens = min(min_tokens, max_tokens)
        self.scheduler.add(ids, tokens, max_tokens=max_tokens, min_tokens=min_tokens, **options)
        stops = set() if options["ignore_eos"] else {EOS}
        for seq_id in ids:
            self.live[seq_id] = Live(list(tokens), length, max_tokens, min_tokens, stops)

    @precondition(lambda self: len(self.flying) < 2)
    @rule()
    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.flying or not self.live, "nothing runs, and something is left"
            return
        assert 0 < batch.num_tokens <= 12
        assert batch.num_seqs <= 4
        self.flying.append(batch)

    @precondition(lambda self: self.flying)
    @rule(padding=st.integers(0, 3))
    def commit(self, padding: int) -> None:
        batch = self.flying.popleft()
        arena = batch.arena(
            batch.num_tokens + padding, batch.num_seqs + padding, batch.num_rows + padding
        )
        tokens = self.device.run(batch, arena)[: batch.num_rows]
        for seq_id, token, row, end in self.scheduler.commit(batch, tokens):
            live = self.live[seq_id]
            assert token == tokens[row]
            assert token == sample(digest_all(live.tokens), seq_id, VOCAB)
            live.tokens.append(token)
            assert end == live.reason()
            if end:
                del self.live[seq_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.finish(seq_id, data.draw(st.sampled_from(["abort", "stop"])))
        del self.live[seq_id]

    @precondition(lambda self: self.flying)
    @rule()
    def discard(self) -> None:
        self.flying.clear()
        self.scheduler.discard()

    @invariant()
    def holds(self) -> None:
        self.scheduler.check_invariants()
        assert self.scheduler.has_unfinished() == bool(self.live)
        assert self.scheduler.num_in_flight() == len(self.flying)

    def teardown(self) -> None:
        for _ in range(1000):
            if not (self.live or self.flying):
                break
            if len(self.flying) < 2:
                self.schedule()
            if self.flying:
                self.commit(0)
        assert not self.live, "no progress"
        assert self.scheduler.stats().used_blocks == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_arena_is_seen_without_a_copy_and_outlives_its_batch() -> None:
    scheduler = make_scheduler()
    scheduler.add([0], [1, 2, 3], max_tokens=2)
    batch = scheduler.schedule()
    assert batch is not None
    arena = batch.arena(tokens=8, seqs=2, rows=2)
    view = memoryview(arena)
    assert (view.format, view.ndim, view.nbytes) == ("i", 1, 4 * len(arena))
    array = np.frombuffer(memoryview(arena), dtype=np.int32)
    tensor = torch.frombuffer(arena, dtype=torch.int32)
    offset, length = arena.offsets["input_ids"]
    array[offset] = 4
    assert tensor[offset : offset + length].tolist() == [4, 2, 3, 0, 0, 0, 0, 0]
    del arena, batch, scheduler, view
    gc.collect()
    assert tensor[offset + 1] == array[offset + 1] == 2


def test_documented_offsets_hold() -> None:
    scheduler = make_scheduler()
    scheduler.add([0, 1], [1, 2, 3], max_tokens=2)
    batch = scheduler.schedule()
    assert batch is not None
    offsets = batch.arena(tokens=5, seqs=4, rows=6).offsets
    lengths = {name: length for name, (_, length) in offsets.items()}
    assert lengths == {
        "input_ids": 5,
        "positions": 5,
        "slots": 5,
        "seq_lens": 4,
        "cu_q": 5,
        "table_rows": 4,
        "logits_rows": 6,
        "row_positions": 6,
        "row_seq_ids": 6,
        "table_updates": 3,
        "copies": 0,
    }
    assert all(offset % 4 == 0 for offset, _ in offsets.values())


def test_decisions_read_from_python() -> None:
    scheduler = make_scheduler()
    scheduler.add([7], [1, 2, 3], max_tokens=1)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, [0])
    decisions = scheduler.decisions()
    assert [(d.seq_id, d.reason, d.a, d.b) for d in decisions] == [
        (7, engine.Reason.ADMITTED, 3, 0),
        (7, engine.Reason.PREFIX_SHORT, 3, SIZE),
        (7, engine.Reason.FINISHED, 1, 1),
    ]
    assert repr(decisions[0]) == "<step 0: sequence 7 ADMITTED 3 0>"
    assert scheduler.decisions(since=2)[0].index == 2


def test_a_hundred_thousand_prompts() -> None:
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=256, max_num_batched_tokens=4096)
    for seq_id in range(100_000):
        scheduler.add([seq_id], [seq_id % VOCAB, seq_id // VOCAB % VOCAB, 1], max_tokens=1)
    finished = 0
    while (batch := scheduler.schedule()) is not None:
        finished += len(scheduler.commit(batch, [0] * batch.num_rows))
    assert finished == 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * MAX_LEN}, r"prompt has 24 tokens, expected fewer than 24"),
        ({"prompt": [1, VOCAB]}, r"prompt\[1\] is 5, expected 0 <= id < 5"),
        ({"prompt": [-1]}, r"prompt\[0\] is -1"),
        ({"prompt": [2**40]}, r"prompt\[0\] is 1099511627776"),
        ({"max_tokens": 0}, "max_tokens must be positive, got 0"),
        ({"max_tokens": -5}, "max_tokens must be positive, got -5"),
        ({"min_tokens": 9}, r"min_tokens must be from 0 to max_tokens \(2\), got 9"),
        ({"stop_token_ids": [VOCAB]}, r"stop_token_ids\[0\] is 5"),
        ({"seq_ids": []}, "seq_ids must name at least one"),
        ({"seq_ids": [0, 0]}, "sequence id 0 is in use"),
        ({"seq_ids": [5]}, "sequence id 5 is in use"),
        ({"seq_ids": [1, 2, 3, 4, 6]}, r"at most 4 sequences \(max_num_seqs\), got 5"),
        ({"seq_ids": [2**31]}, "seq_ids must fit in 31 bits"),
    ],
)
def test_bad_requests_leave_nothing_behind(arguments: dict[str, Any], message: str) -> None:
    scheduler = make_scheduler()
    scheduler.add([5], [1], max_tokens=1)
    request: dict[str, Any] = {"seq_ids": [0], "prompt": [1], "max_tokens": 2}
    with pytest.raises(ValueError, match=message):
        scheduler.add(**request | arguments)
    assert scheduler.stats().waiting == 1
    scheduler.check_invariants()


def test_a_prompt_beyond_the_whole_cache_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4)
    message = "a prompt of 13 tokens with up to 2 outputs needs 4 blocks of 4 tokens, the cache"
    with pytest.raises(ValueError, match=message):
        scheduler.add([0], [1] * 13, max_tokens=2)


def test_unknown_ids_and_reasons_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add([0], [1], max_tokens=1)
    for call in (scheduler.finish, scheduler.block_table):
        with pytest.raises(ValueError, match="sequence id 9 is unknown or finished"):
            call(9)
    with pytest.raises(ValueError, match="sequence id 9 is unknown"):
        scheduler.state(9)
    with pytest.raises(ValueError, match="reason must be 'abort' or 'stop', got 'bored'"):
        scheduler.finish(0, "bored")
    assert scheduler.state(0) == "waiting"


def test_bad_commits_change_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add([0], [1], max_tokens=2)
    batch = scheduler.schedule()
    assert batch is not None
    with pytest.raises(ValueError, match="each of the 1 logits rows of step 0, got 2"):
        scheduler.commit(batch, [1, 1])
    with pytest.raises(ValueError, match=r"tokens\[0\] \(sequence 0\) is 5, expected 0 <= id < 5"):
        scheduler.commit(batch, [VOCAB])
    assert scheduler.commit(batch, [1])[0][1] == 1
    with pytest.raises(ValueError, match="no batch is in flight"):
        scheduler.commit(batch, [1])


@pytest.mark.parametrize(
    ("outputs", "prompt_logprobs", "row_us", "tokens"),
    [
        (1, False, 0.0, 63),  # a step of 64; padded to 128, 81 tokens exceed the target
        (2, False, 0.0, 80),  # more rows than a padded step has: all fit
        (1, True, 0.0, 80),
        (1, True, 1.0, 49),  # 50 tokens and as many rows
    ],
)
def test_chunks_count_the_rows_of_their_step(
    outputs: int, prompt_logprobs: bool, row_us: float, tokens: int
) -> None:
    cost = engine.StepCost(token_us=1.0, row_us=row_us, sizes=[32, 64, 128], sized_seqs=2)
    scheduler = make_scheduler(
        num_blocks=200, max_model_len=100, max_num_batched_tokens=128, latency_target_us=100,
        cost=cost,
    )  # fmt: skip
    scheduler.add([0], [1], max_tokens=50, ignore_eos=True)
    first = scheduler.schedule()
    assert first is not None
    scheduler.commit(first, [1])
    ids = list(range(1, 1 + outputs))
    scheduler.add(ids, [2] * 80, max_tokens=2, prompt_logprobs=prompt_logprobs)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.num_tokens == 1 + tokens
    assert batch.predicted_us <= 100.0
