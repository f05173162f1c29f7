"""Products of many rows by weights of 4 or 8 bits on Hopper: who multiplies a tile, and bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from gemm_choice import choice_of
from ridgeline import ops

# M, N, K, and who multiplies a tile: one block, several a segment of K, another its tail, or two
# where all blocks multiply as many stages; or the cluster kernel.
SHARED = [
    (230, 10240, 14336, "tail"),
    (250, 4608, 14336, "tail"),  # tiles of 128 rows
    (170, 8704, 14336, "tail"),  # of 192
    (768, 1024, 14336, "cluster"),  # of groups of 64 segments, tiles of 192 rows
    (700, 8704, 3584, "rest"),  # of groups of 64 even shares
    (250, 8704, 5120, "even"),  # tiles of 128 rows
    (1000, 10240, 3584, "rest"),  # of groups of 64 even shares behind a whole wave
    (250, 18944, 3584, "rest"),  # the last columns are the cluster kernel's
    (500, 18944, 3584, "rest"),
    (190, 18944, 3584, "rest"),  # behind tiles of 192 rows
    (140, 18944, 1024, "rest"),  # of 160
    (210, 18944, 1024, "rest"),  # of 224
    (300, 8704, 3584, "even"),  # of 160
    (330, 8704, 5120, "even"),  # of 192
    (650, 6144, 3584, "even"),  # of 224
    (140, 8704, 8192, "tail"),  # of 160
    (210, 8704, 8192, "tail"),  # of 224
    (440, 10240, 1024, "whole"),  # of 160
    (650, 4608, 1024, "whole"),  # of 224
    (140, 8192, 14336, "segments"),  # of 160
    (65, 2048, 2048, "cluster"),
    (128, 4096, 2048, "cluster"),
    (250, 4096, 2048, "cluster"),  # rows of the last tile are multiplied twice
    (100, 6128, 4224, "cluster"),  # tall tiles of 64 weight rows
    (330, 2048, 2048, "cluster"),
    (128, 4096, 14336, "cluster"),  # two blocks a tile
    (500, 4096, 14336, "cluster"),  # tall tiles of 128 weight rows
    (250, 6144, 4096, "cluster"),  # broad tiles of 64 rows
    (192, 7168, 4096, "cluster"),  # the last is not whole
    (192, 4096, 14336, "cluster"),  # two blocks a tile
    (500, 6144, 4096, "cluster"),  # broad tiles of 128 rows
    (120, 18944, 3584, "cluster"),
    (384, 4096, 14336, "cluster"),
    (150, 8704, 2048, "cluster"),  # broad tiles of 80 rows
    (384, 6144, 4096, "cluster"),  # of 96
    (448, 4096, 4096, "cluster"),  # of 112
    (190, 6144, 4096, "cluster"),  # two blocks a tile of 96
    (250, 5120, 5120, "cluster"),  # tall tiles of 88 rows by 128 weight rows
    (160, 4096, 14336, "cluster"),  # two blocks a tile of 80
    (190, 4096, 4096, "cluster"),  # tall tiles of 96 rows by 64 weight rows
    (500, 5120, 5120, "cluster"),  # of 176 rows by 128
]


def plan(M: int, N: int, K: int, format: str = "int4", sms: int = 132) -> dict[str, Any]:
    chosen = choice_of(M, N, K, format, sms=sms)
    assert chosen["path"] in ("expand", "expand_to_fp8", "cluster")
    return chosen


def who(chosen: dict[str, Any]) -> str:
    if chosen["path"] == "cluster":
        return "cluster"
    if chosen["rest"] != 0:
        return "rest"
    if chosen["even"] == 1:
        return "even"
    return "tail" if chosen["tail"] != 0 else "segments" if chosen["segments"] != 1 else "whole"


@pytest.mark.parametrize(("M", "N", "K", "expected"), [*SHARED, (4096, 4096, 4096, "whole")])
def test_who_multiplies_a_tile(M: int, N: int, K: int, expected: str) -> None:
    assert who(plan(M, N, K)) == expected


@pytest.mark.parametrize(
    ("M", "N", "K", "rows", "expected"),
    [
        (96, 4096, 4096, 104, "cluster"),  # tall tiles
        (250, 2048, 2048, 64, "cluster"),
        (300, 4096, 4096, 160, "segments"),
        (300, 8704, 3584, 160, "even"),
        (330, 8704, 5120, 192, "even"),
        (650, 6144, 3584, 224, "even"),
        (230, 10240, 14336, 256, "tail"),
    ],
)
def test_who_multiplies_int4_by_float16(M: int, N: int, K: int, rows: int, expected: str) -> None:
    chosen = choice_of(M, N, K, "int4", dtype="float16")
    assert (who(chosen), chosen["tile_rows"]) == (expected, rows)


@pytest.mark.parametrize("sms", [132, 78])
def test_blocks_that_wait_for_each_other_run_at_once(sms: int) -> None:
    """Blocks of a tile's segments, and those of tails, have an SM each."""
    shared = 0
    for M in range(65, 1025, 31):
        for N in range(1024, 16384, 1024):
            for format in ("int4", "fp8", "int4_fp8"):
                chosen = plan(M, N, 4096, format, sms)
                if who(chosen) not in ("segments", "tail"):
                    continue
                tiles = -(-M // int(chosen["tile_rows"])) * -(-N // int(chosen["tile_cols"]))
                helpers = -(-tiles // int(chosen["tails"])) if who(chosen) == "tail" else 0
                assert tiles * int(chosen["segments"]) + helpers <= sms
                shared += 1
    assert shared > 0


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["plain", "gates", "gated"])
@pytest.mark.parametrize("zero_point", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group", [128, 64])  # of 64 tiles are never the cluster kernel's
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "N", "K"), [shape[:3] for shape in SHARED])
def test_shared_tiles(
    M: int, N: int, K: int, dtype: torch.dtype, group: int, zero_point: bool, epilogue: str
) -> None:
    """The sums of several blocks, in a launch that a graph runs again, over any workspace. Gates
    alone, or with a residual, which tiles that know the way of gates leave to any other."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    weight = ops.pack_int4(normal(N, K) * K**-0.5, group, zero_point)
    bias, x = normal(N), normal(M, K)
    options: dict[str, Any] = {} if epilogue == "plain" else {"activation": "silu_mul"}
    wanted = F.linear(x.float(), weight.dequantize().float(), bias.float())
    if epilogue != "plain":
        gate, up = wanted.chunk(2, -1)
        wanted = F.silu(gate) * up
    if epilogue == "gated":
        options["residual"] = normal(M, N // 2)
        wanted += options["residual"].float()
    first = ops.int4_linear(x, weight, bias, **options)
    torch.testing.assert_close(first.float(), wanted, rtol=1.6e-2, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.int4_linear(x, weight, bias, **options)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["gelu", "residual"])
@pytest.mark.parametrize(("M", "N", "K"), [shape[:3] for shape in SHARED])
def test_known_ways_of_shared_tiles(M: int, N: int, K: int, epilogue: str) -> None:
    """Tiles of int4 by bfloat16 that have kernels of their own for GELU and for a residual."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    weight, bias, x = ops.pack_int4(normal(N, K) * K**-0.5, 128), normal(N), normal(M, K)
    wanted = F.linear(x.float(), weight.dequantize().float(), bias.float())
    if epilogue == "gelu":
        out, wanted = ops.int4_linear(x, weight, bias, activation="gelu"), F.gelu(wanted)
    else:
        residual = normal(M, N)
        out, wanted = ops.int4_linear(x, weight, bias, residual=residual), wanted + residual.float()
    torch.testing.assert_close(out.float(), wanted, rtol=1.6e-2, atol=1e-2)


# Rows of bfloat16 by fp8, more than few, and who multiplies them.
EXPANDED_FP8 = [
    (65, 2048, 2048, "cluster"),
    (128, 4096, 4096, "cluster"),
    (100, 4088, 4112, "cluster"),  # last tile and last stage are not whole
    (128, 6144, 4096, "cluster"),  # a tile of 128 weight rows
    (140, 4608, 1024, "cluster"),  # of 128, by 64 of x
    (250, 2048, 2048, "cluster"),  # rows of the last tile are multiplied twice
    (128, 4096, 14336, "segments"),
    (140, 6144, 4096, "segments"),  # tiles of 160 rows of x
    (140, 4096, 2048, "cluster"),  # of gates four segments under such tiles
    (650, 1024, 8192, "segments"),  # of 192
    (210, 4096, 14336, "segments"),  # of 224
    (250, 4096, 14336, "segments"),  # of 256
    (210, 4608, 2048, "tail"),  # of 128
    (140, 8704, 4096, "tail"),  # of 160
    (170, 8704, 3584, "tail"),  # of 192
    (210, 8704, 4096, "tail"),  # of 224
    (450, 6144, 3584, "tail"),  # of 256
    (300, 8712, 2064, "even"),  # of 160, the last tile and the last stage are not whole
    (330, 8704, 2048, "even"),  # of 192
    (440, 8704, 2048, "even"),  # of 224
    (1000, 10240, 3584, "even"),  # of 256 behind a whole wave
    (140, 8704, 1024, "whole"),  # of 160
    (170, 8704, 1024, "whole"),  # of 224
    (300, 8704, 1024, "whole"),  # tiles of 256 weight rows
    (140, 18944, 1024, "rest"),  # the last columns are the cluster kernel's
]


@pytest.mark.parametrize("format", ["fp8", "fp8_blocks"])
@pytest.mark.parametrize(("M", "N", "K", "expected"), EXPANDED_FP8)
def test_who_multiplies_expanded_fp8(M: int, N: int, K: int, expected: str, format: str) -> None:
    assert who(plan(M, N, K, format)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chained"])
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("epilogue", ["plain", "gelu", "residual", "gates", "gated"])
@pytest.mark.parametrize(("M", "N", "K"), [shape[:3] for shape in EXPANDED_FP8])
def test_expanded_fp8(
    M: int, N: int, K: int, epilogue: str, scales: Literal["row", "block"], chained: bool
) -> None:
    """More than few rows of bfloat16 by fp8, against float64: nothing but y is rounded, or weights
    times the scales of their blocks, too. In a launch that a graph runs again, the same bits."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    weight, scale = ops.quantize_fp8(normal(N, K) * K**-0.5, scales)
    x, bias, residual = normal(M, K), normal(N), normal(M, N)
    gated_residual = residual[:, : N // 2].contiguous()
    epilogues: dict[str, dict[str, Any]] = {
        "plain": {},
        "gelu": {"bias": bias, "activation": "gelu"},
        "residual": {"bias": bias, "residual": residual},
        "gates": {"bias": bias, "activation": "silu_mul"},
        "gated": {"bias": bias, "activation": "silu_mul", "residual": gated_residual},
    }
    options = epilogues[epilogue] | {"weights_ready": chained}
    scale = scale.view(-1) if scales == "row" else scale
    out = ops.fp8_linear(x, weight, scale, **options)
    factors = scale.double().view(-1, 1)
    if scales == "block":
        factors = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:N, :K]
    wanted = x.double() @ (weight.double() * factors).T
    if epilogue != "plain":
        wanted += bias.double()
    if epilogue == "gelu":
        wanted = F.gelu(wanted)
    if epilogue in ("gates", "gated"):
        gate, up = wanted.chunk(2, -1)
        wanted = F.silu(gate) * up
    if "residual" in options:
        wanted += options["residual"].double()
    assert (out.double() - wanted).norm() < 3.2e-3 * wanted.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = ops.fp8_linear(x, weight, scale, **options)
    for _ in range(2):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, out)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize(
    ("M", "N", "K"), [shape[:3] for shape in EXPANDED_FP8 if shape[3] in ("segments", "tail")]
)
def test_a_residual_of_tiles_that_blocks_share(
    M: int, N: int, K: int, activation: str | None
) -> None:
    """The copy engine brings a block's share of it; rows that it cannot map come one by one, and
    give the same bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight, scale = ops.quantize_fp8(torch.randn(N, K, generator=generator, device="cuda"))
    x = torch.randn(M, K, generator=generator, device="cuda").bfloat16()
    columns = N // 2 if activation else N
    residual = torch.randn(M, columns, generator=generator, device="cuda").bfloat16()
    apart = torch.empty(M, columns + 4, device="cuda", dtype=torch.bfloat16)[:, 4:].copy_(residual)
    mapped, read = (
        ops.fp8_linear(x, weight, scale, activation=activation, residual=of)
        for of in (residual, apart)
    )
    assert torch.equal(mapped, read)
    plain = ops.fp8_linear(x, weight, scale, activation=activation)
    assert not torch.equal(mapped, plain)


# Rows of fp8 by int4, and who multiplies them: the cluster kernel, where its tiles are few; tiles
# of 128 rows, of 192, or of 256.
CODES = [
    (65, 4096, 4096, "cluster"),
    (128, 4096, 4096, "cluster"),
    (128, 2048, 2048, "cluster"),  # two blocks a tile
    (250, 2048, 2048, "cluster"),  # rows of the last tile are multiplied twice
    (128, 6144, 4096, "cluster"),  # a tile of up to 128 rows
    (100, 4112, 8192, "cluster"),  # two blocks of such a tile
    (192, 4096, 4096, "cluster"),  # two blocks an SM
    (160, 4096, 8192, "cluster"),  # two blocks of a broad tile of 64 rows
    (250, 6144, 4096, "cluster"),  # two blocks of a broad tile of 128 rows
    (66, 18944, 1024, "cluster"),  # one
    (330, 8192, 3072, "whole"),  # tiles of 192 rows
    (300, 8704, 2048, "even"),
    (384, 11776, 3584, "even"),
    (140, 8704, 5120, "tail"),
    (140, 4096, 14336, "segments"),  # four of them
    (140, 8192, 8192, "segments"),  # two
    (120, 18944, 3584, "even"),  # tiles of 128 rows
    (130, 1024, 1152, "cluster"),
    (600, 8192, 128, "whole"),  # one stage
    (600, 8192, 256, "whole"),  # two
    (600, 8192, 384, "whole"),
    (250, 4096, 14336, "cluster"),  # tall tiles of 64 weight rows
    (500, 4096, 14336, "segments"),  # two, tiles of 256 rows
    (500, 6144, 4096, "tail"),
    (1000, 6144, 4096, "even"),
    (1000, 10240, 3712, "even"),  # behind a whole wave
    (250, 18944, 3584, "rest"),
    (1000, 4096, 2048, "whole"),
    (2100, 8192, 384, "whole"),  # several tiles a block
]


@pytest.mark.parametrize(("M", "N", "K", "expected"), CODES)
def test_who_multiplies_codes(M: int, N: int, K: int, expected: str) -> None:
    assert who(plan(M, N, K, "int4_fp8")) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chained"])
@pytest.mark.parametrize("scale", ["row", "one"])
@pytest.mark.parametrize("epilogue", ["plain", "gelu", "residual", "gates", "gated"])
@pytest.mark.parametrize(("M", "N", "K"), [shape[:3] for shape in CODES] + [(100, 2048, 2048)])
def test_codes(M: int, N: int, K: int, epilogue: str, scale: str, chained: bool) -> None:
    """Rows of fp8 by int4, against float64: products of 128 columns are added in float32."""
    gated = epilogue in ("gates", "gated")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    weight = ops.pack_int4((normal(N, K) * K**-0.5).bfloat16(), 128)
    x, x_scale = normal(M, K).to(torch.float8_e4m3fn), normal(M).abs() + 0.5
    if scale == "one":
        x_scale = x_scale[:1]
    residual = None
    if epilogue in ("residual", "gated"):
        residual = normal(M, N // 2 if gated else N).bfloat16()
    activation = "silu_mul" if gated else "gelu" if epilogue == "gelu" else None
    out = ops.int4_linear(
        x, weight, x_scale=x_scale, activation=activation, residual=residual, weights_ready=chained
    )
    wanted = (x.double() * x_scale[:, None].double()) @ weight.dequantize().double().T
    if epilogue == "gelu":
        wanted = F.gelu(wanted)
    if gated:
        gate, up = wanted.chunk(2, -1)
        wanted = F.silu(gate) * up
    if residual is not None:
        wanted += residual.double()
    assert (out.double() - wanted).norm() < 3e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("M", "N", "K", "expected"), [s for s in CODES if s[3] != "whole"])
def test_shared_tiles_of_codes(M: int, N: int, K: int, expected: str, gated: bool) -> None:
    """Rows of fp8 by int4 in a launch that a graph runs again: the same bits, whoever adds last."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = ops.pack_int4(torch.randn(N, K, generator=generator, device="cuda").bfloat16(), 128)
    x = torch.randn(M, K, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    options: dict[str, Any] = {"x_scale": torch.full((1,), K**-0.5, device="cuda")}
    if gated:
        options["activation"] = "silu_mul"
    first = ops.int4_linear(x, weight, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.int4_linear(x, weight, **options)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["off 16 bytes", "permuted", "short rows"])
@pytest.mark.parametrize("M", [300, 1000])
def test_codes_that_are_gathered(M: int, layout: str) -> None:
    """Where the copy engine cannot bring rows of fp8, a kernel ahead does."""
    generator = torch.Generator().manual_seed(0)
    N, K = 4096, 424 if layout == "short rows" else 1024
    group = K if layout == "short rows" else 128
    q = torch.randint(0, 16, (N, K), generator=generator)
    scales = torch.rand(K // group, N, generator=generator).bfloat16() + 0.5
    index = torch.randperm(K, generator=generator) // group if layout == "permuted" else None
    weight = ops.Int4Weight.from_quantized(q, scales, None, index).to("cuda")
    off = 8 if layout == "off 16 bytes" else 0
    wide = torch.randn(M, K + 16, generator=generator).to("cuda", torch.float8_e4m3fn)
    x = wide[:, off : off + K]
    out = ops.int4_linear(x, weight, x_scale=torch.ones(1, device="cuda"))
    packed = replace(weight, scales=weight.scales.float())  # sums are scaled
    wanted = x.double() @ packed.dequantize().double().T
    assert (out.double() - wanted).norm() < 3e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("zero_point", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("M", "group"), [(20, 128), (40, 64), (100, 128), (100, 64)])
def test_scales_of_any_size(M: int, group: int, dtype: torch.dtype, zero_point: bool) -> None:
    """Each row of the weight has scales of its own power of two, up to the ends of what bfloat16
    weights are expanded within: 2^26 and 2^-60. By the cluster kernel, which scales sums of up to
    32 rows, and in groups of 64 also by the one for more rows."""
    N, K = 256, 256
    generator = torch.Generator().manual_seed(0)
    first, last = (-60, 26) if dtype == torch.bfloat16 else (-10, 2)
    powers = torch.linspace(first, last, N).round()
    scales = (2.0**powers * (1 + torch.rand(K // group, N, generator=generator) / 2)).to(dtype)
    q = torch.randint(0, 16, (N, K), generator=generator)
    zeros = torch.randint(0, 16, (K // group, N), generator=generator) if zero_point else None
    weight = ops.Int4Weight.from_quantized(q, scales, zeros, None).to("cuda")
    x = torch.randn(M, K, generator=generator).to("cuda", dtype)
    wanted = x.double() @ weight.dequantize().double().T
    out = ops.int4_linear(x, weight).double()
    error = (out - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert error.max() < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("ready", [False, True], ids=["alone", "chained"])
@pytest.mark.parametrize("codes", [False, True], ids=["bfloat16", "codes"])
def test_the_rest_of_a_wave_sees_x_that_was_just_written(codes: bool, ready: bool) -> None:
    """Two kernels: either has the x that the kernel ahead of both writes, and what comes behind
    them finds all of y."""
    generator = torch.Generator("cuda").manual_seed(0)
    M, N, K = 250, 18944, 3584
    assert who(plan(M, N, K, "int4_fp8" if codes else "int4")) == "rest"

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    weight, scale = ops.pack_int4(normal(N, K) * K**-0.5, 128), normal(K)
    inputs = [normal(M, K) for _ in range(4)]

    def product(x: torch.Tensor) -> torch.Tensor:
        normed = ops.rmsnorm(x, scale)
        if not codes:
            return ops.int4_linear(normed, weight, weights_ready=ready)
        quantised, x_scale = ops.quantize_fp8(normed, "row")
        return ops.int4_linear(quantised, weight, x_scale=x_scale, weights_ready=ready)

    wanted = []
    for x in inputs:
        wanted.append(product(x))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [ops.rmsnorm(product(x), torch.ones(N, device="cuda").bfloat16()) for x in inputs]
    expected = [ops.rmsnorm(y, torch.ones(N, device="cuda").bfloat16()) for y in wanted]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, y in zip(outs, expected, strict=True):
            assert torch.equal(out, y)
