"""Types of the core extension module: the engine's classes and its lock.

Importing the module also registers the operators ``torch.ops.ridgeline.*``.
"""

from collections.abc import Sequence
from typing import ClassVar

class FairLock:
    """Reentrant; who waits comes before who has just released it; no interrupt leaves it held."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...
    @property
    def waiting(self) -> int: ...

class engine:
    """The submodule ``ridgeline._C.engine``: block manager and scheduler, without tensors.

    The classes are single-threaded: the GIL, which no call releases, is their only lock.
    Errors in arguments raise ``ValueError`` and leave everything as it was.
    """

    class Scheduler:
        """Decides what each step computes. The loop around it has three verbs::

            batch = scheduler.schedule()
            for seq_id, token, row, end in scheduler.commit(batch, runner.run(batch)): ...

        A batch may be scheduled while the one before it is still in flight (at most two
        uncommitted); batches are run in the order of ``schedule`` and committed in that order.
        Every batch returned by ``schedule`` is owed either a ``commit`` or a ``discard``.
        """

        def __init__(
            self,
            *,
            num_blocks: int,
            block_size: int,
            max_model_len: int,
            vocab_size: int,
            max_num_seqs: int = 256,
            max_num_batched_tokens: int = 8192,
            eos_token_ids: Sequence[int] = (),
            enable_prefix_caching: bool = True,
            seed: int = 0,
            decision_log_size: int = 4096,
            num_host_blocks: int = 0,
            latency_target_us: int = 0,
            cost: engine.StepCost = ...,
        ) -> None:
            """``num_blocks`` counts the dummy block 0, which no sequence gets.

            ``num_host_blocks``: where preempted sequences may wait instead of being computed
            again, if copying them there and back costs less. ``latency_target_us``: while others
            decode, chunks of prompts are cut so that the predicted time of a step, times the time
            scale, keeps to it (16 tokens of one prompt are always taken); 0: no target.

            ``max_num_batched_tokens`` must be at least ``max_num_seqs``, so that each live
            sequence can have a token a step. ``seed`` seeds the prefix hash.
            """

        def add(
            self,
            seq_ids: Sequence[int],
            prompt: Sequence[int],
            *,
            max_tokens: int,
            min_tokens: int = 0,
            stop_token_ids: Sequence[int] = (),
            ignore_eos: bool = False,
            priority: int = 0,
            tenant: str = "",
            prompt_logprobs: bool = False,
            now: int = 0,
            deadline: int | None = None,
        ) -> None:
            """Queues a prompt and one output sequence for each of ``seq_ids`` (``n`` of them).

            The ids are the caller's: int32, not negative, not in use. All sequences share the
            prompt's computation and its blocks; each then samples on its own. ``n > 1`` needs
            ``n <= max_num_seqs``. Service is in order of due time, then of arrival: ``now`` plus
            a minute plus ten seconds for each unit of ``priority``, but no later than
            ``deadline``. ``now`` and ``deadline`` are microseconds of one clock, on which ``now``
            never falls. What is not finished at its deadline is ended by ``schedule``. Prefix
            blocks are shared among requests of one ``tenant`` only. With ``prompt_logprobs`` every
            prompt position gets a logits row, once, and no cached prefix is used. Before
            ``min_tokens`` outputs no stop token ends a sequence.

            Raises ``ValueError`` with the numbers if the request could never run: an empty
            prompt, ``len(prompt) >= max_model_len``, more blocks than the cache has, a token id
            outside the vocabulary, ``max_tokens < 1``, a duplicate id.
            """

        def schedule(self, now: int = 0, only: Sequence[int] = ()) -> engine.Batch | None:
            """The next step, or None if nothing can be computed before a commit or an add; with
            nothing in flight: all have finished. ``only``: these alone."""

        def take_expired(self) -> list[int]:
            """The sequences that deadlines ended since the last call."""

        def add_time_ratio(self, padded_tokens: int, ratio: float) -> None:
            """A step of prompt tokens beside decodes, padded to so many tokens, took ``ratio``
            times as long as predicted: what steps of a size took lately cuts the chunks."""

        def commit(
            self,
            batch: engine.Batch,
            tokens: Sequence[int],
            into: list[tuple[int, int, int, str | None]] | None = None,
        ) -> list[tuple[int, int, int, str | None]]:
            """Takes the sampled token of each logits row (``batch.num_rows`` of them, in order).

            Requires: ``batch`` is the oldest in flight. The token of a row that was not a sample
            (a prompt position) or whose sequence has ended is ignored. Returns, in row order, of
            each that got one: id, token, row, and its end: "stop", "length", or None: none yet.
            They are appended to ``into``, if given: an interrupt behind the call loses none.
            """

        def finish(self, seq_id: int, reason: str = "abort") -> None:
            """Ends a sequence now, waiting or live, and frees its blocks.

            ``reason`` is "abort" or "stop" (a stop string found by the caller); it is logged.
            A step in flight may still hold rows of it: commit ignores them, and the id stays in
            use until then. Raises ``ValueError`` for an id that is unknown or already finished.
            """

        def discard(self) -> None:
            """Forgets batches in flight, as after a failed run: they are computed again."""

        def has_unfinished(self) -> bool: ...
        def num_in_flight(self) -> int:
            """Batches scheduled and neither committed nor discarded: 0, 1 or 2."""

        def state(self, seq_id: int) -> str:
            """One of "waiting", "running", "finished" (only in flight still), or an error."""

        def block_table(self, seq_id: int) -> list[int]:
            """The blocks of a sequence in order; empty while it waits."""

        def stats(self) -> engine.Stats: ...
        def decisions(self, since: int = 0) -> list[engine.Decision]:
            """The kept decisions with ``index >= since``, oldest first (a bounded log)."""

        def check_invariants(self) -> None:
            """Raises ``RuntimeError`` naming the first invariant that does not hold. For tests."""
        max_blocks_per_seq: int
        """Columns of the device's block-table tensor ``[max_num_seqs, max_blocks_per_seq]``."""

    class StepCost:
        """The least time of a step on a machine, in microseconds; all 0: not known."""

        def __init__(
            self,
            *,
            fixed_us: float = 0.0,
            token_us: float = 0.0,
            row_us: float = 0.0,
            swap_us: float = 0.0,
            attention: Sequence[tuple[int, float, float]] = (),
            sizes: Sequence[int] = (),
            sized_seqs: int = ...,
        ) -> None:
            """A step takes the longer of ``fixed_us`` (the weights are read) and its products
            (``token_us`` a token, ``row_us`` a logits row), then attention: for each (window or
            0, time a key, time a (query, key) pair) the longer of both. ``swap_us``: a block
            between device and host, one way. ``sizes``: ascending; steps with prompt tokens are
            padded to one of them, unless they have more than ``sized_seqs`` sequences or rows.
            """

    class Batch:
        """What one step computes: sequences, each with some new tokens, and rows of logits."""

        step: int
        num_tokens: int
        num_seqs: int
        num_rows: int
        """Logits rows: usually one for each sequence whose known tokens end in this step."""
        num_decode_tokens: int
        """Tokens that were sampled before; the other ``num_tokens`` are prefill."""
        max_q: int
        """The most new tokens of one sequence; 1: a pure decode step."""
        max_seq_len: int
        shared_blocks: int
        """How many leading blocks of their tables all sequences of the step have in common."""
        padded_tokens: int
        """The size of its ``StepCost`` that the step is padded to; 0: to none."""
        predicted_us: float
        """The least time of the step by its ``StepCost``; 0 without one."""
        read_us: float
        """The time of its reads alone; ``compute_us``: of its operations."""
        compute_us: float
        swap_outs: list[tuple[int, int]]
        """(block, host block): copy to the host before anything else writes the cache."""
        swap_ins: list[tuple[int, int]]
        """(host block, block): copy back after all ``swap_outs``, before the step's tokens."""
        seq_ids: list[int]
        """Sequences in batch order (``num_seqs``): decodes, chunks, newly admitted."""
        row_seq_ids: list[int]
        """The sequence of each logits row (``num_rows``)."""
        row_positions: list[int]
        """The index in its sequence of the token each row predicts; in the prompt: no sample."""

        def digest(self) -> int:
            """A 64-bit hash of everything that the step computes."""

        def arena(self, tokens: int = 0, seqs: int = 0, rows: int = 0) -> engine.Arena:
            """All index arrays of the step, padded to at least these counts.

            A smaller count than the batch has is an error, 0 means no padding. Padding tokens
            have id 0, position 0 and slot 0 (in the dummy block); a padding sequence has
            ``seq_len`` 0, table row 0 and a padding token as long as there are some, the last one
            all that are left. Padding rows point at token 0 and have sequence id -1 and
            position 0.
            """

    class Arena:
        """One contiguous int32 buffer (buffer protocol: ``torch.frombuffer(arena, dtype=int32)``).

        ``offsets[name]`` is ``(offset, length)``, in int32 units; each offset is a multiple of 4.
        The fixed part comes first and its offsets depend on the padded counts T, B, R alone::

            input_ids      [T]     token ids; -1 - r: the token sampled in row r of the previous
                                   batch, which was in flight when this one was scheduled
            positions      [T]     index of the token in its sequence
            slots          [T]     block * block_size + offset: where its key and value go
            seq_lens       [B]     KV length including the new tokens
            cu_q           [B + 1] first token of each sequence
            table_rows     [B]     the sequence's row of the device's block-table tensor
            logits_rows    [R]     index of the token whose logits the row takes
            row_positions  [R]     as Batch.row_positions: the sampling position
            row_seq_ids    [R]     as Batch.row_seq_ids

        Then the lists that vary::

            table_updates  [U, 3]  (row, column, block), no (row, column) twice: apply first
            copies         [C, 2]  (source, destination) blocks: copy before anything writes the
                                   cache, in any order, as no destination is a source
        """

        offsets: dict[str, tuple[int, int]]
        num_tokens: int
        num_seqs: int
        num_rows: int
        num_table_updates: int
        num_copies: int
        def __len__(self) -> int: ...  # int32 values of the whole buffer
        def __buffer__(self, flags: int, /) -> memoryview: ...

    class Decision:
        index: int
        step: int
        seq_id: int
        reason: engine.Reason
        a: int
        b: int

    class Reason:
        """Why; the numbers ``a`` and ``b`` of the decision in brackets."""

        ADMITTED: ClassVar[engine.Reason]  # (tokens scheduled, tokens found in the prefix cache)
        CHUNKED: ClassVar[engine.Reason]  # (tokens scheduled, tokens left for later steps)
        CHUNKED_LATENCY: ClassVar[engine.Reason]  # the same, cut by the latency target
        HELD_TOKENS: ClassVar[engine.Reason]  # (tokens wanted, budget left)
        HELD_LATENCY: ClassVar[engine.Reason]  # (tokens wanted, tokens that the target allows)
        HELD_BLOCKS: ClassVar[engine.Reason]  # (blocks wanted, blocks available)
        HELD_SEQUENCES: ClassVar[engine.Reason]  # (sequences wanted, places left)
        HELD_PREFIX_IN_FLIGHT: ClassVar[engine.Reason]  # (block index, block being computed)
        PREEMPTED: ClassVar[engine.Reason]  # (blocks given back, tokens to compute again)
        SWAPPED_OUT: ClassVar[engine.Reason]  # (blocks copied to the host, tokens kept there)
        SWAPPED_IN: ClassVar[engine.Reason]  # (blocks copied back, tokens kept)
        EVICTED: ClassVar[engine.Reason]  # (blocks taken from the prefix cache, cached blocks left)
        PREFIX_DIFFERS: ClassVar[engine.Reason]  # (first differing block index, full blocks)
        PREFIX_EVICTED: ClassVar[engine.Reason]  # (first missing block index, full blocks)
        PREFIX_SHORT: ClassVar[engine.Reason]  # (tokens, block size): no full block to look for
        FORKED: ClassVar[engine.Reason]  # (parent id, blocks shared)
        FINISHED: ClassVar[engine.Reason]  # (output tokens, 0 stop, 1 length, 2 abort, 3 deadline)
        name: str
        value: int

    class Stats:
        """Counts at the moment of the call; the second group since construction."""

        total_blocks: int
        """Without the dummy block: free + cached + used."""
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
        """Of the preemptions, those that kept what was computed in host memory."""
        evictions: int
        copies: int

    class BlockManager:
        """Blocks and the tables that own them: what the scheduler stands on, usable alone.
        A table is an index below ``max_tables``. A block is free, cached (no owner, contents
        kept, least recently used goes first) or used."""

        def __init__(
            self,
            *,
            num_blocks: int,
            block_size: int,
            max_tables: int = 256,
            enable_prefix_caching: bool = True,
            seed: int = 0,
        ) -> None: ...
        def open(self, tenant: str = "") -> int:
            """A new empty table. Raises ``ValueError`` when all are open, as :meth:`fork`."""

        def close(self, table: int) -> None:
            """Gives the table's blocks back; registered ones stay cached."""

        def fork(self, table: int) -> int:
            """A new table sharing every block."""

        def prepare_write(self, table: int, start: int, end: int) -> bool:
            """Makes token positions ``[start, end)`` writable: all of it, or False and no change.

            Appends missing blocks; a block that is shared or registered is replaced by a copy,
            whose (source, destination) pair ``take_copies`` returns.
            """

        def take_copies(self) -> list[tuple[int, int]]:
            """The copies owed since the last call; until then no source is handed out again."""

        def match(self, tokens: Sequence[int], tenant: str = "") -> list[int]:
            """Registered blocks holding a prefix of ``tokens``, full blocks only; no change."""

        def adopt(self, table: int, tokens: Sequence[int]) -> int:
            """Gives an empty table the matched blocks; returns the number of tokens in them."""

        def register(self, table: int, tokens: Sequence[int]) -> None:
            """Makes full blocks findable by the table's contents, ``tokens`` from the start.
            A block whose contents are registered already stays private."""

        def blocks(self, table: int) -> list[int]: ...
        def refcount(self, block: int) -> int: ...
        num_free: int
        num_cached: int
        num_used: int
        evictions: int
        def check_invariants(self) -> None: ...
