"""What the formats of quantised checkpoints share: how one is asked, codes in words, one scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.quant.stored import FP8_BLOCK, ScaledCodes, Weight

# Of activations and of the KV cache: nothing here is quantised by them.
INPUT_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".activation_scale")


class TensorInfo(NamedTuple):
    """What the header of a file says of a tensor; ``dtype`` in safetensors' words."""

    shape: tuple[int, ...]
    dtype: str


Stored = Mapping[str, TensorInfo]
Get = Callable[[str], Tensor]


Kept = Literal["fp8", "fp4", "int4", "dtype"]
"""e4m3 with a scale a row; 4-bit floats, of experts alone; 4 bits that are stored in 8, by groups
of 128 as most files have; the model's dtype, since no product takes them otherwise."""


class Format(Protocol):
    """How one tool stores the weight ``[N, K]`` of a module.

    Whether a module is quantised is read from its tensors, not from lists of names: a file says
    what it holds.
    """

    @property
    def ignored(self) -> tuple[str, ...]:
        """Ends of names that say nothing about the weight's values."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Of ends of names, in safetensors' words, where they are not those of most formats."""
        ...

    @property
    def kept_as(self) -> Kept | None:
        """What quantised weights become that do not stay as they are stored."""
        ...

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        """The names and shapes that the weight must have; None: it is not quantised."""
        ...

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight: ...


_WORDS = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")
_FLOATING = (".scales", ".weight_scale", ".weight_scale_inv", ".SCB")


def wrong_dtype(name: str, dtype: str, own: Mapping[str, str]) -> str | None:
    """What the dtype of a tensor in :meth:`Format.layout` should be, if it is another. ``own``: the
    format's :attr:`Format.dtypes`."""
    for end, wanted in own.items():
        if name.endswith(end):
            return None if dtype == wanted else wanted
    if name.endswith(_WORDS) and dtype != "I32":
        return "I32"
    if name.endswith(_FLOATING) and not dtype.startswith(("F", "BF")):
        return "a floating dtype"
    return "I32" if name.endswith("g_idx") and dtype not in ("I32", "I64") else None


def checked_groups(name: str, index: Tensor, groups: int) -> Tensor:
    """The group of each column; ValueError if there are not so many."""
    if index.numel() and not (0 <= int(index.min()) and int(index.max()) < groups):
        got = f"{int(index.min())} to {int(index.max())}"
        raise ValueError(f"{name}: expected groups from 0 to {groups - 1}, got {got}")
    return index


def one_of(config: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any) -> Any:
    value = config.get(key, default)
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"quantization_config: {key} must be one of {words}, got {value!r}")
    return value


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, words]`` to uint8 ``[rows, words * 32 / bits]``, lowest bits first."""
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`unpack_words`; a last word that is not full is filled with zeros."""
    bytes_ = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % (32 // bits)))
    if bits == 4:
        bytes_ = bytes_[:, ::2] | (bytes_[:, 1::2] << 4)
    # A single row may count as contiguous whatever its stride, which a wider dtype cannot have.
    rows, columns = bytes_.shape[0], bytes_.shape[1] // 4
    return bytes_.contiguous().flatten().view(torch.int32).unflatten(0, (rows, columns))


def block_of(value: Any) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or min(value) < 1:
        raise ValueError(f"quantization_config: a block must be two sizes, got {value!r}")
    return int(value[0]), int(value[1])


@dataclass(frozen=True)
class ScaledFormat:
    """Weights of ``dtype`` under their own name, and a float scale beside them.

    Attributes:
        scale: the name's end. scale_unit: what a stored scale is multiplied by.
        block: rows and columns that share a scale, where blocks do.
    """

    dtype: str
    scale: str
    block: tuple[int, int] | None = None
    scale_unit: float = 1.0
    ignored: tuple[str, ...] = ()

    dtypes: ClassVar[Mapping[str, str]] = {}

    @property
    def kept_as(self) -> Kept | None:
        blocks = (None, (FP8_BLOCK, FP8_BLOCK))
        return None if self.block in blocks[: 1 if self.dtype == "I8" else 2] else "dtype"

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        weight, scale = f"{module}.weight", f"{module}.{self.scale}"
        if weight not in stored or stored[weight].dtype != self.dtype:
            return None
        if self.block is not None:
            shape: tuple[int, ...] = (-(-N // self.block[0]), -(-K // self.block[1]))
        else:
            shape = stored[scale].shape if scale in stored else (N,)
            shape = shape if shape in ((), (1,), (1, 1), (N,), (N, 1)) else (N,)
        return {weight: (N, K), scale: shape}

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        scale = get(f"{module}.{self.scale}").float()
        scale = scale if self.block is not None else scale.reshape(-1)
        if self.scale_unit != 1:
            scale = scale * self.scale_unit
        return ScaledCodes(get(f"{module}.weight"), scale, self.block)
