"""The loop: schedule, run, commit; and the requests it serves."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TextIO

from ridgeline._C import engine
from ridgeline.outputs import StreamOutput
from ridgeline.request import Request, Sequence
from ridgeline.runner import Runner, StepResult
from ridgeline.sampling_params import SamplingParams
from ridgeline.tokenizer import Tokenizer

_SEEDS = 2**63
_MIX = 0x9E3779B97F4A7C15


class Core:
    """Requests in, pieces of output out; one step at a time.

    On a GPU the next step is scheduled and launched while one still runs: a sequence that turns
    out to have ended is dropped from it.
    """

    def __init__(
        self,
        scheduler: engine.Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: SequenceOf[int],
        seed: int,
        trace: TextIO | None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos = tuple(eos_token_ids)
        self._seeds = random.Random(seed)
        self._trace = None if trace is None else _Trace(scheduler, trace)
        self._in_flight: deque[tuple[engine.Batch, float, StepResult]] = deque()
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._unscheduled: dict[int, Request] = {}
        self._ids = _SequenceIds()
        self._num_requests = 0

    def add(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        updates: deque[StreamOutput],
        prompt_index: int,
    ) -> Request:
        """Queues a request; what it produces goes to ``updates``. ValueError: nothing is kept."""
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none")
        seed = self._seeds.randrange(_SEEDS) if params.seed is None else params.seed
        seq_ids = self._ids.take(params.n)
        try:
            self.scheduler.add(
                seq_ids,
                token_ids,
                max_tokens=self._max_model_len if params.max_tokens is None else params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
                prompt_logprobs=params.prompt_logprobs is not None,
            )
        except Exception:
            self._ids.give_back(seq_ids)
            raise
        request = Request(
            str(self._num_requests),
            prompt,
            token_ids,
            params,
            seq_ids,
            updates,
            prompt_index=prompt_index,
            tokenizer=self._tokenizer,
            arrival_time=time.perf_counter(),
        )
        self._num_requests += 1
        self._requests[request.output.request_id] = request
        self._unscheduled[seq_ids[0]] = request
        blocked = tuple(params.stop_token_ids) + (() if params.ignore_eos else self._eos)
        for sequence in request.sequences:
            self._sequences[sequence.seq_id] = sequence
            # The n outputs differ by their seeds, the first one has the request's own.
            own_seed = (seed + sequence.index * _MIX) % _SEEDS
            self._runner.sampling.add(sequence.seq_id, params, own_seed, token_ids, blocked)
        if self._trace is not None:
            self._trace.added(request.output.request_id, seq_ids)
        return request

    def abort(self, request_id: str, reason: str = "abort", error: Exception | None = None) -> bool:
        """Ends a request now and frees its blocks; False if it is not running any more."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        now = time.perf_counter()
        request.output.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                self.scheduler.finish(sequence.seq_id, "abort")
                sequence.end(reason, now)
                self._drop(sequence)
        self._drain()
        return True

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._ids.scheduled += 1
            start = time.perf_counter()
            try:
                self._in_flight.append((batch, start, self._runner.run(batch)))
            except BaseException:
                self._discard()
                raise
            if self._runner.asynchronous and len(self._in_flight) < 2:
                return True
        if not self._in_flight:
            return False
        self._commit()
        self._drain()
        return True

    def _drain(self) -> None:
        """Waits for steps that run for nobody: nothing is left in flight without a request."""
        while self._in_flight and not self._requests:
            self._commit()

    def _commit(self) -> None:
        """Waits for the oldest step and takes its tokens."""
        batch, start, result = self._in_flight.popleft()
        try:
            tokens = result.tokens()
        except BaseException:
            self._discard()
            raise
        now = time.perf_counter()
        if self._unscheduled and batch.num_tokens > batch.num_decode_tokens:
            for seq_id in batch.seq_ids:
                request = self._unscheduled.pop(seq_id, None)
                if request is not None:
                    request.output.metrics.first_scheduled_time = start
        if result.prompt_rows:
            row_seq_ids = batch.row_seq_ids
            for row in result.prompt_rows:
                sequence = self._sequences.get(row_seq_ids[row])
                if sequence is not None:
                    sequence.request.add_prompt_logprobs(result.candidates(row))
        for output in self.scheduler.commit(batch, tokens):
            sequence = self._sequences[output.seq_id]
            candidates = result.candidates(output.row) if sequence.wants_logprobs else None
            stopped = sequence.append(output.token, output.finish_reason, candidates, now)
            if stopped and output.finish_reason is None:
                self.scheduler.finish(output.seq_id, "stop")
            if sequence.finished:
                self._drop(sequence)
        self._ids.committed += 1
        if self._trace is not None:
            self._trace.write()

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        self._unscheduled.pop(sequence.seq_id, None)
        self._runner.sampling.remove(sequence.seq_id)
        self._ids.retire(sequence.seq_id)
        if sequence.request.finished:
            del self._requests[sequence.request.output.request_id]

    def _discard(self) -> None:
        """After a failed run: the sequences go back to the queue, no token of theirs is lost."""
        self.scheduler.discard()
        self._in_flight.clear()
        self._ids.committed = self._ids.scheduled
        for sequence in self._sequences.values():
            self._runner.sampling.recount(sequence.seq_id, sequence.token_ids)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        bad = [token for token in ids if token >= self._vocab_size]
        if bad:
            raise ValueError(
                f"{name}: token ids must be below the vocabulary's {self._vocab_size}, got {bad}"
            )


class _SequenceIds:
    """Small ids, used again once no step in flight can hold rows of their last owner."""

    def __init__(self) -> None:
        self.scheduled = 0  # steps
        self.committed = 0
        self._free: list[int] = []
        self._next = 0
        self._retired: deque[tuple[int, int]] = deque()

    def take(self, count: int) -> list[int]:
        while self._retired and self._retired[0][0] <= self.committed:
            self._free.append(self._retired.popleft()[1])
        ids = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(ids)
        ids += range(self._next, self._next + fresh)
        self._next += fresh
        return ids

    def give_back(self, ids: list[int]) -> None:
        self._free += ids

    def retire(self, seq_id: int) -> None:
        self._retired.append((self.scheduled, seq_id))


class _Trace:
    """Writes the scheduler's decisions as JSON lines, and which request has which sequences."""

    def __init__(self, scheduler: engine.Scheduler, file: TextIO) -> None:
        self._scheduler = scheduler
        self._file = file
        self._next = 0

    def added(self, request_id: str, seq_ids: list[int]) -> None:
        self._line(event="added", request_id=request_id, seq_ids=seq_ids)

    def write(self) -> None:
        for decision in self._scheduler.decisions(self._next):
            if decision.index > self._next:
                self._line(event="lost", decisions=decision.index - self._next)
            self._next = decision.index + 1
            self._line(
                event=decision.reason.name.lower(),
                index=decision.index,
                step=decision.step,
                seq_id=decision.seq_id,
                a=decision.a,
                b=decision.b,
            )
        self._file.flush()

    def _line(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")
