"""What a request gives back: text, tokens, log-probabilities, reasons and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """One candidate at one position; the natural logarithm of its probability."""

    logprob: float
    decoded_token: str | None


Logprobs = dict[int, Logprob]
"""Token id -> its entry: the token of the output (or prompt) first, then the most likely ones."""


@dataclass
class RequestMetrics:
    """When things happened, in seconds of ``time.perf_counter()``; durations in seconds.

    ``token_times`` has one time a token of the first output. A duration is None until both of
    its ends are known.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list, repr=False)
    prompt_tokens: int = 0

    @property
    def queue(self) -> float | None:
        """From arrival to the first step that computed something of the request."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill(self) -> float | None:
        """From that step's start to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: from arrival."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def decode(self) -> float | None:
        """From the first token to the last."""
        return _between(self.first_token_time, self.finished_time)

    @property
    def inter_token(self) -> list[float]:
        """The times between tokens of the first output: one less than it has tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:])]

    @property
    def inter_token_p50(self) -> float | None:
        return self._gap(0.5)

    @property
    def inter_token_p99(self) -> float | None:
        return self._gap(0.99)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second of :attr:`prefill`; cached ones count."""
        return self.prompt_tokens / self.prefill if self.prefill else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second of the first output, behind its first token."""
        times = self.token_times
        span = times[-1] - times[0] if len(times) > 1 else 0.0
        return (len(times) - 1) / span if span else None

    def _gap(self, share: float) -> float | None:
        gaps = sorted(self.inter_token)
        return gaps[min(int(share * len(gaps)), len(gaps) - 1)] if gaps else None


@dataclass
class CompletionOutput:
    """One of the ``n`` outputs of a request.

    Attributes:
        finish_reason: "stop" (end of sequence, stop token or stop string), "length", "abort",
            "deadline", or "error" (something raised, see ``RequestOutput.error``); None while the
            request runs.
        stop_reason: the stop string or stop token that ended it; None for the model's own
            end-of-sequence token and for every other reason.
        cumulative_logprob: sum over the sampled tokens; None without ``logprobs``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """A request and its outputs, in the order of ``index``.

    Attributes:
        prompt: the text; None for a prompt given as token ids.
        prompt_logprobs: one entry a prompt token (None for the first, which nothing predicts);
            None if not asked for.
        error: what the callback, the tokenizer or the request's step raised, if one did (logits
            that are not finite: FloatingPointError); the request was ended then.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(slots=True)
class StreamOutput:
    """What one step added to one output of a request: the new tokens and text only.

    ``text`` may lag behind the tokens: it ends neither inside a character nor where a stop
    string could have begun. Joined, the pieces are the text of the finished output.

    Attributes:
        prompt_index: which of the prompts given to ``stream`` or ``generate``.
        index: which of its ``n`` outputs.
        finish_reason: set on the last piece of the output.
        request: the whole request, on the last piece of its last output; None before.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request: RequestOutput | None = None


@dataclass(frozen=True)
class Stats:
    """Blocks and sequences at the moment of the call; from ``steps`` on, since the start.

    ``total_blocks`` is free + cached + used: the unused block 0 does not count. Times are seconds
    and None before there are any; percentiles are of the latest 4096 values.

    Attributes:
        kv_occupancy: used blocks, as a share of all.
        swaps: preemptions in which what was computed waited in host memory.
        prefix_hit_rate: the share of prompt tokens found in the prefix cache.
        graphs, graph_replays: CUDA graphs captured, and steps that replayed one.
        prefill_rate: prompt tokens a second in steps that computed some. decode_rate: output
            tokens a second in all others.
        prefill_mfu, decode_mfu: the operations of these steps, as a share of what the device can
            do in their time; None where its peak is not known.
        prefill_mbu, decode_mbu: the same of the bytes read: weights, keys and values.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    waiting: int
    running: int
    in_flight: int
    steps: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    swaps: int
    evictions: int
    copies: int
    kv_occupancy: float
    prefix_hit_rate: float
    graphs: int
    graph_replays: int
    ttft_p50: float | None
    ttft_p99: float | None
    inter_token_p50: float | None
    inter_token_p99: float | None
    prefill_rate: float | None
    decode_rate: float | None
    prefill_mfu: float | None
    prefill_mbu: float | None
    decode_mfu: float | None
    decode_mbu: float | None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
