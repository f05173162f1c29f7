"""A row's bits depend on the row alone, not on how many rows stand beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 300
# Few rows (up to 132) are shared by more threads, each row by one, two or four blocks: four up to
# 8 or 16 rows, two up to 32; 1 to 67 by blocks with room for their dependents.
PARTS = [(0, 1), (7, 1), (299, 1), (3, 16), (3, 17), (5, 33), (0, 64), (100, 132), (100, 133)]
# One warp, a full one, full rows, rows that do not fill the threads, rows of four blocks, streamed
# ones. Of one warp, or two, layernorm has several of many rows in a block.
WIDTHS = [256, 1024, 2048, 4096, 5120, 8192, 16384, 259]


def _ops(device: str, cols: int) -> dict[str, Callable[[Tensor], tuple[Tensor, ...]]]:
    weight, bias = (torch.randn(cols, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "rmsnorm": lambda x: (ops.rmsnorm(x, weight),),
        "rmsnorm fp8": lambda x: ops.rmsnorm(x, weight, out_quant="fp8"),
        "rmsnorm fp8 by group": lambda x: ops.rmsnorm(x, weight, out_quant="fp8_group"),
        "add_rmsnorm": lambda x: (ops.add_rmsnorm(x, x.flip(-1), weight),),
        "layernorm": lambda x: (ops.layernorm(x, weight, bias),),
        "layernorm off the origin": lambda x: (ops.layernorm(x + 100, weight, bias),),
        "layernorm off the origin, some": lambda x: (
            ops.layernorm(x + 100 * (x[:, :1] > 0), weight, bias),
        ),
        "layernorm_gelu": lambda x: (ops.layernorm_gelu(x, weight, bias),),
        "softmax": lambda x: (ops.softmax(x),),
        "sum": lambda x: (ops.row_reduce(x, "sum"),),
        "logsumexp": lambda x: (ops.row_reduce(x, "logsumexp"),),
        "quantize_fp8 by row": lambda x: ops.quantize_fp8(x, "row"),
        "quantize_fp8 by group": lambda x: ops.quantize_fp8(x, "group"),
        "silu_mul": lambda x: (ops.silu_mul(torch.cat([x, x.flip(-1)], -1)),),
    }


@pytest.mark.parametrize("cols", WIDTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_alone_are_rows_together(device: str, cols: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, cols, device=device, dtype=torch.bfloat16)
    for name, op in _ops(device, cols).items():
        together = op(x)
        for first, count in PARTS:
            part = slice(first, first + count)
            for alone, whole in zip(op(x[part]), together, strict=True):
                same = torch.equal(alone.view(torch.uint8), whole[part].view(torch.uint8))
                assert same, f"{name}: rows {first} to {first + count - 1}"
