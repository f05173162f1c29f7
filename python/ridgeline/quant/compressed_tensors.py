"""The formats of compressed-tensors (llm-compressor), read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.quant.four_bits import Nvfp4, PackedMxfp4
from ridgeline.quant.layout import (
    INPUT_SCALES,
    Format,
    Get,
    Kept,
    ScaledFormat,
    Stored,
    TensorInfo,
    block_of,
    checked_groups,
    one_of,
    pack_words,
    unpack_words,
)
from ridgeline.quant.stored import FP8_BLOCK, GroupedCodes, ScaledCodes, Weight


@dataclass(frozen=True)
class CompressedTensors:
    """Packed integers ("pack-quantized"), or int8 and fp8 weights with a scale beside them. Of
    4 bits integers may have a byte each, as llm-compressor leaves them where inputs are quantised.

    Attributes:
        bits: of packed integers, by the number of groups' sizes: (bits, columns a group or None).
        packed: what the configuration says; tensors say it of each weight.
        fp8_inputs: of integers of 4 bits: inputs are meant to be fp8, too (W4AFP8).
    """

    bits: int
    group: int | None
    block: tuple[int, int] | None
    packed: bool = True
    fp8_inputs: bool = False

    ignored = (*INPUT_SCALES, ".input_zero_point", ".weight_shape", ".input_global_scale")
    dtypes: ClassVar[Mapping[str, str]] = {}

    @property
    def kept_as(self) -> Kept | None:
        if self.packed:
            return None if self.bits == 4 else "dtype"
        if self.bits == 4:
            return "int4"
        return ScaledFormat("F8_E4M3", "weight_scale", self.block).kept_as

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        packed, zero = f"{module}.weight_packed", f"{module}.weight_zero_point"
        groups, codes = 1 if self.group is None else K // self.group, 32 // self.bits
        if packed not in stored:
            weight = f"{module}.weight"
            if self._has_bytes(stored.get(weight)):
                return {weight: (N, K), f"{module}.weight_scale": (N, groups)}
            kind = self._scaled(stored.get(weight))
            return None if kind is None else kind.layout(module, N, K, stored)
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
            weight = f"{module}.weight"
            if self._has_bytes(stored[weight]):
                q, scales = _codes_of_bytes(weight, get(weight)), get(f"{module}.weight_scale").t()
                return GroupedCodes(q, scales, fp8_inputs=self.fp8_inputs)
            kind = self._scaled(stored[weight])
            assert kind is not None
            return kind.read(module, N, K, stored, get)
        zeros = index = None
        if f"{module}.weight_zero_point" in stored:
            words = get(f"{module}.weight_zero_point").t()
            zeros = unpack_words(words, self.bits)[:, :N]
        if f"{module}.weight_g_idx" in stored:
            index = get(f"{module}.weight_g_idx")
            if bool((index == -1).all()):  # in order
                index = None
            else:
                groups = stored[f"{module}.weight_scale"].shape[-1]
                index = checked_groups(f"{module}.weight_g_idx", index, groups)
        return GroupedCodes(
            q=unpack_words(get(f"{module}.weight_packed"), self.bits)[:, :K].contiguous(),
            scales=get(f"{module}.weight_scale").t(),
            zeros=zeros,
            group_index=index,
            bits=self.bits,
            fp8_inputs=self.fp8_inputs,
        )

    def _has_bytes(self, weight: TensorInfo | None) -> bool:
        """Whether integers of 4 bits have a byte each."""
        return self.bits == 4 and weight is not None and weight.dtype == "I8"

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
    found: set[Format] = set()
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if (kind, bits) == ("float", 4):
            found.add(_four_bit_floats(weights))
            continue
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ValueError(f"quantization_config: weights of {kind} {bits} bits are not read")
        strategy = _strategy_of(weights)
        packed = "pack" in str(group.get("format") or config.get("format"))
        inputs = group.get("input_activations") or {}
        found.add(
            CompressedTensors(
                bits=bits,
                group=weights.get("group_size") if strategy == "group" else None,
                block=block_of(weights.get("block_structure")) if strategy == "block" else None,
                packed=packed,
                fp8_inputs=bits == 4 and _are_fp8(inputs),
            )
        )
    if len(found) != 1:
        raise ValueError(
            "quantization_config: config_groups must quantise all weights in one way, "
            f"got {len(found)}"
        )
    return found.pop()


def _codes_of_bytes(name: str, integers: Tensor) -> Tensor:
    """int8 from -8 to 7 as codes whose zero is 8."""
    if integers.numel():
        low, high = int(integers.min()), int(integers.max())
        if low < -8 or high > 7:
            raise ValueError(f"{name}: expected integers from -8 to 7, got {low} to {high}")
    return (integers + 8).to(torch.uint8)


def _are_fp8(inputs: Mapping[str, Any]) -> bool:
    """Whether they are e4m3 with a scale a token, or one for all, which a token's stands for.

    Others that are quantised stay in 16 bits, and so lose less than is meant: int8, for which there
    is no product with integers of 4 bits, and e4m3 with scales of columns.
    """
    is_fp8 = inputs.get("type") == "float" and inputs.get("num_bits", 8) == 8
    return is_fp8 and _strategy_of(inputs) in ("token", "tensor")


def _strategy_of(kind: Mapping[str, Any]) -> str:
    """What shares a scale; where it is not said the group's size says it."""
    group = kind.get("group_size")
    told = "tensor" if group is None else "channel" if group == -1 else "group"
    return str(kind.get("strategy") or told)


def _four_bit_floats(weights: Mapping[str, Any]) -> Format:
    columns = one_of(weights, "group_size", (16, 32), None)
    if columns == 32:
        return PackedMxfp4()
    return Nvfp4("weight_packed", "weight_global_scale", divides=True)


def written(weight: GroupedCodes | ScaledCodes) -> dict[str, Tensor]:
    """The tensors that stand for a weight, by the ends of their names.

    Requires: no ``group_index``, which its readers have given up.
    """
    if isinstance(weight, ScaledCodes):
        by_row = weight.block is None and weight.scale.numel() > 1
        scale = weight.scale[:, None] if by_row else weight.scale
        return {"weight": weight.codes, "weight_scale": scale}
    tensors = {
        "weight_packed": pack_words(weight.q, weight.bits),
        "weight_scale": weight.scales.t(),
        "weight_shape": torch.tensor(weight.q.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack_words(weight.zeros, weight.bits).t()
    return tensors


def written_config(
    kind: str, *, group_size: int, zero_point: bool, granularity: str, ignore: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint with weights of one kind.

    Args:
        kind: "int4", "w4a8" (int4 with inputs in e4m3: llm-compressor's W4AFP8), "fp8" or "int8".
        group_size: of 4 bits: columns that share a scale, -1: all; it holds for every weight, so
            that no single one can tell it: where it is the weight's width both look the same.
        zero_point: of int4. granularity: of fp8: "tensor", "row" or "block".
        ignore: names of modules that are not quantised, or patterns after "re:".
    """
    weights: dict[str, Any] = {"type": "int", "num_bits": 4, "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if kind in ("int4", "w4a8"):
        form, by_group = "pack-quantized", {"strategy": "group", "group_size": group_size}
        weights |= {"strategy": "channel"} if group_size == -1 else by_group
        weights["symmetric"] = not zero_point
        if kind == "w4a8":
            inputs = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "token",
                      "dynamic": True}  # fmt: skip
    else:
        form = "int-quantized" if kind == "int8" else "float-quantized"
        weights |= {"type": "int" if kind == "int8" else "float", "num_bits": 8}
        weights["strategy"] = "tensor" if granularity == "tensor" else "channel"
        inputs = weights | {"strategy": "token", "dynamic": True}
        if granularity == "block":
            weights |= {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
            inputs |= {"strategy": "group", "group_size": FP8_BLOCK}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": list(ignore),
    }
