"""Four-bit floats and codes of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.ops._nibbles import low_nibbles_first
from ridgeline.ops.fp4_weight import e2m1_values
from ridgeline.quant.layout import INPUT_SCALES, Get, Kept, Stored
from ridgeline.quant.stored import Expanded, Fp4Codes, Weight


def _bytes(name: str, get: Get) -> Tensor:
    """Of a weight whose name says nothing about its dtype."""
    packed = get(name)
    if packed.dtype != torch.uint8:
        raise ValueError(f"{name}: expected U8, got {packed.dtype}")
    return packed


# ---- MXFP4: 32 columns to a power of two -------------------------------------------------------


@dataclass(frozen=True)
class Mxfp4:
    """gpt-oss's experts: 4-bit floats, low nibble first, 32 columns to a power of two.

    The weights of all experts are one tensor ``[experts, rows, columns / 32, 16]``, not transposed
    as they are where they are not quantised. Source: OCP, "Microscaling Formats", 2023.
    """

    ignored = ()
    dtypes: ClassVar[Mapping[str, str]] = {"_blocks": "U8", "_scales": "U8"}
    kept_as: ClassVar[Kept] = "fp4"

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        blocks, scales = f"{module}_blocks", f"{module}_scales"
        if blocks not in stored:
            return None
        experts = max(stored[blocks].shape[0], 1) if stored[blocks].shape else 1
        groups = (experts, N // experts, K // 32)
        return {blocks: (*groups, 16), scales: groups}

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        blocks, scales = get(f"{module}_blocks"), get(f"{module}_scales")
        return Fp4Codes(blocks.flatten(0, 1), scales.flatten(0, 1))


@dataclass(frozen=True)
class PackedMxfp4:
    """The same of one matrix, as compressed-tensors stores it ("mxfp4-pack-quantized"). Read as
    e4m3 with a power of two a row, since only experts are multiplied in 4-bit floats.
    """

    ignored = (*INPUT_SCALES, ".weight_shape")
    dtypes: ClassVar[Mapping[str, str]] = {".weight_packed": "U8", ".weight_scale": "U8"}
    kept_as: ClassVar[Kept] = "fp8"

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        packed = f"{module}.weight_packed"
        if packed not in stored:
            return None
        return {packed: (N, K // 2), f"{module}.weight_scale": (N, K // 32)}

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        blocks = get(f"{module}.weight_packed").view(N, K // 32, 16)
        return Fp4Codes(blocks, get(f"{module}.weight_scale")).in_eight_bits()


# ---- NVFP4: 16 columns to an e4m3, and a float32 for all ---------------------------------------


@dataclass(frozen=True)
class Nvfp4:
    """4-bit floats, low nibble first, as compressed-tensors and Model Optimizer store them.

    Attributes:
        packed, whole: ends of the names of the codes and of the matrix's scale.
        divides: whether that divides the scales of columns, or multiplies them.
    """

    packed: str
    whole: str
    divides: bool

    ignored = (*INPUT_SCALES, ".input_global_scale", ".weight_shape")
    dtypes: ClassVar[Mapping[str, str]] = {
        ".weight_packed": "U8",
        ".weight_scale": "F8_E4M3",
        ".weight_global_scale": "F32",
        ".weight_scale_2": "F32",
    }
    kept_as: ClassVar[Kept] = "dtype"

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        packed, whole = f"{module}.{self.packed}", f"{module}.{self.whole}"
        # Other weights have the name, too, that Model Optimizer gives to codes.
        if packed not in stored or stored[packed].dtype.startswith(("F", "BF")):
            return None
        of_all = stored[whole].shape if whole in stored else ()
        return {
            packed: (N, K // 2),
            f"{module}.weight_scale": (N, K // 16),
            whole: of_all if of_all in ((), (1,)) else (),
        }

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        scale = get(f"{module}.weight_scale").float().unsqueeze(-1)
        of_all = get(f"{module}.{self.whole}").reshape(())
        packed = _bytes(f"{module}.{self.packed}", get)
        values = e2m1_values(low_nibbles_first(packed)).unflatten(-1, (-1, 16))
        values *= scale  # exact
        values = values / of_all if self.divides else values * of_all
        return Expanded(values.flatten(-2), "no product takes 4-bit floats by scales of 16 columns")


# ---- bitsandbytes: codes of a table ------------------------------------------------------------


@dataclass(frozen=True)
class TableCodes:
    """bitsandbytes' nf4 and fp4: 16 values, high nibble first, and a largest magnitude for 64
    weights that follow each other, row by row; these may be 8-bit codes of a table, too.

    Source: Dettmers et al., "QLoRA", 2023.
    """

    ignored = ()
    dtypes: ClassVar[Mapping[str, str]] = {
        ".quant_map": "F32",
        ".nested_quant_map": "F32",
        ".nested_absmax": "F32",
        ".bitsandbytes__nf4": "U8",
        ".bitsandbytes__fp4": "U8",
    }
    kept_as: ClassVar[Kept] = "dtype"

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        weight = f"{module}.weight"
        state = _state_of(weight, stored)
        if state is None:
            return None
        ends = ["absmax", "nested_absmax", "nested_quant_map"]
        if f"{weight}.nested_absmax" not in stored:
            ends = ends[:1]
        names = [state, *(f"{weight}.{end}" for end in ends)]
        # How many weights share a magnitude is not said by shapes: read() compares.
        shapes = {name: stored[name].shape if name in stored else (-1,) for name in names}
        return {weight: (-(-N * K // 2), 1), f"{weight}.quant_map": (16,)} | shapes

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight:
        weight = f"{module}.weight"
        name = _state_of(weight, stored)
        assert name is not None
        state = json.loads(bytes(get(name).tolist()))
        largest = self._largest(weight, state, stored, get)
        each = int(state["blocksize"])
        expected = {"shape": [N, K], "absmax": -(-N * K // each)}
        got = {"shape": list(state["shape"]), "absmax": len(largest)}
        if got != expected:
            raise ValueError(f"{weight}: expected {expected} of blocks of {each}, got {got}")
        packed = _bytes(weight, get).flatten()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: N * K]
        values = get(f"{weight}.quant_map")[codes.int()]
        values *= largest.repeat_interleave(each)[: N * K]
        return Expanded(values.view(N, K), "no product takes 4-bit codes of a table")

    @staticmethod
    def _largest(weight: str, state: Mapping[str, Any], stored: Stored, get: Get) -> Tensor:
        """Of each block."""
        largest = get(f"{weight}.absmax")
        nested = f"{weight}.nested_absmax" in stored
        wanted = torch.uint8 if nested else torch.float32
        if largest.dtype != wanted:
            raise ValueError(f"{weight}.absmax: expected {wanted}, got {largest.dtype}")
        if not nested:
            return largest
        of_blocks = get(f"{weight}.nested_absmax").repeat_interleave(int(state["nested_blocksize"]))
        table = get(f"{weight}.nested_quant_map")
        return table[largest.int()] * of_blocks[: len(largest)] + float(state["nested_offset"])


def _state_of(weight: str, stored: Stored) -> str | None:
    names = (f"{weight}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    return next((name for name in names if name in stored), None)
