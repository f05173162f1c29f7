"""The host's part of a decode step: schedule, stage the arrays, commit, hand out tokens.

No model and no GPU: every sample is the same token. A row a part, and one for the whole step.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from ridgeline import SamplingParams
from ridgeline._C import engine
from ridgeline.core import Core
from ridgeline.graphs import StepBuffers
from ridgeline.sampler import Sampler
from timer import Bench

VOCAB, PROMPT, TOKEN = 128256, 128, 5
WARM = 20


class Staging:
    """In place of a runner: takes a step's arrays as far as the copy to a GPU."""

    asynchronous = False

    def __init__(self, seqs: int, blocks: int) -> None:
        self.sampling = Sampler(torch.device("cpu"), VOCAB)
        self.seqs = seqs
        words = StepBuffers.words(
            max_num_seqs=seqs, max_blocks_per_seq=blocks, max_num_batched_tokens=8192,
            extra=Sampler.words(8192 + seqs),
        )  # fmt: skip
        self.stage = torch.empty(words, dtype=torch.int32)

    def run(self, batch: engine.Batch) -> Any:
        padded = (self.seqs,) * 3 if batch.max_q == 1 else (0, 0, 0)
        arena, rows = batch.arena(*padded), batch.num_rows
        source = torch.frombuffer(arena, dtype=torch.int32)
        begin, _ = arena.offsets["row_seq_ids"]
        self.stage[: len(arena)].copy_(source)
        start = -(-len(arena) // 4) * 4
        words = self.stage[start : start + Sampler.words(rows)]
        self.sampling.fill(words, source[begin : begin + rows])
        return SimpleNamespace(tokens=lambda: [TOKEN] * rows, prompt_rows=[])


def measure(bench: Bench, seqs: int, streams: bool, steps: int) -> None:
    length = PROMPT + steps + WARM + 64
    blocks = -(-length // 64)
    scheduler = engine.Scheduler(
        num_blocks=seqs * blocks + 1, block_size=64, max_model_len=length, vocab_size=VOCAB,
        max_num_seqs=seqs,
    )  # fmt: skip
    runner = Staging(seqs, blocks)
    core: Any = Core(
        scheduler, runner, None, vocab_size=VOCAB, max_model_len=length, eos_token_ids=[1], seed=0,
    )  # type: ignore[arg-type]  # fmt: skip
    updates: deque[Any] = deque()
    params = SamplingParams(max_tokens=None, temperature=0.0)
    for i in range(seqs):
        prompt = [(7 * i + j) % 1000 for j in range(PROMPT)]
        core.add(None, prompt, params, updates, i, streams=streams)
    times: dict[str, list[float]] = {name: [] for name in ("schedule", "stage", "commit", "step")}
    for _ in range(WARM + steps):
        marks = [time.perf_counter()]
        batch = core._schedule([])
        marks.append(time.perf_counter())
        result = runner.run(batch)
        marks.append(time.perf_counter())
        core._in_flight.append((batch, marks[1], result))
        core._commit()
        marks.append(time.perf_counter())
        updates.clear()
        for name, first, last in zip(times, marks, marks[1:]):
            times[name].append(last - first)
        times["step"].append(marks[-1] - marks[0])
    for name, values in times.items():
        ordered = sorted(values[WARM:])
        us, p10, p90 = (round(1e6 * ordered[int(q * len(ordered))], 1) for q in (0.5, 0.1, 0.9))
        row = {"bench": "host", "impl": "ridgeline", "part": name, "batch": seqs,
               "streams": streams, "us": us, "us_p10": p10, "us_p90": p90}  # fmt: skip
        bench.add(row | bench.machine())


def main() -> None:
    bench = Bench.from_args(__doc__)
    torch.set_num_threads(1)
    for seqs in (32, 256):
        for streams in (False, True):
            measure(bench, seqs, streams, steps=50 if bench.quick else 400)


if __name__ == "__main__":
    main()
