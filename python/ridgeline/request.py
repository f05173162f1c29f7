"""The host's side of a request: its outputs as tokens come, stop strings, times."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ridgeline.outputs import (
    CompletionOutput,
    Logprob,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    StreamOutput,
)
from ridgeline.sampling_params import SamplingParams
from ridgeline.tokenizer import Detokenizer, StopStrings, Tokenizer

if TYPE_CHECKING:
    from ridgeline._C import engine
    from ridgeline.runner import Candidates, StepResult

SEEDS = 2**63
_MIX = 0x9E3779B97F4A7C15

Output = tuple[int, int, int, str | None]
"""Of a commit: sequence id, token, row, and why the sequence ended, if it did."""


@dataclass
class Delivery:
    """What a commit gave, on its way to the sequences; those up to ``at`` have theirs, or the one
    at ``at`` is being given it."""

    batch: engine.Batch
    result: StepResult
    now: float
    outputs: list[Output] = field(default_factory=list)
    at: int = -1

    def prompt_rows(self) -> list[tuple[int, int, int]]:
        """Of each row for a prompt token: row, sequence, and the token's index in the prompt."""
        if not self.result.prompt_rows:
            return []
        seq_ids, positions = self.batch.row_seq_ids, self.batch.row_positions
        return [(row, seq_ids[row], positions[row]) for row in self.result.prompt_rows]

    def ended(self) -> set[int]:
        """The sequences that the scheduler has ended in that commit."""
        return {seq_id for seq_id, _, _, reason in self.outputs if reason is not None}


class Request:
    """One prompt and its ``n`` outputs; each piece of output is appended to ``updates``."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seq_ids: list[int],
        updates: deque[StreamOutput],
        *,
        prompt_index: int,
        tokenizer: Tokenizer | None,
        arrival_time: float,
        streams: bool = True,
    ) -> None:
        self.params = params
        self.streams = streams
        self.prompt_index = prompt_index
        self.updates = updates
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index=i) for i in range(params.n)],
            metrics=RequestMetrics(arrival_time, prompt_tokens=len(prompt_token_ids)),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        self.sequences = [
            Sequence(self, seq_id, completion, tokenizer)
            for seq_id, completion in zip(seq_ids, self.output.outputs, strict=True)
        ]
        self._tokenizer = tokenizer

    @property
    def finished(self) -> bool:
        return self.output.finished

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.output.outputs)

    def without_token(self) -> FloatingPointError:
        """For a step in which the sampler had nothing to choose from."""
        return FloatingPointError(
            f"the logits of request {self.output.request_id} are not finite: NaN, or with biases "
            "and bans -inf, throughout"
        )

    def warn_of(self, error: Exception) -> None:
        warnings.warn(
            f"a step of request {self.output.request_id} raised {error!r}; it ends there",
            RuntimeWarning,
            stacklevel=6,
        )

    def add_prompt_logprobs(self, result: StepResult, row: int, position: int) -> None:
        """Takes the candidates of a prompt token, once: positions come in order, but after an
        interrupt those of a step may come again."""
        entries, count = self.output.prompt_logprobs, self.params.prompt_logprobs
        assert entries is not None and count is not None
        if position < len(entries):
            return
        candidates = result.candidates(row, count)
        token = self.output.prompt_token_ids[position]
        entries.append(logprobs_of(token, candidates, self._tokenizer))


class Sequence:
    """One output of a request while it grows.

    Attributes:
        plain: for a token that does not end the output, :attr:`keep` and :attr:`stamp` (with the
            time) do what :meth:`append` would: nobody listens, and there is no text or
            log-probability to make of it. At 256 sequences that spares a step 0.2 ms.
    """

    def __init__(
        self,
        request: Request,
        seq_id: int,
        output: CompletionOutput,
        tokenizer: Tokenizer | None,
    ) -> None:
        params = request.params
        self.request = request
        self.seq_id = seq_id
        self._output = output
        times = request.output.metrics.token_times
        self.keep: Callable[[int], None] = output.token_ids.append
        self.stamp: Callable[[float], None] = times.append if output.index == 0 else _ignore
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                request.output.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._stops = StopStrings(params.stop if isinstance(params.stop, tuple) else ())
        self._text: list[str] = []
        self.plain = False
        if params.logprobs is not None:
            output.logprobs, output.cumulative_logprob = [], 0.0

    @property
    def index(self) -> int:
        return self._output.index

    @property
    def token_ids(self) -> list[int]:
        return self._output.token_ids

    def candidates(self, result: StepResult, row: int) -> Candidates | None:
        """The log-probabilities that the output's parameters ask of a row."""
        count = self.request.params.logprobs
        return None if count is None else result.candidates(row, count)

    @property
    def finished(self) -> bool:
        return self._output.finish_reason is not None

    def append(
        self, token: int, finish_reason: str | None, candidates: Candidates | None, now: float
    ) -> bool:
        """Takes a sampled token; True if a stop string in its text ended the output now."""
        output, params, metrics = self._output, self.request.params, self.request.output.metrics
        self.keep(token)
        logprobs = None
        if candidates is not None and output.logprobs is not None:
            logprobs = logprobs_of(token, candidates, self._tokenizer)
            output.logprobs.append(logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + candidates.logprob
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        self.stamp(now)
        text, found = self._read(token, stopped=finish_reason == "stop")
        if found is not None:
            output.finish_reason, output.stop_reason = "stop", found
        elif finish_reason is not None:
            text += self._rest()
            output.finish_reason = finish_reason
            if finish_reason == "stop" and token in params.stop_token_ids:
                output.stop_reason = token
        self._emit(text, [token], logprobs, now)
        quiet = not self.request.streams and self._detokenizer is None
        self.plain = quiet and output.logprobs is None
        return found is not None

    def end(self, reason: str, now: float) -> None:
        """Ends the output between tokens: "abort", "deadline", or "error": then without the text
        that was held back, since reading it may be what raised."""
        self._output.finish_reason = reason
        self._emit("" if reason == "error" else self._rest(), [], None, now)

    def _read(self, token: int, *, stopped: bool) -> tuple[str, str | None]:
        """New text that may be shown, and the stop string in it, if any.

        The token that stopped the output has no text of its own.
        """
        if self._detokenizer is None or stopped:
            return "", None
        active = len(self._output.token_ids) >= self.request.params.min_tokens
        return self._stops.push(self._detokenizer.push(token), active=active)

    def _rest(self) -> str:
        if self._detokenizer is None:
            return ""
        shown, _ = self._stops.push(self._detokenizer.finish(), active=False)
        return shown

    def _emit(self, text: str, token_ids: list[int], logprobs: Logprobs | None, now: float) -> None:
        output, request = self._output, self.request
        if text:
            self._text.append(text)
        done = False
        if output.finish_reason is not None:
            output.text = "".join(self._text)
            done = request.finished
            if done:
                request.output.metrics.finished_time = now
        elif not request.streams:
            return
        request.updates.append(
            StreamOutput(
                request_id=request.output.request_id,
                prompt_index=request.prompt_index,
                index=output.index,
                text=text,
                token_ids=token_ids,
                logprobs=None if logprobs is None else [logprobs],
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                request=request.output if done else None,
            )
        )


class SequenceIds:
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


def own_seed(seed: int, index: int) -> int:
    """The n outputs of a request differ by their seeds; the first one has the request's own."""
    return (seed + index * _MIX) % SEEDS


def _ignore(time: float) -> None:
    """The times of tokens are those of the first output."""


def logprobs_of(token: int, candidates: Candidates, tokenizer: Tokenizer | None) -> Logprobs:
    """The entry of one position: the token first, then the most likely ones in order."""
    values = {token: candidates.logprob}
    for top, logprob in zip(candidates.top_ids, candidates.top_logprobs, strict=True):
        values.setdefault(top, logprob)
    return {
        key: Logprob(value, None if tokenizer is None else tokenizer.token_text(key))
        for key, value in values.items()
    }
