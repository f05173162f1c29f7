"""Two thousand random requests in a tiny cache, beside an engine that serves one at a time."""

from __future__ import annotations

import random
from collections import deque
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_device import Device, digest, digest_all
from ridgeline import SamplingParams
from ridgeline._C import engine
from ridgeline.core import Core
from ridgeline.outputs import StreamOutput
from ridgeline.request import Request
from ridgeline.trace import Recorder, Replay, make_scheduler

REQUESTS, VOCAB, EOS, BLOCK = 2000, 50, 3, 4
SETTINGS = {
    "num_blocks": 24,
    "block_size": BLOCK,
    "max_model_len": 64,
    "vocab_size": VOCAB,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "eos_token_ids": [EOS],
    "num_host_blocks": 16,
    "latency_target_us": 40,
    "decision_log_size": 1 << 16,
    # Swapping three blocks costs less than computing ten tokens again.
    "cost": {"fixed_us": 5.0, "token_us": 1.0, "swap_us": 1.5, "attention": [(0, 0.01, 0.02)]},
}


class FakeRunner(Device):
    """Digests for keys and values; the sample depends on the seed. Some steps raise."""

    asynchronous = True

    def __init__(self, scheduler: engine.Scheduler, draw: random.Random) -> None:
        super().__init__(scheduler, block_size=BLOCK, vocab_size=VOCAB)
        self.draw = draw
        self.seeds: dict[int, int] = {}
        self.cursed: set[int] = set()  # sequences whose steps always raise
        self.raised = 0
        self.sampling = SimpleNamespace(
            add=lambda seq_id, params, seed, *_: self.seeds.update({seq_id: seed}),
            remove=lambda seq_id: None,
            recount=lambda seq_id, output: None,
        )

    def sample(self, state: int, seq_id: int) -> int:
        return digest(state, self.seeds[seq_id]) % VOCAB

    def run(self, batch: engine.Batch) -> SimpleNamespace:
        if self.cursed & set(batch.seq_ids) or self.draw.random() < 0.01:
            self.raised += 1
            raise MemoryError("no memory for this step")
        tokens = super().run(batch, batch.arena())
        if self.draw.random() < 0.005:
            return SimpleNamespace(tokens=self.fail, prompt_rows=[])
        return SimpleNamespace(tokens=lambda: tokens, prompt_rows=[])

    def fail(self) -> None:
        self.raised += 1
        raise RuntimeError("a kernel failed")


def naive(prompt: list[int], seed: int, count: int, ignore_eos: bool) -> list[int]:
    """One request at a time, a token at a time, without a cache."""
    tokens: list[int] = []
    state = digest_all(prompt)
    while len(tokens) < count and (ignore_eos or EOS not in tokens):
        tokens.append(digest(state, seed) % VOCAB)
        state = digest(state, tokens[-1])
    return tokens


@pytest.mark.filterwarnings("ignore:a step of request")
def test_random_load_gives_the_tokens_of_one_at_a_time(tmp_path: Path):
    draw, now = random.Random(5), [0.0]
    scheduler = make_scheduler(SETTINGS)
    runner = FakeRunner(scheduler, random.Random(6))
    path = tmp_path / "trace.jsonl"
    ends: dict[str, int] = {}
    with closing(Recorder(scheduler, SETTINGS, path, "none")) as recorder:
        core = Core(
            scheduler, runner, None, vocab_size=VOCAB, max_model_len=64, eos_token_ids=[EOS],
            seed=0, recorder=recorder, keeps_latency=True,
            clock=lambda: now[0],
        )  # fmt: skip
        updates: deque[StreamOutput] = deque()
        live: dict[str, Request] = {}
        served = 0
        while served < REQUESTS or live:
            for _ in range(draw.randrange(4) if served < REQUESTS else 0):
                length = draw.randrange(1, 24)
                start, variant = draw.randrange(3), draw.randrange(3)  # so that prefixes meet
                prompt = [(start + i * variant + i // 7) % VOCAB for i in range(length)]
                params = SamplingParams(
                    n=draw.choice((1, 1, 1, 2)), seed=draw.randrange(1000),
                    max_tokens=draw.randrange(1, 20), ignore_eos=draw.random() < 0.5,
                )  # fmt: skip
                request = core.add(
                    None, prompt, params, updates, served, priority=draw.randrange(-2, 3),
                    deadline=draw.choice((None, None, None, 0.05)), streams=draw.random() < 0.5,
                )  # fmt: skip
                if draw.random() < 0.02:
                    runner.cursed.add(request.sequences[0].seq_id)
                live[request.output.request_id] = request
                served += 1
            if draw.random() < 0.05 and live:
                core.abort(draw.choice(list(live)))
            progressed = core.step()
            now[0] += 0.001
            if served % 16 == 0:
                scheduler.check_invariants()
            while updates:
                update = updates.popleft()
                if update.request is not None:
                    request = live.pop(update.request_id)
                    runner.cursed -= {s.seq_id for s in request.sequences}
                    reason = check(request)
                    ends[reason] = ends.get(reason, 0) + 1
            assert progressed or not live, "no progress"
        core._drain()
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert (stats.used_blocks, stats.in_flight, stats.waiting, stats.running) == (0, 0, 0, 0)
    assert sum(ends.values()) >= REQUESTS
    assert stats.preemptions > 100 and 0 < stats.swaps < stats.preemptions
    assert stats.prefix_hit_tokens > 1000 and stats.evictions > 100 and runner.raised > 20
    assert min(ends[reason] for reason in ("stop", "length", "abort", "deadline", "error")) > 10
    assert ends["error"] < 100, "only the cursed"
    assert sum(1 for _ in Replay(path).events()) > 5000


def check(request: Request) -> str:
    """The tokens are those of the naive engine, as far as the request came; how it ended."""
    params, prompt = request.params, request.output.prompt_token_ids
    for output in request.output.outputs:
        seed = (params.seed + output.index * 0x9E3779B97F4A7C15) % 2**63
        expected = naive(prompt, seed, params.max_tokens, params.ignore_eos)
        whole = output.finish_reason in ("stop", "length")
        got = output.token_ids
        assert got == (expected if whole else expected[: len(got)])
    assert (request.output.error is not None) == (
        request.output.outputs[0].finish_reason == "error"
        or request.output.outputs[-1].finish_reason == "error"
    )
    return request.output.outputs[-1].finish_reason
