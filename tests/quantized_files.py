"""Writes checkpoints as quantising tools do: random codes in each tool's own layout.

Every function takes the rows and columns of a weight and gives the tensors that stand for it, under
the ends of their names, and the values that these mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import tiny_model

Written = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32


@dataclass(frozen=True)
class FileFormat:
    """``write(N, K, generator)``; ``config`` is the ``quantization_config``."""

    name: str
    config: dict[str, Any]
    write: Callable[[int, int, torch.Generator], Written]
    keeps: str = "int4"  # what the loaded layers are: int4, fp8, block fp8, dense
    model: dict[str, Any] = field(default_factory=dict)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes side by side in the last dimension as int32, the first in the lowest bits."""
    count = 32 // bits
    total = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for i in range(count):
        total |= codes[..., (i if order is None else order[i]) :: count].long() << (bits * i)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def grouped(
    N: int, K: int, groups: int, bits: int, zero_point: bool, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[N, K]``, scales and zero points ``[groups, N]``; every code occurs."""
    q = torch.randint(0, 1 << bits, (N, K), generator=draw)
    scales = ((torch.rand(groups, N, generator=draw) + 0.5) * 0.9 / (1 << bits)).half()
    zeros = torch.full((groups, N), 1 << (bits - 1))
    if zero_point:
        zeros = torch.randint(0, 1 << bits, (groups, N), generator=draw)
    return q, scales, zeros


def values(q: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (q - zeros[group_of].t()).float() * scales.float()[group_of].t()


def gptq(
    group: int = GROUP, *, bits: int = 4, version: int = 1, zero_point: bool = True,
    order: bool = False, g_idx: bool = True,
) -> FileFormat:  # fmt: skip
    # Tools give the parts of one product the same order: they have the same inputs.
    def write(N: int, K: int, draw: torch.Generator) -> Written:
        columns = K if group == -1 else group
        index = torch.arange(K) // columns
        if order:
            index = index[torch.randperm(K, generator=torch.Generator().manual_seed(K))]
        q, scales, zeros = grouped(N, K, K // columns, bits, zero_point, draw)
        tensors = {
            "qweight": words(q, bits).t().contiguous(),
            "qzeros": words((zeros - int(version == 1)) % (1 << bits), bits),
            "scales": scales,
        }
        if g_idx:
            tensors["g_idx"] = index.int()
        return tensors, values(q, scales, zeros, index)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    name = f"gptq v{version}, {bits} bits, groups of {group}"
    name += f"{', act-order' * order}{', symmetric' * (not zero_point)}"
    return FileFormat(name, config, write, "int4" if bits == 4 else "dense")


def awq(group: int = GROUP) -> FileFormat:
    def write(N: int, K: int, draw: torch.Generator) -> Written:
        columns = K if group == -1 else group
        q, scales, zeros = grouped(N, K, K // columns, 4, True, draw)
        tensors = {
            "qweight": words(q.t().contiguous(), 4, AWQ_ORDER),
            "qzeros": words(zeros, 4, AWQ_ORDER),
            "scales": scales,
        }
        return tensors, values(q, scales, zeros, torch.arange(K) // columns)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return FileFormat(f"awq, groups of {group}", config | {"version": "gemm"}, write)


W4AFP8 = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}


def compressed_packed(
    group: int | None = GROUP, *, bits: int = 4, zero_point: bool = False, order: bool = False,
    inputs: dict[str, Any] | None = None,
) -> FileFormat:  # fmt: skip
    def write(N: int, K: int, draw: torch.Generator) -> Written:
        columns = group or K
        index = torch.arange(K) // columns
        if order:
            index = index[torch.randperm(K, generator=torch.Generator().manual_seed(K))]
        q, scales, zeros = grouped(N, K, K // columns, bits, zero_point, draw)
        tensors = {
            "weight_packed": words(q, bits),
            "weight_scale": scales.t().contiguous(),
            "weight_shape": torch.tensor([N, K]),
        }
        if zero_point:
            tensors["weight_zero_point"] = words(zeros, bits).t().contiguous()
        if order:
            tensors["weight_g_idx"] = index.int()
        return tensors, values(q, scales, zeros, index)

    weights = {"type": "int", "num_bits": bits, "symmetric": not zero_point}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    name = f"compressed-tensors, {bits} bits, groups of {group}"
    name += f"{', zero points' * zero_point}{', act-order' * order}{', fp8 inputs' * bool(inputs)}"
    meets = group is None or group % 128 == 0  # in 8 bits on Hopper, without zero points
    keeps = "w4a8" if inputs == W4AFP8 and meets and not zero_point else "int4"
    keeps = keeps if bits == 4 else "dense"
    return compressed(name, "pack-quantized", weights, write, keeps, inputs)


def compressed_bytes(group: int | None, *, inputs: dict[str, Any]) -> FileFormat:
    """Four bits in a byte each, as llm-compressor leaves them where inputs are quantised too."""

    def write(N: int, K: int, draw: torch.Generator) -> Written:
        columns = group or K
        q, scales, zeros = grouped(N, K, K // columns, 4, False, draw)
        tensors = {"weight": (q - 8).to(torch.int8), "weight_scale": scales.t().contiguous()}
        return tensors, values(q, scales, zeros, torch.arange(K) // columns)

    weights = {"type": "int", "num_bits": 4, "symmetric": True}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    name = f"compressed-tensors, 4 bits a byte, groups of {group}, {inputs['type']} inputs"
    keeps = "w4a8" if inputs == W4AFP8 else "int4"
    return compressed(name, "int-quantized", weights, write, keeps, inputs)


def compressed(
    name: str, form: str, weights: dict[str, Any],
    write: Callable[[int, int, torch.Generator], Written], keeps: str,
    inputs: dict[str, Any] | None = None,
) -> FileFormat:  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return FileFormat(name, config | {"ignore": ["lm_head"]}, write, keeps)


def _fp8(N: int, K: int, draw: torch.Generator) -> Tensor:
    return torch.randn(N, K, generator=draw).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_rows(N: int, K: int, draw: torch.Generator) -> Written:
    codes, scale = _fp8(N, K, draw), torch.rand(N, 1, generator=draw) * 0.003 + 0.001
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
    return tensors, codes.float() * scale


def fp8_tensor(N: int, K: int, draw: torch.Generator) -> Written:
    codes, scale = _fp8(N, K, draw), torch.rand((), generator=draw) * 0.003 + 0.001
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_blocks(block: int) -> Callable[[int, int, torch.Generator], Written]:
    def write(N: int, K: int, draw: torch.Generator) -> Written:
        codes = _fp8(N, K, draw)
        scale = torch.rand(-(-N // block), -(-K // block), generator=draw) * 0.003 + 0.001
        whole = scale.repeat_interleave(block, 0)[:N].repeat_interleave(block, 1)[:, :K]
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * whole

    return write


def int8_rows(N: int, K: int, draw: torch.Generator) -> Written:
    codes = torch.randint(-127, 128, (N, K), generator=draw).to(torch.int8)
    scale = torch.rand(N, 1, generator=draw) * 0.005 + 0.001
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def bitsandbytes(N: int, K: int, draw: torch.Generator) -> Written:
    codes = torch.randint(-127, 128, (N, K), generator=draw).to(torch.int8)
    largest = torch.rand(N, generator=draw) + 0.2
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest * (1 / 127))[:, None]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def four_bit_floats(N: int, K: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bytes, the low nibble first, and the floats that they mean."""
    codes = torch.randint(0, 16, (N, K), generator=draw)
    floats = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float64)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), floats[codes]


def mxfp4(N: int, K: int, draw: torch.Generator) -> Written:
    packed, floats = four_bit_floats(N, K, draw)
    powers = torch.randint(121, 125, (N, K // 32), generator=draw, dtype=torch.uint8)
    scale = 2.0 ** (powers.double() - 127).repeat_interleave(32, 1)
    return {"weight_packed": packed, "weight_scale": powers}, (floats * scale).float()


def nvfp4(packed_end: str, whole_end: str, whole: float) -> Callable[..., Written]:
    """``whole``: what the stored scale of the matrix is; it divides where it is above one."""

    def write(N: int, K: int, draw: torch.Generator) -> Written:
        packed, floats = four_bit_floats(N, K, draw)
        scale = (torch.rand(N, K // 16, generator=draw) * 300 + 10).to(torch.float8_e4m3fn)
        of_all = torch.tensor([whole]) if whole > 1 else torch.tensor(whole)
        factor = 1 / of_all.double() if whole > 1 else of_all.double()
        meant = floats * scale.double().repeat_interleave(16, 1) * factor
        tensors = {packed_end: packed, "weight_scale": scale, whole_end: of_all}
        return tensors | {"input_scale": torch.ones(())}, meant.float()

    return write


def table_codes(kind: str, nested: bool) -> Callable[..., Written]:
    """bitsandbytes' 4 bits: the high nibble first, a largest magnitude for 64 weights in a row."""

    def write(N: int, K: int, draw: torch.Generator) -> Written:
        codes = torch.randint(0, 16, (N * K,), generator=draw)
        table, count = torch.rand(16, generator=draw) * 2 - 1, N * K // 64
        state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [N, K]}
        tensors = {
            "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": table,
        }
        largest = torch.rand(count, generator=draw) * 0.2 + 0.01
        tensors["weight.absmax"] = largest
        if nested:
            of_codes = torch.randint(0, 256, (count,), generator=draw)
            of_table = torch.rand(256, generator=draw) * 2 - 1
            of_blocks = torch.rand(-(-count // 256), generator=draw) * 0.1
            offset = 0.11
            largest = of_table[of_codes] * of_blocks[torch.arange(count) // 256] + offset
            tensors |= {
                "weight.absmax": of_codes.to(torch.uint8),
                "weight.nested_absmax": of_blocks,
                "weight.nested_quant_map": of_table,
            }
            state |= {"nested_blocksize": 256, "nested_offset": offset}
        written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = written
        meant = table[codes] * largest[torch.arange(N * K) // 64]
        return tensors, meant.view(N, K)

    return write


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FORMATS = [
    awq(), awq(64), awq(128), awq(-1),
    gptq(), gptq(128, version=2), gptq(-1, zero_point=False, g_idx=False),
    gptq(order=True), gptq(64, version=2, order=True, zero_point=False), gptq(bits=8),
    compressed_packed(), compressed_packed(128, zero_point=True), compressed_packed(None),
    compressed_packed(order=True, zero_point=True), compressed_packed(64, bits=8),
    compressed_packed(128, inputs=W4AFP8), compressed_packed(None, order=True, inputs=W4AFP8),
    compressed_packed(64, inputs=W4AFP8), compressed_packed(128, zero_point=True, inputs=W4AFP8),
    compressed_bytes(128, inputs=W4AFP8), compressed_bytes(None, inputs=W4AFP8),
    compressed_bytes(128, inputs=W4AFP8 | {"type": "int"}),
    compressed("compressed-tensors, int8", "int-quantized",
               {"type": "int", "num_bits": 8, "strategy": "channel"}, int8_rows, "int8"),
    compressed("compressed-tensors, fp8 rows", "float-quantized",
               {"type": "float", "num_bits": 8, "strategy": "channel"}, fp8_rows, "fp8"),
    FileFormat("fp8, one scale a tensor",
               {"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, "fp8"),
    FileFormat("fp8, blocks", BLOCKS | {"weight_block_size": [128, 128]}, fp8_blocks(128),
               "block fp8", {"num_key_value_heads": 4}),
    FileFormat("fp8, blocks that no product takes", BLOCKS | {"weight_block_size": [64, 64]},
               fp8_blocks(64), "dense"),
    compressed("compressed-tensors, mxfp4", "mxfp4-pack-quantized",
               {"type": "float", "num_bits": 4, "group_size": 32}, mxfp4, "weights in fp8"),
    compressed("compressed-tensors, nvfp4", "nvfp4-pack-quantized",
               {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
               nvfp4("weight_packed", "weight_global_scale", 9000.0), "dense"),
    FileFormat("modelopt, nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"},
               nvfp4("weight", "weight_scale_2", 2.0**-13), "dense"),
    FileFormat("modelopt, fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor,
               "fp8"),
    FileFormat("bitsandbytes nf4", BNB, table_codes("nf4", nested=True), "dense"),
    FileFormat("bitsandbytes fp4", BNB, table_codes("fp4", nested=False), "dense"),
    FileFormat("bitsandbytes int8", {"quant_method": "bitsandbytes", "load_in_8bit": True},
               bitsandbytes, "int8"),
]  # fmt: skip


def save(folder: Path, kind: FileFormat, **overrides: Any) -> PreTrainedModel:
    """A Llama whose layers are quantised; transformers' model has the values that they mean."""
    shape = {"hidden_size": 128, "intermediate_size": 256} | kind.model | overrides
    model = tiny_model.save_llama(folder, **shape)
    path, draw = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(path)
    state = model.state_dict()
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        written, meant = kind.write(*tensors.pop(name).shape, draw)
        tensors |= {f"{name.removesuffix('weight')}{end}": t for end, t in written.items()}
        state[name].copy_(meant)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind.config}))
    return model
