"""Sampling parameters of live sequences, and the sampling of a step's rows on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline._C import engine
from ridgeline.bad_words import NEVER, BadWords
from ridgeline.sampling_params import SamplingParams

_CAPACITY = 256
_WORDS = 6
"""int32s of a row in a step's upload: four parameters, and a seed of two."""


@dataclass(frozen=True)
class _Extras:
    """What a sequence needs beyond the plain choice of a token."""

    params: SamplingParams
    prompt: list[int]
    blocked: tuple[int, ...]  # what must not come before min_tokens
    banned: list[list[int]]  # sequences that must not come at all


@dataclass(frozen=True)
class RowPlan:
    """What the rows of one step need beyond the plain choice of a token.

    Attributes:
        seq_ids: the sequence of each row.
        outputs: row -> how many tokens its sequence has put out already, for rows that sample and
            have extras.
        targets: row -> the prompt token it predicts, for rows of prompt positions.
        logprobs: the most candidates a row wants; None: no row wants log-probabilities.
    """

    seq_ids: list[int]
    outputs: dict[int, int]
    targets: dict[int, int]
    logprobs: int | None


class Sampler:
    """Parameters by sequence id, on the host; a step gathers the rows it needs and uploads them.

    Token counts, which penalties need, and the newest tokens, which bad words are looked for in,
    stay on the device: they know tokens that the host has not seen yet.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._seeds = torch.zeros(_CAPACITY, dtype=torch.int64, device="cpu")
        self._top_k = torch.zeros(_CAPACITY, dtype=torch.int32, device="cpu")
        # temperature, top_p, min_p
        self._reals = torch.zeros((3, _CAPACITY), dtype=torch.float32, device="cpu")
        self._extras: dict[int, _Extras] = {}
        self._counts: dict[int, Tensor] = {}
        self._bad_words: dict[int, BadWords] = {}

    def add(
        self,
        seq_id: int,
        params: SamplingParams,
        seed: int,
        prompt: list[int],
        stop_tokens: tuple[int, ...],
        banned: list[list[int]],
    ) -> None:
        """``stop_tokens``: those that would end the output, and must not before min_tokens;
        ``banned``: sequences of tokens that it must not hold."""
        if seq_id >= self._seeds.shape[0]:
            self._grow(seq_id + 1)
        self._seeds[seq_id] = seed
        self._top_k[seq_id] = min(params.top_k, self._vocab_size)
        reals = (params.temperature, params.top_p, params.min_p)
        self._reals[:, seq_id] = self._reals.new_tensor(reals)
        blocked = stop_tokens if params.min_tokens else ()
        wants = params.has_penalties or params.logit_bias or blocked or banned
        if wants or (params.logprobs, params.prompt_logprobs) != (None, None):
            self._extras[seq_id] = _Extras(params, prompt, blocked, banned)

    def remove(self, seq_id: int) -> None:
        self._extras.pop(seq_id, None)
        self._counts.pop(seq_id, None)
        self._bad_words.pop(seq_id, None)

    def recount(self, seq_id: int, output: list[int]) -> None:
        """Starts what the device knows of the output anew from what the host knows."""
        if seq_id in self._counts:
            self._counts[seq_id] = self._fresh_counts(self._extras[seq_id].prompt, output)
        if seq_id in self._bad_words:
            self._bad_words[seq_id].restart(output)

    def plan(self, batch: engine.Batch) -> RowPlan | None:
        """None: every row is plain."""
        if not self._extras:
            return None
        seq_ids, outputs, targets = batch.row_seq_ids, {}, {}
        wanted = []
        for row, (seq_id, position) in enumerate(zip(seq_ids, batch.row_positions, strict=True)):
            extras = self._extras.get(seq_id)
            if extras is None:
                continue
            if position < len(extras.prompt):
                targets[row] = extras.prompt[position]
                wanted.append(extras.params.prompt_logprobs)
            else:
                outputs[row] = position - len(extras.prompt)
                wanted.append(extras.params.logprobs)
        if not wanted:
            return None
        counts = [count for count in wanted if count is not None]
        return RowPlan(seq_ids, outputs, targets, max(counts, default=None))

    @staticmethod
    def words(rows: int) -> int:
        """int32s that :meth:`fill` writes."""
        return _WORDS * rows

    def fill(self, out: Tensor, row_seq_ids: Tensor) -> None:
        """Gathers the rows' parameters into ``out`` (host, int32, aligned for int64)."""
        rows = row_seq_ids.shape[0]
        torch.index_select(self._seeds, 0, row_seq_ids, out=out[: 2 * rows].view(torch.int64))
        torch.index_select(self._top_k, 0, row_seq_ids, out=out[2 * rows : 3 * rows])
        reals = out[3 * rows :].view(torch.float32).view(3, rows)
        torch.index_select(self._reals, 1, row_seq_ids, out=reals)

    def sample(
        self,
        logits: Tensor,
        words: Tensor,
        positions: Tensor,
        plan: RowPlan | None,
        first: int,
        last_tokens: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Tokens of some rows, int32 (-1: none), and their (log-probabilities, ids) if the plan
        wants any.

        Args:
            logits: ``[rows, vocab]``, rows ``first`` and on of the step.
            words: what :meth:`fill` wrote for all rows of the step, on the device.
            positions: of these rows, int32.
            last_tokens: int32, one of these rows each: receives the tokens too.
        """
        count, total = logits.shape[0], words.shape[0] // _WORDS
        own = slice(first, first + count)
        seeds = words[: 2 * total].view(torch.int64)[own]
        top_k = words[2 * total : 3 * total][own]
        temperature, top_p, min_p = words[3 * total :].view(torch.float32).view(3, total)[:, own]
        penalties = counts = bias = None
        if plan is not None:
            rows = range(first, first + count)
            penalties, counts = self._penalties(plan, rows)
            bias = self._bias(plan, rows)
        tokens = ops.sample(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            penalties=penalties,
            token_counts=counts,
            bias=bias,
            last_tokens=last_tokens,
        )
        assert isinstance(tokens, Tensor)
        if plan is None:
            return tokens, None
        targets = tokens.clamp(min=0)  # -1, no token, ends a request
        self._note(plan, targets, first)
        if plan.logprobs is None:
            return tokens, None
        prompt_rows = [row for row in plan.targets if first <= row < first + count]
        if prompt_rows:
            prompt_tokens = self._int32(plan.targets[row] for row in prompt_rows)
            targets[self._indices(row - first for row in prompt_rows)] = prompt_tokens
        return tokens, ops.top_logprobs(logits, targets, plan.logprobs)

    def _penalties(self, plan: RowPlan, rows: range) -> tuple[Tensor | None, Tensor | None]:
        """``[rows, 3]`` and the counts ``[rows, vocab]`` if any of these rows is penalised."""
        penalties = self._reals.new_tensor([1.0, 0.0, 0.0]).repeat(len(rows), 1)
        counts: dict[int, Tensor] = {}
        for row in filter(plan.outputs.__contains__, rows):
            seq_id, own = plan.seq_ids[row], row - rows.start
            extras = self._extras[seq_id]
            params = extras.params
            if not params.has_penalties:
                continue
            if seq_id not in self._counts:
                self._counts[seq_id] = self._fresh_counts(extras.prompt, [])
            counts[own] = self._counts[seq_id]
            penalties[own] = penalties.new_tensor(
                (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            )
        if not counts:
            return None, None
        all_counts = self._zeros(len(rows), torch.int32)
        all_counts[self._indices(counts)] = torch.stack(list(counts.values()))
        return penalties.to(self._device), all_counts

    def _bias(self, plan: RowPlan, rows: range) -> Tensor | None:
        """``[rows, vocab]`` if any of these rows has a bias, bad words, or must not end yet."""
        entries: list[tuple[int, int, float]] = []
        banned: list[tuple[int, BadWords]] = []
        for row in filter(plan.outputs.__contains__, rows):
            seq_id, own = plan.seq_ids[row], row - rows.start
            extras = self._extras[seq_id]
            entries += [(own, token, bias) for token, bias in extras.params.logit_bias.items()]
            if plan.outputs[row] < extras.params.min_tokens:
                entries += [(own, token, NEVER) for token in extras.blocked]
            if extras.banned:
                if seq_id not in self._bad_words:
                    self._bad_words[seq_id] = BadWords(extras.banned, self._device)
                banned.append((own, self._bad_words[seq_id]))
        if not entries and not banned:
            return None
        bias = self._zeros(len(rows), torch.float32)
        if entries:
            at_rows, tokens, values = zip(*entries, strict=True)
            at = (self._indices(at_rows), self._indices(tokens))
            bias.index_put_(at, bias.new_tensor(values), accumulate=True)
        for own, words in banned:
            words.exclude(bias[own])
        return bias

    def _note(self, plan: RowPlan, tokens: Tensor, first: int) -> None:
        """Notes the tokens just sampled: two for each in the counts, beside the prompt's one."""
        for row in plan.outputs:
            seq_id, own = plan.seq_ids[row], row - first
            if not 0 <= own < tokens.shape[0]:
                continue
            token = tokens[own : own + 1]
            if seq_id in self._counts:
                self._counts[seq_id].index_add_(0, token, self._int32((2,)))
            if seq_id in self._bad_words:
                self._bad_words[seq_id].push(token)

    def _fresh_counts(self, prompt: list[int], output: list[int]) -> Tensor:
        """int32 ``[vocab]``: twice the count in the output, plus one if in the prompt."""
        counts = torch.bincount(self._seeds.new_tensor(output), minlength=self._vocab_size)
        counts *= 2
        counts[self._seeds.new_tensor(prompt).unique()] += 1
        return counts.to(self._device, torch.int32)

    def _zeros(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, self._vocab_size), dtype=dtype, device=self._device)

    def _indices(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _int32(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)

    def _grow(self, capacity: int) -> None:
        more = max(capacity, 2 * self._seeds.shape[0]) - self._seeds.shape[0]
        pad = torch.nn.functional.pad
        self._seeds, self._top_k = pad(self._seeds, (0, more)), pad(self._top_k, (0, more))
        self._reals = pad(self._reals, (0, more))
