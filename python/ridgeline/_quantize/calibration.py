"""A text cut into windows, and what the layers make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kv_cache import KVCache, KVCacheLayout
from ridgeline.models.decoder import Decoder, StepInputs
from ridgeline.nn.linear import at_rest
from ridgeline.tokenizer import Tokenizer

_BLOCK_SIZE = 64
_STEP_TOKENS = 8192  # of several windows together
_LOSS_TOKENS = 256  # whose logits are there at once, each in float32 and more


@dataclass(frozen=True)
class Windows:
    """Token ids, int32 ``[count, tokens]`` each: what is learned from, and what is not."""

    seen: Tensor
    held_out: Tensor


def windows_of(text: Path, tokenizer: Tokenizer, samples: int, window: int, seed: int) -> Windows:
    """Windows from all over the text, an eighth as many more held out.

    Each begins with what the tokenizer puts before a text, if anything.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, or too short for so many windows.
    """
    if not text.is_file():
        raise FileNotFoundError(f"text: expected a file of text to calibrate on, {text} is none")
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: expected UTF-8 in {text}: {error}") from error
    (special,), (ids,) = tokenizer.encode([""]), tokenizer.encode([content])
    begin = special if ids[: len(special)] == special else []
    ids, held_out = ids[len(begin) :], max(1, samples // 8)
    own = window - len(begin)
    wanted = (samples + held_out) * own
    if len(ids) < wanted:
        raise ValueError(
            f"text: expected at least {wanted} tokens for {samples} windows of {window} and "
            f"{held_out} held out, got {len(ids)} in {text}: give more text, fewer samples or a "
            "shorter window"
        )
    cut = torch.tensor(ids[: len(ids) // own * own], dtype=torch.int32).view(-1, own)
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))
    cut = cut[order[: samples + held_out]]
    cut = torch.cat((torch.tensor(begin, dtype=torch.int32).expand(len(cut), -1), cut), 1)
    return Windows(cut[:samples], cut[samples:])


@dataclass(frozen=True)
class _Through:
    """In place of the norm after a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x)


class Layerwise:
    """Runs windows through a model one layer at a time, each with a cache of its own.

    Args:
        ends: the model without layers: embedding, last norm, head.
        window: tokens of a window.
    """

    def __init__(self, ends: Decoder, window: int) -> None:
        self._ends, self._window = ends, window
        self._device, self._dtype = ends.embedding.device, ends.embedding.dtype
        self._count = max(1, _STEP_TOKENS // window)
        layout = KVCacheLayout.of(
            replace(ends.config, num_layers=1), _BLOCK_SIZE, "auto", self._dtype
        )
        self._blocks = -(-window // _BLOCK_SIZE)
        self._cache = KVCache.allocate(layout, 1 + self._count * self._blocks, self._device)

    def embed(self, ids: Tensor) -> Tensor:
        """``[count, tokens]`` to ``[count, tokens, hidden]``."""
        ids = ids.to(self._device)
        positions = torch.arange(self._window, dtype=ids.dtype, device=self._device)
        hidden = self._ends.embed(ids.flatten(), positions.repeat(len(ids)))
        return hidden.unflatten(0, (len(ids), -1))

    def run(self, one: Decoder, hidden: Tensor, *, advance: bool) -> None:
        """Calls the layer of ``one`` on all windows; ``advance``: ``hidden`` becomes its output."""
        at_rest(hidden)  # products read weights ahead of the stream, and these are just made
        for low in range(0, len(hidden), self._count):
            some = hidden[low : low + self._count]
            decoder = replace(
                one,
                embedding=some.flatten(0, 1),
                embedding_scale=1.0,
                positions=None,
                norm=_Through(),
            )
            out = decoder.hidden_states(self._inputs(len(some)), self._cache)
            if advance:
                some.copy_(out.view_as(some))

    def loss(self, hidden: Tensor, ids: Tensor) -> float:
        """Nats a token, of each after those before it in its window."""
        total = 0.0
        for states, row in zip(hidden, ids.to(self._device).long()):
            for some, next_ids in zip(states[:-1].split(_LOSS_TOKENS), row[1:].split(_LOSS_TOKENS)):
                logits = self._ends.logits(self._ends.norm(some.contiguous()))
                total += float(F.cross_entropy(logits.float(), next_ids, reduction="sum"))
        return total / (ids.shape[0] * (ids.shape[1] - 1))

    def _inputs(self, count: int) -> StepInputs:
        def ints(values: Tensor) -> Tensor:
            return values.to(device=self._device, dtype=torch.int32)

        tokens, blocks = self._window, self._blocks
        tables = 1 + torch.arange(count * blocks).view(count, blocks)
        slots = tables[:, :1] * _BLOCK_SIZE + torch.arange(tokens)
        return StepInputs(
            input_ids=ints(torch.arange(count * tokens)),
            positions=ints(torch.arange(tokens).repeat(count)),
            slots=ints(slots.flatten()),
            seq_lens=ints(torch.full((count,), tokens)),
            cu_q=ints(torch.arange(count + 1) * tokens),
            block_tables=ints(tables),
            max_q=tokens,
        )
