"""Blocks of preempted sequences in host memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.kv_cache import KVCache, KVCacheLayout

_AT_ONCE = 64  # blocks a copy, so that what is gathered on the device stays small

Pairs = Sequence[tuple[int, int]]


class SwapSpace:
    """As many blocks as ``num_blocks`` of a cache, pinned if that is on a GPU until :meth:`close`.

    Copies are asynchronous, in the order of the calls on the current stream.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        device = [_blocks(t) for t in (*cache.k, *cache.v)]
        device += [t for t in (*cache.k_scale, *cache.v_scale) if t is not None]
        # Bytes, since not every dtype of a cache can be gathered.
        self._device = [t.view(torch.uint8) for t in device]
        # Pinned here: torch's pinned memory has sizes of powers of two and is kept for reuse.
        self._host = [
            torch.empty((num_blocks, *t.shape[1:]), dtype=torch.uint8) for t in self._device
        ]
        pinned: list[Tensor] = []
        # Also where nobody closes it, as after an error of the start.
        self._unpin = weakref.finalize(self, _unpin, pinned)
        for t in self._host if self._device[0].is_cuda else ():
            error = torch.cuda.cudart().cudaHostRegister(t.data_ptr(), t.nbytes, 0)
            if int(error) != 0:
                self.close()
                _forget_error(self._device[0].device)
                raise MemoryError(f"swap_space: {t.nbytes / 2**30:.2f} GiB cannot be pinned")
            pinned.append(t)

    def close(self) -> None:
        """Requires: no copy is running any more."""
        self._unpin()

    def save(self, pairs: Pairs) -> None:
        """(block, host block): to the host."""
        for blocks, first in _runs([(host, block) for block, host in pairs]):
            index = self._index(blocks)
            for device, host in zip(self._device, self._host, strict=True):
                target = host[first : first + len(blocks)]
                target.copy_(device.index_select(0, index), non_blocking=True)

    def restore(self, pairs: Pairs) -> None:
        """(host block, block): back."""
        for blocks, first in _runs(pairs):
            index = self._index(blocks)
            for device, host in zip(self._device, self._host, strict=True):
                source = host[first : first + len(blocks)]
                device.index_copy_(0, index, source.to(device.device, non_blocking=True))

    def _index(self, blocks: list[int]) -> Tensor:
        index = torch.tensor(blocks, device="cpu")
        if self._device[0].is_cuda:
            return index.pin_memory().to(self._device[0].device, non_blocking=True)
        return index


def swap_blocks(layout: KVCacheLayout, gib: float) -> int:
    """How many blocks fit into so much host memory."""
    return int(gib * 2**30) // layout.block_bytes


def _unpin(pinned: list[Tensor]) -> None:
    for t in pinned:
        torch.cuda.cudart().cudaHostUnregister(t.data_ptr())
    pinned.clear()


def _forget_error(device: torch.device) -> None:
    """CUDA keeps a failed call's error for whoever asks next: torch, after a launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _blocks(values: Tensor) -> Tensor:
    """``[num_blocks, kv_heads, block_size, head_dim]``, as a cache lies in memory."""
    return values.transpose(1, 2)


def _runs(pairs: Pairs) -> list[tuple[list[int], int]]:
    """Pairs (host block, block) -> blocks whose host blocks follow each other, and the first."""
    runs: list[tuple[list[int], int]] = []
    for host, block in sorted(pairs):
        if runs and len(runs[-1][0]) < _AT_ONCE and host == runs[-1][1] + len(runs[-1][0]):
            runs[-1][0].append(block)
        else:
            runs.append(([block], host))
    return runs
