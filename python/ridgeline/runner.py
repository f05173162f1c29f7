"""Runs one scheduled step on the device: upload, model, sampling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline._C import engine
from ridgeline.graphs import GraphKey, StepBuffers, StepGraphs
from ridgeline.kv_cache import KVCache
from ridgeline.models.decoder import Decoder, StepInputs
from ridgeline.sampler import RowPlan, Sampler
from ridgeline.swap_space import SwapSpace

_PAIRED = {"table_updates": 3, "copies": 2}
"""Arrays of an arena that have several columns."""

_SPARED_BYTES = 64 << 20
"""Shared keys are read apart where that spares a layer so much. It costs three kernels more, about
15 us a layer on an H200, in which as many bytes are read."""


@dataclass(frozen=True)
class StepLimits:
    """What one step has at most."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int


@dataclass(frozen=True)
class Candidates:
    """The log-probabilities of one position: the token itself, then the most likely ones."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult:
    """The tokens of a step that may still be running; :meth:`tokens` waits for them.

    Attributes:
        prompt_rows: rows that hold log-probabilities of a prompt token, in order.
    """

    def __init__(
        self,
        tokens: Tensor,
        logprobs: tuple[Tensor, Tensor] | None,
        prompt_rows: list[int],
        aside: torch.cuda.Stream | None,
    ) -> None:
        """``aside``: where tokens on a GPU are copied to the host, beside the step after."""
        self.prompt_rows = prompt_rows
        self._logprobs = logprobs
        self._host_logprobs: tuple[list[list[float]], list[list[int]]] | None = None
        self._done: torch.cuda.Event | None = None
        self._tokens = tokens
        if aside is not None:
            self._tokens = torch.empty(
                tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True
            )
            aside.wait_stream(torch.cuda.current_stream(tokens.device))
            tokens.record_stream(aside)
            with torch.cuda.stream(aside):
                self._tokens.copy_(tokens, non_blocking=True)
                self._done = torch.cuda.Event()
                self._done.record()

    def tokens(self) -> list[int]:
        """The sampled token of each logits row."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def candidates(self, row: int, count: int) -> Candidates:
        """Log-probabilities of a row and its ``count`` most likely tokens; the step may have more,
        for another row. Requires: its sequence asked for so many."""
        if self._host_logprobs is None:
            assert self._logprobs is not None
            logprobs, ids = self._logprobs
            self._host_logprobs = logprobs.tolist(), ids.tolist()
        all_logprobs, all_ids = self._host_logprobs
        top = slice(1, 1 + count)
        return Candidates(all_logprobs[row][0], all_ids[row][top], all_logprobs[row][top])


class Runner:
    """The model, its cache and the buffers of a step."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        limits: StepLimits,
        *,
        use_graphs: bool,
        graph_bytes: int = 0,
        host_blocks: int = 0,
    ) -> None:
        """``graph_bytes``: what the largest step that gets a graph takes."""
        device, vocab = model.embedding.device, model.config.vocab_size
        self._model = model
        self._cache = cache
        self._limits = limits
        self._buffers = StepBuffers(
            device,
            max_num_seqs=limits.max_num_seqs,
            max_blocks_per_seq=limits.max_blocks_per_seq,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            extra=Sampler.words(limits.max_num_batched_tokens + limits.max_num_seqs),
        )
        # The splits of a decode meet here, so that attention is one kernel, and items are dealt by
        # it; zero between steps.
        counters = (limits.max_num_seqs + 1) * model.config.num_kv_heads + 2
        self._counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self._swap_space = SwapSpace(cache, host_blocks) if host_blocks else None
        self._graphs = None
        if use_graphs:
            self._graphs = StepGraphs(
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                limits.max_blocks_per_seq,
                cache.block_size,
                graph_bytes,
                device,
            )
        self.sampling = Sampler(device, vocab)
        self.asynchronous = device.type == "cuda"
        # One stream orders all steps, whatever stream or device the caller has chosen.
        self._stream = torch.cuda.current_stream(device) if self.asynchronous else None
        self._aside = torch.cuda.Stream(device) if self.asynchronous else None

    def run(self, batch: engine.Batch) -> StepResult:
        """Launches a step; on a GPU it may still be running when this returns."""
        with torch.inference_mode(), self._on_stream():
            return self._run(batch)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _run(self, batch: engine.Batch) -> StepResult:
        key, shared = None, self._shared_blocks(batch)
        if self._graphs is not None:
            key = self._graphs.key(batch, shared)
        arena = batch.arena() if key is None else batch.arena(key.tokens, key.seqs, key.rows)
        rows = batch.num_rows
        begin, _ = arena.offsets["row_seq_ids"]
        host = torch.frombuffer(arena, dtype=torch.int32)
        row_seq_ids = host[begin : begin + rows]
        index, words = self._buffers.upload(
            arena, Sampler.words(rows), lambda out: self.sampling.fill(out, row_seq_ids)
        )
        step = _StepArrays(arena, index)
        if self._swap_space is not None:
            self._swap_space.save(batch.swap_outs)
            self._swap_space.restore(batch.swap_ins)
        self._apply_lists(step)
        if key is None:
            blocks = -(-batch.max_seq_len // self._cache.block_size)
            given = _StepArrays(arena, host)
            ends = batch.max_q > 1 and torch.equal(given.cu_q[1:] - 1, given.logits_rows)
            hidden = self._hidden(step, batch.max_q, blocks, shared, ends)
            logits = None
        else:
            assert self._graphs is not None
            logits = self._graphs.run(key, lambda: self._logits(step, key))
            hidden = None
        return self._sample(batch, step, words, hidden, logits)

    def profile(self, tokens: int, seqs: int, max_q: int) -> None:
        """Runs a step of padding, as large as given, for the memory it takes."""
        device = self._model.embedding.device
        zeros = torch.zeros(max(tokens, seqs + 1), dtype=torch.int32, device=device)
        with torch.inference_mode(), self._on_stream():
            tables = self._buffers.block_tables.index_select(0, zeros[:seqs])
            inputs = StepInputs(
                input_ids=zeros[:tokens],
                positions=zeros[:tokens],
                slots=zeros[:tokens],
                seq_lens=zeros[:seqs],
                cu_q=zeros[: seqs + 1],
                block_tables=tables,
                max_q=max_q,
                counters=self._counters,
            )
            hidden = self._model.hidden_states(inputs, self._cache)
            rows = min(seqs, tokens)
            logits = self._model.logits(hidden[:rows])
            words = torch.ones(Sampler.words(rows), dtype=torch.int32, device=device)
            self.sampling.sample(logits, words, zeros[:rows], None, 0)

    @property
    def graph_counts(self) -> tuple[int, int]:
        """CUDA graphs captured, and steps that replayed one."""
        return (0, 0) if self._graphs is None else (len(self._graphs), self._graphs.replays)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        if self._swap_space is not None:
            self._swap_space.close()

    def _apply_lists(self, step: _StepArrays) -> None:
        """Block-table entries that changed, and copies of blocks about to be written."""
        updates, copies = step.table_updates, step.copies
        if updates.shape[0]:
            row, column = updates[:, :2].long().unbind(1)
            self._buffers.block_tables[row, column] = updates[:, 2]
        if copies.shape[0]:
            cache = self._cache
            for layer in zip(cache.k, cache.v, cache.k_scale, cache.v_scale, strict=True):
                k, v, k_scale, v_scale = layer
                ops.copy_blocks(k, v, copies, k_scale, v_scale)

    def _shared_blocks(self, batch: engine.Batch) -> int:
        """How many blocks attention reads once for all sequences. That sums in another order, so
        in batch-invariant mode none; quantised caches are not read so."""
        if self._model.batch_invariant or batch.max_q > 1 or self._cache.k_scale[0] is not None:
            return 0
        blocks, cache = batch.shared_blocks, self._cache
        spared = (batch.num_seqs - 1) * blocks * (cache.k[0][0].nbytes + cache.v[0][0].nbytes)
        return blocks if spared >= _SPARED_BYTES else 0

    def _hidden(
        self, step: _StepArrays, max_q: int, blocks: int, shared: int, ends: bool = False
    ) -> Tensor:
        """The last layer's output at the tokens whose logits are wanted.

        ``blocks``: no sequence has more. Attention takes workspace for so many. ``ends``: they are
        the last tokens of all sequences.
        """
        tables = self._buffers.block_tables[:, :blocks]
        inputs = StepInputs(
            input_ids=step.input_ids,
            positions=step.positions,
            slots=step.slots,
            seq_lens=step.seq_lens,
            # None: each has one token, so attention may plan while the kernels ahead run.
            cu_q=step.cu_q if max_q > 1 else None,
            block_tables=ops.embed(step.table_rows, tables),
            max_q=max_q,
            # A negative id stands for a token that the step before, maybe still running, sampled.
            last_tokens=self._buffers.last_tokens if self.asynchronous else None,
            counters=self._counters,
            shared_blocks=shared,
            # They came by a copy, and last_tokens before it; the gather of the tables, ahead, has
            # begun behind that.
            ids_ready=True,
            rows=step.logits_rows,
            rows_are_ends=ends,
        )
        return self._model.hidden_states(inputs, self._cache)

    def _logits(self, step: _StepArrays, key: GraphKey) -> Tensor:
        return self._model.logits(self._hidden(step, key.max_q, key.blocks, key.shared_blocks))

    def _sample(
        self,
        batch: engine.Batch,
        step: _StepArrays,
        words: Tensor,
        hidden: Tensor | None,
        logits: Tensor | None,
    ) -> StepResult:
        """Samples all rows; logits that are not there yet are made a piece of rows at a time."""
        rows, piece = batch.num_rows, self._limits.max_num_seqs
        plan: RowPlan | None = self.sampling.plan(batch)
        parts = []
        for first in range(0, rows, piece):
            end = min(first + piece, rows)
            if hidden is not None:
                part = self._model.logits(hidden[first:end])
            else:
                assert logits is not None
                part = logits[first:end]
            positions = step.row_positions[first:end]
            last_tokens = self._buffers.last_tokens[first:end]
            parts.append(self.sampling.sample(part, words, positions, plan, first, last_tokens))
        pieces = [t for t, _ in parts] or [step.row_positions[:0]]
        tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        logprobs = [pair for _, pair in parts if pair is not None]
        joined = None
        if logprobs:
            joined = torch.cat([p for p, _ in logprobs]), torch.cat([i for _, i in logprobs])
        targets = list(plan.targets) if plan is not None else []
        return StepResult(tokens, joined, targets, self._aside)


class _StepArrays:
    """The arrays of an arena, by name, where they lie on the device. Each is made when first asked
    for: of a step that replays a graph, which reads fixed addresses, few are."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    cu_q: Tensor
    table_rows: Tensor
    logits_rows: Tensor
    row_positions: Tensor
    table_updates: Tensor
    copies: Tensor

    def __init__(self, arena: engine.Arena, index: Tensor) -> None:
        self._offsets, self._index = arena.offsets, index

    def __getattr__(self, name: str) -> Tensor:
        offset, length = self._offsets[name]
        array = self._index[offset : offset + length]
        if name in _PAIRED:
            array = array.view(-1, _PAIRED[name])
        setattr(self, name, array)
        return array
