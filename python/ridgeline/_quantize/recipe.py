"""How a checkpoint is quantised, and what it came to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline._quantize.files import RECORD, write_json
from ridgeline._quantize.gptq import ACT_ORDERS
from ridgeline._quantize.schemes import GRANULARITIES, SCHEMES

METHODS = {
    "int4": ("rtn", "awq", "gptq", "awq+gptq"),
    "w4a8": ("rtn", "awq", "gptq", "awq+gptq"),
    "fp8": ("rtn", "gptq"),
    "int8": ("rtn", "smoothquant", "gptq", "smoothquant+gptq"),
}
"""Of each scheme; rtn: round to nearest. Scaling of columns goes before the choice of codes."""

RISE_TO_TELL = 0.03


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The arguments of :func:`ridgeline.quantize_checkpoint`, which documents them; checked."""

    scheme: str
    method: str
    group_size: int
    zero_point: bool
    granularity: str
    act_order: str
    clip: bool
    alpha: float
    damping: float
    samples: int
    window: int
    skip: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        for name, allowed in (
            ("scheme", SCHEMES),
            ("granularity", GRANULARITIES),
            ("act_order", ACT_ORDERS),
            ("method", METHODS.get(self.scheme, ())),
        ):
            value = getattr(self, name)
            if value not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ValueError(f"{name}: expected one of {words}, got {value!r}")
        for name, low, high, kind in (
            ("alpha", 0, 1, float),
            ("damping", 1e-6, 1, float),
            ("samples", 1, 1 << 20, int),
            ("window", 16, 1 << 20, int),
            ("seed", 0, 1 << 62, int),
            ("group_size", -1, 1 << 20, int),
            ("zero_point", False, True, bool),
            ("clip", False, True, bool),
        ):
            value = getattr(self, name)
            kinds = (int, float) if kind is float else kind
            if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
                wanted = {float: "a number", int: "an integer", bool: "a bool"}[kind]
                raise TypeError(f"{name}: expected {wanted}, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name}: expected a number from {low} to {high}, got {value}")
        four_bits = self.scheme in ("int4", "w4a8")
        for option, value, needs in (
            ("zero_point", self.zero_point, self.scheme == "int4"),
            ("clip", self.clip, four_bits),
            ("group_size", self.group_size != 128, four_bits),
            ("granularity", self.granularity != "row", self.scheme == "fp8"),
            ("alpha", self.alpha != 0.5, "smoothquant" in self.method),
            ("damping", self.damping != 0.01, "gptq" in self.method),
            ("act_order", self.act_order != "none", "gptq" in self.method),
            ("act_order group", self.act_order == "group", self.scheme == "int4"),
        ):
            if value and not needs:
                raise ValueError(f"{option}: not an option of {self.scheme} by {self.method}")

    @property
    def scales(self) -> bool:
        """Whether columns are scaled."""
        return "awq" in self.method or "smoothquant" in self.method

    @property
    def reads_products(self) -> bool:
        """Whether sums of ``x x^T`` are needed."""
        return self.clip or "awq" in self.method or "gptq" in self.method

    @property
    def needs_text(self) -> bool:
        return self.reads_products or self.scales


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """What :func:`ridgeline.quantize_checkpoint` did.

    Attributes:
        matrices: how many of the checkpoint's tensors were quantised.
        bytes_before, bytes_after: of these.
        loss_before, loss_after: nats a token of the windows held out; None: without a text.
        held_out: tokens that these are the mean of.
    """

    folder: Path
    scheme: str
    method: str
    matrices: int
    bytes_before: int
    bytes_after: int
    loss_before: float | None
    loss_after: float | None
    held_out: int

    @property
    def rise(self) -> float | None:
        """Of the loss, as a share of what it was."""
        if self.loss_before is None or self.loss_after is None:
            return None
        return self.loss_after / self.loss_before - 1

    def warning(self) -> str | None:
        """What to tell whoever makes or uses the checkpoint."""
        if self.rise is None or self.rise <= RISE_TO_TELL:
            return None
        return (
            f"{self.folder}: {self.scheme} by {self.method} costs this model quality: the loss of "
            f"held-out text rose by {self.rise:.1%}, from {self.loss_before:.3f} to "
            f"{self.loss_after:.3f} nats a token"
        )

    def __str__(self) -> str:
        size = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        text = f"{self.folder}: {self.matrices} matrices in {self.scheme} by {self.method}, {size}"
        if self.rise is None:
            return f"{text}\nloss: not measured without a text"
        return (
            f"{text}\nloss of {self.held_out} held-out tokens: {self.loss_before:.4f} -> "
            f"{self.loss_after:.4f} nats a token ({self.rise:+.2%})"
        )

    def save(self, folder: Path, recipe: Recipe) -> None:
        values: dict[str, Any] = {"recipe": asdict(recipe), "result": asdict(self)}
        del values["result"]["folder"]
        write_json(folder / RECORD, values)

    @classmethod
    def of_folder(cls, folder: Path) -> QuantizedCheckpoint | None:
        """As :meth:`save` left it, if it did."""
        try:
            values = json.loads((folder / RECORD).read_text(encoding="utf-8"))["result"]
            return cls(folder, **values)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / RECORD} is not what quantize wrote: {error!r}") from error
