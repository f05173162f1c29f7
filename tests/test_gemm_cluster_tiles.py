"""Tiles of the cluster kernel by few rows of x: which are taken, and that each is right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gemm_choice import choice_of
from ridgeline import ops

SMS = 132
FORMATS = ["dense", "int4", "int4_fp8", "fp8", "fp8_blocks", "fp8_fp8", "int8"]
EXPANDED = ["int4", "int4_fp8", "fp8", "fp8_blocks"]


def plan(
    M: int, N: int, K: int, format: str, activation: str = "none", **options: Any
) -> dict[str, Any]:
    """What the op takes on an H200 without the library."""
    return choice_of(M, N, K, format, activation=activation, library=False, **options)


def tile(M: int, N: int, K: int, format: str, **options: Any) -> tuple[int, int]:
    chosen = plan(M, N, K, format, **options)
    assert chosen["path"] == "cluster"
    return chosen["tile_cols"], chosen["segments"]


@pytest.mark.parametrize(
    ("M", "N", "K", "format", "expected"),
    [
        (16, 18944, 3584, "fp8_fp8", (72, 1)),  # 264 blocks, two an SM; of 128 rows 148
        (16, 18944, 3584, "int8", (72, 1)),
        (16, 18944, 3584, "dense", (72, 1)),
        (16, 18944, 3584, "int4", (160, 1)),  # three warpgroups by turns: 119 tiles, one an SM
        (64, 18944, 3584, "int4", (192, 1)),  # three that share out the rows
        (64, 18944, 3584, "int4_fp8", (192, 1)),
        (16, 18944, 3584, "fp8", (160, 1)),
        (33, 18944, 3584, "int4_fp8", (192, 1)),
        (32, 17920, 5120, "int4_fp8", (144, 1)),
        (16, 28672, 4096, "int4_fp8", (224, 1)),
        (16, 28672, 4096, "int4", (128, 1)),  # two blocks an SM: registers hold no 224
        (32, 57344, 8192, "fp8", (224, 1)),  # two in turn
        (16, 8192, 28672, "int4_fp8", (128, 2)),
        (64, 18944, 3584, "fp8", (224, 1)),  # two terms of x spare the expansion
        (64, 5120, 13824, "int4", (192, 4)),
        (16, 5120, 13824, "fp8_fp8", (80, 2)),
        (16, 4096, 4096, "fp8_fp8", (64, 2)),
        (64, 4096, 14336, "int4", (64, 2)),
        (32, 4096, 14336, "int4", (64, 2)),
        (33, 4096, 14336, "int4", (64, 2)),
        (32, 6144, 4096, "int4", (64, 2)),
        (48, 6144, 4096, "int4", (64, 2)),
        (49, 6144, 4096, "int4", (48, 1)),  # three warpgroups by turns, an SM each
        (64, 6144, 5248, "int4", (64, 2)),  # each of 128 blocks would read all of x
        (64, 6368, 4096, "int4", (64, 2)),  # 133 of 48
        (32, 4096, 14336, "int4_fp8", (64, 2)),
        (64, 6144, 4096, "int4_fp8", (64, 2)),
        (32, 8192, 28672, "fp8", (64, 2)),
        (33, 8192, 28672, "fp8", (224, 3)),  # two terms, K cut
        (32, 3584, 18944, "fp8_fp8", (56, 2)),
        (32, 8192, 8192, "dense", (128, 2)),
    ],
)
def test_tiles_are_as_high_as_fills_the_sms(
    M: int, N: int, K: int, format: str, expected: tuple[int, int]
) -> None:
    assert tile(M, N, K, format) == expected


@pytest.mark.parametrize(("format", "activation"), list(product(FORMATS, ["none", "silu_mul"])))
def test_every_tile_can_be_multiplied(format: str, activation: str) -> None:
    """Whole eights of weight rows, of int4 whole strips; clusters that an H200 runs at once."""
    gated = activation == "silu_mul"
    seen = set()
    for M, N, K, chained in product(
        (9, 16, 33, 64), range(256, 40000, 1312), (640, 4096, 14336), (False, True)
    ):
        N = N // 32 * 32
        chosen = plan(M, N, K, format, activation, chained=chained)
        wide = chosen["tile_cols"] == 224 and not chosen["shares_stages"]
        if chosen["path"] != "cluster" or wide:
            continue
        rows, segments = chosen["tile_cols"], chosen["segments"]
        box = rows // 2 if gated else rows
        assert box % (16 if format.startswith("int4") else 8) == 0
        most = 192 if format in EXPANDED else 128
        if chosen["shares_stages"]:
            most = {"int4": 192, "int4_fp8": 256, "fp8": 224, "fp8_blocks": 192}[format]
        assert 48 <= rows <= most
        assert segments == 1 or segments * 640 <= K
        if (rows > 128 or chosen["shares_stages"]) and segments > 1:
            assert -(-(N // 2 if gated else N) // box) * segments <= SMS
        seen.add(rows)
    assert len(seen) > 1


@pytest.mark.parametrize("format", FORMATS)
def test_stages_by_turns_are_of_few_rows_and_weights_that_are_expanded(format: str) -> None:
    expanded = format in EXPANDED
    for M, options, expected in (
        (9, {}, True),
        (32, {}, True),
        (33, {}, False),
        (16, {"dtype": "float16"}, False),
        (16, {"invariant": True}, False),
    ):
        assert plan(M, 18944, 3584, format, **options)["shares_stages"] == (expected and expanded)
    if format in ("fp8", "dense"):  # folds the norm
        assert plan(16, 28672, 4096, format, norm=True)["shares_stages"] == 0
    assert plan(16, 6144, 4096, format)["shares_stages"] == 0  # K cut so often that the end counts


@pytest.mark.parametrize("format", FORMATS)
def test_tiles_of_three_warpgroups_are_of_weights_that_are_expanded(format: str) -> None:
    """Not where a norm is folded, or bits may not depend on the rows, or in float16, of which there
    are no such kernels: none refuses it."""
    expanded = format in EXPANDED
    assert (tile(16, 18944, 3584, format)[0] > 128) == expanded
    if format in ("fp8", "dense"):
        assert tile(16, 28672, 4096, format, norm=True)[0] <= 128
    assert tile(16, 18944, 3584, format, invariant=True)[0] in (112, 128)
    for M in (16, 64):
        assert tile(M, 18944, 3584, format, dtype="float16")[0] <= 128


def rest(M: int, N: int, K: int, format: str, **options: Any) -> tuple[int, int, int]:
    chosen = plan(M, N, K, format, **options)
    return chosen["rest"], chosen["rest_tile_cols"], chosen["rest_segments"]


WAVE = SMS * 128


@pytest.mark.parametrize(
    ("M", "N", "K", "format", "expected"),
    [
        *((M, 57344, 8192, "int4", (6656, 128, 2)) for M in (9, 16, 32, 64)),
        (64, 57344, 8192, "int4_fp8", (6656, 64, 1)),
        (32, 57344, 8192, "int4_fp8", (0, 0, 0)),  # three warpgroups by turns fill the SMs
        *((64, 57344, 8192, format, (0, 0, 0)) for format in ("fp8", "fp8_blocks")),  # wide tiles
        *((M, 36864, 4096, format, (3072, 64, 2)) for M in (9, 64) for format in EXPANDED),
        (32, 51200, 8192, "fp8", (0, 0, 0)),  # by turns, beside three waves
        (64, 51200, 8192, "fp8", (512, 64, 2)),
        (64, 2 * WAVE + 64, 1280, "int4", (64, 64, 2)),
        (64, 2 * WAVE, 1280, "int4", (0, 0, 0)),
        (64, 2 * WAVE + 64, 1216, "int4", (0, 0, 0)),  # K is too short to be shared
        (64, 2 * WAVE + WAVE // 2 + 64, 4096, "int4", (0, 0, 0)),  # more than half a wave
        (64, WAVE + 64, 4096, "int4", (0, 0, 0)),
        *((64, 36864, 4096, format, (0, 0, 0)) for format in ("dense", "fp8_fp8", "int8")),
    ],
)
def test_a_part_of_a_wave_is_left_to_smaller_tiles(
    M: int, N: int, K: int, format: str, expected: tuple[int, int, int]
) -> None:
    """Two whole waves of 128 weight rows or more, behind which at most half of one is left."""
    assert rest(M, N, K, format) == expected
    if expected[0] > 0:
        assert tile(M, N, K, format) == (128, 1)
        assert -(-expected[0] // expected[1]) * expected[2] <= SMS
        gated = rest(M, N, K, format, activation="silu_mul")
        assert gated == (expected[0] // 2, *expected[1:])
        assert rest(M, N, K, format, invariant=True) == (0, 0, 0)


# ---- Products -----------------------------------------------------------------------------------


def operands(M: int, N: int, K: int, format: str) -> tuple[Tensor, Any, dict[str, Any], Tensor]:
    """x, the op's product of it, its scale of x, and the exact product in float64."""
    generator = torch.Generator("cuda").manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, weight = normal(M, K), normal(N, K) * K**-0.5
    options: dict[str, Any] = {}
    values = x.double()
    if format in ("int4_fp8", "fp8_fp8"):
        options["x_scale"] = normal(M).float().abs() + 0.5
        x = x.to(torch.float8_e4m3fn)
    elif format == "int8":
        options["x_scale"] = normal(M).float().abs() * 0.01 + 0.01
        x = (x * 30).to(torch.int8)
    if "x_scale" in options:
        values = x.double() * options["x_scale"].double()[:, None]
    if format == "dense":
        return x, weight, options, values @ weight.double().T
    if format.startswith("int4"):
        packed = ops.pack_int4(weight)
        by = packed.scales.double().repeat_interleave(packed.group, 0).T
        return x, packed, options, values @ ((packed.quantized().double() - 8) * by).T
    if format == "fp8_blocks":
        codes, scale = ops.quantize_fp8(weight, "block")
        scale *= 1 + torch.rand(scale.shape, generator=generator, device="cuda")
        exact = values @ (codes.double() * by_weight(scale, N, K).double()).T
        return x, (codes, scale), options, exact
    scale = normal(N).float().abs() * 0.01 + 0.01
    codes = (weight * 100).to(torch.float8_e4m3fn if format != "int8" else torch.int8)
    return x, (codes, scale), options, values @ (codes.double() * scale.double()[:, None]).T


def by_weight(scale: Tensor, N: int, K: int) -> Tensor:
    """A scale for each weight, of those of rows or of blocks."""
    if scale.dim() == 1:
        return scale[:, None]
    return scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]


def multiply(format: str, x: Tensor, weight: Any, **options: Any) -> Tensor:
    if format == "dense":
        return ops.linear(x, weight, **options)
    if format.startswith("int4"):
        return ops.int4_linear(x, weight, **options)
    call = ops.int8_linear if format == "int8" else ops.fp8_linear
    return call(x, *weight, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize(
    ("M", "N", "K", "format"),
    [
        *((16, 8576, 640, format) for format in ("dense", "fp8_fp8", "int8")),  # 72 rows, 80 gated
        *((40, 9600, 1088, format) for format in ("dense", "fp8_fp8", "int8")),  # 80; a tail of K
        *((13, 4608, 3584, format) for format in ("dense", "fp8_fp8", "int8")),  # 48; 72, K cut
        *((64, 3616, 2048, format) for format in ("dense", "fp8_fp8", "int8")),
        (16, 128, 2048, "dense"),  # 48 by turns, K cut, rows behind N
        (32, 3584, 18944, "fp8_fp8"),  # 56 so
        *((9, 17024, 640, format) for format in EXPANDED),  # three warpgroups
        *((40, 17056, 1152, format) for format in EXPANDED),
        (9, 27008, 1088, "fp8_blocks"),  # wide tiles
        (57, 18720, 400, "fp8_blocks"),
        *((64, 13856, 2176, format) for format in ("fp8", "fp8_blocks")),  # whose K is cut in two
        (35, 6720, 4112, "fp8_blocks"),  # in four
        *((M, 4096, 4240, "fp8_blocks") for M in (33, 64)),  # scaled sums of 64 rows
        (48, 5120, 10240, "int4"),  # and K cut
        (57, 4640, 2560, "int4"),  # 48 by turns, of more than 32 rows of x
        (32, 5120, 10240, "int4_fp8"),
        *((100, 2048, 2112, format) for format in ("fp8_fp8", "int8")),  # more rows; K cut
        *((72, 5600, 1088, format) for format in ("fp8_fp8", "int8")),  # 128; tails of K and N
        *((190, 4096, 656, format) for format in ("fp8_fp8", "int8")),
    ],
)
def test_products_of_every_tile(
    M: int, N: int, K: int, format: str, activation: str | None
) -> None:
    """Beside float64 on the weight's own values, with a residual; rows that end within a tile."""
    x, weight, options, exact = operands(M, N, K, format)
    residual = torch.randn(M, N if activation is None else N // 2, device="cuda")
    residual = residual.to(torch.bfloat16)
    if activation is not None:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    exact = exact + residual.double()
    ours = multiply(format, x, weight, activation=activation, residual=residual, **options)
    assert ours.shape == residual.shape and ours.dtype == torch.bfloat16
    assert (ours.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("M", [9, 16, 17, 32])
@pytest.mark.parametrize(
    ("N", "K", "format", "rows"),
    [
        *((9728, 1280, format, 80) for format in EXPANDED),  # two units
        *((13856, 1408, format, 112) for format in ("int4", "int4_fp8")),  # stages of odd count
        *((13856, 1344, format, 112) for format in ("fp8", "fp8_blocks")),  # a tail of K
        *((17920, 1408, format, 144) for format in EXPANDED),  # three
        *((18912, 1408, format, 160) for format in ("int4", "int4_fp8")),
        *((18912, 1344, format, 160) for format in ("fp8", "fp8_blocks")),
        *((28640, 1280, format, 224) for format in ("int4_fp8", "fp8")),  # four; rows behind N
        (33024, 1280, "int4_fp8", 256),
        *((5120, 13824, format, 176) for format in ("fp8", "fp8_blocks")),  # K cut
        (8192, 16384, "int4_fp8", 128),
    ],
)
def test_products_by_turns(M: int, N: int, K: int, format: str, rows: int) -> None:
    """Three warpgroups take stages of the tile by turns; its last unit of 64 rows is not whole."""
    chosen = plan(M, N, K, format)
    assert chosen["shares_stages"] == 1 and chosen["tile_cols"] == rows
    x, weight, options, exact = operands(M, N, K, format)
    bias = torch.randn(N, device="cuda").to(torch.bfloat16)
    ours = multiply(format, x, weight, bias=bias, **options)
    exact = exact + bias.double()
    assert (ours.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("cols", [96, WAVE // 4, WAVE // 4 + 64])
@pytest.mark.parametrize("format", EXPANDED)
@pytest.mark.parametrize("M", [9, 32, 57])
def test_products_with_a_rest(M: int, format: str, cols: int, activation: str | None) -> None:
    """Columns on both sides of the border, with a residual and a bias."""
    N, K = 2 * WAVE + cols, 1408 if format.startswith("int4") else 1312
    chosen = rest(M, N, K, format, activation=activation or "none")
    if chosen[0] == 0:
        pytest.skip("three warpgroups by turns fill the SMs")
    x, weight, options, exact = operands(M, N, K, format)
    bias = torch.randn(N, device="cuda").to(torch.bfloat16)
    exact = exact + bias.double()
    if activation is not None:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    residual = torch.randn(exact.shape, device="cuda").to(torch.bfloat16)
    ours = multiply(
        format, x, weight, bias=bias, activation=activation, residual=residual, **options
    )
    border = exact.shape[1] - chosen[0]
    for part in (slice(0, border), slice(border, None)):
        mine, right = ours[:, part].double(), (exact + residual.double())[:, part]
        assert (mine - right).norm() <= 3e-3 * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("M", [16, 64])
def test_a_rest_keeps_its_place_in_a_stream(M: int, ready: bool) -> None:
    """It waits for the kernel that makes x, and what reads y waits for it and those beside it: a
    graph in whose memory x and y are written many times gives the bits of launches one by one."""
    N, K = 3 * WAVE + 64, 4096  # blocks that share K end before those of the last wave
    assert rest(M, N, K, "int4") == (64, 64, 2)
    _, weight, _, _ = operands(1, N, K, "int4")
    norm = torch.ones(N, device="cuda", dtype=torch.bfloat16)
    first = torch.randn(K, K, device="cuda").to(torch.bfloat16) * K**-0.5
    inputs = [torch.randn(M, K, device="cuda").to(torch.bfloat16) for _ in range(16)]

    def steps(pause: bool) -> list[Tensor]:
        outputs = []
        for x in inputs:
            x = ops.linear(x, first, weights_ready=ready)
            if pause:
                torch.cuda.synchronize()
            y = ops.int4_linear(x, weight, weights_ready=ready)
            if pause:
                torch.cuda.synchronize()
            outputs.append(ops.rmsnorm(y, norm, weights_ready=ready))
        return outputs

    apart = steps(pause=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = steps(pause=False)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


# Rows of e4m3 by int4 that tall tiles take, and into how many segments they cut K.
TALL_CODES = [(128, 1536, 18944, 4), (120, 4608, 3584, 3)]


@pytest.mark.parametrize(("M", "N", "K", "segments"), TALL_CODES)
def test_tall_tiles_of_codes_cut_k(M: int, N: int, K: int, segments: int) -> None:
    chosen = plan(M, N, K, "int4_fp8")
    assert (chosen["path"], chosen["tile_rows"]) == ("cluster", 128)
    assert chosen["segments"] == segments


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N", "K"), [shape[:3] for shape in TALL_CODES])
def test_sums_of_tall_tiles_have_room(M: int, N: int, K: int) -> None:
    """128 rows of int4 by e4m3, whose sums half of an SM's shared memory does not hold."""
    x, weight, options, exact = operands(M, N, K, "int4_fp8")
    ours = multiply("int4_fp8", x, weight, **options)
    assert (ours.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 192, -1])
@pytest.mark.parametrize(
    ("M", "N", "K", "rows"),
    [
        (16, 18944, 1536, 160),  # by turns
        (16, 4096, 1536, 64),  # K cut
        (64, 6112, 3840, 48),  # short; of gates the last tiles are not whole
        (150, 4064, 1152, 64),  # more rows, where groups are whole
    ],
)
def test_groups_of_every_size(
    M: int, N: int, K: int, rows: int, group: int, zero_point: bool, activation: str | None
) -> None:
    """Scales that come with a stage, and those of all stages at once; of gates and ups."""
    assert tile(M, N, K, "int4")[0] == rows
    generator = torch.Generator("cuda").manual_seed(11)
    x, weight = (
        torch.randn(rows, K, generator=generator, device="cuda").to(torch.bfloat16)
        for rows in (M, N)
    )
    packed = ops.pack_int4(weight * K**-0.5, group, zero_point)
    exact = x.double() @ packed.dequantize().double().T
    if activation is not None:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    ours = ops.int4_linear(x, packed, activation=activation)
    assert (ours.double() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("M", "N", "K", "format"),
    [
        (16, 8576, 640, "fp8_fp8"),
        (33, 8576, 1088, "int8"),
        (16, 8576, 256, "dense"),
        (16, 128, 2048, "dense"),
        (16, 17024, 256, "int4"),
        (33, 17024, 1152, "int4_fp8"),
        (33, 17024, 256, "fp8"),
        (16, 9728, 1280, "int4"),  # by turns
        (32, 9728, 1280, "int4_fp8"),
        (64, 4640, 2560, "int4"),
        (16, 18912, 1280, "fp8"),
        (16, 18912, 1280, "fp8_blocks"),
        (9, 27008, 256, "fp8_blocks"),  # wide
        (35, 6720, 4112, "fp8_blocks"),  # and K cut
    ],
)
def test_short_tiles_stay_in_shared_memory(M: int, N: int, K: int, format: str) -> None:
    """The last operand of a tile that ends within a warpgroup's 64 rows."""
    assert tile(M, N, K, format)[0] % 64 != 0 or tile(M, N, K, format)[0] == 192
    x, weight, options, exact = operands(M, N, K, format)
    ours = multiply(format, x, weight, **options)
    assert (ours.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("format", ["fp8", "fp8_blocks"])
@pytest.mark.parametrize(("M", "N", "K"), [(41, 28672, 592), (35, 13440, 4112)])  # whole; K cut
def test_terms_of_x_take_any_value(
    M: int, N: int, K: int, format: str, activation: str | None
) -> None:
    """Infinities, NaN, rows of zeros, and magnitudes from one end of bfloat16 to the other."""
    assert plan(M, N, K, format)["splits_x"] == 1
    x, (codes, scale), _, _ = operands(M, N, K, format)
    x[0], x[1] = 0.0, x[1] * 1e-30
    x[2, K // 2 :] *= 2.0**20  # units differ along a row
    x[3] = 1e30 * x[3].sign() * (torch.arange(K, device="cuda") == K - 1)
    x[8, 0], x[9, 130], x[10, K - 1] = torch.inf, -torch.inf, torch.inf
    x[11, 5], x[11, K - 2] = torch.inf, -torch.inf
    x[12, K - 1], x[13, :2] = torch.nan, torch.tensor([torch.nan, torch.inf], device="cuda")
    x[M - 1, 1] = torch.inf
    values = codes.double()
    values *= by_weight(scale, N, K).double()
    exact = x.double() @ values.T
    ours = multiply(format, x, (codes, scale), activation=activation)
    if activation is not None:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    exact = exact.to(torch.bfloat16).double()  # what is beyond it is infinite
    assert torch.equal(ours.isnan(), exact.isnan())
    assert torch.equal(ours.isposinf(), exact.isposinf())
    assert torch.equal(ours.isneginf(), exact.isneginf())
    for row, wanted in zip(ours.double(), exact):
        finite = wanted.isfinite()
        error = (row[finite] - wanted[finite]).norm()
        assert error <= 4e-3 * wanted[finite].norm() + 1e-37


# More than few rows of dense weights, whose tiles are few.
ENDS = [
    (65, 3072, 768),
    (72, 2048, 2048),  # two blocks a tile
    (100, 4304, 1152),
    (128, 2048, 8192),  # three
    (90, 6144, 4096),  # tiles of 112 weight rows
    (128, 4096, 4096),
    (97, 4072, 2056),  # the last tile and the last stage are not whole
    (128, 96, 64),
    (129, 3072, 768),  # two tiles of x, of 72 rows
    (184, 3080, 1032),  # of 96
    (200, 1024, 4096),  # three blocks a tile
    (224, 4072, 2056),
    (320, 2048, 2048),  # three tiles of x
    (443, 768, 1096),  # four, two blocks each
]


@pytest.mark.parametrize(("M", "N", "K"), ENDS)
def test_who_ends_few_dense_tiles(M: int, N: int, K: int) -> None:
    for activation in ("gelu", "silu") if N // 2 % 16 else ("gelu", "silu_mul"):
        assert choice_of(M, N, K, "dense", activation=activation)["path"] == "cluster"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize(
    "activation", ["gelu", "gelu_tanh", "silu", "relu", "silu_mul", "gelu_mul"]
)
@pytest.mark.parametrize(("M", "N", "K"), ENDS)
def test_ends_of_few_dense_tiles(
    M: int, N: int, K: int, activation: str, residual: bool, dtype: torch.dtype
) -> None:
    """Bias, activation and residual, against float64: nothing but y is rounded."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    x, weight, bias = normal(M, K), normal(N, K) * K**-0.5, normal(N)
    wanted = x.double() @ weight.double().T + bias.double()
    functions = {
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }
    if activation.endswith("_mul"):
        gate, up = wanted.chunk(2, -1)
        wanted = functions[activation.removesuffix("_mul")](gate) * up
    else:
        wanted = functions[activation](wanted)
    added = normal(*wanted.shape) if residual else None
    out = ops.linear(x, weight, bias, activation=activation, residual=added)
    if added is not None:
        wanted += added.double()
    eps = torch.finfo(dtype).eps
    assert (out.double() - wanted).norm() < 0.4 * eps * wanted.norm()
