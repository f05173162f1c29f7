"""The formats of quantised checkpoints: the tensors that stand for a module's weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.quant.compressed_tensors import compressed_tensors
from ridgeline.quant.four_bits import Mxfp4, Nvfp4, TableCodes
from ridgeline.quant.layout import (
    INPUT_SCALES,
    Format,
    Get,
    Kept,
    ScaledFormat,
    Stored,
    block_of,
    checked_groups,
    one_of,
    pack_words,
    unpack_words,
)
from ridgeline.quant.stored import GroupedCodes, Weight

_LEAVES = "-:"  # begins a rule of GPTQModel's "dynamic" for modules that are not quantised
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column 8 j + _AWQ_ORDER[i]


def format_of(config: Mapping[str, Any]) -> Format:
    """From the ``quantization_config`` of a ``config.json``; what is not understood is refused."""
    method = config.get("quant_method")
    makers: dict[str, Callable[[Mapping[str, Any]], Format]] = {
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "modelopt": _modelopt,
        "mxfp4": lambda _: Mxfp4(),
    }
    if method not in makers:
        raise ValueError(
            f"quantization_config: quant_method must be one of {', '.join(makers)}, got {method!r}"
        )
    return makers[str(method)](config)


def _group_size(config: Mapping[str, Any]) -> int:
    key = "group_size" if "group_size" in config else "q_group_size"
    value = config.get(key, 128)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"quantization_config: {key} must be positive or -1, got {value!r}")
    return value


def _groups(K: int, group: int) -> int:
    return 1 if group == -1 else -(-K // group)


def _group_index(K: int, group: int, stored: Tensor | None) -> Tensor | None:
    """The group of each column; None where groups are of equal size and in order."""
    group = K if group == -1 else group
    in_order = torch.arange(K, device=None if stored is None else stored.device) // group
    index = in_order if stored is None else stored.long()
    return None if K % group == 0 and torch.equal(index, in_order) else index


# ---- AWQ ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's "gemm": words of eight rows of W side by side. Source: Lin et al., "AWQ", 2023."""

    group: int

    ignored = ()
    dtypes: ClassVar[Mapping[str, str]] = {}
    kept_as = None

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        if f"{module}.qweight" not in stored:
            return None
        groups = _groups(K, self.group)
        return {
            f"{module}.qweight": (K, N // 8),
            f"{module}.qzeros": (groups, N // 8),
            f"{module}.scales": (groups, N),
        }

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        order = torch.tensor(_AWQ_ORDER).argsort()

        def codes(name: str) -> Tensor:
            nibbles = unpack_words(get(f"{module}.{name}"), 4).unflatten(-1, (-1, 8))
            return nibbles[..., order.to(nibbles.device)].flatten(-2)

        scales = get(f"{module}.scales")
        index = _group_index(K, self.group, None)
        return GroupedCodes(codes("qweight").t().contiguous(), scales, codes("qzeros"), index)


def _awq(config: Mapping[str, Any]) -> Format:
    one_of(config, "bits" if "bits" in config else "w_bit", (4,), 4)
    one_of(config, "version", ("gemm", "GEMM"), "gemm")
    return Awq(_group_size(config))


# ---- GPTQ --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gptq:
    """Words of eight columns of W (four at 8 bits); ``g_idx`` is the group of each column.

    Version 1 stores zero points less one. Source: Frantar et al., "GPTQ", 2022; AutoGPTQ.
    """

    bits: int
    group: int
    zero_offset: int

    ignored = (".bias_scale",)
    dtypes: ClassVar[Mapping[str, str]] = {}

    @property
    def kept_as(self) -> Kept | None:
        return None if self.bits == 4 else "dtype"

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        if f"{module}.qweight" not in stored:
            return None
        groups, codes = _groups(K, self.group), 32 // self.bits
        shapes: dict[str, tuple[int, ...]] = {
            f"{module}.qweight": (K // codes, N),
            f"{module}.qzeros": (groups, N // codes),
            f"{module}.scales": (groups, N),
        }
        if f"{module}.g_idx" in stored:
            shapes[f"{module}.g_idx"] = (K,)
        return shapes

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        zeros = unpack_words(get(f"{module}.qzeros"), self.bits)
        index, name = None, f"{module}.g_idx"
        if name in stored:
            index = checked_groups(name, get(name), len(zeros))
        return GroupedCodes(
            q=unpack_words(get(f"{module}.qweight").t(), self.bits),
            scales=get(f"{module}.scales"),
            # A zero point of 0 less one has wrapped around.
            zeros=(zeros + self.zero_offset) & ((1 << self.bits) - 1),
            group_index=_group_index(K, self.group, index),
            bits=self.bits,
        )


def _gptq(config: Mapping[str, Any]) -> Format:
    bits = one_of(config, "bits", (4, 8), 4)
    layout = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    # Rules that leave modules as they were say what the file's tensors say.
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise ValueError(f"quantization_config: dynamic must map patterns, got {rules!r}")
    changes = [rule for rule in rules if not rule.startswith(_LEAVES)]
    if changes:
        raise ValueError(
            f"quantization_config: dynamic: other settings for some modules ({changes[0]!r}) are "
            "not read"
        )
    return Gptq(bits, _group_size(config), zero_offset=int(layout == "gptq"))


def gptq_written(weight: GroupedCodes) -> dict[str, Tensor]:
    """The tensors of version 2 that stand for a weight, by the ends of their names."""
    N, K = weight.q.shape
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full_like(weight.scales, 1 << (weight.bits - 1), dtype=torch.uint8)
    index = weight.group_index
    if index is None:
        index = torch.arange(K, device=weight.q.device) // (K // len(weight.scales))
    return {
        "qweight": pack_words(weight.q, weight.bits).t(),
        "qzeros": pack_words(zeros, weight.bits),
        "scales": weight.scales,
        "g_idx": index.int(),
    }


_TOGETHER = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Products that other engines make one of, and then look for by the name of that."""


def _with_joined(names: Sequence[str]) -> list[str]:
    found = list(names)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for joined, parts in _TOGETHER.items():
            if leaf == parts[0] and all(f"{parent}.{part}" in names for part in parts):
                found.append(f"{parent}.{joined}")
    return found


def gptq_written_config(
    group_size: int, *, zero_point: bool, ignore: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint of 4-bit weights with an order of columns.

    Args:
        group_size: of every weight, -1: all columns.
        ignore: names of modules that are not quantised, or patterns after "re:". Rules match from
            a name's beginning on.
    """
    patterns = [
        name.removeprefix("re:") if name.startswith("re:") else re.escape(name) + "$"
        for name in _with_joined(ignore)
    ]
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 4,
        "group_size": group_size,
        "desc_act": True,
        "sym": not zero_point,
        "dynamic": {f"{_LEAVES}{pattern}": {} for pattern in patterns},
    }


# ---- One scale a tensor, row or block ----------------------------------------------------------


def _fp8(config: Mapping[str, Any]) -> Format:
    """DeepSeek's blocks (``weight_scale_inv`` multiplies, for all its name), or AutoFP8's."""
    one_of(config, "fmt", ("e4m3", None), None)
    block = config.get("weight_block_size")
    if block is None:
        return ScaledFormat("F8_E4M3", "weight_scale", ignored=INPUT_SCALES)
    return ScaledFormat("F8_E4M3", "weight_scale_inv", block_of(block), ignored=INPUT_SCALES)


def _bitsandbytes(config: Mapping[str, Any]) -> Format:
    if config.get("load_in_4bit"):
        one_of(config, "bnb_4bit_quant_storage", ("uint8",), "uint8")
        return TableCodes()
    if not config.get("load_in_8bit"):
        raise ValueError("quantization_config: expected load_in_4bit or load_in_8bit, got neither")
    return ScaledFormat("I8", "SCB", scale_unit=1 / 127, ignored=(".weight_format",))


def _modelopt(config: Mapping[str, Any]) -> Format:
    """NVIDIA's Model Optimizer."""
    if one_of(config, "quant_algo", ("FP8", "NVFP4"), None) == "FP8":
        return ScaledFormat("F8_E4M3", "weight_scale", ignored=INPUT_SCALES)
    return Nvfp4("weight", "weight_scale_2", divides=False)
