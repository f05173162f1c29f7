"""The loop: schedule, run, commit; and the requests it serves."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Any

from ridgeline._C import engine
from ridgeline.metrics import Meter
from ridgeline.outputs import StreamOutput
from ridgeline.request import SEEDS, Delivery, Request, Sequence, SequenceIds, own_seed
from ridgeline.runner import Runner, StepResult
from ridgeline.sampling_params import SamplingParams
from ridgeline.tokenizer import Tokenizer
from ridgeline.trace import Recorder


class Core:
    """Requests in, pieces of output out; one step at a time.

    On a GPU the next step is scheduled and launched while one still runs: a sequence that turns
    out to have ended is dropped from it.

    A step that raises is forgotten, and who was in it is computed again, each request alone until
    it has a token: whose step raises once more ends with the error, the others go on.
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
        recorder: Recorder | None = None,
        keeps_latency: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.meter = Meter()
        self._runner = runner
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos = tuple(eos_token_ids)
        self._seeds = random.Random(seed)
        self._recorder = recorder
        self._keeps_latency = keeps_latency
        self._clock = clock
        self._in_flight: deque[tuple[engine.Batch, float, StepResult]] = deque()
        self._delivery: Delivery | None = None
        self._last_done = 0.0
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._unscheduled: dict[int, Request] = {}
        self._suspects: deque[Request] = deque()
        self._ids = SequenceIds()
        self._num_requests = 0

    def add(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        updates: deque[StreamOutput],
        prompt_index: int,
        *,
        streams: bool = True,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """Queues a request; what it produces goes to ``updates``. ValueError: nothing is kept.

        ``streams``: False leaves out pieces that end no output. ``deadline``: seconds from now.
        """
        params.check_for(self._vocab_size, has_tokenizer=self._tokenizer is not None)
        spelled = [] if self._tokenizer is None else self._tokenizer.spellings(params.bad_words)
        banned = [ids for ids in spelled if max(ids) < self._vocab_size]  # others cannot come
        seed = self._seeds.randrange(SEEDS) if params.seed is None else params.seed
        arrival = self._clock()
        now = int(arrival * 1e6)
        seq_ids = self._ids.take(params.n)
        arguments: dict[str, Any] = {
            "max_tokens": min(params.max_tokens or self._max_model_len, self._max_model_len),
            "min_tokens": min(params.min_tokens, self._max_model_len),
            "stop_token_ids": params.stop_token_ids,
            "ignore_eos": params.ignore_eos,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "priority": priority,
            "now": now,
            "deadline": None if deadline is None else now + int(deadline * 1e6),
        }
        request = Request(
            str(self._num_requests), prompt, token_ids, params, seq_ids, updates,
            prompt_index=prompt_index, tokenizer=self._tokenizer, arrival_time=arrival,
            streams=streams,
        )  # fmt: skip
        self._num_requests += 1
        request_id = request.output.request_id
        blocked = tuple(params.stop_token_ids) + (() if params.ignore_eos else self._eos)
        try:
            self._requests[request_id] = self._unscheduled[seq_ids[0]] = request
            for i, seq_id in enumerate(seq_ids):
                self._sequences[seq_id] = request.sequences[i]
                own = own_seed(seed, i)
                self._runner.sampling.add(seq_id, params, own, token_ids, blocked, banned)
            self.scheduler.add(seq_ids, token_ids, **arguments)
            if self._recorder is not None:
                self._recorder.added(request_id, seq_ids=seq_ids, prompt=token_ids, **arguments)
        except BaseException:  # refused, or an interrupt
            self._withdraw(request_id, seq_ids)
            raise
        return request

    def _withdraw(self, request_id: str, seq_ids: list[int]) -> None:
        """Forgets a request that was not queued, or not quite."""
        for seq_id in seq_ids:
            with suppress(ValueError):  # not queued
                self._finish(seq_id, "abort")
            self._sequences.pop(seq_id, None)
            self._runner.sampling.remove(seq_id)
        self._unscheduled.pop(seq_ids[0], None)
        self._requests.pop(request_id, None)
        self._ids.give_back(seq_ids)

    def abort(self, request_id: str, reason: str = "abort", error: Exception | None = None) -> bool:
        """Ends a request now and frees its blocks; False if it is not running any more."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason, error)
        self._drain()
        return True

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        try:
            return self._step()
        except BaseException:  # an interrupt: what was committed is delivered, the rest forgotten
            self._recover()
            raise

    def _step(self) -> bool:
        only, before = self._next_suspect(), len(self._sequences)
        outputs = self._suspects[0].num_output_tokens if only else 0
        batch = self._schedule(only)
        if batch is None and only:  # nothing to compute for it before others go on
            self._suspects.popleft()
            return True
        if batch is not None:
            self._ids.scheduled += 1
            start = self._clock()
            try:
                self._in_flight.append((batch, start, self._runner.run(batch)))
            except Exception as error:
                self._fail(error, batch)
                return True
            if self._runner.asynchronous and not only and len(self._in_flight) < 2:
                return True
        if not self._in_flight:  # deadlines may have ended some
            return bool(self._suspects) or len(self._sequences) < before
        self._commit()
        # A prompt in chunks may raise in any of them: trusted is who has reached a token alone.
        if only and self._suspects and self._suspects[0].num_output_tokens > outputs:
            self._suspects.popleft()
        self._drain()
        return True

    def _next_suspect(self) -> list[int]:
        """The unfinished sequences of the request to be tried alone; none: all may run."""
        while self._suspects:
            live = [s.seq_id for s in self._suspects[0].sequences if not s.finished]
            if live:
                return live
            self._suspects.popleft()
        return []

    def _schedule(self, only: list[int]) -> engine.Batch | None:
        seconds = self._clock()
        now = int(seconds * 1e6)
        batch = self.scheduler.schedule(now, only)
        if self._recorder is not None:
            self._recorder.scheduled(now, only, batch)
        for seq_id in self.scheduler.take_expired():
            sequence = self._sequences[seq_id]
            try:
                sequence.end("deadline", seconds)
            except Exception as error:
                sequence.request.output.error = error
                sequence.end("error", seconds)
            self._drop(sequence)
        return batch

    def _drain(self) -> None:
        """Waits for steps that run for nobody: nothing is left in flight without a request."""
        while self._in_flight and not self._requests:
            self._commit()

    def _commit(self) -> None:
        """Waits for the oldest step and takes its tokens."""
        batch, start, result = self._in_flight[0]
        try:
            tokens = result.tokens()
        except Exception as error:
            return self._fail(error)
        self._in_flight.popleft()
        if min(tokens, default=0) < 0:
            for seq_id, token in zip(batch.row_seq_ids, tokens, strict=True):
                if token < 0 and (sequence := self._sequences.get(seq_id)) is not None:
                    failure = sequence.request.without_token()
                    self._end(sequence.request, "error", failure)
                    sequence.request.warn_of(failure)
        delivery = self._delivery = Delivery(batch, result, self._clock())
        if self._unscheduled and batch.num_tokens > batch.num_decode_tokens:
            for seq_id in batch.seq_ids:
                if (request := self._unscheduled.pop(seq_id, None)) is not None:
                    request.output.metrics.first_scheduled_time = start
        self.scheduler.commit(batch, tokens, delivery.outputs)  # there when an interrupt comes
        if self._recorder is not None:
            self._recorder.committed(batch, tokens)
        self._take(delivery)
        self._delivery = None
        self._ids.committed += 1
        self._measure(batch, start, delivery.now)

    def _take_prompt_rows(self, delivery: Delivery) -> None:
        """Gives requests the log-probabilities of their prompts, before any token after them."""
        result = delivery.result
        for row, seq_id, position in delivery.prompt_rows():
            if (sequence := self._sequences.get(seq_id)) is None:
                continue
            try:
                sequence.request.add_prompt_logprobs(result, row, position)
            except Exception as error:
                self._end(sequence.request, "error", error, delivery.ended())

    def _take(self, delivery: Delivery) -> None:
        """Gives each sequence its token. What raises there ends that request alone."""
        if delivery.at < 0:
            self._take_prompt_rows(delivery)
        sequences, result, now = self._sequences, delivery.result, delivery.now
        for at in range(delivery.at + 1, len(delivery.outputs)):
            delivery.at = at
            seq_id, token, row, end = delivery.outputs[at]
            if (sequence := sequences.get(seq_id)) is None:  # a sibling's error has ended it
                continue
            if end is None and sequence.plain:
                sequence.keep(token)
                sequence.stamp(now)
                continue
            try:
                stopped = sequence.append(token, end, sequence.candidates(result, row), now)
            except Exception as error:
                self._end(sequence.request, "error", error, delivery.ended())
                continue
            if stopped and end is None:
                self._finish(seq_id, "stop")
            if sequence.finished:
                self._drop(sequence)

    def _recover(self) -> None:
        """After an interrupt: whose token was being delivered ends, others get theirs."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            seq_id = delivery.outputs[delivery.at][0] if delivery.at >= 0 else -1
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                error = RuntimeError("interrupted while a token was delivered")
                self._end(sequence.request, "error", error, delivery.ended())
                if seq_id in self._sequences:  # it had ended, and was not dropped yet
                    self._drop(sequence)
            self._take(delivery)
        self._discard()

    def _measure(self, batch: engine.Batch, start: float, now: float) -> None:
        # A step waits for the one before; its time is what it adds.
        seconds = now - max(start, self._last_done)
        self._last_done = now
        self.meter.step(batch, seconds)
        if self._recorder is not None:
            self._recorder.ran(batch, seconds)
        # Steps that a latency target cuts; others are nearer to their roof.
        is_cut = 0 < batch.num_decode_tokens < batch.num_tokens
        if self._keeps_latency and is_cut and batch.predicted_us > 0 and seconds > 0:
            ratio = seconds * 1e6 / batch.predicted_us
            self.scheduler.add_time_ratio(batch.padded_tokens, ratio)
            if self._recorder is not None:
                self._recorder.took(batch.padded_tokens, ratio)

    def _finish(self, seq_id: int, reason: str) -> None:
        self.scheduler.finish(seq_id, reason)
        if self._recorder is not None:
            self._recorder.finished(seq_id, reason)

    def _end(
        self,
        request: Request,
        reason: str,
        error: Exception | None,
        ended: Collection[int] = (),
    ) -> None:
        """Ends a request; the scheduler has ended the sequences in ``ended`` already."""
        now = self._clock()
        request.output.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                if sequence.seq_id not in ended:
                    self._finish(sequence.seq_id, "abort")
                sequence.end(reason, now)
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        self._unscheduled.pop(sequence.seq_id, None)
        self._runner.sampling.remove(sequence.seq_id)
        self._ids.retire(sequence.seq_id)
        if sequence.request.finished:
            del self._requests[sequence.request.output.request_id]
            self.meter.request(sequence.request.output)

    def _fail(self, error: Exception, batch: engine.Batch | None = None) -> None:
        """A step raised: its requests are suspected, or the only one is ended."""
        batches = [flying for flying, _, _ in self._in_flight]
        seq_ids = [i for b in [*batches, *([] if batch is None else [batch])] for i in b.seq_ids]
        sequences = [self._sequences[i] for i in dict.fromkeys(seq_ids) if i in self._sequences]
        suspects = list({id(s.request): s.request for s in sequences}.values())
        self._discard()
        if len(suspects) > 1:
            self._suspects = deque(suspects)
        for request in suspects if len(suspects) == 1 else ():
            self._end(request, "error", error)
            request.warn_of(error)

    def _discard(self) -> None:
        """After a failed run: the sequences go back to the queue, no token of theirs is lost."""
        self.scheduler.discard()
        if self._recorder is not None:
            self._recorder.discarded()
        self._in_flight.clear()
        self._ids.committed = self._ids.scheduled
        for sequence in self._sequences.values():
            self._runner.sampling.recount(sequence.seq_id, sequence.token_ids)
