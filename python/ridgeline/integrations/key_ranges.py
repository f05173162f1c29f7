"""What a padded batch may see, in a tensor of a few bytes instead of a mask of every pair.

The tensor goes wherever a model hands on its attention mask, and has four dimensions as one:
int32 ``[B, 1 + bidirectional, 1 + window, columns]``, an expanded view. Its values are, for each
row of the batch, the first visible key, the end of the visible keys, and how many queries stand up
to there, the last at the last visible key. A fourth column says that there are queries after it, of
padding on the right; one column, that every query and key counts. What the host must know is in
the shape, so nothing is read back from the device, and torch.compile and CUDA graphs see one
static tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyRanges:
    """``ranges``: int32 ``[B, 3]`` of first key, end and queries; None: all keys and queries.

    ``late``: some rows have more queries than that, which see all visible keys of their row.
    """

    ranges: Tensor | None
    causal: bool
    window: int | None
    late: bool = False

    @classmethod
    def is_packed(cls, mask: Tensor) -> bool:
        """Whether the tensor is one of :meth:`pack`: masks are booleans or floating."""
        return mask.dtype == torch.int32

    @classmethod
    def unpack(cls, mask: Tensor) -> KeyRanges:
        _, directions, windows, values = mask.shape
        ranges = mask[:, 0, 0, :3] if values >= 3 else None
        return cls(ranges, directions == 1, windows - 1 if windows > 1 else None, values == 4)

    def pack(self, device: torch.device) -> Tensor:
        values = self.ranges
        if values is None:
            values = torch.zeros(1, 1, dtype=torch.int32, device=device)
        elif self.late:
            values = torch.nn.functional.pad(values, (0, 1))
        shape = (values.shape[0], 1 if self.causal else 2, 1 + (self.window or 0), values.shape[1])
        return values[:, None, None].expand(shape)

    def offsets(
        self, queries: int, keys: int, heads: int = 1, late: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``cu_q``, ``cu_k`` of the rows packed one after the other, ``heads`` times each.

        A row becomes four sequences, which part the keys before the visible ones, those, and the
        keys after, and give the queries that stand up to the end (``late``: those after it) the
        visible keys and the others none. One row alone needs one sequence.
        """
        assert self.ranges is not None
        first, end, count = self.ranges.repeat_interleave(heads, 0).unbind(1)
        rows = first.shape[0]
        if rows == 1:
            begin, stop = (count, torch.full_like(count, queries)) if late else (count * 0, count)
            return torch.cat((begin, stop)), torch.cat((first, end))
        row = torch.arange(rows, dtype=torch.int32, device=first.device)
        q, k = row * queries, row * keys
        if late:
            q_parts, k_parts = (q, q + count, q + count, q + queries), (k, k, k + first, k + end)
        else:
            q_parts, k_parts = (q, q, q + count, q + count), (k, k + first, k + end, k + keys)
        cu_q, cu_k = torch.stack(q_parts, 1).flatten(), torch.stack(k_parts, 1).flatten()
        last = row[-1:] + 1
        return torch.cat((cu_q, last * queries)), torch.cat((cu_k, last * keys))

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The boolean mask that it stands for, ``[B or 1, 1, queries, keys]``."""
        key = torch.arange(keys, device=device)
        query = torch.arange(queries, device=device)[:, None]
        if self.ranges is None:
            position, visible = query + (keys - queries), (key >= 0)[None, None]
        else:
            first, end, count = self.ranges.to(device)[:, :, None, None].unbind(1)
            position = end - count + query
            visible = (key >= first) & (key < end)
        if self.causal:
            visible = visible & (key <= position)
        if self.window is not None:
            visible = visible & (key > position - self.window)
        return visible.expand(-1, queries, keys)[:, None]
