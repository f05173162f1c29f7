"""The formats of quantised checkpoints: the tensors that stand for a module's weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline.quant.stored import Expanded, GroupedCodes, ScaledCodes, Weight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column 8 j + _AWQ_ORDER[i]


class TensorInfo(NamedTuple):
    """What the header of a file says of a tensor; ``dtype`` in safetensors' words."""

    shape: tuple[int, ...]
    dtype: str


Stored = Mapping[str, TensorInfo]
Get = Callable[[str], Tensor]


class Format(Protocol):
    """How one tool stores the weight ``[N, K]`` of a module.

    Whether a module is quantised is read from its tensors, not from lists of names: a file says
    what it holds.
    """

    @property
    def ignored(self) -> tuple[str, ...]:
        """Ends of names that say nothing about the weight's values."""
        ...

    def layout(
        self, module: str, N: int, K: int, stored: Stored
    ) -> dict[str, tuple[int, ...]] | None:
        """The names and shapes that the weight must have; None: it is not quantised."""
        ...

    def read(self, module: str, N: int, K: int, stored: Stored, get: Get) -> Weight: ...


def format_of(config: Mapping[str, Any]) -> Format:
    """From the ``quantization_config`` of a ``config.json``; what is not understood is refused."""
    method = config.get("quant_method")
    makers: dict[str, Callable[[Mapping[str, Any]], Format]] = {
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "mxfp4": lambda _: Mxfp4(),
    }
    if method not in makers:
        raise ValueError(
            f"quantization_config: quant_method must be one of {', '.join(makers)}, got {method!r}"
        )
    return makers[str(method)](config)


def _one_of(config: Mapping[str, Any], key: str, allowed: Sequence[Any], default: Any) -> Any:
    value = config.get(key, default)
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"quantization_config: {key} must be one of {words}, got {value!r}")
    return value


def _group_size(config: Mapping[str, Any]) -> int:
    key = "group_size" if "group_size" in config else "q_group_size"
    value = config.get(key, 128)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"quantization_config: {key} must be positive or -1, got {value!r}")
    return value


def _groups(K: int, group: int) -> int:
    return 1 if group == -1 else -(-K // group)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, words]`` to uint8 ``[rows, words * 32 / bits]``, lowest bits first."""
    bytes_ = words.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


# ---- AWQ ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's "gemm": words of eight rows of W side by side. Source: Lin et al., "AWQ", 2023."""

    group: int

    ignored = ()

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
        return GroupedCodes(codes("qweight").t().contiguous(), scales, codes("qzeros"))


def _awq(config: Mapping[str, Any]) -> Format:
    _one_of(config, "bits" if "bits" in config else "w_bit", (4,), 4)
    _one_of(config, "version", ("gemm", "GEMM"), "gemm")
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
        index = None
        if f"{module}.g_idx" in stored:
            index = get(f"{module}.g_idx")
            group = K if self.group == -1 else self.group
            in_order = torch.arange(K, device=index.device) // group
            index = None if torch.equal(index.long(), in_order) else index
        return GroupedCodes(
            q=unpack_words(get(f"{module}.qweight").t(), self.bits),
            scales=get(f"{module}.scales"),
            # A zero point of 0 less one has wrapped around.
            zeros=(zeros + self.zero_offset) & ((1 << self.bits) - 1),
            group_index=index,
            bits=self.bits,
        )


def _gptq(config: Mapping[str, Any]) -> Format:
    bits = _one_of(config, "bits", (4, 8), 4)
    layout = _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.get("dynamic"):
        raise ValueError("quantization_config: dynamic (other bits for some modules) is not read")
    return Gptq(bits, _group_size(config), zero_offset=int(layout == "gptq"))


# ---- One scale a tensor, row or block ----------------------------------------------------------


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


_INPUT_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".activation_scale")


def _fp8(config: Mapping[str, Any]) -> Format:
    """DeepSeek's blocks (``weight_scale_inv`` multiplies, for all its name), or AutoFP8's."""
    _one_of(config, "fmt", ("e4m3", None), None)
    block = config.get("weight_block_size")
    if block is None:
        return ScaledFormat("F8_E4M3", "weight_scale", ignored=_INPUT_SCALES)
    return ScaledFormat("F8_E4M3", "weight_scale_inv", _block(block), ignored=_INPUT_SCALES)


def _block(value: Any) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or min(value) < 1:
        raise ValueError(f"quantization_config: a block must be two sizes, got {value!r}")
    return int(value[0]), int(value[1])


def _bitsandbytes(config: Mapping[str, Any]) -> Format:
    if config.get("load_in_4bit") or not config.get("load_in_8bit"):
        raise ValueError(
            "quantization_config: of bitsandbytes' formats int8 (load_in_8bit) is read, not 4 bits"
        )
    return ScaledFormat("I8", "SCB", scale_unit=1 / 127, ignored=(".weight_format",))


# ---- MXFP4 -------------------------------------------------------------------------------------

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Mxfp4:
    """gpt-oss's experts: 4-bit floats, low nibble first, 32 columns to a power of two.

    The weights of all experts are one tensor ``[experts, rows, columns / 32, 16]``, not transposed
    as they are where they are not quantised. Source: OCP, "Microscaling Formats", 2023.
    """

    ignored = ()

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
        positive = torch.tensor(_E2M1, device=blocks.device)
        values = torch.cat((positive, -positive))
        nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        # Each expert by itself: as indices, codes take 16 times their bytes.
        expanded = [
            torch.ldexp(values[codes.int()], exponents.int().unsqueeze(-1) - 127).bfloat16()
            for codes, exponents in zip(nibbles, scales)
        ]
        weight = torch.stack(expanded).view(N, K)
        return Expanded(weight, "there is no product of experts with 4-bit floats")


# ---- compressed-tensors ------------------------------------------------------------------------


@dataclass(frozen=True)
class CompressedTensors:
    """Packed integers ("pack-quantized"), or int8 and fp8 weights with a scale beside them.

    Attributes:
        bits: of packed integers, by the number of groups' sizes: (bits, columns a group or None).
    """

    bits: int
    group: int | None
    block: tuple[int, int] | None

    ignored = (*_INPUT_SCALES, ".input_zero_point", ".weight_shape", ".input_global_scale")

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


def _compressed_tensors(config: Mapping[str, Any]) -> Format:
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
                block=_block(weights.get("block_structure")) if by_block else None,
            )
        )
    if len(found) != 1:
        raise ValueError(
            "quantization_config: config_groups must quantise all weights in one way, "
            f"got {len(found)}"
        )
    return found.pop()
