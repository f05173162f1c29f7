"""Products of experts: against each expert's own product, where Hopper's kernels have edges."""

import pytest
import torch

import ridgeline
from gemm_choice import TALL_SHAPE, TALL_TILES, WIDE
from op_table.grouped import mxfp4_of
from ridgeline import ops
from ridgeline.roofline import op_cost

KINDS = ["dense", "fp8", "fp8_fp8", "fp8_blocks", "fp8_fp8_blocks", "int4", "fp4"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def blocks_of(weight: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of the rows of all experts and scales of blocks, which differ by powers of two."""
    pairs = [ops.quantize_fp8(part, "block") for part in weight.chunk(experts)]
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in pairs]).view(pairs[0][0].dtype)
    scale = torch.stack([scale for _, scale in pairs])
    places = torch.arange(scale.numel(), device=scale.device).view_as(scale)
    return codes, scale * 2.0 ** -(places * 7 % 5 % 3)


def expanded(scale: torch.Tensor, N: int, K: int) -> torch.Tensor:
    """``[experts, N, K]`` of scales of blocks."""
    return scale.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)[..., :K]


def check(kind: str, counts: list[int], N: int, K: int, gated: bool, device: str) -> None:
    """`counts`: the rows of each expert. Rows are gathered; three belong to no expert."""
    experts, M = len(counts), sum(counts)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts * N, K, generator=generator) / K**0.5
    x = torch.randn(M, K, generator=generator)
    rows = torch.randperm(M, generator=generator).to(device, torch.int32)
    rows = torch.cat([rows, rows.new_zeros(3)])
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    weight, x = weight.to(device, torch.bfloat16), x.to(device, torch.bfloat16)
    activation = "silu_mul" if gated else None
    if device == "cuda":  # memory that the op may get: NaN, not the rows of an op before
        torch.full((rows.numel() * K * 2 + 4096,), 255, dtype=torch.uint8, device=device)
    if kind == "dense":
        stacked, dense, meant = weight.view(experts, N, K), weight.float(), x.float()
        out = ops.grouped_linear(x, stacked, offsets, rows=rows, activation=activation)
    elif kind.startswith("int4"):
        group = 32 if kind == "int4_groups" else 128
        packed = ops.pack_int4(weight, group, zero_point=kind == "int4_zeros")
        dense, meant = packed.dequantize().float(), x.float()
        of_experts = ops.Int4Experts.from_rows(packed, experts)
        out = ops.grouped_int4_linear(x, of_experts, offsets, rows=rows, activation=activation)
    elif kind == "fp4":
        fp4 = ops.Fp4Experts.from_mxfp4(*(t.to(device) for t in mxfp4_of(experts, N, K, generator)))
        dense, meant = fp4.dequantize().float(), x.float()
        out = ops.grouped_fp4_linear(x, fp4, offsets, rows=rows, activation=activation)
    else:
        blocks = "blocks" in kind
        codes, scale = blocks_of(weight, experts) if blocks else ops.quantize_fp8(weight, "row")
        whole = expanded(scale, N, K).view(-1, K) if blocks else scale.view(-1, 1)
        dense, meant, x_scale = codes.float() * whole, x.float(), None
        if kind.startswith("fp8_fp8"):
            x, x_scale = ops.quantize_fp8(x, "group" if blocks else "row")
            wide = x_scale.repeat_interleave(128, 1)[:, :K] if blocks else x_scale.view(-1, 1)
            meant = x.float() * wide
        out = ops.grouped_fp8_linear(
            x,
            codes.view(experts, N, K),
            scale if blocks else scale.view(experts, N),
            offsets,
            rows=rows,
            x_scale=x_scale,
            out_dtype=torch.bfloat16,
            activation=activation,
        )
    expected = [
        meant[rows[start:end].long()] @ of_expert.T
        for start, end, of_expert in zip(
            offsets[:-1].tolist(), offsets[1:].tolist(), dense.view(experts, N, K), strict=True
        )
    ]
    sums = torch.cat(expected)
    if gated:
        gate, up = sums.chunk(2, dim=-1)
        sums = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out[:M].float(), sums, rtol=2e-2, atol=2e-2)
    assert not out[M:].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_end_anywhere_in_a_tile(kind: str, gated: bool, device: str) -> None:
    """y goes 32 rows at a time, or 64 of gated outputs; the last tile of columns is not whole."""
    check(
        kind, [300, 0, 1, 31, 32, 33, 63, 64, 65, 129, 255, 256, 257, 97], 288, 384, gated, device
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [9, 128, 150])
def test_few_rows_of_any_experts(experts: int, kind: str, device: str) -> None:
    """Up to 128 experts of a tile at most each are found in registers, others by a longer way."""
    for crowd in (1, 17):  # one tile of an expert, or several
        counts = [e % 3 % 2 for e in range(experts)]
        counts[experts // 2] = crowd
        check(kind, counts, 64, 2048, False, device)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [640, 1152, 1536, 4608, 8192])
def test_chunks_of_few_rows_go_round_the_warps(K: int, kind: str, gated: bool) -> None:
    """Strips of 2 to 64 chunks, fewer than the warps that ask for them and more; blocks have two or
    three, of one expert and of the next."""
    check(kind, [1, 0, 1, 1, 1, 0, 0, 1], 1056, K, gated, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks", "int4", "fp4"])
@pytest.mark.parametrize("mean", [9, 16, 22, 30, 44, 60, 75, 120])
def test_some_rows_meet_tiles_of_as_many(mean: int, kind: str, gated: bool, device: str) -> None:
    """Tiles of 16, 24, 32, 48, 64, 80 and 88 rows; one expert has more rows than its tile."""
    check(kind, [2 * mean, 0, mean + 1, mean - 1], 288, 384, gated, device)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "mean", "rows"), TALL_TILES)
def test_tall_tiles_of_four_bits(kind: str, mean: int, rows: int, gated: bool) -> None:
    """One expert has more rows than its tile; the last tile of columns is not whole."""
    N, K = TALL_SHAPE
    check(kind, [2 * mean, 0, mean + 1, mean - 1], N, K, gated, "cuda")
    check(kind, [rows, rows + 1, 1, 4 * mean - 2 * rows - 2], N, K, gated, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("N", "K", "counts", "gathered"), WIDE)
def test_wide_tiles_of_dense_weights(
    N: int, K: int, counts: list[int], gathered: bool, gated: bool, dtype: torch.dtype
) -> None:
    """The last tile of columns is not whole, and rows behind the last expert's are NaN."""
    experts, M = len(counts), sum(counts)
    draw = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(experts, N, K, device="cuda", generator=draw) / K**0.5
    weight, bias = (
        weight.to(dtype),
        torch.randn(experts, N, device="cuda", generator=draw).to(dtype),
    )
    x = torch.randn(M + 32, K, device="cuda", generator=draw).to(dtype)
    x[M:] = torch.nan
    order = torch.arange(M, device="cuda")
    if gathered:
        order = torch.randperm(M, device="cuda", generator=draw)
    rows = order.int() if gathered else None
    offsets = torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32)
    activation = "silu_mul" if gated else None
    out = ops.grouped_linear(
        x if gathered else x[:M], weight, offsets, rows=rows, bias=bias, activation=activation
    )
    for e, part in enumerate(out.split(counts)):
        start = int(offsets[e])
        sums = x[order[start : start + counts[e]]].float() @ weight[e].float().T + bias[e].float()
        if gated:
            gate, up = sums.chunk(2, dim=-1)
            sums = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(part.float(), sums, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("mean", [4, 22, 70])
@pytest.mark.parametrize(  # whole units of 128 columns, and parts of one
    "K", [1152, pytest.param(400, marks=pytest.mark.sanitize), 48]
)
def test_rows_in_two_terms_keep_their_bits(
    K: int, mean: int, blocks: bool, gathered: bool, device: str
) -> None:
    """Rows of magnitudes far apart, one of zeros, and in each values a thousandth of its largest. A
    value that is not finite stays in its row."""
    N, counts = 288, [2 * mean, 0, mean + 1, mean - 1]
    M, experts = sum(counts), len(counts)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(experts * N, K, generator=generator) / K**0.5).to(device, torch.bfloat16)
    codes, scale = blocks_of(weight, experts) if blocks else ops.quantize_fp8(weight, "row")
    wide = expanded(scale, N, K) if blocks else scale.view(experts, N, 1)
    codes = codes.view(experts, N, K)
    dense = codes.double() * wide.double()
    x = torch.randn(M, K, generator=generator) * 2.0 ** torch.randint(
        -60, 60, (M, 1), generator=generator
    )
    x[:, ::2] /= 1000
    x[3] = 0
    x = x.to(device, torch.bfloat16)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    order = torch.randperm(M, generator=generator) if gathered else torch.arange(M)
    rows = order.to(device, torch.int32) if gathered else None
    chosen = torch.arange(experts).repeat_interleave(torch.tensor(counts))
    scale = scale if blocks else scale.view(experts, N)
    out = ops.grouped_fp8_linear(x, codes, scale, offsets, rows=rows)
    expected = torch.stack([dense[chosen[s]] @ x[order[s]].double() for s in range(M)])
    error = (out.double() - expected).norm(dim=1)
    assert (error <= 4e-3 * expected.norm(dim=1)).all()
    last = x[5, K - 1].clone()
    for value in (torch.inf, torch.nan):
        x[5, K - 1] = value
        broken = ops.grouped_fp8_linear(x, codes, scale, offsets, rows=rows)
        bad = int((order == 5).nonzero())
        others = torch.arange(M) != bad
        assert torch.equal(broken[others], out[others])
        assert not broken[bad][dense[chosen[bad], :, K - 1] != 0].isfinite().any()
    x[5, K - 1] = last
    assert torch.equal(ops.grouped_fp8_linear(x, codes, scale, offsets, rows=rows), out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("group", [64, 128])  # columns of a scale: of x, 128 have a sum
@pytest.mark.parametrize("mean", [9, 16, 22])
@pytest.mark.parametrize("K", [256, 1152, 384])
def test_zero_points_of_int4_meet_sums_of_rows(
    K: int, mean: int, group: int, gathered: bool, device: str
) -> None:
    """Rows whose mean is many times what they differ by: what is left of products and zero points
    is 1 of 30 of them, and may not lose the bits of one bfloat16. A value that is not finite stays
    in its row."""
    N, counts = 288, [2 * mean, 0, mean + 1, mean - 1]
    M = sum(counts)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(counts) * N, K, generator=generator) / K**0.5
    x = (64 + torch.randn(M, K, generator=generator)).to(device, torch.bfloat16)
    packed = ops.pack_int4(weight.to(device, torch.bfloat16), group)
    of_experts = ops.Int4Experts.from_rows(packed, len(counts))
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    order = torch.randperm(M, generator=generator) if gathered else torch.arange(M)
    rows = order.to(device, torch.int32) if gathered else None
    dense = packed.dequantize().double().view(len(counts), N, K)
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    of_rows = [x[order[s]].double() @ dense[chosen[s]].T for s in range(M)]
    out = ops.grouped_int4_linear(x, of_experts, offsets, rows=rows)
    expected = torch.stack(of_rows)
    assert (out - expected).norm() < 4e-3 * expected.norm()
    x[5, K - 1] = torch.inf
    broken = ops.grouped_int4_linear(x, of_experts, offsets, rows=rows)
    bad = int((order == 5).nonzero())
    others = torch.arange(M) != bad
    assert torch.equal(broken[others], out[others])
    assert not broken[bad][dense[chosen[bad], :, K - 1] != 0].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1152, 128])  # a row of 16-bit x is two units, or a part of one
def test_rows_are_gathered_while_others_are_multiplied(
    K: int, kind: str, gated: bool, device: str
) -> None:
    """256 rows an expert or more in the mean: experts of full tiles first, and their rows of x."""
    check(kind, [513, 0, 700, 257, 1, 330, 64, 511], 288, K, gated, device)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1, 2])  # of the rows: in order by a warp of each block, or ahead
@pytest.mark.parametrize("K", [1152, 384, 128])  # a tile has more stages than a ring, or fewer
def test_tiles_of_a_block_follow_each_other(K: int, share: int, kind: str, gated: bool) -> None:
    """Several tiles a block, of one to four pieces of 64 rows, found while others are brought."""
    counts = [513, 0, 700, 257, 1, 330, 65, 511, 192, 140, 385]
    check(kind, [count // share for count in counts], 2112, K, gated, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("N", [6400, 8320])  # rows in order by a warp of each block, or ahead
def test_tall_tiles_of_many_rows(N: int, gated: bool) -> None:
    """500 rows an expert in the mean: where rows are put in order ahead, tiles have up to 272."""
    counts = [513, 0, 272, 273, 528, 544, 545, 816, 817, 257, 935]
    check("fp8_fp8", counts, N, 384, gated, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", [[1, 0, 1, 1, 0, 1], [1, 0, 2, 1, 0, 0]])
@pytest.mark.parametrize("K", [2048, 1152])
def test_one_token_of_int4_experts(K: int, counts: list[int], device: str) -> None:
    """Its row of x is all rows, and stays where it is unless an expert has it twice. A value that
    is not finite is in each row."""
    N, M = 288, sum(counts)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(counts) * N, K, generator=generator) / K**0.5
    x = torch.randn(1, K, generator=generator).to(device, torch.bfloat16)
    packed = ops.pack_int4(weight.to(device, torch.bfloat16))
    of_experts = ops.Int4Experts.from_rows(packed, len(counts))
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    rows = torch.zeros(M, device=device, dtype=torch.int32)
    dense = packed.dequantize().float().view(len(counts), N, K)
    chosen = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    out = ops.grouped_int4_linear(x, of_experts, offsets, rows=rows)
    torch.testing.assert_close(out.float(), (dense[chosen] @ x[0].float()), rtol=2e-2, atol=2e-2)
    x[0, K - 1] = torch.inf
    out = ops.grouped_int4_linear(x, of_experts, offsets, rows=rows)
    of_last = dense[chosen, :, K - 1]
    assert torch.equal(out.float().isnan(), of_last == 0)
    assert torch.equal(out[of_last != 0].float().sign(), of_last[of_last != 0].sign())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(  # rows of a token, or of so many tokens
    "tokens", [1, pytest.param(5, marks=pytest.mark.sanitize), 24, 70, 300]
)
@pytest.mark.parametrize(  # whole chunks of columns, gpt-oss's columns, and less than a block
    ("N", "K"), [(576, 1024), (288, 2880), pytest.param(96, 544, marks=pytest.mark.sanitize)]
)
def test_four_bit_floats_are_not_rounded(
    N: int,
    K: int,
    tokens: int,
    biased: bool,
    activation: str | None,
    invariant: bool,
    device: str,
) -> None:
    """Four experts a token of eight, gathered or, of rows of their own, in place: the error from
    float64 is that of one bfloat16. Rows of no expert are zero."""
    experts, each = 8, 4
    draw = torch.Generator().manual_seed(tokens)
    fp4 = ops.Fp4Experts.from_mxfp4(*(t.to(device) for t in mxfp4_of(experts, N, K, draw)))
    dense = fp4.dequantize().double()
    bias = torch.randn(experts, N, generator=draw).to(device, torch.bfloat16) if biased else None
    choices = torch.stack([torch.randperm(experts, generator=draw)[:each] for _ in range(tokens)])
    order = choices.flatten().argsort(stable=True)
    counts = torch.bincount(choices.flatten(), minlength=experts)
    offsets = torch.cat([counts.new_zeros(1), counts]).cumsum(0).to(device, torch.int32)
    rows = torch.cat([order // each, torch.zeros(2)]).to(device, torch.int32)  # two of no expert
    x = torch.randn(tokens, K, generator=draw).to(device, torch.bfloat16)
    chosen = torch.arange(experts).repeat_interleave(counts).to(device)
    sums = torch.empty(len(chosen), N, dtype=torch.float64, device=device)
    for e in range(experts):
        sums[chosen == e] = x.double()[rows[: len(chosen)].long()][chosen == e] @ dense[e].T
    if bias is not None:
        sums += bias.double()[chosen]
    if activation is not None:
        gate, up = sums.chunk(2, -1)
        sums = torch.nn.functional.silu(gate) * up
    options = {"bias": bias, "activation": activation, "batch_invariant": invariant}
    in_place = x[rows.long()]
    for of_x, of_rows in ((x, rows), (in_place, None)):
        out = ops.grouped_fp4_linear(of_x, fp4, offsets, rows=of_rows, **options)
        assert not out[len(chosen) :].any()
        error = (out[: len(chosen)].double() - sums).norm() / sums.norm()
        assert error < 2.5e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize("power", [-126, -125, 0, 1])
def test_scales_of_four_bit_floats_reach_both_ends(power: int, tokens: int, device: str) -> None:
    """Every code by the smallest scales, whose product with the least is no normal number, and by
    the largest: each row of x has one value, so that the output is a weight times it."""
    N, K = 96, 512
    codes = torch.arange(N * K, dtype=torch.int64).view(1, N, K // 32, 32) * 7 // 3 % 16
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).to(device)
    scales = torch.full(blocks.shape[:3], 127 + power, dtype=torch.uint8, device=device)
    fp4 = ops.Fp4Experts.from_mxfp4(blocks, scales)
    places = torch.arange(tokens) * 37 % K
    x = torch.zeros(tokens, K)
    x[torch.arange(tokens), places] = 2.0 ** (-power // 2)
    x = x.to(device, torch.bfloat16)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    expected = fp4.dequantize()[0].double()[:, places].T * 2.0 ** (-power // 2)
    for invariant in (False, True):
        out = ops.grouped_fp4_linear(x, fp4, offsets, batch_invariant=invariant)
        assert torch.equal(out.double(), expected)


@pytest.mark.gpu
def test_gathered_rows_follow_what_the_kernel_ahead_writes() -> None:
    """The product starts while its rows are put in order: by then their choice has to be there."""
    experts, tokens, K, N, turns = 8, 32, 512, 1024, 6
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts * N, K, generator=generator).to("cuda", torch.bfloat16)
    packed = ops.Int4Experts.from_rows(ops.pack_int4(weight), experts)
    cuts = torch.randint(0, 2 * tokens, (turns, experts + 1), generator=generator).sort().values
    cuts[:, 0], cuts[:, -1] = 0, 2 * tokens
    chosen = torch.randint(0, tokens, (turns, 2 * tokens), generator=generator)
    of_turns = [torch.randn(tokens, K, generator=generator).bfloat16() for _ in range(turns)]
    inputs = [
        [t.cuda() for t in (x, offsets.int(), rows.int())]
        for x, offsets, rows in zip(of_turns, cuts, chosen, strict=True)
    ]
    expected = []
    for x, offsets, rows in inputs:
        torch.cuda.synchronize()
        expected.append(ops.grouped_int4_linear(x, packed, offsets, rows=rows))
    written = [torch.zeros_like(t) for t in inputs[0]]
    for _ in range(3):
        for of_turn, wanted in zip(inputs, expected, strict=True):
            for to, new in zip(written, of_turn, strict=True):
                to.copy_(new)
            x, offsets, rows = written
            out = ops.grouped_int4_linear(x, packed, offsets, rows=rows)
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["fp8_blocks", "fp8_fp8_blocks"])
@pytest.mark.parametrize(("N", "K"), [(416, 1104), (72, 80), (1536, 48)])
@pytest.mark.parametrize("rows", [1, 12, 30, 70, 150])
def test_last_blocks_of_scales_are_parts(
    rows: int, N: int, K: int, kind: str, gated: bool, device: str
) -> None:
    """Gates end within a block; 72 rows are no whole strips."""
    check(kind, [rows, 0, rows, rows + 1], N, K, gated, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("N", "gated"),
    [(400, False), (512, True), (768, True), pytest.param(256, True, marks=pytest.mark.sanitize)],
)
@pytest.mark.parametrize("K", [1040, pytest.param(784, marks=pytest.mark.sanitize), 112])
@pytest.mark.parametrize(  # rows are put in order ahead, or, of the last, meanwhile
    "counts", [[300, 0, 30, 1, 70, 140], [64, 0, 9, 1, 16, 17], [513, 0, 300]]
)
def test_scales_of_columns_and_of_blocks(
    counts: list[int], N: int, K: int, gated: bool, device: str
) -> None:
    """Tiles of one piece of 64 rows or two, of which the second is a part; stages fewer than a ring
    has, and more."""
    check("fp8_fp8_blocks", counts, N, K, gated, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_columns_with_bias(
    dtype: torch.dtype, activation: str | None, device: str
) -> None:
    """Values that are not finite stay in their rows; the others' bits are as without them."""
    counts, N, K = [150, 3, 64, 0, 81], 768, 400
    experts, M = len(counts), sum(counts)
    draw = torch.Generator().manual_seed(1)
    weight = (torch.randn(experts * N, K, generator=draw) / K**0.5).to(device, torch.bfloat16)
    codes, scale = blocks_of(weight, experts)
    codes = codes.view(experts, N, K)
    bias = torch.randn(experts, N, generator=draw).to(device, dtype)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    x, x_scale = ops.quantize_fp8(torch.randn(M, K, generator=draw).to(device, dtype), "group")

    def product() -> torch.Tensor:
        return ops.grouped_fp8_linear(
            x, codes, scale, offsets, x_scale=x_scale, bias=bias, out_dtype=dtype,
            activation=activation,
        )  # fmt: skip

    out = product()
    dense = codes.double() * expanded(scale, N, K).double()
    meant = x.double() * x_scale.double().repeat_interleave(128, 1)[:, :K]
    expert = torch.arange(experts).repeat_interleave(torch.tensor(counts)).to(device)
    sums = torch.einsum("mk,mnk->mn", meant, dense[expert]) + bias.double()[expert]
    if activation:
        gate, up = sums.chunk(2, dim=-1)
        sums = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), sums, rtol=1e-2, atol=1e-2)

    bad = torch.tensor([0, 149, 151, 160, M - 1], device=device)
    x[bad[0], K - 1], x_scale[bad[1], 3] = torch.nan, torch.inf
    x_scale[bad[2:], 0] = torch.nan
    broken, kept = product(), torch.ones(M, dtype=torch.bool, device=device)
    kept[bad] = False
    assert torch.equal(broken[kept], out[kept])
    assert not broken[bad].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("counts", "gathered", "kernels"),
    [
        # Tiles whose rows both warpgroups have half of, beside whole ones, and rows of no expert.
        ([150, 3, 64, 0, 81, 65, 1], True, 2),
        pytest.param([64, 0, 9, 1, 16, 17], False, 1, marks=pytest.mark.sanitize),
        ([513, 0, 300], True, 2),  # put in order meanwhile, behind a kernel that clears counts
        ([1, 2, 0, 1], False, 2),  # strips
    ],
)
@pytest.mark.parametrize(("K", "N"), [(400, 768), (1040, 256)])
def test_codes_of_experts_are_those_of_the_output(
    K: int, N: int, counts: list[int], gathered: bool, kernels: int, biased: bool, device: str
) -> None:
    experts, M = len(counts), sum(counts)
    draw = torch.Generator().manual_seed(2)
    weight = (torch.randn(experts * N, K, generator=draw) / K**0.5).to(device, torch.bfloat16)
    codes, scale = blocks_of(weight, experts)
    codes = codes.view(experts, N, K)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    x, x_scale = ops.quantize_fp8(torch.randn(M + 3, K, generator=draw).to(device), "group")
    x[1] = 0.0  # of zeros; scales of every size, and one that is not finite
    x_scale[3:] *= 2.0 ** -(2 * torch.arange(M, device=device) % 70).float().unsqueeze(1)
    x_scale[2, 0] = torch.nan
    options = {
        "x_scale": x_scale,
        "rows": torch.randperm(M + 3, generator=draw).int().to(device) if gathered else None,
        "bias": torch.randn(experts, N, generator=draw).to(device).bfloat16() if biased else None,
        "activation": "silu_mul",
    }
    y, y_scale = ops.grouped_fp8_linear(x, codes, scale, offsets, out_quant="fp8_group", **options)
    expected = ops.quantize_fp8(
        ops.grouped_fp8_linear(x, codes, scale, offsets, **options), "group"
    )
    known = ~expected[1].isnan()
    assert known[:M].any() and not known[:M].all()
    assert torch.equal(y_scale.isnan(), ~known)
    assert torch.equal(y_scale[known], expected[1][known])
    each = known.repeat_interleave(128, 1)
    assert torch.equal(y.view(torch.uint8)[each], expected[0].view(torch.uint8)[each])
    assert not y[M:].view(torch.uint8).any() and bool((y_scale[M:] == 1).all())
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        told = ridgeline.explain(
            "grouped_fp8_linear", x, codes, scale, offsets, out_quant="fp8_group", **options
        )
        assert len(told.kernels) == kernels


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 15, 40, 100])
def test_rows_by_blocks_are_those_of_a_float64_product(
    count: int, dtype: torch.dtype, device: str
) -> None:
    experts, N, K = 5, 320, 1408
    draw = torch.Generator().manual_seed(count)
    weight = (torch.randn(experts * N, K, generator=draw) / K**0.5).to(device, torch.bfloat16)
    codes, scale = blocks_of(weight, experts)
    codes = codes.view(experts, N, K)
    dense = codes.double() * expanded(scale, N, K).double()
    x = torch.randn(experts * count, K, generator=draw).to(device, dtype)
    offsets = torch.arange(experts + 1, dtype=torch.int32, device=device) * count
    expected = torch.einsum("emk,enk->emn", x.double().view(experts, count, K), dense)
    outs = [
        ops.grouped_fp8_linear(x, codes, scale, offsets, batch_invariant=invariant)
        for invariant in (False, True)
    ]
    for out in outs:
        error = (out.double().view_as(expected) - expected).norm() / expected.norm()
        assert error < (1.1e-3 if dtype == torch.float16 else 4e-3)
    few = ops.grouped_fp8_linear(
        x.view(experts, count, K)[:, 0].contiguous(), codes, scale, offsets // count,
        batch_invariant=True,
    )  # fmt: skip
    assert torch.equal(few, outs[1].view(experts, count, N)[:, 0])


def test_codes_cost_products_of_8_bits() -> None:
    x, weight = (torch.zeros(s, dtype=torch.float8_e4m3fn) for s in ((4, 256), (2, 128, 256)))
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    rows = op_cost("grouped_fp8_linear", x, weight, torch.ones(2, 128), offsets)
    blocks = op_cost("grouped_fp8_linear", x, weight, torch.ones(2, 1, 2), offsets)
    wide = op_cost("grouped_fp8_linear", x.to(torch.bfloat16), weight, torch.ones(2, 128), offsets)
    assert (rows.unit, blocks.unit, wide.unit) == ("fp8", "fp8", "bf16")
