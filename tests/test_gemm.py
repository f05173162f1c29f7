"""Matrix products with weights: packing, row independence, and the choice of kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ridgeline
from gemm_choice import choice_of
from op_table.gemm import activate
from op_table.grouped import mxfp4_of
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference_int4(weight: Tensor, group: int, zero_point: bool) -> tuple[Tensor, Tensor]:
    """Integers and values, one element at a time."""
    N, K = weight.shape
    group = K if group == -1 else group
    q, values = torch.empty(N, K, dtype=torch.uint8), torch.empty_like(weight)
    for n in range(N):
        for start in range(0, K, group):
            part = [float(v) for v in weight[n, start : start + group]]
            if zero_point:
                low, high = min(0.0, *part), max(0.0, *part)
                scale = float(torch.tensor((high - low) / 15).to(weight.dtype))
                zero = min(15, max(0, round(-low / scale)))
            else:
                extreme = torch.tensor(max(map(abs, part)) / 7)
                scale, zero = float(extreme.to(weight.dtype)), 8
            for i, value in enumerate(part):
                code = min(15, max(0, round(value / scale) + zero))
                q[n, start + i] = code
                values[n, start + i] = (code - zero) * scale
    return q, values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_pack_int4_equals_a_plain_reference(group: int, zero_point: bool, device: str) -> None:
    weight = torch.randn(19, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, values = reference_int4(weight, group, zero_point)
    packed = ops.pack_int4(weight.to(device), group, zero_point)
    assert torch.equal(packed.quantized().cpu(), q)
    assert torch.equal(packed.dequantize().cpu(), values)


def test_int4_layout_is_the_documented_one() -> None:
    """Nibbles j and j + 4 of word f of lane (g, t): row g + 8 (j % 2), columns 16 f + 2 t + ..."""
    q = torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(2))
    packed = ops.Int4Weight.from_quantized(q, torch.ones(1, 32)).packed
    for n_block, k_block, lane, f in itertools.product(range(2), range(2), range(32), range(4)):
        word = int(packed[n_block, k_block, lane, f]) & 0xFFFFFFFF
        for j, element in itertools.product(range(4), range(2)):
            row = 16 * n_block + lane // 4 + 8 * (j % 2)
            column = 64 * k_block + 16 * f + 2 * (lane % 4) + 8 * (j // 2) + element
            assert word >> (4 * (j + 4 * element)) & 15 == q[row, column]


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (33, 100), (5, 0), (0, 64)])
def test_packing_pads_and_gives_everything_back(shape: tuple[int, int]) -> None:
    q = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    scales = torch.ones(1 if shape[1] else 0, shape[0])
    assert torch.equal(ops.Int4Weight.from_quantized(q, scales).quantized(), q)


def test_activation_order_keeps_the_columns_of_the_weight() -> None:
    generator = torch.Generator().manual_seed(4)
    q = torch.randint(0, 16, (24, 96), generator=generator)
    scales = torch.rand(3, 24, generator=generator) + 0.5
    index = torch.randperm(96, generator=generator) // 32
    weight = ops.Int4Weight.from_quantized(q, scales, group_index=index)
    assert weight.perm is not None
    assert torch.equal(weight.quantized(), q.to(torch.uint8))
    assert torch.equal(weight.dequantize(), (q - 8) * scales[index].t())
    in_order = ops.Int4Weight.from_quantized(q, scales, group_index=torch.arange(96) // 32)
    assert in_order.perm is None


CODES = torch.arange(4 * 64).reshape(4, 64) % 10


def from_codes(**changed: Tensor) -> ops.Int4Weight:
    return ops.Int4Weight.from_quantized(**({"q": CODES, "scales": torch.ones(2, 4)} | changed))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.pack_int4(torch.ones(4, 96), 64), "K divisible by the group 64, got K = 96"),
        (lambda: ops.pack_int4(torch.ones(4, 96), 48), "multiple of 32, got 48"),
        (lambda: ops.pack_int4(torch.ones(4, 96), 0), "multiple of 32, got 0"),
        (lambda: ops.pack_int4(torch.ones(96), 32), r"\[N, K\], got torch.float32 \[96\]"),
        (lambda: ops.pack_int4(torch.ones(4, 64).int(), 32), "floating .* torch.int32"),
        (lambda: from_codes(scales=torch.ones(3, 4)), "K divisible by 3 groups"),
        (lambda: from_codes(scales=torch.ones(0, 4)), "K divisible by 0 groups, got K = 64"),
        (lambda: from_codes(scales=torch.ones(2, 3)), r"scales: expected floating \[groups, 4\]"),
        (lambda: from_codes(scales=torch.ones(2, 4).int()), "scales: .* got torch.int32"),
        (lambda: from_codes(zeros=torch.ones(1, 4).int()), r"zeros: .* \[2, 4\], got \[1, 4\]"),
        (lambda: from_codes(q=CODES > 4), "q: expected integers from 0 to 15, got torch.bool"),
        (lambda: from_codes(q=CODES + 9), "q: expected integers from 0 to 15, got 9 to 18"),
        (lambda: from_codes(q=CODES - 1), "q: expected integers from 0 to 15, got -1 to 8"),
        (lambda: from_codes(q=CODES.float()), "q: expected integers from 0 to 15, got torch.float"),
        (lambda: from_codes(zeros=torch.full((2, 4), 16)), "zeros: expected .* got 16 to 16"),
        (lambda: from_codes(group_index=torch.zeros(64)), "each of 2 groups 32 times"),
        (lambda: from_codes(group_index=torch.arange(64) // 32 - 1), "group_index: .* from -1 on"),
        (lambda: from_codes(group_index=torch.zeros(2, 32)), r"group_index: expected \[64\] .* 32"),
    ],
)
def test_packing_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_zero_point_group_of_one_sign_reaches_its_values(sign: int) -> None:
    """Zero is always in the range: the zero point that would leave it out is none of 0 to 15."""
    weight = sign * (5 + torch.rand(4, 64, generator=torch.Generator().manual_seed(0)))
    actual = ops.pack_int4(weight, 32, zero_point=True).dequantize()
    assert (actual - weight).abs().max() <= 6 / 15 / 2 + 1e-6


def test_a_weight_moves_with_all_its_tensors() -> None:
    index = torch.arange(64).flip(0) // 32
    moved = from_codes(zeros=torch.ones(2, 4).int(), group_index=index).to("meta")
    tensors = (moved.packed, moved.scales, moved.zeros, moved.perm)
    assert all(tensor is not None and tensor.is_meta for tensor in tensors)
    assert (moved.N, moved.K, moved.group) == (4, 64, 32)


@pytest.mark.parametrize(
    ("rows", "experts", "message"),
    [
        (48, 2, "expected 2 experts of a multiple of 16 rows, got 48 rows"),
        (32, 0, "expected 0 experts"),
        (32, 2, "weight.perm: expected None"),
    ],
)
def test_experts_are_cut_between_blocks_of_rows(rows: int, experts: int, message: str) -> None:
    q, index = torch.zeros(rows, 64).int(), torch.arange(64).flip(0) // 32
    weight = ops.Int4Weight.from_quantized(q, torch.ones(2, rows), group_index=index)
    with pytest.raises(ValueError, match=message):
        ops.Int4Experts.from_rows(weight, experts)


def test_packing_refuses_a_group_that_is_no_integer() -> None:
    with pytest.raises(TypeError, match="group_size: expected an integer, got 64.0"):
        ops.pack_int4(torch.ones(4, 64), 64.0)  # type: ignore[arg-type]


def test_a_weight_that_is_not_packed_is_named() -> None:
    x, weight = torch.ones(2, 64), ops.pack_int4(torch.ones(32, 64), 32)
    for dense in (torch.ones(32, 64), None):
        with pytest.raises(TypeError, match="weight: expected an Int4Weight, got (Tensor|None)"):
            ops.int4_linear(x, dense)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight: expected an Int4Experts, got Int4Weight"):
        ops.grouped_int4_linear(x, weight, torch.tensor([0, 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0)])
def test_pack_int4_takes_empty_weights(shape: tuple[int, int]) -> None:
    packed = ops.pack_int4(torch.ones(shape), -1, zero_point=True)
    assert packed.dequantize().shape == shape


@pytest.mark.parametrize("zero_point", [False, True])
def test_packing_keeps_no_graph_of_the_weight(zero_point: bool) -> None:
    """Scales with a history would hold the weight in memory, and ask a backward of the product."""
    weight = torch.randn(16, 64, requires_grad=True)
    packed = ops.pack_int4(weight, 32, zero_point)
    assert packed.scales.grad_fn is None
    assert not ops.int4_linear(torch.randn(2, 64), packed).requires_grad


def test_pack_int4_keeps_nan_in_its_group() -> None:
    weight = torch.ones(3, 128)
    weight[1, 70] = math.nan
    expected = torch.zeros(3, 128, dtype=torch.bool)
    expected[1, 64:] = True
    assert torch.equal(ops.pack_int4(weight, 64).dequantize().isnan(), expected)


def test_the_cpu_checks_a_permutation() -> None:
    weight = ops.pack_int4(torch.randn(16, 64), 32)
    broken = ops.Int4Weight(
        weight.packed, weight.scales, None, torch.full((64,), 64, dtype=torch.int32), 16, 64, 32
    )
    with pytest.raises(ValueError, match=r"weight.perm.*\[0, 64\), got 64 at 0"):
        ops.int4_linear(torch.randn(2, 64), broken)


# ---- A row's bits do not depend on its neighbours ----------------------------------------------


def products(device: str) -> list[tuple[str, Callable[[Tensor], Tensor], int]]:
    """Each weight format with its epilogues, batch-invariant, and its K."""
    generator = torch.Generator().manual_seed(5)
    N, K = 160, 1088
    weight = torch.randn(N, K, generator=generator).bfloat16().to(device)
    bias = torch.randn(N, generator=generator).bfloat16().to(device)
    long = torch.randn(N, 4096, generator=generator).bfloat16().to(device)
    int4 = ops.pack_int4(weight, 64, zero_point=True)
    fp8 = weight.to(torch.float8_e4m3fn)
    int8 = ops.quantize_int8(weight)[0]
    scale = (torch.rand(N, generator=generator) + 0.5).to(device)
    norm = torch.randn(K, generator=generator).bfloat16().to(device)
    return [
        ("dense", lambda x: ops.linear(x, weight, bias, batch_invariant=True), K),
        (
            "dense gated",
            lambda x: ops.linear(x, weight, activation="silu_mul", batch_invariant=True),
            K,
        ),
        (
            "dense, K cut",
            lambda x: ops.linear(x, long, bias, residual=x[:, :N], batch_invariant=True),
            4096,
        ),
        ("dense unaligned", lambda x: ops.linear(x, weight[:, 1:], batch_invariant=True), K - 1),
        ("int4", lambda x: ops.int4_linear(x, int4, bias, batch_invariant=True), K),
        (
            "int4 gated",
            lambda x: ops.int4_linear(x, int4, activation="gelu_mul", batch_invariant=True),
            K,
        ),
        ("fp8", lambda x: ops.fp8_linear(x, fp8, scale, bias, batch_invariant=True), K),
        ("int8", lambda x: ops.int8_linear(x, int8, scale, bias, batch_invariant=True), K),
        ("norm", lambda x: ops.linear(x, weight, norm_weight=norm, batch_invariant=True), K),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(9))
def test_a_row_has_the_same_bits_in_every_batch(index: int, device: str) -> None:
    name, multiply, K = products(device)[index]
    x = torch.randn(300, K, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    whole = multiply(x)
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200):
        assert torch.equal(multiply(x[:rows]), whole[:rows]), f"{name}: first {rows} of 300 rows"
    assert torch.equal(multiply(x[77:78]), whole[77:78]), f"{name}: row 77 alone"


QUANTISED = ["int4", "int4 zeros", "int4 group 32", "int4 column", "int4 act order", "int4 fp8"]
QUANTISED += ["fp8", "fp8 blocks", "fp8 fp8", "fp8 fp8 blocks", "fp8 fp8 groups", "fp8 makes codes"]
QUANTISED += ["int8"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(
    ("N", "K", "epilogue"),
    [
        (4096, 4096, "residual"),  # K is cut
        (9088, 1152, "gated"),  # two blocks an SM
        (1040, 2176, "norm"),
    ],
)
def test_a_quantised_row_has_the_same_bits_in_every_batch(
    N: int, K: int, epilogue: str, kind: str, dtype: torch.dtype
) -> None:
    if kind == "fp8 makes codes" and dtype == torch.float16:
        pytest.skip("as of bfloat16")
    generator = torch.Generator("cuda").manual_seed(8)
    M = 300

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    name, _, variant = kind.partition(" ")
    x, dense, bias = normal(M, K), normal(N, K) * K**-0.5, normal(N)
    options: dict[str, Any] = {"bias": bias, "batch_invariant": True}
    by_row: dict[str, Tensor] = {}  # what has a row for each of x's
    if epilogue == "residual":
        by_row["residual"] = normal(M, N)
    if epilogue == "gated":
        options["activation"] = "silu_mul"
    scale: Tensor | None = None
    if name == "int4":
        group = {"group 32": 32, "column": -1}.get(variant, 128)
        packed = ops.pack_int4(dense, group, zero_point=variant == "zeros")
        if variant == "act order":
            order = torch.randperm(K, generator=generator, device="cuda")
            packed = replace(packed, perm=order.int())
    elif name == "int8":
        codes, scale = ops.quantize_int8(dense)
        x, by_row["x_scale"] = ops.quantize_int8(x)
    else:
        codes = (dense * 50).to(torch.float8_e4m3fn)
        scale = torch.rand(N, generator=generator, device="cuda") * 0.02 + 0.01
        if "blocks" in variant:
            blocks = -(-N // 128), -(-K // 128)
            scale = torch.rand(*blocks, generator=generator, device="cuda") * 0.02 + 0.01
    if variant.startswith("fp8"):
        x = x.to(torch.float8_e4m3fn)
        scales = (M, -(-K // 128)) if "groups" in variant else (M,)
        by_row["x_scale"] = torch.rand(*scales, generator=generator, device="cuda") + 0.5
    if variant == "makes codes":
        options["quantize_x"] = True
    if epilogue == "norm" and x.dtype == dtype and name != "int8":
        options["norm_weight"] = normal(K)
    if x.dtype != dtype and name != "int4":
        options["out_dtype"] = dtype

    def multiply(begin: int, end: int) -> Tensor:
        rows = {key: value[begin:end] for key, value in by_row.items()}
        if name == "int4":
            return ops.int4_linear(x[begin:end], packed, **rows, **options)
        product = ops.int8_linear if name == "int8" else ops.fp8_linear
        assert scale is not None
        return product(x[begin:end], codes, scale, **rows, **options)

    whole = multiply(0, M)
    assert whole.isfinite().all()
    for rows in (*range(1, 67), 95, 96, 97, *range(126, 132), 160, 191, 192, 193, 255, 256, 257):
        assert torch.equal(multiply(0, rows), whole[:rows]), f"first {rows} of {M} rows"
    for begin, end in ((77, 78), (1, 3), (200, 300), (63, 130)):
        assert torch.equal(multiply(begin, end), whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("N", "K", "gated"),
    [
        (28672, 200, True),  # K whole, tiles enough for two warpgroups by turns
        (4096, 4104, False),  # K cut, each tile on an SM of its own
        (12288, 4096, False),  # ... or not
    ],
)
def test_a_row_has_the_same_bits_in_every_kernel(
    dtype: torch.dtype, N: int, K: int, gated: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    x, weight, bias, residual = normal(700, K), normal(N, K), normal(N), normal(700, N)

    def multiply(rows: int) -> Tensor:
        options: dict[str, Any] = {"residual": residual[:rows]}
        if gated:
            options = {"activation": "silu_mul"}
        return ops.linear(x[:rows], weight, bias, batch_invariant=True, **options)

    whole = multiply(700)
    for rows in (1, 33, 64, 65, 96, 97, 128, 129, 193, 256, 257, 384, 512, 513):
        assert torch.equal(multiply(rows), whole[:rows]), f"first {rows} of 700 rows"


@pytest.mark.gpu
@pytest.mark.parametrize("added", ["bias", "residual", "both"])
@pytest.mark.parametrize("N", [16392, 6136])  # tiles of 168 fill their waves, or do not
def test_the_library_multiplies_many_rows_whichever_tile_is_taken(N: int, added: str) -> None:
    generator = torch.Generator("cuda").manual_seed(9)
    M, K = 2001, 1544  # more than its short K; odd tails of rows, columns and K
    x, weight = (
        torch.randn(n, K, generator=generator, device="cuda", dtype=torch.bfloat16) for n in (M, N)
    )
    bias = torch.randn(N, generator=generator, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(M, N, generator=generator, device="cuda", dtype=torch.bfloat16)
    exact = x.float() @ weight.float().T
    if added != "residual":
        exact += bias.float()
    if added != "bias":
        exact += residual.float()
    out = ops.linear(
        x, weight, None if added == "residual" else bias,
        residual=None if added == "bias" else residual,
    )  # fmt: skip
    error = (out.float() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-3 * K**0.5).all()


# M, N, K of products whose activation cuBLASLt adds.
ENDED_BY_LIBRARY = [
    (300, 5120, 1536),
    (600, 4104, 4096),
    (300, 5001, 1536),  # rows of y that are not aligned
    (257, 515, 333),  # nor those of x and the weight
]


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize(("M", "N", "K"), ENDED_BY_LIBRARY)
def test_the_library_is_left_what_it_ends(M: int, N: int, K: int, activation: str) -> None:
    chosen = plan(M, N // 8 * 8, K // 8 * 8, hopper=True, activation=activation)
    assert chosen["path"] == "library"


def test_without_the_library_another_kernel_ends_products() -> None:
    for M, N, K, path in ((1024, 8192, 4096, "turns"), (192, 3072, 1024, "cluster")):
        options: dict[str, Any] = {"hopper": True, "activation": "gelu_tanh"}
        assert plan(M, N, K, **options)["path"] == "library"
        assert plan(M, N, K, library=False, **options)["path"] == path


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize(("M", "N", "K"), ENDED_BY_LIBRARY)
def test_the_library_ends_products(
    M: int, N: int, K: int, activation: str, dtype: torch.dtype, bias: bool
) -> None:
    """In one kernel, with one rounding; what is not finite stays where it is, behind relu too. Not
    where its kernels are slow, GELU of what is not aligned, or lose NaN, relu of float16."""
    aligned = N % 8 == K % 8 == 0
    generator = torch.Generator("cuda").manual_seed(M)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    x, weight = normal(M, K), normal(N, K) * K**-0.5
    x[3, 1], x[5, 2], x[7, 0] = math.nan, math.inf, -math.inf
    added = normal(N) if bias else None
    found = ridgeline.explain("linear", x, weight, added, activation=activation)
    alone = aligned if activation == "gelu_tanh" else dtype == torch.bfloat16
    assert any("finish_kernel" in kernel.name for kernel in found.kernels) != alone
    out = ops.linear(x, weight, added, activation=activation)
    exact = x.double() @ weight.double().T
    if added is not None:
        exact += added.double()
    exact = activate(exact, activation)
    assert torch.equal(out.isnan(), exact.isnan()) and out[3].isnan().all()
    assert torch.equal(out.isinf(), exact.isinf())
    finite = [m for m in range(M) if m not in (3, 5, 7)]
    rounding = (exact[finite].to(dtype).double() - exact[finite]).norm()
    once = 1.05 if aligned and alone else 2.0  # cuBLASLt may cut K and add rounded sums
    assert (out[finite].double() - exact[finite]).norm() <= once * rounding


@pytest.mark.parametrize("device", DEVICES)
def test_float32_rows_have_the_same_bits_in_every_batch(device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(80, 130, generator=generator).to(device)
    x = torch.randn(130, 130, generator=generator).to(device)
    whole = ops.linear(x, weight, batch_invariant=True)
    for rows in (1, 3, 64, 65):
        assert torch.equal(ops.linear(x[:rows], weight, batch_invariant=True), whole[:rows])


@pytest.mark.gpu
def test_expanded_rows_and_weights() -> None:
    """Rows of stride 0, which no library layout can name."""
    x = torch.randn(1, 128, device="cuda", dtype=torch.bfloat16).expand(100, 128)
    weight = torch.randn(96, 128, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(ops.linear(x, weight), ops.linear(x.contiguous(), weight))
    row = weight[:1].expand(96, 128)
    assert torch.equal(ops.linear(x, row)[:, 0], ops.linear(x, row)[:, 95])


# ---- The choice of kernel, without a GPU -------------------------------------------------------


def plan(M: int, N: int, K: int, **options: Any) -> dict[str, Any]:
    """Of any GPU, but where ``hopper`` is said."""
    return choice_of(M, N, K, **({"hopper": False} | options))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "int2"}, "format: expected 'dense', .*got 'int2'"),
        ({"dtype": "float64"}, "dtype: expected float32, float16 or bfloat16, got float64"),
        ({"activation": "tanh"}, "activation: expected None, .*got 'tanh'"),
        ({"M": -1}, "M: expected 0 or more, got -1"),
        ({"N": -1}, "N must fit in 31 bits, got -1"),
        ({"sms": 0}, "sms: expected 1 or more, got 0"),
    ],
)
def test_no_kernel_is_told_of_what_no_product_has(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"M": 8, "N": 64, "K": 256} | changed
    with pytest.raises(ValueError, match=f"^{message}"):
        choice_of(**arguments)


@pytest.mark.parametrize(
    ("M", "options", "path"),
    [
        (1, {}, "stream"),
        (16, {}, "stream"),
        (17, {}, "tile"),
        (64, {}, "tile"),
        (65, {}, "library"),
        (65, {"library": False}, "tile"),
        (65, {"invariant": True}, "tile"),
        (65, {"format": "int4"}, "tile"),
        (1, {"dtype": "float32"}, "library"),
        (1, {"dtype": "float32", "invariant": True}, "simple"),
        (1, {"hopper": True, "chained": True}, "strips"),
        (1, {"hopper": True, "norm": True}, "strips"),
        (2, {"hopper": True, "norm": True, "chained": True}, "cluster"),
        (1, {"hopper": True}, "cluster"),
        (64, {"hopper": True}, "cluster"),
        (9, {"hopper": True, "library": False}, "cluster"),
        (1, {"hopper": True, "format": "int4"}, "once"),
        (1, {"hopper": True, "format": "int4", "chained": True}, "digits"),
        (8, {"hopper": True, "format": "int4"}, "once"),
        (8, {"hopper": True, "format": "int4", "norm": True}, "once"),
        (9, {"hopper": True, "format": "int4"}, "cluster"),
        (9, {"hopper": True, "format": "int4", "chained": True}, "cluster"),
        (4, {"hopper": True, "format": "int4_fp8", "chained": True}, "digits"),
        (5, {"hopper": True, "format": "int4_fp8", "chained": True}, "cluster"),
        (9, {"hopper": True, "format": "int4_fp8"}, "cluster"),
        (4, {"hopper": True, "format": "int4", "chained": True}, "digits"),
        (5, {"hopper": True, "format": "int4", "chained": True}, "cluster"),
        (5, {"hopper": True, "format": "int4", "norm": True, "chained": True}, "held"),
        (8, {"hopper": True, "format": "int4", "norm": True, "chained": True}, "held"),
        (8, {"hopper": True, "format": "int4", "activation": "silu_mul"}, "cluster"),
        (1, {"hopper": True, "format": "fp8"}, "cluster"),
        (1, {"hopper": True, "format": "fp8", "norm": True}, "once"),
        (1, {"hopper": True, "format": "fp8", "chained": True}, "strips"),
        (2, {"hopper": True, "format": "fp8", "chained": True}, "cluster"),
        (2, {"hopper": True, "format": "fp8", "norm": True}, "cluster"),
        (1, {"hopper": True, "format": "fp8_fp8"}, "cluster"),
        (1, {"hopper": True, "format": "fp8_fp8", "chained": True}, "strips"),
        (2, {"hopper": True, "format": "fp8_fp8", "chained": True}, "cluster"),
        (65, {"hopper": True}, "cluster"),
        (129, {"hopper": True}, "cluster"),
        (257, {"hopper": True}, "library"),
        (65, {"hopper": True, "format": "int4"}, "cluster"),
        (256, {"hopper": True, "format": "int4"}, "cluster"),
        (1025, {"hopper": True, "format": "int4"}, "expand"),
        (65, {"hopper": True, "format": "int4", "dtype": "float16"}, "cluster"),
        (65, {"hopper": True, "format": "fp8"}, "cluster"),
        (65, {"hopper": True, "format": "fp8", "activation": "silu_mul"}, "cluster"),
        (65, {"hopper": True, "format": "fp8", "dtype": "float16"}, "expand"),
        (257, {"hopper": True, "format": "fp8"}, "expand"),
        (65, {"hopper": True, "format": "fp8_fp8"}, "cluster"),
        (65, {"hopper": True, "format": "fp8_fp8", "activation": "silu_mul"}, "cluster"),
        (257, {"hopper": True, "format": "fp8_fp8", "activation": "silu_mul"}, "fp8"),
        (256, {"hopper": True, "format": "fp8_fp8"}, "cluster"),
        (257, {"hopper": True, "format": "fp8_fp8"}, "fp8"),
        (1, {"hopper": True, "format": "fp8_fp8", "invariant": True}, "cluster"),
        (4096, {"hopper": True, "format": "fp8_fp8", "invariant": True}, "cluster"),
        (1, {"hopper": True, "format": "int4", "invariant": True}, "cluster"),
        (65, {"format": "int4", "invariant": True}, "tile"),
        (65, {"hopper": True, "format": "int4_fp8"}, "cluster"),
        (65, {"hopper": True, "format": "int4_fp8", "activation": "silu_mul"}, "cluster"),
        (256, {"hopper": True, "format": "int4_fp8"}, "cluster"),
        (1025, {"hopper": True, "format": "int4_fp8"}, "expand_to_fp8"),
        (64, {"hopper": True, "format": "int4_fp8"}, "cluster"),
        (1, {"format": "int8"}, "tile"),
        (1, {"hopper": True, "format": "int8"}, "cluster"),
        (1, {"hopper": True, "format": "int8", "chained": True}, "strips"),
        (2, {"hopper": True, "format": "int8", "chained": True}, "cluster"),
        (65, {"hopper": True, "format": "int8"}, "cluster"),
        (65, {"hopper": True, "format": "int8", "activation": "silu_mul"}, "cluster"),
        (257, {"hopper": True, "format": "int8"}, "fp8"),
        (65, {"hopper": True, "format": "int8", "invariant": True}, "cluster"),
        (1, {"hopper": True, "invariant": True}, "cluster"),
        (300, {"hopper": True, "invariant": True}, "grouped"),
        (1, {"hopper": True, "invariant": True, "activation": "gelu"}, "stream"),
        (1, {"hopper": True, "dtype": "float32"}, "library"),
    ],
)
def test_path_by_rows(M: int, options: dict[str, object], path: str) -> None:
    assert plan(M, 4096, 4096, **options)["path"] == path


@pytest.mark.parametrize(
    ("M", "N", "K", "path"),
    [
        (32, 5120, 5120, "cluster"),
        (33, 5120, 5120, "cluster"),
        (64, 1024, 1024, "cluster"),
        (9, 1023, 4096, "cluster"),
        (64, 64, 2048, "cluster"),  # a router's
        (64, 128256, 4096, "cluster"),
        (65, 28672, 4096, "cluster"),
        (128, 4096, 14336, "cluster"),
        (129, 4096, 14336, "cluster"),
        (128, 28672, 4096, "cluster"),
        (128, 6144, 4096, "library"),
        (128, 8192, 2048, "cluster"),
        (128, 7040, 2048, "library"),  # 110 blocks
        (128, 57344, 8192, "library"),
        (240, 4096, 4096, "cluster"),
        (241, 4096, 4096, "library"),
        (224, 4096, 8192, "cluster"),
        (192, 4096, 4032, "library"),
        (192, 3520, 4096, "library"),  # 110 blocks
        (192, 4288, 4096, "library"),  # 134
        (72, 3072, 768, "cluster"),  # 48 blocks of little K
        (81, 3072, 768, "library"),
        (160, 3072, 768, "cluster"),  # two tiles of 80 rows
        (161, 3072, 768, "library"),
        (160, 3072, 1032, "library"),
        (96, 2560, 2560, "cluster"),  # K in two segments
        (97, 2560, 2560, "library"),
        (160, 2048, 8192, "cluster"),
        (161, 2048, 8192, "library"),
        (200, 2048, 8192, "cluster"),
        (225, 2048, 8192, "library"),
        (256, 1216, 4096, "cluster"),  # in three
        (257, 832, 4096, "library"),
        (448, 448, 3072, "cluster"),  # in four
    ],
)
def test_dense_products_by_size(M: int, N: int, K: int, path: str) -> None:
    assert plan(M, N, K, hopper=True)["path"] == path


@pytest.mark.parametrize(
    ("M", "N", "K", "activation", "path"),
    [
        (64, 5120, 5120, "silu_mul", "cluster"),
        (65, 2048, 2048, "silu_mul", "cluster"),
        (65, 3072, 768, "gelu", "cluster"),
        (128, 4096, 1024, "silu_mul", "cluster"),
        (128, 8192, 2048, "relu", "cluster"),
        (128, 6144, 4096, "gelu", "cluster"),  # 110 blocks
        (128, 5120, 5120, "gelu", "library"),  # 92
        (96, 11008, 4096, "silu_mul", "library"),  # 99 of a larger weight
        (96, 18176, 4544, "gelu", "library"),  # SMs have two tiles or one
        (128, 16384, 4096, "gelu", "cluster"),
        (128, 16384, 4096, "silu_mul", "turns"),
        (96, 16384, 4096, "silu_mul", "cluster"),
        (128, 28672, 4096, "gelu", "turns"),
        (96, 28672, 4096, "gelu", "cluster"),
        (96, 28672, 4096, "silu_mul", "library"),
        (128, 4104, 1024, "silu_mul", "library"),  # gates that do not pair up with ups
        (129, 3072, 768, "gelu", "cluster"),
        (448, 2048, 2048, "gelu", "cluster"),
        (449, 2048, 2048, "gelu", "library"),
        (320, 4096, 4096, "gelu", "library"),  # three tiles of x, 192 blocks
        (224, 4096, 8192, "silu_mul", "cluster"),
        (225, 4096, 8192, "gelu", "library"),
        (192, 4096, 14336, "gelu", "cluster"),
        (192, 3072, 14336, "gelu", "library"),  # 96 blocks
        (192, 4096, 4096, "relu", "cluster"),
        (241, 4096, 4096, "relu", "library"),  # which cuBLASLt ends itself
        (192, 3072, 1024, "gelu_tanh", "library"),
        (128, 4096, 1024, "gelu_tanh", "library"),
        (128, 8192, 2048, "gelu_tanh", "cluster"),
        (1024, 8192, 4096, "gelu_tanh", "library"),
        (1024, 8192, 4088, "gelu_tanh", "turns"),
        (1024, 8192, 4096, "gelu", "turns"),
        (223, 6144, 4096, "gelu", "turns"),  # 96 tiles
        (256, 6144, 4096, "gelu", "library"),
        (192, 5120, 1280, "silu_mul", "turns"),  # 80 of little K
        (180, 5120, 1280, "silu_mul", "library"),
        (320, 10240, 2560, "gelu", "turns"),  # two waves
        (224, 14336, 4096, "gelu", "library"),
    ],
)
def test_activations_by_size(M: int, N: int, K: int, activation: str, path: str) -> None:
    """Behind cuBLASLt they are another kernel."""
    assert plan(M, N, K, hopper=True, activation=activation)["path"] == path


@pytest.mark.parametrize(
    ("N", "K", "format", "norm", "most"),
    [
        (6144, 4096, "dense", False, 1),
        (6144, 4096, "dense", True, 4),
        (28672, 4096, "dense", False, 4),
        (4096, 14336, "dense", True, 1),  # two strips an SM
        (6144, 4096, "fp8", False, 4),
        (6144, 4096, "fp8", True, 8),
        (2048, 4096, "fp8", False, 4),
        (4096, 14336, "fp8", False, 1),
        (18944, 3584, "fp8", False, 4),  # the cluster kernel's warpgroups take stages by turns
        (28672, 4096, "fp8_fp8", False, 1),
        (28672, 4096, "int8", False, 1),
        (1024, 4096, "dense", False, 4),  # narrow
        (1032, 4096, "dense", False, 1),
        (512, 2048, "dense", False, 8),
        (1024, 2048, "dense", False, 4),
        (1024, 14336, "dense", False, 0),
    ],
)
def test_rows_that_strips_take(N: int, K: int, format: str, norm: bool, most: int) -> None:
    for chained in (False, True):
        rows = range(1 if chained else 2, 10)
        options: dict[str, Any] = {"format": format, "norm": norm, "chained": chained}
        paths = [plan(M, N, K, hopper=True, **options)["path"] for M in rows]
        assert paths == ["strips" if M <= most else "cluster" for M in rows], chained


@pytest.mark.parametrize(("chained", "most"), [(False, 4), (True, 1)])
@pytest.mark.parametrize("format", ["fp8_fp8", "int8"])
def test_strips_that_leave_no_sm_idle(format: str, chained: bool, most: int) -> None:
    paths = [plan(M, 18944, 3584, hopper=True, format=format, chained=chained)["path"]
             for M in range(1, 10)]  # fmt: skip
    assert paths == ["strips"] * most + ["cluster"] * (9 - most)


def test_a_norm_goes_where_it_is_folded() -> None:
    paths = [plan(M, 5120, 5120, hopper=True, norm=True)["path"] for M in (4, 5, 32, 33)]
    assert paths == ["strips", "cluster", "cluster", "cluster"]
    narrow = [plan(M, 1016, 5120, hopper=True, norm=True)["path"] for M in (4, 5, 17)]
    assert narrow == ["strips", "cluster", "cluster"]


@pytest.mark.parametrize(
    ("N", "K", "format", "path"),
    [
        (6144, 4096, "int4", "once"),  # three strips an SM
        (6400, 4096, "int4", "digits"),
        (4096, 4160, "int4", "digits"),  # more columns than 16 warps have
        (4096, 4096, "fp8", "cluster"),
        (3072, 3072, "fp8", "once"),
        (3072, 3072, "fp8_fp8", "cluster"),
        (4096, 1024, "fp8_fp8", "once"),
        (6144, 4096, "fp8", "strips"),
        (2048, 4096, "fp8", "strips"),  # a strip an SM
        (2048, 2048, "fp8", "once"),
    ],
)
def test_one_row_of_a_weight_that_registers_hold(N: int, K: int, format: str, path: str) -> None:
    assert plan(1, N, K, hopper=True, format=format)["path"] == path
    if format == "int4":
        assert plan(2, N, K, hopper=True, format=format)["path"] == path


@pytest.mark.parametrize(
    ("M", "K", "norm", "path", "segments"),
    [
        (8, 4096, True, "held", 1),
        (8, 8192, False, "cluster", 2),
        (8, 8192, True, "cluster", 2),  # a norm of more columns than a block has
        (8, 4096, False, "cluster", 1),
        (4, 8192, True, "digits", 1),
        (8, 18944, False, "cluster", 4),
        (8, 1984, False, "cluster", 1),  # too few columns for its warps
    ],
)
def test_rows_that_registers_hold(M: int, K: int, norm: bool, path: str, segments: int) -> None:
    chosen = plan(M, 28672 if K < 8192 else 3584, K, hopper=True, format="int4", norm=norm)
    assert (chosen["path"], chosen["segments"]) == (path, segments)


@pytest.mark.parametrize(
    ("M", "N", "K", "chained", "path"),
    [
        (2, 4096, 14336, False, "digits"),
        (3, 4096, 14336, False, "cluster"),
        (4, 4096, 14336, False, "cluster"),
        (4, 4096, 14336, True, "digits"),  # in a model the cluster kernel comes later
        (4, 5120, 13824, False, "digits"),  # its tiles fill the SMs badly
        (4, 28672, 4096, False, "digits"),
    ],
)
def test_narrow_int4_of_three_rows_is_the_cluster_kernels(
    M: int, N: int, K: int, chained: bool, path: str
) -> None:
    assert plan(M, N, K, hopper=True, format="int4", chained=chained)["path"] == path


@pytest.mark.parametrize(
    ("M", "N", "K", "format", "folds"),
    [
        *((4, 28672, 4096, format, True) for format in ("dense", "fp8", "int4")),
        *((16, 6144, 4096, format, format != "int4") for format in ("dense", "fp8", "int4")),
        *((16, 10240, 8192, format, format == "dense") for format in ("dense", "fp8", "int4")),
        *((17, 28672, 4096, format, False) for format in ("dense", "fp8", "int4")),
    ],
)
def test_norms_are_folded_where_a_kernel_ahead_takes_longer(
    M: int, N: int, K: int, format: str, folds: bool
) -> None:
    assert plan(M, N, K, hopper=True, format=format, norm=True)["folds_norm"] == folds
    assert plan(M, N, K, hopper=True, format=format)["folds_norm"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "K", "activation"),
    [
        *((9, 4096, 4096, activation) for activation in (None, "silu_mul")),
        *((32, 4128, 5000, activation) for activation in (None, "silu_mul")),
        *((49, 6144, 4096, activation) for activation in (None, "silu_mul")),
        (100, 28672, 4096, None),
        (65, 4096, 14336, None),
        (128, 4096, 5000, None),
    ],
)
def test_dense_products_of_the_cluster_kernel(
    M: int, N: int, K: int, activation: str | None
) -> None:
    """Fewer and all rows of a tile; rows and columns of the weight that end within one."""
    chosen = plan(M, N, K, hopper=True, activation=activation or "none")
    assert chosen["path"] == "cluster"
    generator = torch.Generator("cuda").manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    def product(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, weight, bias)
        if activation is not None:
            gate, up = y.chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return y + residual

    inputs = normal(M, K), normal(N, K), normal(N), normal(M, N if activation is None else N // 2)
    exact = product(*(t.double() for t in inputs))
    x, weight, bias, residual = inputs
    ours = ops.linear(x, weight, bias, activation=activation, residual=residual)
    error = (ours.double() - exact).norm()
    assert error <= 2 * (product(*inputs).double() - exact).norm()


@pytest.mark.parametrize("format", ["dense", "int4", "fp8"])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (28672, 4096), (64, 128), (4096, 14336)])
def test_segments_of_k_depend_on_the_weight_alone(format: str, N: int, K: int) -> None:
    counts = {
        plan(M, N, K, format=format, invariant=True)["segments"] for M in (1, 16, 17, 64, 5000)
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("N", "K", "segments"), [(4096, 4096, 3), (6144, 4096, 2), (4096, 14336, 3), (28672, 4096, 1)]
)
def test_segments_of_batch_invariant_products(N: int, K: int, segments: int) -> None:
    """The same in both kernels, neither of which may then take stages by turns."""
    for M, path in ((1, "cluster"), (64, "cluster"), (300, "grouped")):
        chosen = plan(M, N, K, hopper=True, invariant=True)
        assert (chosen["path"], chosen["segments"]) == (path, segments)
        assert chosen["tile_cols"] > 64


@pytest.mark.parametrize("format", ["int4", "int4_fp8", "fp8", "fp8_fp8", "int8"])
@pytest.mark.parametrize("activation", ["none", "silu_mul"])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (28672, 4096), (4096, 14336), (160, 1088)])
def test_cuts_of_batch_invariant_quantised_products(
    N: int, K: int, activation: str, format: str
) -> None:
    """Of any number of rows those of one, and no tile that takes stages by turns or two terms."""
    options: dict[str, Any] = {"format": format, "activation": activation, "invariant": True}
    cuts = set()
    for M in (1, 16, 33, 64, 65, 300, 5000):
        chosen = plan(M, N, K, hopper=True, **options)
        assert chosen["path"] == "cluster" and chosen["tile_cols"] in (112, 128)
        assert chosen["splits_x"] == 0
        cuts.add((chosen["tile_cols"], chosen["segments"]))
    assert len(cuts) == 1


@pytest.mark.parametrize(
    ("M", "path"),
    [(111, "cluster"), (112, "turns"), (129, "grouped"), (512, "turns"), (513, "grouped")],
)
def test_kernels_of_batch_invariant_gated_products(M: int, path: str) -> None:
    """All with K whole."""
    chosen = plan(M, 28672, 4096, hopper=True, invariant=True, activation="silu_mul")
    assert (chosen["path"], chosen["segments"]) == (path, 1)


def test_rows_that_shared_memory_cannot_hold_are_split_over_a_cluster() -> None:
    assert plan(1, 4096, 28672, hopper=True, chained=True)["path"] == "strips"
    assert plan(8, 4096, 28672, hopper=True, format="fp8")["path"] == "cluster"


@pytest.mark.parametrize(
    ("N", "K", "format", "tile"),
    [
        (4096, 4096, "fp8_fp8", (64, 2)),
        (4096, 14336, "fp8_fp8", (64, 2)),
        (6144, 4096, "fp8_fp8", (48, 1)),
        (28672, 4096, "fp8_fp8", (224, 1)),
        (4096, 14336, "int4", (64, 2)),
        (4096, 14336, "fp8", (64, 2)),
        (6144, 4096, "int4", (48, 1)),
        (28672, 4096, "int4", (128, 1)),
        (1024, 512, "fp8_fp8", (64, 1)),
        (4096, 4096, "int4", (64, 2)),
        (8192, 8192, "int4", (128, 2)),
        (8192, 8192, "fp8", (64, 1)),
    ],
)
def test_a_cluster_fills_the_machine(N: int, K: int, format: str, tile: tuple[int, int]) -> None:
    chosen = plan(64, N, K, hopper=True, format=format)
    assert tuple(chosen[name] for name in ("tile_cols", "segments")) == tile


@pytest.mark.parametrize(
    ("M", "N", "options", "wide"),
    [
        (64, 28672, {"format": "fp8"}, "split"),
        (33, 26880, {"format": "fp8", "activation": "silu_mul"}, "split"),
        (64, 28672, {"format": "fp8_fp8"}, "whole"),
        (64, 28672, {"format": "fp8_fp8", "activation": "silu_mul"}, ""),
        (64, 28672, {"format": "fp8", "dtype": "float16"}, ""),
        (32, 28672, {"format": "fp8"}, ""),
        (64, 26656, {"format": "fp8_fp8"}, ""),  # 119 tiles
        (64, 18593, {"format": "fp8"}, "split"),  # 84
        (64, 18592, {"format": "fp8"}, ""),
        (64, 29569, {"format": "fp8"}, ""),  # more tiles than SMs
        (64, 57344, {"format": "fp8"}, "split"),  # nearly twice as many
        (64, 57344, {"format": "fp8_fp8"}, ""),
        (64, 28672, {"format": "int4"}, ""),
        (64, 28672, {"format": "fp8_blocks"}, "split"),
        (9, 28672, {"format": "fp8_blocks"}, "split"),
        (9, 26656, {"format": "fp8_blocks"}, ""),
        (33, 18593, {"format": "fp8_blocks"}, "split"),
        (64, 28672, {"format": "fp8_blocks", "dtype": "float16"}, ""),
        (64, 28672, {"format": "fp8_blocks", "invariant": True}, ""),
    ],
)
def test_wide_tiles_have_an_sm_each(M: int, N: int, options: dict[str, object], wide: str) -> None:
    chosen = plan(M, N, 4096, hopper=True, **options)
    assert chosen["path"] == "cluster"
    is_wide = chosen["tile_cols"] == 224 and chosen["shares_stages"] == 0
    assert is_wide == bool(wide)
    assert (chosen["splits_x"] == 1) == (wide == "split")


@pytest.mark.parametrize(
    ("M", "N", "K", "segments"),
    [
        (64, 13824, 5120, 2),
        (33, 8192, 28672, 3),
        (33, 6720, 4096, 4),  # 120 blocks
        (64, 6720, 4080, 0),  # of 1024 columns at least
        (64, 8192, 8192, 0),  # 111 blocks, of 2731 columns
        (32, 13824, 5120, 0),
    ],
)
@pytest.mark.parametrize("format", ["fp8", "fp8_blocks", "fp8_fp8"])
def test_wide_tiles_cut_k_where_they_fill_the_sms(
    M: int, N: int, K: int, segments: int, format: str
) -> None:
    chosen = plan(M, N, K, hopper=True, format=format)
    assert chosen["path"] == "cluster"
    expected = 0 if format == "fp8_fp8" else segments
    assert chosen["splits_x"] * chosen["segments"] == expected


@pytest.mark.parametrize(
    ("M", "N", "K", "format", "tile"),
    [
        (128, 4096, 4096, "fp8_fp8", (64, 64, 1)),  # the cluster kernel's, of 64 rows
        (192, 4096, 4096, "fp8_fp8", (64, 64, 1)),  # two blocks an SM
        (128, 5120, 5120, "fp8_fp8", (64, 64, 1)),
        (192, 10240, 8192, "fp8_fp8", (64, 128, 1)),
        (256, 4096, 4096, "fp8_fp8", (64, 128, 1)),
        (128, 5120, 5120, "int8", (64, 112, 1)),
        (128, 8192, 8192, "int8", (64, 128, 1)),
        (128, 2048, 2048, "fp8_fp8", (64, 64, 2)),
        (128, 8192, 28672, "fp8_fp8", (128, 128, 2)),
        (192, 4096, 14336, "fp8_fp8", (128, 128, 2)),
        (128, 4096, 14336, "fp8", (128, 128, 4)),
        (104, 4096, 4096, "fp8", (104, 64, 2)),
        (224, 4096, 4096, "fp8", (112, 64, 1)),
        (224, 4096, 14336, "fp8", (224, 128, 4)),
        (105, 4096, 4096, "fp8", (64, 64, 1)),
        (128, 6144, 4096, "fp8", (128, 128, 2)),
        (128, 6144, 4096, "int4", (128, 64, 1)),  # of up to 128 rows
        (256, 6144, 4096, "int4", (64, 192, 1)),  # of three warpgroups
        (512, 6144, 4096, "int4", (128, 192, 1)),
        (128, 4096, 4096, "int4", (64, 64, 1)),
        (128, 28672, 4096, "fp8_fp8", (128, 256, 1)),
        (512, 4096, 4096, "fp8_fp8", (128, 128, 1)),
        (128, 256, 128, "fp8_fp8", (64, 128, 1)),
        (256, 28672, 4096, "int4", (128, 256, 1)),  # and columns behind a whole wave
        (256, 13824, 5120, "int4", (256, 128, 1)),
        (192, 13824, 5120, "int4", (192, 128, 1)),
        (192, 4096, 14336, "int4", (96, 128, 2)),
        (224, 4096, 4096, "int4", (112, 64, 1)),
        (256, 5120, 5120, "int4", (88, 128, 1)),  # few rows are multiplied twice
        (320, 6144, 4096, "int4", (80, 192, 1)),
        (384, 6144, 4096, "int4", (96, 192, 1)),
        (512, 4096, 14336, "int4", (128, 128, 1)),
        (4096, 4096, 4096, "int4", (256, 128, 1)),
    ],
)
def test_tiles_fill_the_machine(
    M: int, N: int, K: int, format: str, tile: tuple[int, int, int]
) -> None:
    chosen = plan(M, N, K, hopper=True, format=format)
    assert tuple(chosen[name] for name in ("tile_rows", "tile_cols", "segments")) == tile


def test_tiles_of_gates_fill_the_machine() -> None:
    def cols(M: int, **options: Any) -> str:
        chosen = plan(M, 28672, 4096, hopper=True, format="fp8_fp8", **options)
        assert chosen["path"] == "fp8"
        return chosen["tile_cols"]

    assert [cols(M, activation="silu_mul") for M in (128, 256, 512)] == [224] * 3
    assert cols(4096, activation="silu_mul") == 256  # as many waves, which hold more
    assert cols(128) == cols(128, activation="gelu_mul") == 256
    assert cols(128, activation="silu_mul", dtype="float16") == 256


def test_small_grids_are_split_and_large_ones_are_not() -> None:
    assert plan(32, 4096, 4096)["split"] == 1
    assert plan(4096, 4096, 4096, library=False)["split"] == 0
    assert plan(32, 28672, 4096)["segments"] == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["dense", "fp8", "int4", "fp4"])
def test_a_row_of_experts_keeps_its_bits(kind: str, device: str):
    """One to six rows an expert, whose rings Hopper's kernel shapes, or twenty to a hundred."""
    experts, N, K = 4, 256, 512
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts * N, K, generator=generator).to(device, torch.bfloat16)
    codes, scale = ops.quantize_fp8(weight, "row")
    packed = ops.Int4Experts.from_rows(ops.pack_int4(weight), experts)
    fp4 = ops.Fp4Experts.from_mxfp4(*(t.to(device) for t in mxfp4_of(experts, N, K, generator)))
    x = torch.randn(experts, 100, K, generator=generator).to(device, torch.bfloat16)

    def product(count: int) -> torch.Tensor:
        offsets = torch.arange(experts + 1, dtype=torch.int32, device=device) * count
        rows = x[:, :count].reshape(-1, K)
        if kind == "dense":
            stacked = weight.view(experts, N, K)
            out = ops.grouped_linear(rows, stacked, offsets, batch_invariant=True)
        elif kind == "fp8":
            stacked, scales = codes.view(experts, N, K), scale.view(experts, N)
            out = ops.grouped_fp8_linear(rows, stacked, scales, offsets, batch_invariant=True)
        elif kind == "fp4":
            out = ops.grouped_fp4_linear(rows, fp4, offsets, batch_invariant=True)
        else:
            out = ops.grouped_int4_linear(rows, packed, offsets, batch_invariant=True)
        return out.view(experts, count, N)

    many = product(100)
    for count in (1, 3, 6, 20, 40, 70):
        assert torch.equal(product(count), many[:, :count]), count


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["dense", "fp8", "int4", "fp4"])
def test_few_rows_of_experts_keep_their_bits_where_their_strips_move(kind: str, device: str):
    """Hopper deals all strips that have rows to its blocks: they move with other rows."""
    experts, N, K = 8, 1056, 4608
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts * N, K, generator=generator).to(device, torch.bfloat16)
    x = torch.randn(experts, 7, K, generator=generator).to(device, torch.bfloat16)
    codes, scale = ops.quantize_fp8(weight, "row")
    packed = ops.Int4Experts.from_rows(ops.pack_int4(weight), experts)
    fp4 = ops.Fp4Experts.from_mxfp4(*(t.to(device) for t in mxfp4_of(experts, N, K, generator)))

    def product(counts: list[int]) -> list[torch.Tensor]:
        offsets = torch.tensor([sum(counts[:e]) for e in range(experts + 1)], dtype=torch.int32)
        offsets = offsets.to(device)
        rows = torch.cat([x[e, :count] for e, count in enumerate(counts)])
        if kind == "dense":
            out = ops.grouped_linear(rows, weight.view(experts, N, K), offsets)
        elif kind == "fp8":
            stacked, scales = codes.view(experts, N, K), scale.view(experts, N)
            out = ops.grouped_fp8_linear(rows, stacked, scales, offsets)
        elif kind == "fp4":
            out = ops.grouped_fp4_linear(rows, fp4, offsets)
        else:
            out = ops.grouped_int4_linear(rows, packed, offsets)
        return list(out.split(counts))

    many = product([1, 0, 7, 1, 2, 2, 0, 3])
    for counts in ([0, 0, 1, 0, 0, 0, 0, 0], [1, 0, 5, 0, 0, 2, 0, 3], [0, 0, 2, 1, 2, 0, 0, 1]):
        for e, out in enumerate(product(counts)):
            assert torch.equal(out, many[e][: counts[e]]), (counts, e)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["dense", "fp8", "fp8_fp8", "int8"])
@pytest.mark.parametrize("M", [13, 16, 20, 30, 33, 64])  # two, four, eight octets, and parts
def test_a_cluster_of_two_ends_with_the_same_bits(
    M: int, kind: str, dtype: torch.dtype, residual: bool
) -> None:
    """Two blocks exchange sums from registers to registers, where pairs of a residual are aligned;
    else by shared memory. (int4 with such a residual is another kernel's.)"""
    N, K = 4096, 4096
    for chained in (False, True):
        options: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "chained": chained}
        chosen = plan(M, N, K, hopper=True, format=kind, **options)
        assert (chosen["path"], chosen["tile_cols"], chosen["segments"]) == ("cluster", 64, 2)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    x, dense = normal(M, K), normal(N, K) * K**-0.5
    options = {"bias": normal(N)}
    if kind.endswith("8") and kind != "fp8":
        options["x_scale"] = normal(M).float().abs() + 0.5
        x = x.to(torch.float8_e4m3fn) if kind == "fp8_fp8" else (x * 30).to(torch.int8)

    def multiply(residual: Tensor | None, weights_ready: bool) -> Tensor:
        more = {**options, "residual": residual, "weights_ready": weights_ready}
        if kind == "dense":
            return ops.linear(x, dense, **more)
        if kind == "int8":
            return ops.int8_linear(x, codes, scale, **more, out_dtype=dtype)
        return ops.fp8_linear(x, codes, scale, **more, out_dtype=dtype)

    codes, scale = (dense * 100).to(torch.float8_e4m3fn), normal(N).float().abs() * 0.01 + 0.01
    if kind == "int8":
        codes, scale = (dense * 1000).to(torch.int8), scale * 0.01
    odd = torch.zeros(M, N + 1, device="cuda", dtype=dtype)[:, :N]
    if residual:
        odd.copy_(normal(M, N))
    by_shared_memory = multiply(odd, False)
    assert by_shared_memory.isfinite().all()
    for weights_ready in (False, True, True):
        ours = multiply(odd.contiguous() if residual else None, weights_ready)
        assert torch.equal(ours, by_shared_memory), weights_ready


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["dense", "fp8", "fp8_fp8", "int8"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (70, 4096, 4096),  # the last tile of rows overlaps the one before
        (96, 4104, 4096),  # and tiles of the weight reach beyond N
        (128, 2048, 4096),
        (41, 28672, 4096),  # wide tiles of fp8, blocks that share an SM
        (64, 3000, 640),
    ],
)
def test_a_residual_gives_the_same_bits_however_it_is_read(
    M: int, N: int, K: int, kind: str, dtype: torch.dtype
) -> None:
    """In vectors, beside the exchange of sums, or one by one where it is not aligned."""
    dtype_name = str(dtype).removeprefix("torch.")
    told = plan(M, N, K, dtype=dtype_name, hopper=True, format=kind)
    if told["path"] != "cluster":
        pytest.skip(f"not the cluster kernel's: {told['path']}")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    x, dense = normal(M, K), normal(N, K) * K**-0.5
    options: dict[str, Any] = {"bias": normal(N)}
    codes, scale = (dense * 100).to(torch.float8_e4m3fn), normal(N).float().abs() * 0.01 + 0.01
    if kind == "int8":
        codes, scale = (dense * 1000).to(torch.int8), scale * 0.01
    if kind in ("fp8_fp8", "int8"):
        options["x_scale"] = normal(M).float().abs() + 0.5
        x = x.to(torch.float8_e4m3fn) if kind == "fp8_fp8" else (x * 30).to(torch.int8)

    def multiply(residual: Tensor | None) -> Tensor:
        if kind == "dense":
            return ops.linear(x, dense, **options, residual=residual)
        product = ops.int8_linear if kind == "int8" else ops.fp8_linear
        return product(x, codes, scale, **options, residual=residual, out_dtype=dtype)

    residual = normal(M, N)
    together = multiply(residual)
    rows_apart = torch.empty(M, N + 4, device="cuda", dtype=dtype)[:, 4:].copy_(residual)
    assert torch.equal(multiply(rows_apart), together)
    assert torch.equal(multiply(torch.zeros_like(residual)), multiply(None))
    if M <= 64 or kind == "dense":  # more rows are then another kernel's
        one_by_one = torch.empty(M, N + 1, device="cuda", dtype=dtype)[:, 1:].copy_(residual)
        assert torch.equal(multiply(one_by_one), together)
