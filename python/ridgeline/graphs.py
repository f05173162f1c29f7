"""CUDA graphs of steps, and the static buffers that graphs and steps share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline._C import engine


class GraphKey(NamedTuple):
    """All that a captured step depends on. ``blocks``: columns of the block tables it reads."""

    tokens: int
    seqs: int
    rows: int
    max_q: int
    shared_blocks: int
    blocks: int


MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Steps with prompt tokens get graphs of so many tokens. Launched one by one, their kernels take
the host 10 to 30 ms on the machine of an H200; more tokens keep the GPU longer than that."""

MIXED_SEQS = (8, 32)
"""And of so many sequences. More would cost memory: each has its workspace of attention."""

LONE_KEYS = 16384
"""A sequence alone that has no more gets graphs for so many: its attention has a kernel of its own
up to there, by the width of the block table. H200, Llama-3.1-8B in int4, 200 of 33024 keys: 1.85 ms
a token, and 1.76 so."""

_STAGES = 2  # one is written while the other may still be copied
_ALIGNMENT = 4


class StepBuffers:
    """The memory that index arrays of a step travel through, at fixed addresses.

    Attributes:
        block_tables: int32 ``[max_num_seqs, max_blocks_per_seq]`` on the device.
        last_tokens: the tokens sampled by the step before, one a logits row.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        max_num_batched_tokens: int,
        extra: int,
    ) -> None:
        """``extra``: int32s a step may add to its arena."""
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        self._capacity = self._arena_words(tokens, seqs, max_blocks_per_seq) + extra
        self.block_tables = torch.zeros(
            (seqs, max_blocks_per_seq), dtype=torch.int32, device=device
        )
        self.last_tokens = torch.zeros(tokens + seqs, dtype=torch.int32, device=device)
        self._arena = None
        self._stages: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        if device.type == "cuda":
            self._arena = torch.zeros(self._capacity, dtype=torch.int32, device=device)
            for _ in range(_STAGES):
                words = self._capacity
                stage = torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=True)
                self._stages.append((stage, torch.cuda.Event()))

    @staticmethod
    def _arena_words(tokens: int, seqs: int, blocks: int) -> int:
        # Three arrays of tokens, three of sequences, three of rows, each padded. A step has a row
        # for each token at most, and one more for each sequence that samples from a position
        # whose row another has. A graph may have a sequence more, of padding tokens. Then the
        # lists: no block-table entry is updated twice, no sequence copies more than one block.
        fixed = 6 * tokens + 6 * (seqs + 1) + 10 * _ALIGNMENT
        return fixed + 3 * seqs * blocks + 2 * seqs

    @classmethod
    def words(
        cls, *, max_num_seqs: int, max_blocks_per_seq: int, max_num_batched_tokens: int, extra: int
    ) -> int:
        """int32s of all of it on a GPU."""
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        arena = cls._arena_words(tokens, seqs, max_blocks_per_seq) + extra
        return arena + seqs * max_blocks_per_seq + tokens + seqs

    def upload(
        self, arena: engine.Arena, count: int, fill: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor]:
        """Copies ``arena`` and ``count`` more int32s, written by ``fill``, to the device.

        One copy, asynchronous. Returns both on the device; the second starts at 16 bytes.
        """
        source = torch.frombuffer(arena, dtype=torch.int32)
        start = -(-len(arena) // _ALIGNMENT) * _ALIGNMENT
        size = start + count
        if size > self._capacity:
            raise RuntimeError(f"a step of {size} int32 exceeds the arena's {self._capacity}")
        if self._arena is None:  # On the CPU the arrays are read where they are written.
            extra = torch.empty(count, dtype=torch.int32, device="cpu")
            fill(extra)
            return source, extra
        stage, copied = self._stages[0]
        self._stages.rotate()
        copied.synchronize()
        stage[: len(arena)].copy_(source)
        fill(stage[start:size])
        self._arena[:size].copy_(stage[:size], non_blocking=True)
        copied.record()
        return self._arena[: len(arena)], self._arena[start:size]


class _Graph(NamedTuple):
    """A captured step, and where it leaves its logits."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class _Memory:
    """What PyTorch asks for the address of memory that it shall not own."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
        }


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, without keeping it: of a graph's pool, which other graphs may use again.

    A copy of the logits to one place would take 15 us at 128 rows of 128256 (H200), logits of its
    own for each graph 1 GB.
    """
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)


class StepGraphs:
    """Captured steps by key, made when first needed; all use one memory pool.

    Attributes:
        replays: steps that replayed one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_tokens: int,
        max_blocks: int,
        block_size: int,
        pool_bytes: int,
        device: torch.device,
    ) -> None:
        """``max_tokens``: of a step. ``max_blocks``: of a sequence.

        ``pool_bytes``: what the largest step takes. The pool has them from the first capture on:
        graphs that come in order of size would each take what the smaller ones cannot lend.
        """
        self.buckets = decode_buckets(max_num_seqs)
        self._mixed_seqs = mixed_seqs(max_num_seqs)
        self._mixed_tokens = mixed_tokens(max_tokens)
        self._max_blocks = max_blocks
        self._lone_blocks = min(LONE_KEYS // block_size, max_blocks)
        self._lone_keys = self._lone_blocks * block_size
        self._pool_bytes = pool_bytes
        self._device = device
        self.replays = 0
        self._graphs: dict[GraphKey, _Graph] = {}

    def key(self, batch: engine.Batch, shared_blocks: int) -> GraphKey | None:
        """The smallest graph that holds a step, or None."""
        if batch.max_q > 1:
            tokens = _smallest(self._mixed_tokens, batch.num_tokens)
            seqs = _smallest(self._mixed_seqs, max(batch.num_seqs, batch.num_rows))
            if tokens is None or seqs is None:
                return None
            # One takes the padding tokens.
            return GraphKey(tokens, seqs + 1, seqs, tokens, 0, self._max_blocks)
        # Several outputs may begin at one last token of a prompt: more rows than tokens.
        size = _smallest(self.buckets, max(batch.num_tokens, batch.num_rows))
        if size is None:
            return None
        is_short = size == 1 and batch.max_seq_len <= self._lone_keys
        blocks = self._lone_blocks if is_short else self._max_blocks
        return GraphKey(size, size, size, 1, shared_bucket(shared_blocks), blocks)

    def run(self, key: GraphKey, compute: Callable[[], Tensor]) -> Tensor:
        """The logits that ``compute`` returns, valid until the next run.

        Requires: ``compute`` reads and writes fixed addresses, the same ones for the same key.
        """
        step = self._graphs.get(key)
        if step is None:
            # The first run loads kernels and opens libraries, which a capture must not do. That
            # the step is then run a second time changes nothing: it writes the same values.
            compute()
            graph = torch.cuda.CUDAGraph()
            first = next(iter(self._graphs.values()), None)
            pool = None if first is None else first.graph.pool()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                if first is None:  # freed at once: the pool keeps the memory
                    torch.empty(self._pool_bytes, dtype=torch.uint8, device=self._device)
                logits = compute().contiguous()
            step = self._graphs[key] = _Graph(graph, borrowed(logits))
        step.graph.replay()
        self.replays += 1
        return step.logits

    def clear(self) -> None:
        for step in self._graphs.values():
            step.graph.reset()
        self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: few enough to capture, close enough to waste little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 64)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def mixed_tokens(max_tokens: int) -> list[int]:
    """The numbers of tokens that get graphs of steps with prompt tokens."""
    return sorted({min(size, max_tokens) for size in MIXED_TOKENS})


def mixed_seqs(max_num_seqs: int) -> list[int]:
    """Their numbers of sequences, but for the one of padding tokens."""
    return sorted({min(size, max_num_seqs) for size in MIXED_SEQS})


def _smallest(sizes: list[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)


def shared_bucket(blocks: int) -> int:
    """The most blocks up to ``blocks`` that get a graph: four counts an octave, so that prefixes
    of all lengths need few graphs and at most a fifth of one is read for each sequence anew."""
    shift = max(blocks.bit_length() - 3, 0)
    return blocks >> shift << shift
