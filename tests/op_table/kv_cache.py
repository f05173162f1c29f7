"""Rows of the rotary and KV-cache ops. Caches are NaN everywhere first: a slot that is not named
must keep its bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import ridgeline
from op_table import Context, Error, Lazy, OpCase, Sample, full, normal, tensor


def _rotated(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    half = cos_sin.shape[1] // 2
    angles = cos_sin[positions.long()].to(x.dtype)[:, None]
    cos, sin = angles[..., :half], angles[..., half:]
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = head[..., :half], head[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, tail), -1)


def _rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return tuple(_rotated(x, positions, cos_sin, interleaved) for x in (q, k))  # type: ignore


def _stored(cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """A contiguous copy of the cache with the slots' values written."""
    out = cache.clone(memory_format=torch.contiguous_format)
    out.view(-1, *cache.shape[2:])[slots.long()] = values.to(cache.dtype)
    return out


def _write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    return _stored(k_cache, slots, k), _stored(v_cache, slots, v)


def _rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    interleaved: bool = False,
    weights_ready: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = _rope(q, k, positions, cos_sin, interleaved)
    return q, _stored(k_cache, slots, k), _stored(v_cache, slots, v)


def _copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    pairs: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    copies = []
    for cache in (k_cache, v_cache, k_scale, v_scale):
        if cache is not None:
            out = cache.clone()
            for source, destination in pairs.tolist():
                if destination != 0:
                    out[destination] = cache[source]
            copies.append(out)
    return tuple(copies)


def cos_sin(positions: int, rotary_dim: int, dtype: torch.dtype | None = torch.float32) -> Lazy:
    """A table as models make it."""

    def make(context: Context) -> Tensor:
        inverse = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.arange(positions)[:, None] * inverse
        table = torch.cat((angles.cos(), angles.sin()), -1)
        return table.to(dtype or context.dtype).to(context.device)

    return Lazy(make)


def poisoned(*shape: int) -> Lazy:
    return full(shape, math.nan)


def _expanded(first: int, *shape: int) -> Lazy:
    """Of which all along the first dimension is one element."""
    return Lazy(lambda context: normal(1, *shape)(context).expand(first, *shape))


def _engine_cache(blocks: int, size: int, heads: int, dim: int) -> Lazy:
    """Stored as the engine does: [blocks, heads, size, D]."""
    return poisoned(blocks, heads, size, dim).transpose(1, 2)


def _slices(tokens: int, q_heads: int, kv_heads: int, dim: int) -> dict[str, Lazy]:
    """q, k and v as slices of one fused projection would be strided."""
    heads = q_heads + 2 * kv_heads
    return {
        "q": normal(tokens, heads, dim)[:, :q_heads],
        "k": normal(tokens, heads, dim)[:, q_heads : q_heads + kv_heads],
        "v": normal(tokens, heads, dim)[:, q_heads + kv_heads :],
    }


def _int32(values: list[Any]) -> Lazy:
    return tensor(values, torch.int32)


_GOOD_WRITE = {
    "k": normal(2, 2, 16),
    "v": normal(2, 2, 16),
    "k_cache": poisoned(3, 16, 2, 16),
    "v_cache": poisoned(3, 16, 2, 16),
    "slots": _int32([16, 17]),
}
_GOOD_ROPE = {
    "q": normal(2, 4, 16),
    "k": normal(2, 2, 16),
    "positions": _int32([0, 5]),
    "cos_sin": cos_sin(8, 16),
}
_GOOD_COPY = {
    "k_cache": normal(4, 16, 2, 16),
    "v_cache": normal(4, 16, 2, 16),
    "pairs": _int32([[1, 2]]),
}

ROPE = OpCase(
    name="rope",
    op=ridgeline.ops.rope,
    reference=_rope,
    competitor=_rope,
    mutates=("q", "k"),
    samples=[
        Sample("GQA, a whole head rotated", **_GOOD_ROPE),
        Sample(
            "partial rotary, positions in any order, more than one block",
            q=normal(37, 8, 128),
            k=normal(37, 2, 128),
            positions=_int32([(7 * i) % 37 for i in range(37)]),
            cos_sin=cos_sin(64, 64),
        ),
        Sample(
            "interleaved pairs, 64-bit positions",
            q=normal(5, 4, 64),
            k=normal(5, 1, 64),
            positions=tensor([3, 1, 4, 1, 5], torch.int64),
            cos_sin=cos_sin(8, 64),
            interleaved=True,
        ),
        Sample(
            "half a head is no whole 16-byte piece: 80 of which 20 rotate, interleaved",
            q=normal(3, 3, 80),
            k=normal(3, 1, 80),
            positions=_int32([0, 1, 2]),
            cos_sin=cos_sin(4, 20),
            interleaved=True,
        ),
        Sample(
            "an odd head dimension of single elements, a table in the dtype of q",
            q=normal(3, 3, 42),
            k=normal(3, 1, 42),
            positions=_int32([0, 1, 2]),
            cos_sin=cos_sin(4, 34, None),
        ),
        Sample(
            "the widest head, strided",
            q=normal(3, 6, 256)[:, :4],
            k=normal(3, 6, 256)[:, 4:],
            positions=_int32([1, 0, 2]),
            cos_sin=cos_sin(4, 256),
        ),
        Sample(
            "no tokens",
            q=normal(0, 4, 16),
            k=normal(0, 2, 16),
            positions=_int32([]),
            cos_sin=cos_sin(8, 16),
        ),
    ],
    errors=[
        Error(r"k.*\[2, -1, 16\].*\[3, 2, 16\]", **_GOOD_ROPE | {"k": normal(3, 2, 16)}),
        Error(r"k: expected dtype float32", **_GOOD_ROPE | {"k": normal(2, 2, 16).to(torch.half)}),
        Error(
            r"cos_sin: expected an even number.*\[8, 15\]",
            **_GOOD_ROPE | {"cos_sin": normal(8, 15)},
        ),
        Error(
            r"cos_sin: expected an even number.*\[8, 18\]",
            **_GOOD_ROPE | {"cos_sin": normal(8, 18)},
        ),
        Error(
            r"positions: expected shape \[2\].*\[3\]",
            **_GOOD_ROPE | {"positions": _int32([0, 1, 2])},
        ),
        Error(r"positions: expected dtype int32 or int64", **_GOOD_ROPE | {"positions": normal(2)}),
        Error(r"q: expected 3 dimensions", **_GOOD_ROPE | {"q": normal(2, 16)}),
        Error(r"q: expected to be written", **_GOOD_ROPE | {"q": _expanded(2, 2, 16)}),
        Error(r"k: expected to be written", **_GOOD_ROPE | {"k": _expanded(2, 2, 16)}),
        Error(
            r"q: expected the last dimension contiguous",
            **_GOOD_ROPE | {"q": normal(2, 16, 4).transpose(1, 2)},
        ),
    ],
)

WRITE_KV = OpCase(
    name="write_kv",
    op=ridgeline.ops.write_kv,
    reference=_write_kv,
    bound="exact",
    mutates=("k_cache", "v_cache"),
    samples=[
        Sample("two slots of one block", **_GOOD_WRITE),
        Sample(
            "strided inputs and the engine's storage; the last slot and the dummy",
            k=normal(3, 6, 64)[:, 1:3],
            v=normal(3, 6, 64)[:, 4:],
            k_cache=_engine_cache(4, 16, 2, 64),
            v_cache=_engine_cache(4, 16, 2, 64),
            slots=tensor([63, 0, 31], torch.int64),
        ),
        Sample(
            "vectors of no whole 16-byte pieces",
            k=normal(3, 2, 42),
            v=normal(3, 2, 42),
            k_cache=poisoned(2, 16, 2, 42),
            v_cache=poisoned(2, 16, 2, 42),
            slots=_int32([16, 17, 18]),
        ),
        Sample(
            "an odd number of pieces: 72 is nine of eight",
            k=normal(3, 2, 72),
            v=normal(3, 2, 72),
            k_cache=poisoned(2, 16, 2, 72),
            v_cache=poisoned(2, 16, 2, 72),
            slots=_int32([16, 17, 18]),
        ),
        Sample(
            "NaN and infinities pass",
            k=normal(1, 1, 64).set((0, 0, 3), math.inf),
            v=normal(1, 1, 64).set((0, 0, 5), math.nan),
            k_cache=poisoned(2, 16, 1, 64),
            v_cache=poisoned(2, 16, 1, 64),
            slots=_int32([16]),
        ),
        Sample(
            "no tokens",
            k=normal(0, 2, 64),
            v=normal(0, 2, 64),
            k_cache=poisoned(2, 16, 2, 64),
            v_cache=poisoned(2, 16, 2, 64),
            slots=_int32([]),
        ),
    ],
    errors=[
        Error(r"v: expected the shape of k", **_GOOD_WRITE | {"v": normal(2, 1, 16)}),
        Error(
            r"v_cache: expected to be written",
            **_GOOD_WRITE | {"v_cache": _expanded(3, 16, 2, 16)},
        ),
        Error(
            r"k: expected at most 256.*264",
            **_GOOD_WRITE | {"k": normal(2, 2, 264), "v": normal(2, 2, 264)},
        ),
        Error(
            r"k_cache: expected shape \[-1, -1, 2, 16\]",
            **_GOOD_WRITE | {"k_cache": normal(3, 16, 2, 8)},
        ),
        Error(
            r"k_cache: expected dtype float32 or",
            **_GOOD_WRITE | {"k_cache": normal(3, 16, 2, 16).to(torch.half)},
        ),
        Error(
            r"v_cache: expected the shape of k_cache",
            **_GOOD_WRITE | {"v_cache": normal(2, 16, 2, 16)},
        ),
        Error(r"slots: expected shape \[2\].*\[1\]", **_GOOD_WRITE | {"slots": _int32([1])}),
        Error(r"slots: expected dtype int32 or int64", **_GOOD_WRITE | {"slots": normal(2)}),
        Error(r"k_scale: expected None", **_GOOD_WRITE | {"k_scale": normal(3, 16, 2)}),
        Error(
            r"k_scale: expected a tensor beside a k_cache of int8, got None",
            **_GOOD_WRITE
            | {
                "k_cache": full((3, 16, 2, 16), 0, torch.int8),
                "v_cache": full((3, 16, 2, 16), 0, torch.int8),
            },
        ),
    ],
)

ROPE_WRITE_KV = OpCase(
    name="rope_write_kv",
    op=ridgeline.ops.rope_write_kv,
    reference=_rope_write_kv,
    competitor=_rope_write_kv,
    mutates=("q", "k_cache", "v_cache"),
    samples=[
        Sample(
            "a fused projection's slices into the engine's storage",
            **_slices(3, 4, 2, 64),
            positions=_int32([4, 0, 9]),
            cos_sin=cos_sin(16, 64),
            k_cache=_engine_cache(3, 16, 2, 64),
            v_cache=_engine_cache(3, 16, 2, 64),
            slots=_int32([20, 0, 47]),
        ),
        Sample(
            "partial rotary, interleaved, more than one block",
            **_slices(33, 6, 3, 96),
            positions=_int32(list(range(33))),
            cos_sin=cos_sin(64, 32),
            k_cache=poisoned(4, 16, 3, 96),
            v_cache=poisoned(4, 16, 3, 96),
            slots=_int32(list(range(16, 49))),
            interleaved=True,
        ),
        Sample(
            "a table at rest",
            **_slices(2, 2, 1, 64),
            positions=_int32([7, 2]),
            cos_sin=cos_sin(16, 64),
            k_cache=poisoned(2, 16, 1, 64),
            v_cache=poisoned(2, 16, 1, 64),
            slots=_int32([16, 17]),
            weights_ready=True,
        ),
    ],
    errors=[
        Error(
            r"slots: expected the dtype of positions, int64, got int32",
            **_GOOD_WRITE | _GOOD_ROPE | {"positions": tensor([0, 1], torch.int64)},
        ),
    ],
)

COPY_BLOCKS = OpCase(
    name="copy_blocks",
    op=ridgeline.ops.copy_blocks,
    reference=_copy_blocks,
    bound="exact",
    mutates=("k_cache", "v_cache"),
    samples=[
        Sample("one pair", **_GOOD_COPY),
        Sample(
            "the engine's storage, a block of several chunks, one source twice, padding",
            k_cache=normal(6, 8, 64, 64).transpose(1, 2),
            v_cache=normal(6, 8, 64, 64).transpose(1, 2),
            pairs=_int32([[1, 4], [3, 2], [1, 5], [0, 0]]),
        ),
        Sample(
            "blocks with gaps, of no whole 16-byte pieces",
            k_cache=normal(4, 16, 3, 21)[:, :, :2, :11],
            v_cache=normal(4, 16, 3, 21)[:, :, 1:, 3:14],
            pairs=_int32([[3, 1]]),
        ),
        Sample("no pairs", **_GOOD_COPY | {"pairs": _int32([]).view(0, 2)}),
    ],
    errors=[
        Error(r"pairs: expected shape \[-1, 2\]", **_GOOD_COPY | {"pairs": _int32([1, 2])}),
        Error(
            r"pairs: expected dtype int32", **_GOOD_COPY | {"pairs": tensor([[1, 2]], torch.int64)}
        ),
        Error(r"v_cache: expected the shape", **_GOOD_COPY | {"v_cache": normal(4, 16, 2, 8)}),
    ],
)

CASES = [ROPE, WRITE_KV, ROPE_WRITE_KV, COPY_BLOCKS]
