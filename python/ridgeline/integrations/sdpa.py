"""Ridgeline as a flash-attention implementation of ``scaled_dot_product_attention``.

``enable()`` makes the name known; ``torch.nn.attention.activate_flash_attention_impl("ridgeline")``
puts the ops where SDPA calls its flash kernel, and ``restore_flash_attention_impl()`` takes them
away. The backward stays PyTorch's: it needs the output and the log-sum-exp, which are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline import _loader, ops

NAME = "ridgeline"


class _Handle:
    """Keeps the override until it is removed."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None


def enable() -> None:
    """Registers "ridgeline" with ``torch.nn.attention``; it is not activated.

    Raises:
        RuntimeError: this PyTorch has no register of flash-attention implementations.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_activate)


def _activate() -> _Handle:
    if not _loader.CUDA.loaded:
        raise RuntimeError(f"flash attention is CUDA's alone, and {_loader.CUDA.reason}")
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("_scaled_dot_product_flash_attention", _forward, "CUDA")
    return _Handle(library)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """``_scaled_dot_product_flash_attention``: ``[B, H, S, D]``; causal only where S are equal."""
    if dropout_p or return_debug_mask:
        raise RuntimeError("the flash attention of ridgeline has no dropout and no debug mask")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = ops.attention(q, k, v, causal=is_causal, scale=scale, return_lse=True)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return out.transpose(1, 2), lse, None, None, *lengths, state, unused, query.new_empty(0)
