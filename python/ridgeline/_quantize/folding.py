"""The weights of one layer, and where factors of columns go: into what makes the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.models.config import ModelConfig
from ridgeline.models.weights import Checkpoint, Parameter, Part
from ridgeline.quant.stored import is_finite


@dataclass(frozen=True)
class Fold:
    """A product whose columns can be multiplied by what the rows before it are divided by.

    Attributes:
        reader: its kind ("qkv"). expert: of an expert's product, which.
        norm: the kind of the norm whose output it reads; others: what else reads that.
        writer: instead of a norm: a kind of product, and the rows that make the columns.
        repeats: of :func:`ridgeline._quantize.scaling.awq_factors`: heads that share values.
    """

    reader: str
    expert: int | None = None
    norm: str | None = None
    others: tuple[str, ...] = ()
    writer: tuple[str, int, int] | None = None
    repeats: tuple[int, int, int] | None = None


def folds_of(config: ModelConfig) -> Iterator[Fold]:
    """Those of a layer, in an order in which they may be done one after the other."""
    weights = config.spec.weights
    shared = weights["layers.{i}.attention_norm"] == weights["layers.{i}.mlp_norm"]
    yield from (fold for fold in _all_folds(config) if fold.norm is None or not shared)


def _all_folds(config: ModelConfig) -> Iterator[Fold]:
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield Fold("qkv", norm="attention_norm")
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    yield Fold("output", writer=("qkv", query + kv, query + 2 * kv), repeats=heads)
    inner, experts = config.intermediate_size, config.spec.experts
    if experts is None:
        yield Fold("up", norm="mlp_norm")
        if config.spec.gated or config.activation == "relu":  # the only ones that keep a factor
            first = inner if config.spec.gated else 0
            yield Fold("down", writer=("up", first, first + inner))
        return
    yield Fold("expert_up", norm="mlp_norm", others=("router",))
    if experts.limit is None:
        for e in range(config.num_experts):
            rows = (2 * e + 1) * inner, (2 * e + 2) * inner
            yield Fold("expert_down", expert=e, writer=("expert_up", *rows))


class LayerWeights:
    """The tensors of a layer, whose parts are changed in place.

    Args:
        table: the layer's parameters by kind and end ("qkv.weight").
        wide: names of parts to keep in float32 for the changes; others keep their dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        table: Mapping[str, Parameter],
        checkpoint: Checkpoint,
        wide: frozenset[str],
    ) -> None:
        self._config, self._table = config, table
        self._tensors: dict[str, Tensor] = {}
        self.changed: set[str] = set()
        for parameter in table.values():
            for part in parameter.parts:
                tensor = checkpoint.read(part)
                assert isinstance(tensor, Tensor)
                if not is_finite(tensor):
                    raise ValueError(f"not all values are finite in: {part.name}")
                self._tensors[part.name] = tensor.float() if part.name in wide else tensor

    def __getitem__(self, part: Part) -> Tensor:
        return self._tensors[part.name]

    def of_expert(self, kind: str, expert: int | None) -> tuple[int, int]:
        """The decoder's rows of a product, or those of one of its experts."""
        rows = self._table[f"{kind}.weight"].shape[0]
        if expert is None:
            return 0, rows
        rows //= self._config.num_experts
        return expert * rows, (expert + 1) * rows

    def rows(self, kind: str, low: int, high: int) -> Tensor:
        """The decoder's rows of a product, as float32."""
        pieces = self._pieces(kind, "weight", low, high)
        return torch.cat([self[part][rows].float() for part, rows, _ in pieces])

    def fold(self, fold: Fold, factors: Tensor) -> None:
        """Multiplies the columns and divides what makes them."""
        for kind in (fold.reader, *fold.others):
            low, high = self.of_expert(kind, fold.expert)
            for part, rows, _ in self._pieces(kind, "weight", low, high):
                self._set(part, rows, self[part][rows].float() * factors)
        if fold.norm is not None:
            self._divide_norm(fold.norm, factors)
            return
        assert fold.writer is not None
        if fold.repeats is not None:
            factors = factors.view(fold.repeats)[:, 0].flatten()
        kind, low, high = fold.writer
        for end in ("weight", "bias"):
            if f"{kind}.{end}" in self._table:
                for part, rows, where in self._pieces(kind, end, low, high):
                    own = factors[where]
                    own = own[:, None] if end == "weight" else own
                    self._set(part, rows, self[part][rows].float() / own)

    def _divide_norm(self, kind: str, factors: Tensor) -> None:
        offset = self._config.spec.norm_offset
        for end, added in (("weight", offset), ("bias", 0.0)):
            if f"{kind}.{end}" in self._table:
                (part,) = self._table[f"{kind}.{end}"].parts
                self._set(part, slice(None), (self[part].float() + added) / factors - added)

    def _pieces(
        self, kind: str, end: str, low: int, high: int
    ) -> Iterator[tuple[Part, Tensor, slice]]:
        """Parts with the decoder's rows, which of theirs these are, and where in the range."""
        parameter, begin = self._table[f"{kind}.{end}"], 0
        for part in parameter.parts:
            first, last = max(low, begin), min(high, begin + part.rows)
            if first < last:
                stored = torch.arange(part.rows, device=self[part].device)
                stored = stored if parameter.arrange is None else parameter.arrange(stored)
                yield part, stored[first - begin : last - begin], slice(first - low, last - low)
            begin += part.rows

    def _set(self, part: Part, rows: Tensor | slice, values: Tensor) -> None:
        tensor = self._tensors[part.name]
        if part.name not in self.changed:
            tensor = self._tensors[part.name] = tensor.clone()
            self.changed.add(part.name)
        tensor[rows] = values.to(tensor.dtype)
