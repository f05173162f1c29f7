"""Rows of the products with the weights of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ridgeline
from op_table import Context, Error, Lazy, OpCase, Sample, normal, tensor
from op_table.gemm import (
    HALVES,
    _fp8_reference,
    _int4_weight,
    _positive,
    fp8,
    half_a_code_of_a_product,
    linear,
)
from op_table.quantize import spread


def _grouped(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Expert by expert in plain torch."""
    x = x if rows is None else x[rows.long()]
    parts = []
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        parts.append(linear(x[begin:end], weight[e], None if bias is None else bias[e], activation))
    out = torch.cat(parts)
    return torch.cat((out, out.new_zeros(len(x) - len(out), out.shape[1])))


def at(*offsets: int) -> Lazy:
    return tensor(list(offsets), torch.int32)


def indices(values: Sequence[int]) -> Lazy:
    return tensor(list(values), torch.int32)


MIXED = [(7 * i + i // 5) % 40 for i in range(150)]
MIXED_FEW = [(3 * i) % 4 for i in range(19)]

GROUPED = OpCase(
    name="grouped_linear",
    op=ridgeline.ops.grouped_linear,
    reference=_grouped,
    competitor=_grouped,
    dtypes=HALVES,
    samples=[
        Sample("gathered rows, gated, biases", x=normal(40, 128), weight=normal(3, 96, 128),
               offsets=at(0, 70, 71, 150), rows=indices(MIXED), bias=normal(3, 96),
               activation="silu_mul"),
        Sample("a row each", x=normal(4, 64), weight=normal(4, 128, 64), offsets=at(0, 1, 2, 3, 4)),
        Sample("experts without rows: first, between, last", x=normal(5, 64),
               weight=normal(5, 40, 64), offsets=at(0, 0, 2, 2, 5, 5)),
        Sample("one expert has all", x=normal(33, 72), weight=normal(8, 136, 72),
               offsets=at(0, 0, 0, 33, 33, 33, 33, 33, 33)),
        Sample("rows of no expert are zero", x=normal(40, 64), weight=normal(2, 48, 64),
               offsets=at(0, 3, 6)),
        Sample("no expert has a row", x=normal(3, 64), weight=normal(2, 48, 64),
               offsets=at(0, 0, 0)),
        Sample("stages of 8 rows, more of them than the ring has", x=normal(3, 1600),
               weight=normal(3, 160, 1600), offsets=at(0, 1, 1, 3)),
        Sample("stages of 24 rows, one expert has all, gathered, gated", x=normal(4, 1160),
               weight=normal(2, 160, 1160), offsets=at(0, 0, 19), rows=indices(MIXED_FEW),
               activation="silu_mul"),
        Sample("stages of 8 rows, more of them than the ring has, 16 weight rows left",
               x=normal(5, 1600), weight=normal(2, 144, 1600), offsets=at(0, 2, 5)),
        Sample("strips: more of them than blocks, experts without rows, rows of none, biases",
               x=normal(7, 1064), weight=normal(6, 1040, 1064), offsets=at(0, 0, 1, 3, 3, 5, 5),
               bias=normal(6, 1040)),
        Sample("strips: one expert has the rows of three tiles, gathered, gated, biases",
               x=normal(4, 200), weight=normal(12, 224, 200),
               offsets=at(0, 0, 18, *([19] * 10)), rows=indices(MIXED_FEW),
               bias=normal(12, 224), activation="silu_mul"),
        # Warps pass over strips of a block that they have no chunk of.
        *(Sample(f"strips: {what}, nine and more a block", x=normal(12, K),
                 weight=normal(12, 2048, K), offsets=at(*range(13)))
          for what, K in (("a chunk each", 128), ("three chunks each", 384))),
        Sample("strips: x of one row fits", x=normal(3, 40000), weight=normal(2, 32, 40000),
               offsets=at(0, 1, 3)),
        Sample("tiles of 64 rows, odd tails", x=normal(131, 264), weight=normal(3, 200, 264),
               offsets=at(0, 63, 128, 131)),
        Sample("tiles of 128 rows", x=normal(300, 128), weight=normal(2, 144, 128),
               offsets=at(0, 129, 300), activation="gelu"),
        Sample("tiles of 256 rows dealt evenly, gated", x=normal(700, 72),
               weight=normal(2, 288, 72), offsets=at(0, 130, 690), activation="silu_mul"),
        Sample("many gathered rows", x=normal(40, 136), weight=normal(1, 144, 136),
               offsets=at(0, 150), rows=indices(MIXED), bias=normal(1, 144)),
        Sample("many experts", x=normal(150, 64), weight=normal(130, 32, 64),
               offsets=at(*(min(150, i * 3 // 2) for i in range(131)))),
        Sample("no rows", x=normal(0, 64), weight=normal(2, 32, 64), offsets=at(0, 0, 0)),
        Sample("strided", x=normal(6, 128)[:, 64:], weight=normal(2, 64, 128)[:, ::2, :64],
               offsets=at(0, 2, 6)),
        *(Sample(f"{rows} rows that are one", weight=normal(2, 32, 64), offsets=at(0, 2, rows),
                 x=Lazy(lambda context, rows=rows: normal(1, 64)(context).expand(rows, 64)))
          for rows in (6, 150)),
        Sample("NaN stays in its row", x=normal(6, 64).set((1, 3), float("nan")),
               weight=normal(2, 32, 64), offsets=at(0, 2, 6)),
    ],
    errors=[
        Error(r"x.*64.*\[2, 32\]", x=normal(2, 32), weight=normal(2, 8, 64),
              offsets=at(0, 1, 2)),
        Error(r"weight.*3 dimensions.*\[8, 64\]", x=normal(2, 64), weight=normal(8, 64),
              offsets=at(0, 1, 2)),
        Error(r"offsets.*\[3\].*\[2\]", x=normal(2, 64), weight=normal(2, 8, 64), offsets=at(0, 2)),
        Error(r"offsets.*int32.*int64", x=normal(2, 64), weight=normal(2, 8, 64),
              offsets=tensor([0, 1, 2], torch.int64)),
        Error(r"bias.*\[2, 8\].*\[8\]", x=normal(2, 64), weight=normal(2, 8, 64),
              offsets=at(0, 1, 2), bias=normal(8)),
        Error(r"weight.*even.*silu_mul.*9", x=normal(2, 64), weight=normal(2, 9, 64),
              offsets=at(0, 1, 2), activation="silu_mul"),
    ],
)  # fmt: skip


# ---- fp8: judged against the expanded values ---------------------------------------------------


def _grouped_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Tensor:
    x = x if rows is None else _taken(x, rows)
    if x_scale is not None and rows is not None and x_scale.numel() > 1:
        x_scale = x_scale[rows.long()]
    parts = []
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        scale = x_scale
        if scale is not None and scale.numel() > 1:
            scale = scale[begin:end]
        of_one = (x[begin:end], weight[e], weight_scale[e], None if bias is None else bias[e])
        parts.append(_fp8_reference(*of_one, scale, out_dtype, activation=activation))
    out = torch.cat(parts)
    return torch.cat((out, out.new_zeros(len(x) - len(out), out.shape[1])))


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """float8 has no gather on every device."""
    if x.dtype != torch.float8_e4m3fn:
        return x[rows.long()]
    return x.view(torch.uint8)[rows.long()].view(x.dtype)


def _fp8_samples() -> list[Sample]:
    """Tiles of Hopper's kernels: 32 rows, then 64 to 192 (x of fp8) or 256; the others' one."""
    samples = []
    for name, of_x, out in (("fp8", fp8, torch.bfloat16), ("16 bits", normal, None)):
        scale = {"x_scale": _positive(40)} if out else {}
        one = {"x_scale": _positive(1)} if out else {}
        bias = normal(3, 96, dtype=out)
        samples += [
            Sample(f"x of {name}: gathered rows, gated, biases", x=of_x(40, 144),
                   weight=fp8(3, 96, 144), weight_scale=_positive(3, 96),
                   offsets=at(0, 70, 71, 150), rows=indices(MIXED), bias=bias, out_dtype=out,
                   activation="silu_mul", **scale),
            Sample(f"x of {name}: one scale an expert, few rows, rows of none", x=of_x(40, 64),
                   weight=fp8(5, 48, 64), weight_scale=_positive(5),
                   offsets=at(0, 0, 2, 2, 37, 37), out_dtype=out, **one),
            Sample(f"x of {name}: many rows", x=of_x(700, 256), weight=fp8(2, 272, 256),
                   weight_scale=_positive(2, 272), offsets=at(0, 193, 690), out_dtype=out, **one),
            Sample(f"x of {name}: 64 rows a tile, gathered, stages left over", x=of_x(40, 1216),
                   weight=fp8(3, 304, 1216), weight_scale=_positive(3, 304),
                   offsets=at(0, 65, 66, 130), rows=indices(MIXED), out_dtype=out, **scale),
            Sample(f"x of {name}: 80 rows a tile, gated, rows of none", x=of_x(150, 1216),
                   weight=fp8(2, 288, 1216), weight_scale=_positive(2), offsets=at(0, 33, 147),
                   out_dtype=out, activation="silu_mul", **one),
            Sample(f"x of {name}: many gathered rows", x=of_x(40, 256), weight=fp8(1, 144, 256),
                   weight_scale=_positive(1, 144), offsets=at(0, 150), rows=indices(MIXED),
                   out_dtype=out, **scale),
            Sample(f"x of {name}: N no multiple of 16, another activation", x=of_x(40, 64),
                   weight=fp8(2, 72, 64), weight_scale=_positive(2, 72), offsets=at(0, 33, 40),
                   out_dtype=out, activation="gelu_mul", **scale),
            Sample(f"x of {name}: one row, more stages than the ring has", x=of_x(1, 2192),
                   weight=fp8(3, 144, 2192), weight_scale=_positive(3, 144),
                   offsets=at(0, 0, 1, 1), out_dtype=out, **one),
            Sample(f"x of {name}: five rows, more stages than the ring has", x=of_x(5, 2192),
                   weight=fp8(2, 144, 2192), weight_scale=_positive(2, 144),
                   offsets=at(0, 2, 5), out_dtype=out, **one),
            Sample(f"x of {name}: strips of 8208 columns, rows of none", x=of_x(6, 8208),
                   weight=fp8(5, 560, 8208), weight_scale=_positive(5, 560),
                   offsets=at(0, 1, 1, 4, 5, 5), out_dtype=out,
                   **({"x_scale": _positive(6)} if out else {})),
            Sample(f"x of {name}: strips of three tiles of rows, gathered, gated, one scale",
                   x=of_x(40, 8192), weight=fp8(12, 96, 8192), weight_scale=_positive(12),
                   offsets=at(0, 0, 18, *([19] * 10)), rows=indices(MIXED_FEW), out_dtype=out,
                   bias=normal(12, 96, dtype=out), activation="silu_mul", **scale),
            Sample(f"x of {name}: strips of a chunk, nine and more a block", x=of_x(12, 256),
                   weight=fp8(12, 2048, 256), weight_scale=_positive(12, 2048),
                   offsets=at(*range(13)), out_dtype=out,
                   **({"x_scale": _positive(12)} if out else {})),
            *(Sample(f"x of {name}: scales of blocks, {rows} rows, gathered, gated, biases",
                     x=of_x(40, 400), weight=fp8(3, 288, 400), weight_scale=_positive(3, 3, 4),
                     offsets=at(0, rows // 2, rows // 2, rows - 2), rows=indices(MIXED[:rows]),
                     bias=normal(3, 288, dtype=out), out_dtype=out, activation="silu_mul",
                     **({"x_scale": _positive(40, 4)} if out else {}))
              for rows in (6, 40, 100, 150)),
            Sample(f"x of {name}: scales of blocks, another activation", x=of_x(9, 272),
                   weight=fp8(2, 72, 272), weight_scale=_positive(2, 1, 3), offsets=at(0, 4, 8),
                   out_dtype=out, activation="gelu",
                   **({"x_scale": _positive(9, 2)} if out else {})),
            Sample(f"x of {name}: no rows", x=of_x(0, 64), weight=fp8(2, 32, 64),
                   weight_scale=_positive(2), offsets=at(0, 0, 0), out_dtype=out, **one),
        ]  # fmt: skip
    return samples


GROUPED_FP8 = OpCase(
    name="grouped_fp8_linear",
    op=ridgeline.ops.grouped_fp8_linear,
    reference=_grouped_fp8,
    competitor=_grouped_fp8,
    dtypes=HALVES,
    samples=_fp8_samples(),
    errors=[
        Error(r"weight_scale.*\[2, 8\].*\[8, 1\]", x=normal(2, 64), weight=fp8(2, 8, 64),
              weight_scale=_positive(8, 1), offsets=at(0, 1, 2)),
        Error(r"weight_scale.*\[2, 2, 1\].*\[2, 1, 2\]", x=normal(2, 64), weight=fp8(2, 200, 64),
              weight_scale=_positive(2, 1, 2), offsets=at(0, 1, 2)),
        Error(r"x_scale.*group of columns.*\[2\]", x=fp8(2, 64), weight=fp8(2, 8, 64),
              weight_scale=_positive(2, 1, 1), offsets=at(0, 1, 2), x_scale=_positive(2)),
        Error(r"x_scale.*one a row.*\[2, 2\]", x=fp8(2, 256), weight=fp8(2, 8, 256),
              weight_scale=_positive(2), offsets=at(0, 1, 2), x_scale=_positive(2, 2)),
        Error(r"x_scale.*tensor.*None", x=fp8(2, 64), weight=fp8(2, 8, 64),
              weight_scale=_positive(2), offsets=at(0, 1, 2)),
        Error(r"x_scale.*one value.*\[3\]", x=fp8(2, 64), weight=fp8(2, 8, 64),
              weight_scale=_positive(2), offsets=at(0, 1, 2), x_scale=_positive(3)),
        Error(r"out_quant.*'fp8_group', got 'fp8_group256'", x=normal(2, 64), weight=fp8(2, 8, 64),
              weight_scale=_positive(2), offsets=at(0, 1, 2), out_quant="fp8_group256",
              dtype=torch.bfloat16),
    ],
)  # fmt: skip


def _grouped_fp8_coded(**inputs: Any) -> Tensor:
    codes, scale = ridgeline.ops.grouped_fp8_linear(**inputs, out_quant="fp8_group")
    return codes.float() * spread(scale, codes, "group")


GROUPED_FP8_CODED = OpCase(
    name="grouped_fp8_linear_quant",
    op=_grouped_fp8_coded,
    reference=_grouped_fp8,
    bound=half_a_code_of_a_product,
    dtypes=HALVES,
    devices=("cpu",),  # CUDA's codes are judged bit for bit by test_gemm_grouped
    samples=[
        Sample("two groups and a part, gathered, biases, rows of none", x=normal(40, 144),
               weight=fp8(3, 300, 144), weight_scale=_positive(3, 300), offsets=at(0, 70, 71, 147),
               rows=indices(MIXED), bias=normal(3, 300)),
        Sample("scales of columns and of blocks, gated", x=fp8(40, 400), weight=fp8(3, 512, 400),
               weight_scale=_positive(3, 4, 4), offsets=at(0, 20, 20, 38),
               x_scale=_positive(40, 4), out_dtype=torch.bfloat16, activation="silu_mul"),
        Sample("no rows", x=normal(0, 64), weight=fp8(2, 32, 64), weight_scale=_positive(2),
               offsets=at(0, 0, 0)),
    ],
)  # fmt: skip


# ---- int4: judged against the dequantised values -----------------------------------------------


def _experts(count: int, N: int, K: int, group: int, zero_point: bool) -> Lazy:
    def make(context: Context) -> ridgeline.ops.Int4Experts:
        weight = _int4_weight(count * N, K, group, zero_point, False)(context)
        return ridgeline.ops.Int4Experts.from_rows(weight, count)

    return Lazy(make)


def _grouped_int4(
    x: Tensor, weight: ridgeline.ops.Int4Experts, offsets: Tensor, **options: Tensor
) -> Tensor:
    dense = weight.dequantize().to(device=x.device, dtype=x.dtype)
    return _grouped(x, dense, offsets, **options)


GROUPED_INT4 = OpCase(
    name="grouped_int4_linear",
    op=ridgeline.ops.grouped_int4_linear,
    reference=_grouped_int4,
    competitor=_grouped_int4,
    dtypes=HALVES,
    samples=[
        Sample("gathered rows, gated, biases, zero points", x=normal(40, 128),
               weight=_experts(3, 96, 128, 32, True), offsets=at(0, 70, 71, 150),
               rows=indices(MIXED), bias=normal(3, 96), activation="silu_mul"),
        Sample("few rows, K padded, experts without rows", x=normal(5, 72),
               weight=_experts(5, 48, 72, -1, False), offsets=at(0, 0, 2, 2, 5, 5)),
        Sample("digits: a row of two experts, zero points, more strips than blocks",
               x=normal(2, 4224), weight=_experts(6, 1600, 4224, 128, True),
               offsets=at(0, 0, 1, 1, 1, 2, 2)),
        Sample("digits: rows of none, gathered, gated, biases, groups of 64", x=normal(4, 4160),
               weight=_experts(10, 64, 4160, 64, True),
               offsets=at(0, 2, 2, 7, 11, 16, 16, 16, 16, 16, 16),
               rows=indices(MIXED_FEW), bias=normal(10, 64), activation="silu_mul"),
        Sample("digits: one expert has the rows of three tiles, one scale a row",
               x=normal(18, 4136), weight=_experts(9, 64, 4136, -1, False),
               offsets=at(0, 0, 17, 17, 18, 18, 18, 18, 18, 18)),
        Sample("digits: NaN and inf stay in their rows",
               x=normal(6, 4224).set((1, 3), float("nan")).set((4, 4200), float("inf")),
               weight=_experts(3, 64, 4224, 128, True), offsets=at(0, 2, 4, 6)),
        Sample("digits: strips of two chunks, gathered, gated", x=normal(4, 768),
               weight=_experts(9, 96, 768, 128, True),
               offsets=at(0, 0, 2, 3, 3, 3, 3, 3, 7, 7), rows=indices(MIXED_FEW[:8]),
               activation="silu_mul"),
        Sample("digits: strips of four chunks, more of them than blocks, groups of 64",
               x=normal(6, 2048), weight=_experts(6, 1056, 2048, 64, False),
               offsets=at(0, 0, 1, 4, 4, 5, 6)),
        Sample("groups of 96, few rows, zero points", x=normal(9, 192),
               weight=_experts(2, 64, 192, 96, True), offsets=at(0, 3, 6)),
        Sample("up to 8, 16 and 32 rows an expert", x=normal(48, 320),
               weight=_experts(4, 160, 320, 128, True), offsets=at(0, 7, 16, 16, 48)),
        Sample("the same, gated, two groups a stage", x=normal(48, 320),
               weight=_experts(4, 160, 320, 64, False), offsets=at(0, 7, 16, 16, 48),
               activation="silu_mul"),
        # Hopper: tiles of 256 weight rows by 16, 32, 64 or 80 of x, as the mean has it.
        Sample("16 rows a tile, gathered, rows of none, more stages than the ring has",
               x=normal(4, 2592), weight=_experts(3, 544, 2592, -1, True), offsets=at(0, 9, 9, 17),
               rows=indices(MIXED_FEW)),
        Sample("32 rows a tile, one expert has the rows of three, gated",
               x=normal(70, 1408), weight=_experts(6, 288, 1408, 128, True),
               offsets=at(0, 0, 65, 65, 66, 66, 70), bias=normal(6, 288), activation="silu_mul"),
        Sample("64 rows a tile, gathered, biases", x=normal(40, 1600),
               weight=_experts(3, 288, 1600, -1, False), offsets=at(0, 65, 66, 130),
               rows=indices(MIXED), bias=normal(3, 288)),
        Sample("64 rows a tile, groups of 32, zero points", x=normal(130, 416),
               weight=_experts(3, 288, 416, 32, True), offsets=at(0, 65, 66, 130)),
        *(Sample(f"80 rows a tile, some experts have two, {what}", x=normal(40, 1664),
                 weight=_experts(2, 576, 1664, 128, False), offsets=at(0, 33, 150),
                 rows=indices(MIXED), activation=activation)
          for what, activation in (("gathered", None), ("gathered, gated", "silu_mul"))),
        Sample("80 rows a tile, more stages than the ring has", x=normal(150, 1640),
               weight=_experts(2, 288, 1640, -1, False), offsets=at(0, 80, 150)),
        Sample("many rows", x=normal(700, 256), weight=_experts(2, 288, 256, 128, False),
               offsets=at(0, 193, 690)),
        Sample("many gathered rows, zero points", x=normal(40, 256),
               weight=_experts(1, 160, 256, 64, True), offsets=at(0, 150), rows=indices(MIXED)),
        Sample("another activation", x=normal(40, 64), weight=_experts(2, 64, 64, 64, True),
               offsets=at(0, 33, 40), activation="gelu_mul"),
        Sample("no rows", x=normal(0, 64), weight=_experts(2, 32, 64, 64, False),
               offsets=at(0, 0, 0)),
    ],
    errors=[
        Error(r"weight.*divisible by 32.*48", x=normal(2, 64),
              weight=_experts(2, 48, 64, 64, False), offsets=at(0, 1, 2), activation="silu_mul"),
        Error(r"x.*64.*\[2, 32\]", x=normal(2, 32), weight=_experts(2, 16, 64, 64, False),
              offsets=at(0, 1, 2)),
    ],
)  # fmt: skip

# ---- fp4: judged against the dequantised values ------------------------------------------------


def mxfp4_of(experts: int, N: int, K: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and exponents as files have them, of values of about ``K ** -0.5``: every code occurs,
    and three exponents. One group of each expert is of zeros, one of which has any exponent."""
    blocks = torch.randint(0, 256, (experts, N, K // 32, 16), generator=draw, dtype=torch.uint8)
    middle = 127 - round(math.log2(3 * max(K, 1) ** 0.5))
    scales = torch.randint(middle - 1, middle + 2, blocks.shape[:3], generator=draw)
    if blocks.numel():
        blocks[:, 0, 0], scales[0, 0, 0] = 0x80, 255
    return blocks, scales.to(torch.uint8)


def _fp4_experts(count: int, N: int, K: int) -> Lazy:
    def make(context: Context) -> ridgeline.ops.Fp4Experts:
        blocks, scales = (t.to(context.device) for t in mxfp4_of(count, N, K, context.generator))
        return ridgeline.ops.Fp4Experts.from_mxfp4(blocks, scales)

    return Lazy(make)


def _grouped_fp4(
    x: Tensor, weight: ridgeline.ops.Fp4Experts, offsets: Tensor, **options: Any
) -> Tensor:
    options.pop("batch_invariant", None)
    dense = weight.dequantize().to(device=x.device, dtype=x.dtype)
    return _grouped(x, dense, offsets, **options)


GROUPED_FP4 = OpCase(
    name="grouped_fp4_linear",
    op=ridgeline.ops.grouped_fp4_linear,
    reference=_grouped_fp4,
    competitor=_grouped_fp4,
    dtypes=(torch.bfloat16,),  # float16 and float32 on the CPU: test_fp4_weight
    samples=[
        Sample("gathered rows, gated, biases", x=normal(40, 128), weight=_fp4_experts(3, 96, 128),
               offsets=at(0, 70, 71, 150), rows=indices(MIXED), bias=normal(3, 96),
               activation="silu_mul"),
        Sample("few rows, K padded, experts without rows", x=normal(5, 96),
               weight=_fp4_experts(5, 48, 96), offsets=at(0, 0, 2, 2, 5, 5)),
        Sample("a row of two experts, more strips than blocks", x=normal(2, 4224),
               weight=_fp4_experts(6, 1600, 4224), offsets=at(0, 0, 1, 1, 1, 2, 2)),
        Sample("rows of none, gathered, gated, biases", x=normal(4, 4160),
               weight=_fp4_experts(10, 64, 4160),
               offsets=at(0, 2, 2, 7, 11, 16, 16, 16, 16, 16, 16),
               rows=indices(MIXED_FEW), bias=normal(10, 64), activation="silu_mul"),
        Sample("one expert has the rows of three tiles", x=normal(18, 4128),
               weight=_fp4_experts(9, 64, 4128),
               offsets=at(0, 0, 17, 17, 18, 18, 18, 18, 18, 18)),
        Sample("NaN and inf stay in their rows",
               x=normal(6, 4224).set((1, 3), float("nan")).set((4, 4200), float("inf")),
               weight=_fp4_experts(3, 64, 4224), offsets=at(0, 2, 4, 6)),
        Sample("one token, gathered, biases, gpt-oss's columns", x=normal(1, 2880),
               weight=_fp4_experts(6, 96, 2880), offsets=at(0, 1, 1, 2, 3, 3, 4),
               rows=tensor([0, 0, 0, 0], torch.int32), bias=normal(6, 96)),
        Sample("the same, rows of their own, batch invariant", x=normal(4, 2880),
               weight=_fp4_experts(6, 96, 2880), offsets=at(0, 1, 1, 2, 3, 3, 4),
               batch_invariant=True),
        Sample("up to 8, 16 and 32 rows an expert", x=normal(48, 320),
               weight=_fp4_experts(4, 160, 320), offsets=at(0, 7, 16, 16, 48)),
        Sample("16 rows a tile, gathered, rows of none, more stages than the ring has",
               x=normal(4, 2592), weight=_fp4_experts(3, 544, 2592), offsets=at(0, 9, 9, 17),
               rows=indices(MIXED_FEW)),
        Sample("32 rows a tile, one expert has the rows of three, gated",
               x=normal(70, 1408), weight=_fp4_experts(6, 288, 1408),
               offsets=at(0, 0, 65, 65, 66, 66, 70), bias=normal(6, 288), activation="silu_mul"),
        Sample("64 rows a tile, gathered, biases", x=normal(40, 1600),
               weight=_fp4_experts(3, 288, 1600), offsets=at(0, 65, 66, 130),
               rows=indices(MIXED), bias=normal(3, 288)),
        *(Sample(f"80 rows a tile, some experts have two, {what}", x=normal(40, 1664),
                 weight=_fp4_experts(2, 576, 1664), offsets=at(0, 33, 150),
                 rows=indices(MIXED), activation=activation)
          for what, activation in (("gathered", None), ("gathered, gated", "silu_mul"))),
        Sample("many rows", x=normal(700, 256), weight=_fp4_experts(2, 288, 256),
               offsets=at(0, 193, 690)),
        Sample("many gathered rows, batch invariant", x=normal(40, 256),
               weight=_fp4_experts(1, 160, 256), offsets=at(0, 150), rows=indices(MIXED),
               batch_invariant=True),
        Sample("another activation", x=normal(40, 64), weight=_fp4_experts(2, 64, 64),
               offsets=at(0, 33, 40), activation="gelu_mul"),
        Sample("N divisible by 16 alone", x=normal(9, 64), weight=_fp4_experts(2, 48, 64),
               offsets=at(0, 3, 9)),
        Sample("no rows", x=normal(0, 64), weight=_fp4_experts(2, 32, 64), offsets=at(0, 0, 0)),
    ],
    errors=[
        Error(r"weight.*divisible by 32.*48", x=normal(2, 64), weight=_fp4_experts(2, 48, 64),
              offsets=at(0, 1, 2), activation="silu_mul"),
        Error(r"weight.*divisible by 16.*40", x=normal(2, 64), weight=_fp4_experts(2, 40, 64),
              offsets=at(0, 1, 2)),
        Error(r"x.*64.*\[2, 32\]", x=normal(2, 32), weight=_fp4_experts(2, 16, 64),
              offsets=at(0, 1, 2)),
        Error(r"bias.*\[2, 16\].*\[16\]", x=normal(2, 64), weight=_fp4_experts(2, 16, 64),
              offsets=at(0, 1, 2), bias=normal(16)),
        Error(r"x.*bfloat16.*float16", x=normal(2, 64, dtype=torch.float16),
              weight=_fp4_experts(2, 16, 64), offsets=at(0, 1, 2)),
    ],
)  # fmt: skip

CASES = [GROUPED, GROUPED_FP8, GROUPED_FP8_CODED, GROUPED_INT4, GROUPED_FP4]
