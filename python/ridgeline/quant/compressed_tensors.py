"""The formats of compressed-tensors (llm-compressor)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.quant.layout import (
    INPUT_SCALES,
    Format,
    Get,
    ScaledFormat,
    Stored,
    TensorInfo,
    block_of,
    unpack_words,
)
from ridgeline.quant.stored import GroupedCodes, Weight


@dataclass(frozen=True)
class CompressedTensors:
    """Packed integers ("pack-quantized"), or int8 and fp8 weights with a scale beside them.

    Attributes:
        bits: of packed integers, by the number of groups' sizes: (bits, columns a group or None).
    """

    bits: int
    group: int | None
    block: tuple[int, int] | None

    ignored = (*INPUT_SCALES, ".input_zero_point", ".weight_shape", ".input_global_scale")

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        packed, zero = f"{module}.weight_packed", f"{module}.weight_zero_point"
        if packed not in stored:
            kind = self._scaled(stored.get(f"{module}.weight"))
            return None if kind is None else kind.layout(module, N, K, stored)
        groups, codes = 1 if self.group is None else K // self.group, 32 // self.bits
        shapes: dict[str, tuple[int, ...]] = {
            packed: (N, -(-K // codes)),
            f"{module}.weight_scale": (N, groups),
        }
        if zero in stored:
            shapes[zero] = (-(-N // codes), groups)
        if f"{module}.weight_g_idx" in stored:
            shapes[f"{module}.weight_g_idx"] = (K,)
        return shapes

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        if f"{module}.weight_packed" not in stored:
            kind = self._scaled(stored[f"{module}.weight"])
            assert kind is not None
            return kind.read(module, N, K, stored, get)
        zeros = index = None
        if f"{module}.weight_zero_point" in stored:
            words = get(f"{module}.weight_zero_point").t()
            zeros = unpack_words(words, self.bits)[:, :N]
        if f"{module}.weight_g_idx" in stored:
            index = get(f"{module}.weight_g_idx")
            index = None if bool((index < 0).any()) else index  # -1: in order
        return GroupedCodes(
            q=unpack_words(get(f"{module}.weight_packed"), self.bits)[:, :K].contiguous(),
            scales=get(f"{module}.weight_scale").t(),
            zeros=zeros,
            group_index=index,
            bits=self.bits,
        )

    def _scaled(self, weight: TensorInfo | None) -> ScaledFormat | None:
        if weight is None or weight.dtype not in ("I8", "F8_E4M3"):
            return None
        return ScaledFormat(weight.dtype, "weight_scale", self.block)


def compressed_tensors(config: Mapping[str, Any]) -> Format:
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"quantization_config: sparsity {sparsity['format']!r} is not read")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ValueError("quantization_config: transform_config (rotations) is not read")
    found = set()
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ValueError(f"quantization_config: weights of {kind} {bits} bits are not read")
        by_group = weights.get("strategy") == "group"
        by_block = weights.get("strategy") == "block"
        found.add(
            CompressedTensors(
                bits=bits,
                group=weights.get("group_size") if by_group else None,
                block=block_of(weights.get("block_structure")) if by_block else None,
            )
        )
    if len(found) != 1:
        raise ValueError(
            "quantization_config: config_groups must quantise all weights in one way, "
            f"got {len(found)}"
        )
    return found.pop()
