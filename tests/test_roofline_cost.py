"""The least work of a call, counted by hand."""

from __future__ import annotations

import pytest
import torch

from ridgeline.roofline import op_cost


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def seen(q_len: int, k_len: int, window: int | None, start: int = 0) -> list[list[int]]:
    """The keys of each query, causal."""
    ends = [k_len - q_len + i + 1 for i in range(q_len)]
    return [list(range(max(start, end - (window or end), 0), max(end, 0))) for end in ends]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("q_len, k_len", [(1, 50), (5, 50), (50, 50), (9, 4), (0, 7)])
def test_keys_that_no_query_sees_are_not_read(q_len: int, k_len: int, window: int | None):
    q, k = torch.empty(2, q_len, 4, 8), torch.empty(2, k_len, 2, 8)
    rows = seen(q_len, k_len, window)
    keys, pairs = len({key for row in rows for key in row}), sum(map(len, rows))
    cost = op_cost("attention", q, k, k, window=window)
    assert cost.bytes == 2 * q.nbytes + 2 * (2 * keys * 2 * 8) * 4
    assert cost.flops == 4 * 2 * 4 * 8 * pairs
    offsets = int32(0, q_len, 2 * q_len), int32(0, k_len, 2 * k_len)
    packed = [x.flatten(0, 1) for x in (q, k, k)]
    assert op_cost("attention_varlen", *packed, *offsets, q_len, k_len, window=window) == cost


@pytest.mark.parametrize("window", [None, 6])
def test_padding_on_the_left_is_not_read(window: int | None):
    q, cache = torch.empty(2, 4, 8), torch.empty(8, 16, 2, 8)
    tables, lens, start = torch.zeros(2, 4, dtype=torch.int32), int32(40, 5), int32(10, 5)
    rows = [row for n, s in ((40, 10), (5, 5)) for row in seen(1, n, window, s)]
    cost = op_cost("paged_attention", q, cache, cache, tables, lens, k_start=start, window=window)
    assert cost.bytes == 2 * q.nbytes + tables.nbytes + 8 + 2 * sum(map(len, rows)) * 2 * 8 * 4
    assert cost.flops == 4 * 4 * 8 * sum(map(len, rows))


def test_shared_keys_are_read_once():
    q, cache = torch.empty(2, 4, 8), torch.empty(8, 16, 2, 8)
    tables, lens = torch.zeros(2, 4, dtype=torch.int32), int32(40, 33)
    cost = op_cost("paged_attention", q, cache, cache, tables, lens, shared_blocks=2)
    assert cost.bytes == 2 * q.nbytes + tables.nbytes + 8 + 2 * (32 + 8 + 1) * 2 * 8 * 4
    assert cost.flops == 4 * 4 * 8 * (40 + 33)


def test_rows_of_x_that_no_row_takes_are_not_read():
    x, weight = torch.empty(1000, 64), torch.empty(4, 32, 64)
    offsets, rows = int32(0, 1, 2, 2, 2), int32(5, 900)
    cost = op_cost("grouped_linear", x, weight, offsets, rows=rows)
    read = (2 * 64 + 2 * 32 * 64) * 4 + offsets.nbytes + rows.nbytes
    assert cost.bytes == read + 2 * 32 * 4


def test_a_choice_of_experts_is_written_once_and_its_row_read_once():
    logits, x = torch.empty(100, 16, dtype=torch.float16), torch.empty(1000, 64)
    places, weights = torch.zeros(100, 4, dtype=torch.int32), torch.empty(100, 4)
    assert op_cost("route_experts", logits, 4).bytes == logits.nbytes + 400 * 12 + 17 * 4
    assert op_cost("route_experts", logits, 4).flops == 5 * 400
    assert op_cost("route_experts", logits, 4, normalized=False).flops == 5 * 1600
    chosen = torch.zeros(100, 4, dtype=torch.int64)
    assert op_cost("order_experts", chosen, 16).bytes == 400 * (8 + 8) + 17 * 4
    named = places.nbytes + weights.nbytes
    cost = op_cost("combine_experts", x, places, weights)
    assert (cost.bytes, cost.flops) == (named + (400 + 100) * 64 * 4, 2 * 400 * 64)
    assert op_cost("combine_experts", x[:7], places, weights).bytes == named + 107 * 64 * 4


def test_a_product_of_a_dtype_without_a_unit_is_refused():
    x = torch.empty(4, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match="^x: expected dtype float32, .*, got torch.float64"):
        op_cost("linear", x, x)
    with pytest.raises(ValueError, match="^x: expected dtype float32, .*, got torch.float64"):
        op_cost("fp8_linear", x, x.to(torch.float8_e4m3fn), torch.ones(1))


def test_what_rows_without_columns_give_is_written():
    x, weight = torch.empty(3, 0), torch.empty(0)
    assert op_cost("row_reduce", x, "sum").bytes == 3 * 4
    assert op_cost("quantize_int8", x).bytes == op_cost("quantize_fp8", x).bytes == 3 * 4
    assert op_cost("rmsnorm", x, weight, out_quant="fp8").bytes == 3 * 4
    assert op_cost("rmsnorm", x, weight, out_quant="fp8_group").bytes == 0
