"""Rows of the matrix products with weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ridgeline
from op_table import Context, Error, Lazy, OpCase, Sample, full, integers, normal
from op_table.quantize import spread

HALVES = (torch.float16, torch.bfloat16)


def activate(product: Tensor, activation: str | None) -> Tensor:
    if activation in ("silu_mul", "gelu_mul"):
        gate, up = product.chunk(2, -1)
        return (F.silu(gate) if activation == "silu_mul" else F.gelu(gate)) * up
    functions: dict[str | None, Callable[[Tensor], Tensor]] = {
        None: lambda t: t,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }
    return functions[activation](product)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    batch_invariant: bool = False,
    weights_ready: bool = False,
) -> Tensor:
    """The op in plain torch, in any dtype."""
    if norm_weight is not None:
        x = F.rms_norm(x.to(norm_weight.dtype), x.shape[-1:], norm_weight, 1e-6).to(x.dtype)
    out = activate(F.linear(x, weight, bias), activation)
    return out if residual is None else out + residual


def dense_shapes() -> list[Sample]:
    """Tile edges of every kernel: rows 1, 8, 9, 16, 17, 64, 65; columns, K near 16, 64, 128."""
    return [
        Sample("one row, all whole tiles", x=normal(1, 256), weight=normal(128, 256)),
        Sample("8 rows, a K tail of 8", x=normal(8, 264), weight=normal(48, 264)),
        Sample("9 rows: the second half of an MMA", x=normal(9, 128), weight=normal(64, 128)),
        Sample("17 rows: the tile kernel, split", x=normal(17, 1024), weight=normal(144, 1024)),
        Sample("64 rows, N odd", x=normal(64, 192), weight=normal(77, 192)),
        Sample("65 rows: many rows", x=normal(65, 256), weight=normal(256, 256)),
        Sample("300 rows: three row tiles", x=normal(300, 520), weight=normal(264, 520)),
        Sample("K odd: no 16-byte loads", x=normal(5, 127), weight=normal(33, 127)),
        Sample("K odd, many rows", x=normal(130, 63), weight=normal(70, 63)),
        Sample("K long: every split", x=normal(3, 8192), weight=normal(32, 8192)),
        Sample("rows of a batch", x=normal(2, 3, 64), weight=normal(32, 64)),
        Sample("one dimension", x=normal(64), weight=normal(32, 64)),
        Sample("no rows", x=normal(0, 64), weight=normal(32, 64)),
        Sample("K = 0: the bias", x=normal(3, 0), weight=normal(32, 0), bias=normal(32)),
        Sample("strided rows", x=normal(14, 64)[::2], weight=normal(32, 64)),
        Sample("rows at an odd address", x=normal(6, 72)[:, 3:67], weight=normal(32, 64)),
        Sample("strided weight rows", x=normal(4, 64), weight=normal(32, 128)[:, 64:]),
        Sample("NaN stays in its row", x=normal(4, 64).set((1, 3), float("nan")),
               weight=normal(32, 64)),
        Sample("infinity", x=normal(4, 64).set((2, 5), float("inf")), weight=normal(32, 64)),
    ]  # fmt: skip


def epilogues() -> list[dict[str, Any]]:
    """Each epilogue alone and with the others, of x [rows, 128] and weight [96, 128]."""
    plain = ["gelu", "gelu_tanh", "silu", "relu"]
    return [
        {"bias": normal(96)},
        {"residual": True},
        *({"activation": a, "bias": normal(96)} for a in plain),
        {"activation": "silu_mul"},
        {"activation": "gelu_mul", "bias": normal(96), "residual": True},
        {"activation": "silu", "bias": normal(96), "residual": True},
        {"norm_weight": normal(128), "bias": normal(96)},
        {"norm_weight": normal(128), "activation": "silu_mul", "residual": True},
    ]


def epilogue_samples(make: Callable[[int], dict[str, Any]]) -> list[Sample]:
    """Few rows, split rows and many rows, for each epilogue."""
    samples = []
    for rows in (3, 40, 100):
        for given in epilogues():
            options = dict(given)
            gated = options.get("activation") in ("silu_mul", "gelu_mul")
            if options.pop("residual", False):
                options["residual"] = normal(rows, 48 if gated else 96)
            samples.append(Sample(f"{rows} rows, {sorted(options)}", **make(rows), **options))
    return samples


def _dense_inputs(rows: int) -> dict[str, Any]:
    return {"x": normal(rows, 128), "weight": normal(96, 128, scale=0.1)}


LINEAR = OpCase(
    name="linear",
    op=ridgeline.ops.linear,
    reference=linear,
    competitor=linear,
    samples=[
        *dense_shapes(),
        *epilogue_samples(_dense_inputs),
        Sample("invariant", x=normal(20, 256), weight=normal(80, 256), batch_invariant=True),
        Sample("invariant, many rows", x=normal(129, 256), weight=normal(136, 256),
               batch_invariant=True),
        Sample("invariant, K odd", x=normal(20, 65), weight=normal(80, 65), batch_invariant=True),
        Sample("weights read early", x=normal(2, 256), weight=normal(64, 256), weights_ready=True),
        # Eight warps share out the chunks evenly: each meets what of x it staged itself.
        Sample("5 rows, 16 chunks, norm", x=normal(5, 2048), weight=normal(48, 2048),
               norm_weight=normal(2048)),
    ],
    errors=[
        Error(r"x.*64.*\[2, 32\]", x=normal(2, 32), weight=normal(8, 64)),
        Error(r"weight.*2 dimensions.*\[64\]", x=normal(2, 64), weight=normal(64)),
        Error(r"weight.*float32.*float64|float64|Double", x=normal(2, 64),
              weight=normal(8, 64, dtype=torch.float64)),
        Error(r"weight.*last dimension contiguous", x=normal(2, 64), weight=normal(64, 8).t()),
        Error(r"bias.*\[8\].*\[9\]", x=normal(2, 64), weight=normal(8, 64), bias=normal(9)),
        Error(r"residual.*\[2, 8\].*\[1, 8\]", x=normal(2, 64), weight=normal(8, 64),
              residual=normal(1, 8)),
        Error(r"activation.*'swish'", x=normal(2, 64), weight=normal(8, 64), activation="swish"),
        Error(r"weight.*even.*silu_mul.*9", x=normal(2, 64), weight=normal(9, 64),
              activation="silu_mul"),
        Error(r"norm_weight.*\[64\].*\[32\]", x=normal(2, 64), weight=normal(8, 64),
              norm_weight=normal(32)),
    ],
)  # fmt: skip


def fp8(*shape: int, scale: float = 1.0) -> Lazy:
    return normal(*shape, scale=scale, dtype=torch.float32).to(torch.float8_e4m3fn)


def _positive(*shape: int, scale: float = 1.0) -> Lazy:
    def make(context: Context) -> Tensor:
        values = torch.rand(shape, generator=context.generator) * 0.1 + 0.05
        return (values * scale).to(context.device)

    return Lazy(make)


# ---- int4: judged against the dequantised values -----------------------------------------------


def _int4_weight(N: int, K: int, group: int, zero_point: bool, act_order: bool) -> Any:
    """Integers, scales and zeros at random: every nibble and zero point occurs."""

    def make(context: Context) -> Any:
        groups = 1 if group == -1 else K // group
        draw = context.generator
        q = torch.randint(0, 16, (N, K), generator=draw)
        scales = (torch.rand(groups, N, generator=draw) * 0.02 + 0.01).to(context.dtype)
        zeros = torch.randint(0, 16, (groups, N), generator=draw) if zero_point else None
        index = None
        if act_order:
            index = torch.randperm(K, generator=draw) // (K // groups)
        weight = ridgeline.ops.Int4Weight.from_quantized(q, scales, zeros, index)
        return weight.to(context.device)

    return Lazy(make)


def _int4_reference(
    x: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    act: str | None = None,
    norm_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """With `act` values are quantised in float32, as the op does: no other code is judged."""
    dense = weight.dequantize()
    dtype = dense.dtype if x.dtype == torch.float8_e4m3fn else x.dtype
    if act is not None:
        if norm_weight is not None:
            x = F.rms_norm(x.double(), x.shape[-1:], norm_weight.double(), 1e-6)
        x_scale = x.float().abs().amax(-1, keepdim=True) / 448
        x, norm_weight = (x.float() * (1 / x_scale)).to(torch.float8_e4m3fn), None
    if x_scale is not None:
        x = (x.double() * x_scale.double().reshape(-1, 1)).to(dtype)
    return linear(
        x, dense.to(device=x.device, dtype=dtype), bias, norm_weight=norm_weight, **options
    )


def _int4_inputs(rows: int) -> dict[str, Any]:
    return {"x": normal(rows, 128), "weight": _int4_weight(96, 128, 64, True, False)}


def _int4_shapes() -> list[Sample]:
    samples = []
    for rows in (1, 9, 33, 70):
        for group in (32, 64, 128, -1):
            samples += [
                Sample(f"{rows} rows, group {group}", x=normal(rows, 256),
                       weight=_int4_weight(64, 256, group, False, False)),
                Sample(f"{rows} rows, group {group}, zero points", x=normal(rows, 384),
                       weight=_int4_weight(40, 384, group, True, False)),
            ]  # fmt: skip
        samples += [
            Sample(f"{rows} rows, activation order", x=normal(rows, 256),
                   weight=_int4_weight(48, 256, 32, True, True)),
            Sample(f"{rows} rows, K padded, whole column", x=normal(rows, 100),
                   weight=_int4_weight(33, 100, -1, True, False)),
            Sample(f"{rows} rows, K a group and a half block", x=normal(rows, 96),
                   weight=_int4_weight(130, 96, 32, False, False)),
        ]  # fmt: skip
    return samples


def _w4a8_samples() -> list[Sample]:
    samples = [
        Sample(f"{rows} rows of fp8", x=fp8(rows, 256), x_scale=_positive(rows), bias=normal(64),
               weight=_int4_weight(64, 256, 128, False, False))
        for rows in (1, 4, 9, 33, 70)
    ]  # fmt: skip
    # Up to 8 rows the kernel of digits takes them as they are, where 16 bytes can be read.
    samples += [
        Sample("7 rows of fp8, a chunk and a part, zero points", x=fp8(7, 576),
               x_scale=_positive(7), weight=_int4_weight(80, 576, 64, True, False)),
        *(Sample(f"rows {rows} of fp8, {what}", x=fp8(rows, K), x_scale=_positive(rows),
                 weight=_int4_weight(N, K, 128, zeros, False))
          for rows in (2, 8) for what, N, K, zeros in (
              ("two strips a block", 2128, 4096, False),
              ("three strips a block, zero points", 4256, 1152, True))),
        *(Sample(f"6 rows of fp8, x held, {what}", x=fp8(6, K), x_scale=_positive(6),
                 bias=normal(1072), weight=_int4_weight(1072, K, 128, zeros, False),
                 weights_ready=True)
          for what, K, zeros in (("zero points", 2048, True), ("a cluster of two", 6144, False))),
        Sample("1 row of fp8, chunks that warps take by turns", x=fp8(1, 4608),
               x_scale=_positive(1), weight=_int4_weight(48, 4608, 128, False, False)),
        # Up to 64 the cluster kernel takes them so, without zero points.
        *(Sample(f"{rows} rows of fp8, {what}", x=fp8(rows, K), x_scale=_positive(rows),
                 weight=_int4_weight(N, K, group, False, False), **options)
          for rows in (12, 17, 64) for what, N, K, group, options in (
              ("gated, an odd stage", 224, 640, 128, {"activation": "silu_mul"}),
              ("K a block and a half, whole column", 80, 96, -1, {}),
              ("K long: a cluster, groups of two stages", 64, 8192, 256, {"bias": normal(64)}),
              ("read early", 48, 2048, 128, {"weights_ready": True}))),
        Sample("40 rows of fp8, zero points", x=fp8(40, 256), x_scale=_positive(40),
               weight=_int4_weight(64, 256, 128, True, False)),
        Sample("12 rows of fp8, NaN stays in its row", x_scale=_positive(12),
               x=normal(12, 512, dtype=torch.float32).set((1, 5), math.nan).to(
                   torch.float8_e4m3fn),
               weight=_int4_weight(64, 512, 128, False, False)),
        Sample("3 rows of fp8, off 16 bytes", x=fp8(3, 136)[:, 3:131], x_scale=_positive(3),
               weight=_int4_weight(64, 128, 128, False, False)),
        Sample("3 rows of fp8, NaN stays in its row", x_scale=_positive(3),
               x=normal(3, 512, dtype=torch.float32).set((1, 5), math.nan).to(
                   torch.float8_e4m3fn),
               weight=_int4_weight(64, 512, 64, True, False)),
    ]  # fmt: skip
    return [
        *samples,
        Sample("130 rows, quantised here", x=normal(130, 384), act="fp8",
               weight=_int4_weight(144, 384, 128, False, False)),
        Sample("130 rows, quantised by the norm", x=normal(130, 256), act="fp8",
               norm_weight=normal(256), weight=_int4_weight(144, 256, 256, False, False)),
        Sample("130 rows of fp8, K a block and a half, gated", x=fp8(130, 96), bias=normal(96),
               x_scale=_positive(1), weight=_int4_weight(96, 96, -1, False, False),
               activation="silu_mul"),
        Sample("70 rows of fp8, K in the middle of sixteen columns", x=fp8(70, 100),
               x_scale=_positive(70), weight=_int4_weight(64, 100, -1, False, False)),
        Sample("70 rows of fp8, off 16 bytes", x=fp8(70, 136)[:, 3:131], x_scale=_positive(70),
               bias=normal(64), weight=_int4_weight(64, 128, 128, False, False)),
        Sample("70 rows of fp8, activation order", x=fp8(70, 256), x_scale=_positive(70),
               bias=normal(48), weight=_int4_weight(48, 256, 128, False, True)),
        Sample("70 rows of fp8, zero points", x=fp8(70, 256), x_scale=_positive(70),
               bias=normal(48), weight=_int4_weight(48, 256, 128, True, False)),
        Sample("K long, 130 rows of fp8: a cluster", x=fp8(130, 8192), x_scale=_positive(130),
               bias=normal(544), weight=_int4_weight(544, 8192, 128, False, False)),
    ]  # fmt: skip


INT4 = OpCase(
    name="int4_linear",
    op=ridgeline.ops.int4_linear,
    reference=_int4_reference,
    competitor=_int4_reference,
    dtypes=HALVES,
    samples=[
        *_int4_shapes(),
        *epilogue_samples(_int4_inputs),
        Sample("no rows", x=normal(0, 64), weight=_int4_weight(32, 64, 64, False, False)),
        Sample("strided rows, activation order", x=normal(14, 64)[::2],
               weight=_int4_weight(32, 64, 32, False, True)),
        Sample("weights read early", x=normal(2, 256), weights_ready=True,
               weight=_int4_weight(64, 256, 128, True, False)),
        Sample("K long: every split", x=normal(3, 8192),
               weight=_int4_weight(32, 8192, 128, True, False)),
        Sample("K long, 9 rows: a cluster", x=normal(9, 8192),
               weight=_int4_weight(32, 8192, 128, True, False)),
        Sample("3 rows, 8 chunks, norm", x=normal(3, 4096), norm_weight=normal(4096),
               weights_ready=True,
               weight=_int4_weight(48, 4096, 128, True, False)),
        Sample("8 rows, a group of two chunks", x=normal(8, 2048), weights_ready=True,
               weight=_int4_weight(32, 2048, 1024, True, False)),
        Sample("5 rows, far apart in size", x=normal(5, 1024).set((slice(0, 3), 7), 1e3),
               weights_ready=True,
               weight=_int4_weight(32, 1024, 128, True, False)),
        Sample("infinities, one of them times zero",
               x=normal(4, 512).set((2, 5), -math.inf).set((1, 300), math.inf),
               weight=_int4_weight(64, 512, 64, True, False)),
        Sample("NaN stays in its row", x=normal(4, 512).set((1, 3), math.nan),
               weight=_int4_weight(64, 512, 64, True, False)),
        Sample("K long, 130 rows: a cluster", x=normal(130, 8192), bias=normal(544),
               weight=_int4_weight(544, 8192, 128, True, False), activation="silu_mul"),
        # Weights that registers hold: up to two strips a block, and three, columns of every warp.
        *(Sample(f"rows {rows}, {what}", x=normal(rows, K),
                 weight=_int4_weight(N, K, group, zeros, False), **options)
          for rows in (1, 3, 8) for what, N, K, group, zeros, options in (
              ("two strips a block, norm", 2128, 4096, 256, True, {"norm_weight": normal(4096)}),
              ("three strips a block", 4256, 1088, -1, False, {"bias": normal(4256)}),
              ("a residual", 2128, 640, 128, True, {"residual": normal(rows, 2128)}))),
        Sample("1 row, three strips a block, far apart in size, an infinity",
               x=normal(1, 2048).set((0, 7), 1e3).set((0, 1300), math.inf),
               weight=_int4_weight(4256, 2048, 128, True, False)),
        Sample("1 row, NaN", x=normal(1, 512).set((0, 300), math.nan),
               weight=_int4_weight(64, 512, 128, True, False)),
        Sample("13 rows, two strips a block", x=normal(13, 3072), norm_weight=normal(3072),
               residual=normal(13, 2128), weight=_int4_weight(2128, 3072, 128, True, False)),
        # x that registers hold: a part of K in each block of a cluster, columns of every warp.
        *(Sample(f"rows {rows}, {what}", x=normal(rows, K), weights_ready=True,
                 weight=_int4_weight(N, K, group, zeros, False), **options)
          for rows in (5, 8) for what, N, K, group, zeros, options in (
              ("x held, norm", 2128, 4096, 128, True, {"norm_weight": normal(4096)}),
              ("x held, gated, a part of a slice", 4288, 2112, -1, False,
               {"activation": "silu_mul", "bias": normal(4288)}),
              ("x held, more strips than stages", 10624, 2048, 256, False, {}),
              ("x held by a cluster of two", 1072, 5120, 128, False,
               {"residual": normal(rows, 1072), "activation": "gelu"}),
              ("x held by a cluster of four, gated", 1088, 12800, 128, True,
               {"activation": "silu_mul", "bias": normal(1088)}))),
        Sample("7 rows, x held by a cluster of three", x=normal(7, 8448), bias=normal(704),
               weight=_int4_weight(704, 8448, 128, False, False)),
        Sample("6 rows, x held, infinities, NaN, far apart in size", weights_ready=True,
               x=normal(6, 2048).set((slice(0, 3), 7), 1e3).set((1, 1300), math.inf)
               .set((3, 5), -math.inf).set((4, 300), math.nan),
               weight=_int4_weight(2128, 2048, 128, True, False)),
        Sample("5 rows, three strips a block, far apart in size, infinities, NaN",
               x=normal(5, 2048).set((slice(0, 3), 7), 1e3).set((1, 1300), math.inf)
               .set((3, 5), -math.inf).set((4, 300), math.nan),
               weight=_int4_weight(4256, 2048, 128, True, False)),
        *_w4a8_samples(),
    ],
    errors=[
        Error(r"x.*64.*\[2, 32\]", x=normal(2, 32), dtype=torch.bfloat16,
              weight=_int4_weight(8, 64, 64, False, False)),
        Error(r"x: expected dtype bfloat16, got float16", x=normal(2, 64, dtype=torch.float16),
              dtype=torch.bfloat16, weight=_int4_weight(8, 64, 64, False, False)),
        Error(r"x_scale.*None.*a tensor", x=normal(2, 64), dtype=torch.bfloat16,
              x_scale=full((2,), 1.0, torch.float32),
              weight=_int4_weight(8, 64, 64, False, False)),
        Error(r"act.*'fp8'.*got 'int8'", x=normal(2, 64), dtype=torch.bfloat16, act="int8",
              weight=_int4_weight(8, 64, 64, False, False)),
    ],
)  # fmt: skip


# ---- fp8: judged against the expanded values ---------------------------------------------------


def _block_scales(scale: Tensor, N: int, K: int) -> Tensor:
    return scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]


def _fp8_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Scales widen the product's dtype, as the op applies them before its one rounding."""
    dtype = torch.float64 if weight.dtype == torch.float64 else (out_dtype or x.dtype)
    dense = weight.to(torch.float64)
    if weight_scale.dim() == 2:
        dense = dense * _block_scales(weight_scale.double(), *weight.shape)
    else:
        dense = dense * weight_scale.double().reshape(-1, 1)
    scaled = x
    if x_scale is not None and x_scale.dim() == 2:
        extent = 128 if x_scale.shape[1] == -(-x.shape[1] // 128) else 256
        scaled = x.double() * x_scale.double().repeat_interleave(extent, 1)[:, : x.shape[1]]
    elif x_scale is not None:
        scaled = x.double() * x_scale.double().reshape(-1, 1)
    return linear(scaled.to(dtype), dense.to(dtype), bias, **options)


def _fp8_inputs(rows: int) -> dict[str, Any]:
    return {"x": normal(rows, 128), "weight": fp8(96, 128), "weight_scale": _positive(96)}


def _fp8_shapes() -> list[Sample]:
    samples = []
    for rows in (1, 9, 33, 70):
        samples += [
            Sample(f"{rows} rows, row scales, N odd", x=normal(rows, 272), weight=fp8(77, 272),
                   weight_scale=_positive(77)),
            Sample(f"{rows} rows, one scale", x=normal(rows, 128), weight=fp8(64, 128),
                   weight_scale=_positive(1)),
            Sample(f"{rows} rows, block scales", x=normal(rows, 400), weight=fp8(200, 400),
                   weight_scale=_positive(2, 4)),
            Sample(f"{rows} rows, K odd", x=normal(rows, 65), weight=fp8(40, 65),
                   weight_scale=_positive(40)),
            Sample(f"{rows} rows of fp8, scales a row", x=fp8(rows, 256), weight=fp8(64, 256),
                   x_scale=_positive(rows), weight_scale=_positive(64),
                   out_dtype=torch.bfloat16, bias=normal(64, dtype=torch.bfloat16)),
            Sample(f"{rows} rows of fp8, one scale", x=fp8(rows, 256), weight=fp8(64, 256),
                   x_scale=_positive(1), weight_scale=_positive(1), out_dtype=torch.float16),
            Sample(f"{rows} rows of fp8, scales a group of columns, block scales",
                   x=fp8(rows, 400), weight=fp8(200, 400), x_scale=_positive(rows, 4),
                   weight_scale=_positive(2, 4), out_dtype=torch.bfloat16),
        ]  # fmt: skip
    return samples


FP8 = OpCase(
    name="fp8_linear",
    op=ridgeline.ops.fp8_linear,
    reference=_fp8_reference,
    competitor=_fp8_reference,
    dtypes=HALVES,
    samples=[
        *_fp8_shapes(),
        *epilogue_samples(_fp8_inputs),
        Sample("no rows", x=normal(0, 64), weight=fp8(32, 64), weight_scale=_positive(32)),
        Sample("1 row, two strips a block, norm", x=normal(1, 4096), weight=fp8(2120, 4096),
               weight_scale=_positive(2120), norm_weight=normal(4096)),
        Sample("1 row, two strips a block, block scales", x=normal(1, 1360),
               weight=fp8(2200, 1360), weight_scale=_positive(18, 11)),
        Sample("1 row of fp8, columns of every warp", x=fp8(1, 4096), weight=fp8(2200, 4096),
               x_scale=_positive(1), weight_scale=_positive(2200), out_dtype=torch.bfloat16,
               residual=normal(1, 2200, dtype=torch.bfloat16)),
        Sample("5 rows, 8 chunks, norm", x=normal(5, 2048), weight=fp8(48, 2048),
               weight_scale=_positive(48), norm_weight=normal(2048)),
        Sample("5 rows of fp8, 16 chunks, read early", x=fp8(5, 4096), weight=fp8(48, 4096),
               x_scale=_positive(5), weight_scale=_positive(48), out_dtype=torch.bfloat16,
               weights_ready=True),
        Sample("NaN of e4m3", x=normal(3, 64), weight=fp8(32, 64).set((5, 7), float("nan")),
               weight_scale=_positive(32)),
        Sample("subnormals of e4m3", x=normal(3, 64), weight=fp8(32, 64, scale=0.005),
               weight_scale=_positive(32)),
        Sample("33 rows, wide tiles, infinities and NaN",
               x=normal(33, 272).set((2, 5), -math.inf).set((3, 200), math.inf)
               .set((3, 201), math.inf).set((9, 0), math.nan),
               weight=fp8(27000, 272), weight_scale=_positive(27000), bias=normal(27000)),
        Sample("64 rows, wide tiles, gated, residual", x=normal(64, 400), weight=fp8(28672, 400),
               weight_scale=_positive(28672), activation="silu_mul", residual=normal(64, 14336)),
        Sample("40 rows, wide tiles, one of zeros, one far apart in size",
               x=normal(40, 528).set((4, slice(None)), 0.0).set((5, 3), 300.0),
               weight=fp8(26880, 528), weight_scale=_positive(1)),
        Sample("33 rows, wide tiles, block scales, infinities and NaN",
               x=normal(33, 272).set((2, 5), -math.inf).set((3, 200), math.inf)
               .set((3, 201), math.inf).set((9, 0), math.nan),
               weight=fp8(27000, 272), weight_scale=_positive(211, 3), bias=normal(27000)),
        Sample("40 rows, wide tiles, K cut, block scales, gated, an infinity, residual",
               x=normal(40, 2064).set((39, 2000), math.inf), weight=fp8(13856, 2064),
               weight_scale=_positive(109, 17), activation="silu_mul", residual=normal(40, 6928)),
        Sample("50 rows of fp8, wide tiles, N odd", x=fp8(50, 272), x_scale=_positive(50),
               weight=fp8(26891, 272), weight_scale=_positive(26891), out_dtype=torch.bfloat16),
        Sample("64 rows of fp8, wide tiles, residual", x=fp8(64, 1040), x_scale=_positive(1),
               weight=fp8(26880, 1040), weight_scale=_positive(26880), activation="silu",
               residual=normal(64, 26880, dtype=torch.float16), out_dtype=torch.float16),
        Sample("K long: every split", x=normal(3, 8192), weight=fp8(32, 8192),
               weight_scale=_positive(32)),
        Sample("K long, 17 rows: a cluster", x=normal(17, 8192), weight=fp8(32, 8192),
               weight_scale=_positive(32)),
        Sample("K long, 130 rows: a cluster", x=normal(130, 8208), weight=fp8(544, 8208),
               weight_scale=_positive(544), activation="silu_mul"),
        Sample("K long, 130 rows of fp8: K by a cluster", x=fp8(130, 8208),
               weight=fp8(544, 8208), x_scale=_positive(130), weight_scale=_positive(544),
               out_dtype=torch.bfloat16, bias=normal(544, dtype=torch.bfloat16),
               activation="silu_mul", residual=normal(130, 272, dtype=torch.bfloat16)),
        Sample("130 rows of fp8, few tiles of a cluster", x=fp8(130, 8208), x_scale=_positive(1),
               weight=fp8(528, 8208), weight_scale=_positive(528), out_dtype=torch.bfloat16,
               bias=normal(528, dtype=torch.bfloat16), activation="gelu",
               residual=normal(130, 528, dtype=torch.bfloat16)),
        Sample("200 rows of fp8, more of a cluster", x=fp8(200, 400), x_scale=_positive(200),
               weight=fp8(2200, 400), weight_scale=_positive(1), out_dtype=torch.bfloat16),
        Sample("K long, 70 rows of fp8, a tensor's scale, block scales", x=fp8(70, 4096),
               weight=fp8(264, 4096), x_scale=_positive(1), weight_scale=_positive(3, 32),
               out_dtype=torch.bfloat16),
        Sample("70 rows of fp8, scales of groups and rows", x=fp8(70, 256), weight=fp8(264, 256),
               x_scale=_positive(70, 2), weight_scale=_positive(264), out_dtype=torch.bfloat16),
        *(Sample(f"{rows} rows of fp8, scales of 256 columns", x=fp8(rows, K), weight=fp8(N, K),
                 x_scale=_positive(rows, -(-K // 256)), weight_scale=_positive(N),
                 out_dtype=torch.bfloat16)
          for rows, N, K in ((1, 64, 272), (70, 264, 784), (1000, 4168, 528), (2500, 4096, 272))),
        Sample("300 rows of fp8, scales of 256 columns, one of the weight, residual",
               x=fp8(300, 528), weight=fp8(264, 528), x_scale=_positive(300, 3),
               weight_scale=_positive(1), residual=normal(300, 264, dtype=torch.bfloat16),
               out_dtype=torch.bfloat16),
        Sample("70 rows of fp8, scales of 256 columns and of blocks", x=fp8(70, 528),
               weight=fp8(264, 528), x_scale=_positive(70, 3), weight_scale=_positive(3, 5),
               out_dtype=torch.float16),
        Sample("gated, both halves whole blocks", x=fp8(70, 256), weight=fp8(512, 256),
               x_scale=_positive(70, 2), weight_scale=_positive(4, 2), out_dtype=torch.bfloat16,
               activation="silu_mul"),
        *(Sample(f"gated, block scales, {rows} rows of {name}", x=x, weight=fp8(columns, 256),
                 weight_scale=_positive(4, 2), activation="silu_mul",
                 **({} if name == "bf16" else {"x_scale": _positive(rows),
                                               "out_dtype": torch.bfloat16}))
          for rows in (9, 33, 64) for columns in (512, 416)
          for name, x in (("bf16", normal(rows, 256)), ("fp8", fp8(rows, 256)))),
        Sample("gated, the up rows in the middle of a block", x=fp8(70, 256),
               weight=fp8(416, 256), x_scale=_positive(70, 2), weight_scale=_positive(4, 2),
               out_dtype=torch.bfloat16, activation="silu_mul"),
    ],
    errors=[
        Error(r"weight.*float8_e4m3fn.*bfloat16", x=normal(2, 64), weight=normal(8, 64),
              weight_scale=_positive(8), dtype=torch.bfloat16),
        Error(r"weight_scale.*\[8\].*\[7\]", x=normal(2, 64), weight=fp8(8, 64),
              weight_scale=_positive(7), dtype=torch.bfloat16),
        Error(r"x_scale.*a tensor.*None", x=fp8(2, 64), weight=fp8(8, 64),
              weight_scale=_positive(8), dtype=torch.bfloat16),
        Error(r"x_scale.*2 .one a row.*\[\.\.\., 3\].*\[\.\.\., 2\].*\[2, 4\]", x=fp8(2, 272),
              weight=fp8(8, 272), x_scale=_positive(2, 4), weight_scale=_positive(8),
              dtype=torch.bfloat16),
        Error(r"out_quant.*'fp8_group256', got 'fp8'", x=normal(2, 64), weight=fp8(8, 64),
              weight_scale=_positive(8), out_quant="fp8", dtype=torch.bfloat16),
    ],
)  # fmt: skip


def _fp8_added(residual: Tensor, **inputs: Any) -> Tensor:
    return residual + _fp8_reference(**inputs, out_dtype=residual.dtype)


FP8_ADD = OpCase(
    name="fp8_linear_add",
    op=ridgeline.ops.fp8_linear_add,
    reference=_fp8_added,
    competitor=_fp8_added,
    mutates=("residual",),
    dtypes=HALVES,
    samples=[
        Sample("1 row, N odd", x=normal(1, 128), weight=fp8(77, 128), weight_scale=_positive(77),
               residual=normal(1, 77)),
        Sample("33 rows, bias", **_fp8_inputs(33), bias=normal(96), residual=normal(33, 96)),
        Sample("no rows", **_fp8_inputs(0), residual=normal(0, 96)),
        Sample("130 rows of fp8, K in segments", x=fp8(130, 4096), weight=fp8(264, 4096),
               x_scale=_positive(130), weight_scale=_positive(264), residual=normal(130, 264)),
        Sample("900 rows of fp8, tiles of 128, edges", x=fp8(900, 144), weight=fp8(1816, 144),
               x_scale=_positive(900), weight_scale=_positive(1816), bias=normal(1816),
               residual=normal(900, 1816)),
        Sample("1100 rows of fp8, tiles of 256, edges", x=fp8(1100, 144), weight=fp8(4168, 144),
               x_scale=_positive(1100), weight_scale=_positive(4168),
               residual=normal(1100, 4168)),
        Sample("900 rows of fp8, scales of groups and blocks", x=fp8(900, 144),
               weight=fp8(1816, 144), x_scale=_positive(900, 2), weight_scale=_positive(15, 2),
               residual=normal(900, 1816)),
        Sample("1000 rows of fp8, scales of 256 columns", x=fp8(1000, 528), weight=fp8(4168, 528),
               x_scale=_positive(1000, 3), weight_scale=_positive(4168),
               residual=normal(1000, 4168)),
        Sample("300 rows of fp8, N off 16 bytes", x=fp8(300, 128), weight=fp8(1030, 128),
               x_scale=_positive(1), weight_scale=_positive(1), residual=normal(300, 1030)),
        Sample("900 rows of fp8, residual off 16 bytes", x=fp8(900, 144), weight=fp8(1816, 144),
               x_scale=_positive(900), weight_scale=_positive(1816),
               residual=Lazy(lambda context: normal(900 * 1816 + 1)(context)[1:].view(900, 1816))),
        Sample("infinities and NaN in the residual", x=fp8(900, 128), weight=fp8(2048, 128),
               x_scale=_positive(1), weight_scale=_positive(2048),
               residual=normal(900, 2048).set((3, 5), math.inf).set((899, 2047), math.nan)),
    ],
    errors=[
        Error(r"^residual.*\[2, 8\].*\[2, 9\]", x=normal(2, 64), weight=fp8(8, 64),
              weight_scale=_positive(8), residual=normal(2, 9), dtype=torch.bfloat16),
        Error(r"^residual.*int32", x=normal(2, 64), weight=fp8(8, 64), weight_scale=_positive(8),
              residual=integers(0, 2, 2, 8), dtype=torch.bfloat16),
        Error(r"^residual.*contiguous", x=normal(8, 64), weight=fp8(8, 64),
              weight_scale=_positive(8), residual=normal(8, 8).t(), dtype=torch.bfloat16),
        Error(r"^residual.*expanded|^residual.*contiguous", x=normal(2, 64), weight=fp8(8, 64),
              weight_scale=_positive(8), dtype=torch.bfloat16,
              residual=Lazy(lambda context: normal(1, 8)(context).expand(2, 8))),
    ],
)  # fmt: skip


def _fp8_coded(**inputs: Any) -> Tensor:
    codes, scale = ridgeline.ops.fp8_linear(**inputs, out_quant="fp8_group256")
    return codes.float() * spread(scale, codes, "group256")


def half_a_code_of_a_product(expected: Tensor) -> Tensor:
    """Beside half a step of e4m3 the product's rounding, and what sums that cancel keep of it."""
    finite = torch.where(torch.isfinite(expected), expected.abs(), 0.0)
    largest = finite.max() if finite.numel() else torch.zeros(())
    return finite * (2**-4 + 2**-7) + largest * 2**-9


FP8_CODED = OpCase(
    name="fp8_linear_quant",
    op=_fp8_coded,
    reference=_fp8_reference,
    bound=half_a_code_of_a_product,
    dtypes=HALVES,
    devices=("cpu",),  # CUDA's codes are judged bit for bit by test_gemm_fp8
    samples=[
        Sample("3 rows, a group and a part, bias", x=normal(3, 128), weight=fp8(600, 128),
               weight_scale=_positive(600), bias=normal(600), activation="relu"),
        Sample("40 rows, gated, residual", x=normal(40, 128), weight=fp8(512, 128),
               weight_scale=_positive(512), activation="silu_mul", residual=normal(40, 256)),
        Sample("no rows", **_fp8_inputs(0)),
        Sample("70 rows of fp8, gated", x=fp8(70, 272), weight=fp8(1536, 272),
               x_scale=_positive(70), weight_scale=_positive(1536), out_dtype=torch.bfloat16,
               activation="silu_mul"),
    ],
)  # fmt: skip

# ---- int8: judged against the codes times their scales ------------------------------------------


def codes(*shape: int) -> Lazy:
    """All of int8, also the -128 that no quantising here gives."""
    return integers(-128, 128, *shape, dtype=torch.int8)


def _small(*shape: int) -> Lazy:
    """Scales of a weight: products of large codes stay within float16."""
    return _positive(*shape, scale=0.02)


def _int8_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """An x of floats is quantised in float32, as the op does: a code more or less is not judged."""
    exact = bias is None or bias.dtype == torch.float64
    residual = options.get("residual")
    exact = exact and (residual is None or residual.dtype == torch.float64)
    if x.dtype != torch.int8:
        exact = exact and x.dtype == torch.float64
        values, out_dtype = x, x.dtype
        if norm_weight is not None:
            values = F.rms_norm(x.double(), x.shape[-1:], norm_weight.double(), 1e-6)
        amax = values.float().abs().amax(-1, keepdim=True)
        x_scale = torch.where(amax == 0, 1.0, amax / 127)
        x = (values.float() * (1 / x_scale)).round()
    assert x_scale is not None
    dtype = torch.float64 if exact else (out_dtype or torch.bfloat16)
    wide = F.linear(x.double(), weight.double())
    wide = wide * x_scale.double().reshape(-1, 1) * weight_scale.double().reshape(1, -1)
    wide = wide if bias is None else wide + bias.double()
    out = activate(wide.to(dtype), options.get("activation"))
    return out if residual is None else out + residual


def _int8_inputs(rows: int) -> dict[str, Any]:
    return {"x": normal(rows, 128), "weight": codes(96, 128), "weight_scale": _small(96)}


def _int8_shapes() -> list[Sample]:
    samples = []
    for rows in (1, 9, 33, 70):
        samples += [
            Sample(f"{rows} rows, quantised here, N odd", x=normal(rows, 272),
                   weight=codes(77, 272), weight_scale=_small(77)),
            Sample(f"{rows} rows, scales a row", x=codes(rows, 256), weight=codes(64, 256),
                   x_scale=_positive(rows), weight_scale=_small(64),
                   bias=normal(64, dtype=torch.bfloat16)),
            Sample(f"{rows} rows, one scale each", x=codes(rows, 256), weight=codes(64, 256),
                   x_scale=_positive(1), weight_scale=_small(1), out_dtype=torch.float16),
            Sample(f"{rows} rows, K odd", x=codes(rows, 65), weight=codes(40, 65),
                   x_scale=_positive(rows), weight_scale=_small(40)),
            Sample(f"{rows} rows, K of 32 and 16", x=codes(rows, 304), weight=codes(144, 304),
                   x_scale=_positive(rows), weight_scale=_small(144)),
        ]  # fmt: skip
    return samples


INT8 = OpCase(
    name="int8_linear",
    op=ridgeline.ops.int8_linear,
    reference=_int8_reference,
    competitor=_int8_reference,
    dtypes=HALVES,
    samples=[
        *_int8_shapes(),
        *epilogue_samples(_int8_inputs),
        Sample("no rows", x=codes(0, 64), weight=codes(32, 64), x_scale=_positive(1),
               weight_scale=_small(32)),
        Sample("no columns", x=codes(3, 0), weight=codes(32, 0), x_scale=_positive(3),
               weight_scale=_small(32), bias=normal(32, dtype=torch.bfloat16)),
        Sample("K long: every split", x=codes(3, 8192), weight=codes(32, 8192),
               x_scale=_positive(3), weight_scale=_small(32)),
        Sample("K long, 17 rows: a cluster", x=codes(17, 8192), weight=codes(32, 8192),
               x_scale=_positive(17), weight_scale=_small(32)),
        Sample("K long, 130 rows: K by a cluster", x=codes(130, 8208), weight=codes(544, 8208),
               x_scale=_positive(130), weight_scale=_small(544),
               bias=normal(544, dtype=torch.bfloat16), activation="silu_mul"),
        Sample("130 rows, few tiles of a cluster", x=codes(130, 8208), weight=codes(528, 8208),
               x_scale=_positive(130), weight_scale=_small(528),
               bias=normal(528, dtype=torch.bfloat16), activation="gelu"),
        Sample("invariant", x=codes(20, 256), weight=codes(80, 256), x_scale=_positive(20),
               weight_scale=_small(80), batch_invariant=True),
        Sample("strided rows of x and weight", x=codes(14, 64)[::2],
               weight=codes(32, 128)[:, 64:], x_scale=_positive(7), weight_scale=_small(32)),
        Sample("x off 16 bytes", x=codes(6, 72)[:, 3:67], weight=codes(32, 64),
               x_scale=_positive(6), weight_scale=_small(32)),
        Sample("weights read early", x=codes(2, 256), weight=codes(64, 256),
               x_scale=_positive(2), weight_scale=_small(64), weights_ready=True),
    ],
    errors=[
        Error(r"weight.*int8.*bfloat16", x=normal(2, 64), weight=normal(8, 64),
              weight_scale=_small(8), dtype=torch.bfloat16),
        Error(r"weight_scale.*\[8\].*\[7\]", x=normal(2, 64), weight=codes(8, 64),
              weight_scale=_small(7), dtype=torch.bfloat16),
        Error(r"x_scale.*a tensor.*None", x=codes(2, 64), weight=codes(8, 64),
              weight_scale=_small(8), dtype=torch.bfloat16),
        Error(r"x_scale.*2 .one a row.*\[2, 2\]", x=codes(2, 272), weight=codes(8, 272),
              x_scale=_positive(2, 2), weight_scale=_small(8), dtype=torch.bfloat16),
        Error(r"^norm_weight.*\[64\].*\[32\]", x=normal(2, 64), weight=codes(8, 64),
              weight_scale=_small(8), norm_weight=normal(32), dtype=torch.bfloat16),
        Error(r"weight.*at most 131071.*131072", x=codes(1, 131072), weight=codes(1, 131072),
              x_scale=_positive(1), weight_scale=_small(1), dtype=torch.bfloat16),
    ],
)  # fmt: skip

CASES = [LINEAR, INT4, FP8, FP8_ADD, FP8_CODED, INT8]
