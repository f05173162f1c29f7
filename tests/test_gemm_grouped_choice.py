"""Which kernel multiplies the rows of experts: the borders that docs/experts.md states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ridgeline
from gemm_choice import (
    TALL_SHAPE,
    TALL_TILES,
    WIDE,
    choice_of_experts,
    plan_of_experts,
)

EXPERTS = 128
FORMATS = ["dense", "fp8", "fp8_blocks", "fp8_fp8", "fp8_fp8_blocks", "int4", "fp4"]


def path(mean: int, format: str = "dense", K: int = 2048, **options: Any) -> str:
    """Of so many rows an expert in the mean."""
    return str(choice_of_experts(mean * EXPERTS, EXPERTS, 1536, K, format, **options)["path"])


@pytest.mark.parametrize(
    ("M", "experts", "K", "format", "before", "after"),
    [
        (5 * 128, 128, 2048, "dense", "strips", "few"),  # eight rows fit
        (5 * 128, 128, 2048, "fp8", "strips", "terms"),
        (5 * 128, 128, 2048, "fp8_blocks", "strips", "terms"),
        (2 * 8, 8, 14336, "dense", "strips", "few"),  # five do: two and not fewer
        (2 * 128, 128, 2048, "fp8_fp8", "strips", "few"),
        (5 * 128, 128, 2048, "fp8_fp8_blocks", "strips", "many"),
        (2 * 128, 128, 768, "fp8_fp8_blocks", "strips", "many"),  # three chunks
        (2 * 8, 8, 14336, "fp8_fp8_blocks", "strips", "many"),
        (6 * 128, 128, 2048, "fp4", "strips", "some"),
        (3 * 8, 8, 14336, "fp4", "strips", "some"),  # five rows fit
        (24, 128, 768, "fp4", "strips", "some"),  # two chunks of 512 columns
        (2 * 128, 128, 2048, "int4", "digits", "some"),
        (64, 128, 768, "int4", "digits", "some"),  # two chunks of 512 columns: half a row
        (2, 4, 1536, "int4", "digits", "some"),
        (2 * 4, 4, 1600, "int4", "digits", "some"),
    ],
)
def test_few_rows_meet_strips(
    M: int, experts: int, K: int, format: str, before: str, after: str
) -> None:
    paths = [choice_of_experts(M + more, experts, 4096, K, format)["path"] for more in (0, 1)]
    assert paths == [before, after]


def test_gates_and_ups_have_whole_strips_each() -> None:
    choices = [choice_of_experts(4, 4, N, 2048, activation="silu_mul") for N in (16, 32)]
    assert [choice["path"] for choice in choices] == ["few", "strips"]


@pytest.mark.parametrize(
    ("format", "options", "last", "before", "after"),
    [
        ("dense", {}, 20, "few", "many"),
        ("fp8_fp8", {}, 20, "few", "many"),
        ("fp8", {"dtype": "float16"}, 20, "few", "some"),
        ("fp8_blocks", {"dtype": "float16"}, 80, "some", "many"),
        ("fp8", {}, 160, "terms", "many"),
        ("fp8", {"K": 768}, 112, "terms", "many"),
        ("fp8_blocks", {"K": 768}, 160, "terms", "many"),
        ("int4", {"dtype": "float16"}, 80, "some", "many"),
        ("int4", {"invariant": True}, 1, "many", "many"),
        ("fp4", {"invariant": True}, 21, "many", "many"),
        ("int4", {}, 1024, "some", "many"),
    ],
)
def test_more_rows_meet_tiles(
    format: str, options: dict[str, Any], last: int, before: str, after: str
) -> None:
    assert [path(mean, format, **options) for mean in (last, last + 1)] == [before, after]


@pytest.mark.parametrize(
    ("mean", "experts", "N", "K", "format", "options", "rows"),
    [
        (64, 128, 1536, 2048, "int4", {"activation": "silu_mul"}, 96),
        (96, 128, 1536, 2048, "int4", {"activation": "silu_mul"}, 112),
        (96, 8, 28672, 4096, "int4", {"activation": "silu_mul"}, 112),
        (128, 8, 4096, 14336, "int4", {}, 96),  # two tiles an expert
        (192, 8, 4096, 14336, "int4", {}, 80),  # three
        (384, 8, 4096, 14336, "int4", {}, 112),  # four
        (96, 8, 4096, 14336, "int4", {"zeros": True}, 64),
        (64, 64, 2816, 2048, "int4", {"group": 32}, 64),
        (64, 8, 4096, 14336, "fp4", {}, 96),
        (96, 128, 2048, 768, "fp4", {}, 128),
        (512, 8, 28672, 4096, "int4", {"activation": "silu_mul"}, 256),  # tiles of many
        (128, 32, 5760, 2880, "fp4", {"activation": "silu_mul"}, 256),
    ],
)
def test_tiles_of_four_bits_are_those_that_took_least(
    mean: int, experts: int, N: int, K: int, format: str, options: dict[str, Any], rows: int
) -> None:
    choice = choice_of_experts(mean * experts, experts, N, K, format, **options)
    assert choice["most_rows"] == rows
    assert choice["path"] == ("many" if rows == 256 else "some")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kind", "mean", "rows"), TALL_TILES)
def test_tall_tiles_of_the_gpu_tests(kind: str, mean: int, rows: int, gated: bool) -> None:
    choice = choice_of_experts(
        4 * mean,
        4,
        *TALL_SHAPE,
        "fp4" if kind == "fp4" else "int4",
        activation="silu_mul" if gated else "none",
        gathered=True,
        zeros=kind == "int4_zeros",
        group=32 if kind == "int4_groups" else 128,
    )
    assert (choice["path"], choice["most_rows"]) == ("some", rows)


@pytest.mark.parametrize(
    ("mean", "experts", "N", "K", "options", "wide"),
    [
        (128, 8, 4096, 14336, {}, True),
        (384, 8, 4096, 14336, {}, True),
        (2048, 8, 4096, 14336, {}, True),
        (256, 8, 4096, 14336, {}, False),  # half of the experts have more than a tile of many
        (128, 8, 28672, 4096, {"activation": "silu_mul", "gathered": True}, True),
        (2048, 8, 28672, 4096, {"activation": "silu_mul", "gathered": True}, False),
        (192, 256, 4096, 7168, {"activation": "silu_mul"}, False),  # two tiles, half empty
        (128, 128, 1536, 2048, {}, False),
        (128, 8, 4096, 14336, {"invariant": True}, False),
        (128, 8, 4096, 14336, {"format": "fp8_fp8"}, False),
        (1024, 8, 4096, 14336, {"gathered": True}, False),  # rows are put in order meanwhile
        (1024, 1, 4096, 14336, {}, False),
    ],
)
def test_wide_tiles_are_where_they_take_less(
    mean: int, experts: int, N: int, K: int, options: dict[str, Any], wide: bool
) -> None:
    options = {"format": "dense", **options}
    choice = choice_of_experts(mean * experts, experts, N, K, **options)
    assert choice["path"] == "many"
    assert (choice["most_rows"] == 160) == (choice["tile_cols"] == 256) == wide


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("N", "K", "counts", "gathered"), WIDE)
def test_wide_tiles_of_the_gpu_tests(
    N: int, K: int, counts: list[int], gathered: bool, gated: bool
) -> None:
    activation = "silu_mul" if gated else "none"
    choice = choice_of_experts(
        sum(counts), len(counts), N, K, activation=activation, gathered=gathered
    )
    assert (choice["tile_cols"], choice["claimed"]) == (256, int(len(counts) == 4))


def test_rows_of_an_expert_are_whole_ones_of_the_mean() -> None:
    choices = [choice_of_experts(21 * EXPERTS - less, EXPERTS, 1536, 2048) for less in (1, 0)]
    assert [choice["path"] for choice in choices] == ["few", "many"]


@pytest.mark.parametrize("format", FORMATS)
def test_other_gpus_and_activations_meet_tiles_of_mma(format: str) -> None:
    for options in ({"hopper": False}, {"activation": "gelu"}):
        choice = choice_of_experts(8, EXPERTS, 1536, 2048, format, **options)
        assert choice["path"] == "tile" and choice["x"] == "in_place"
        assert choice["expands_x"] == format.startswith("fp8_fp8")
    few = {"int4": "digits"}.get(format, "strips")
    assert path(1, format, activation="silu_mul") == few


@pytest.mark.parametrize(
    ("mean", "N", "options", "path", "expands_x"),
    [
        (6, 1536, {}, "many", 0),
        (5, 1536, {}, "strips", 0),
        (6, 1536, {"dtype": "float16"}, "many", 0),
        (6, 1552, {}, "many", 0),
        (6, 1536, {"activation": "silu_mul"}, "many", 0),
        (6, 1664, {"activation": "silu_mul"}, "terms", 1),  # ups of a tile in two blocks
        (5, 1664, {"activation": "silu_mul"}, "strips", 0),  # those of a strip are in one
        (5, 1552, {"activation": "silu_mul"}, "terms", 1),  # half a strip of gates
        (6, 1536, {"activation": "gelu"}, "tile", 1),
        (5, 1536, {"invariant": True}, "few", 1),
        (5, 1536, {"hopper": False}, "tile", 1),
    ],
)
def test_rows_with_scales_of_columns_are_multiplied_as_they_are(
    mean: int, N: int, options: dict[str, Any], path: str, expands_x: int
) -> None:
    M = mean * EXPERTS
    choice = choice_of_experts(M, EXPERTS, N, 2048, "fp8_fp8_blocks", **options)
    assert (choice["path"], choice["expands_x"]) == (path, expands_x)
    assert choice["scales_groups"] == (path == "many")
    for format in ("fp8", "fp8_blocks", "fp8_fp8"):
        assert choice_of_experts(M, EXPERTS, N, 2048, format, **options)["scales_groups"] == 0


@pytest.mark.parametrize("gathered", [False, True])
def test_tiles_by_scales_of_columns_have_128_rows(gathered: bool) -> None:
    """Of which 64 are multiplied at a time: by scales of rows tiles have twice as many, or 272."""
    many = [
        choice_of_experts(256 * EXPERTS, EXPERTS, 1536, 2048, format, gathered=gathered)
        for format in ("fp8_fp8", "fp8_fp8_blocks")
    ]
    assert [choice["most_rows"] for choice in many] == [256 if gathered else 272, 128]
    assert [choice["tile_cols"] for choice in many] == [128, 256]
    assert {choice["x"] for choice in many} == {"meanwhile" if gathered else "in_place"}
    for rows, tile in ((32, 64), (33, 128), (255, 128)):
        choice = choice_of_experts(
            rows * EXPERTS, EXPERTS, 1536, 2048, "fp8_fp8_blocks", gathered=gathered
        )
        assert choice["tile_rows"] == tile
        assert choice["x"] == ("gathered" if gathered else "in_place")
    for rows, tile in ((64, 64), (65, 128)):
        assert choice_of_experts(rows, 1, 1536, 2048, "fp8_fp8_blocks")["tile_rows"] == tile


@pytest.mark.parametrize(("mean", "rows", "cols"), [(32, 32, 64), (64, 64, 128), (65, 128, 128)])
def test_tiles_of_mma_have_about_as_many_rows_as_experts(mean: int, rows: int, cols: int) -> None:
    choice = choice_of_experts(mean * EXPERTS, EXPERTS, 1536, 2048, hopper=False)
    assert (choice["tile_rows"], choice["tile_cols"]) == (rows, cols)
    choice = choice_of_experts(mean * EXPERTS, EXPERTS, 1536, 2048, "int4", hopper=False)
    assert (choice["tile_rows"], choice["tile_cols"]) == (64, 128)


@pytest.mark.parametrize("format", FORMATS)
def test_batch_invariance_has_one_order_of_sums(format: str) -> None:
    """No strips, no terms, and of int4 the tiles of many rows alone."""
    paths = {path(mean, format, invariant=True) for mean in (1, 8, 16, 40, 100, 300)}
    assert not paths & {"strips", "digits", "terms", "tile"}
    assert format != "int4" or paths == {"many"}


@pytest.mark.parametrize(
    ("format", "options", "last", "rows"),
    [
        ("int4", {}, 9, 16),  # nearly all experts have up to two roots of the mean more
        ("int4", {}, 16, 24),
        ("int4", {}, 22, 32),
        ("int4", {}, 34, 48),
        ("int4", {}, 49, 64),
        ("int4", {"dtype": "float16"}, 80, 80),
        ("int4", {"group": 64}, 22, 32),
        ("int4", {"group": 64, "dtype": "float16"}, 80, 64),
        ("int4", {"zeros": True, "dtype": "float16"}, 80, 64),
        ("fp8", {"dtype": "float16"}, 49, 64),
        ("fp8", {"dtype": "float16"}, 80, 80),
        ("fp8", {}, 22, 32),
        ("fp8", {}, 36, 48),  # 36 + 2 * 6
        ("fp8", {}, 49, 64),
        ("fp8", {}, 160, 88),
    ],
)
def test_tiles_of_some_rows(format: str, options: dict[str, Any], last: int, rows: int) -> None:
    choices = [
        choice_of_experts(mean * EXPERTS, EXPERTS, 1536, 2048, format, **options)
        for mean in (last, last + 1)
    ]
    assert (choices[0]["tile_rows"], choices[0]["tile_cols"]) == (rows, 256)
    assert choices[1]["tile_rows"] > rows or choices[1]["path"] == "many"


def test_tiles_have_no_more_rows_than_there_are() -> None:
    assert choice_of_experts(20, 2, 32, 40000, "fp8_fp8")["tile_rows"] == 24
    assert choice_of_experts(20, 1, 1536, 2048, "fp8")["tile_rows"] == 32
    assert choice_of_experts(40, 1, 1536, 2048, "fp8")["tile_rows"] == 48


@pytest.mark.parametrize(
    ("options", "as_", "x"),
    [
        ({"gathered": True}, "nibbles", "with_sums"),
        ({}, "differences", "in_place"),
        ({"gathered": True, "zeros": True}, "differences", "gathered"),
        ({"gathered": True, "dtype": "float16"}, "differences", "gathered"),
        ({"gathered": True, "group": 64}, "any", "gathered"),
    ],
)
def test_what_int4_by_few_rows_is_multiplied_as(options: dict[str, Any], as_: str, x: str) -> None:
    choice = choice_of_experts(8 * EXPERTS, EXPERTS, 1536, 2048, "int4", **options)
    assert (choice["as"], choice["x"]) == (as_, x)


def test_nibbles_are_for_as_many_rows_as_experts() -> None:
    choices = [choice_of_experts(M, 128, 2048, 768, "int4", gathered=True) for M in (127, 128)]
    assert [choice["as"] for choice in choices] == ["differences", "nibbles"]


def test_many_gathered_rows_are_put_in_order_meanwhile() -> None:
    """From 256 rows an expert on, and up to 8192 weight rows; else by a kernel ahead."""

    def x(mean: int, N: int, **options: Any) -> tuple[Any, Any]:
        choice = choice_of_experts(mean * EXPERTS, EXPERTS, N, 2048, **options)
        assert choice["path"] == "many"
        return choice["x"], choice["ordered"]

    assert x(256, 8192, gathered=True) == ("meanwhile", 1)
    assert x(255, 8192, gathered=True) == ("gathered", 0)
    assert x(256, 8208, gathered=True) == ("gathered", 1)
    assert x(256, 8192) == ("in_place", 1)


def test_many_experts_of_bytes_are_taken_as_they_lie() -> None:
    def ordered(experts: int, format: str, **options: Any) -> Any:
        return choice_of_experts(512 * experts, experts, 2048, 768, format, **options)["ordered"]

    for format in ("fp8_fp8", "fp8_fp8_blocks"):
        assert [ordered(experts, format) for experts in (63, 64)] == [1, 0]
        assert ordered(64, format, gathered=True) == 1
    assert ordered(64, "dense") == ordered(64, "fp8") == 1


def test_blocks_take_tiles_where_they_have_several() -> None:
    """From 256 rows an expert on, or from 128 where SMs have four tiles and more; one expert's are
    alike, and fewer rows take no longer without."""

    def claimed(mean: int, experts: int = EXPERTS, N: int = 2048) -> Any:
        choice = choice_of_experts(mean * experts, experts, N, 2048, sms=132)
        assert choice["path"] == "many"
        return choice["claimed"]

    assert [claimed(mean) for mean in (127, 128, 256)] == [0, 1, 1]
    assert [claimed(mean, 8, 8192) for mean in (128, 255, 256)] == [0, 0, 1]  # 512 tiles
    assert [claimed(128, 8, N) for N in (8320, 8448)] == [0, 1]  # 520, 528
    assert claimed(300, 1) == 0


def test_few_gathered_rows_stay_where_they_are() -> None:
    for mean, format in ((1, "dense"), (20, "dense"), (1, "int4")):
        choice = choice_of_experts(mean * EXPERTS, EXPERTS, 1536, 2048, format, gathered=True)
        assert choice["x"] == "in_place"


@pytest.mark.parametrize(
    ("mean", "format", "options", "rows"),
    [
        (512, "fp8_fp8", {}, 272),  # spares many experts a third tile of 256
        (256, "fp8_fp8", {}, 272),
        (400, "fp8_fp8", {}, 256),  # two tiles either way
        (512, "fp8_fp8", {"gathered": True}, 256),
        (512, "dense", {}, 256),
        (40, "dense", {}, 128),
    ],
)
def test_tiles_of_many_rows(mean: int, format: str, options: dict[str, Any], rows: int) -> None:
    choice = choice_of_experts(mean * EXPERTS, EXPERTS, 6400, 2048, format, **options)
    assert (choice["tile_rows"], choice["tile_cols"]) == (rows, 128)


def test_few_tiles_are_alike_in_size() -> None:
    """Fewer than four an SM."""
    rows = [choice_of_experts(300 * 8, 8, 2048, 2048, sms=sms)["tile_rows"] for sms in (32, 33)]
    assert rows == [256, 192]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "int8"}, "format: expected 'dense', 'int4', .*got 'int8'"),
        ({"dtype": "float32"}, "dtype: expected float16 or bfloat16, got float32"),
        ({"format": "fp4", "dtype": "float16"}, "dtype: expected bfloat16, got float16"),
        ({"activation": "tanh"}, "activation: expected None, .*got 'tanh'"),
        ({"M": 0}, "M: expected 1 or more, got 0"),
        ({"experts": 1024}, "experts: expected 0 to 1023, got 1024"),
        ({"N": -1}, "N must fit in 31 bits, got -1"),
        ({"K": 1 << 31}, "K must fit in 31 bits, got 2147483648"),
        ({"format": "int4", "group": 48}, "group: expected a multiple of 32, or K = 256, got 48"),
        ({"sms": 0}, "sms: expected 1 or more, got 0"),
    ],
)
def test_refuses_what_no_product_has(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"M": 8, "experts": 4, "N": 64, "K": 256} | changed
    with pytest.raises(ValueError, match=message):
        plan_of_experts(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40])
def test_explain_names_the_choice(rows: int) -> None:
    weight = torch.randn(8, 256, 512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8 * rows, 512, device="cuda", dtype=torch.bfloat16)
    offsets = torch.arange(9, device="cuda", dtype=torch.int32) * rows
    explanation = ridgeline.explain("grouped_linear", x, weight, offsets)
    plan = plan_of_experts(
        8 * rows,
        8,
        256,
        512,
        hopper=torch.cuda.get_device_capability() == (9, 0),
        sms=torch.cuda.get_device_properties(0).multi_processor_count,
    )
    assert explanation.choices == (plan,)
    assert ("strips" in plan) == ("strips" in explanation.kernels[0].name)
