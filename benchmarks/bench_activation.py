"""Activations with a bias and with a gate, beside eager and compiled PyTorch (cols: of y)."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from row_ops import compare, dtypes, name_of, shapes
from timer import Bench

F = torch.nn.functional


def torch_bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def torch_silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def torch_gelu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def torch_swiglu_clamped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def activations(bench: Bench, rows: int, cols: int, dtype: torch.dtype) -> None:
    def matrix(width: int) -> Tensor:
        return torch.randn(rows, width, device=bench.device, dtype=dtype)

    def vector() -> Tensor:
        return torch.randn(cols, device=bench.device, dtype=dtype)

    fields = {"rows": rows, "cols": cols, "dtype": name_of(dtype)}
    compare(
        bench,
        "bias_gelu",
        make=lambda: (matrix(cols), vector()),
        ours=lambda x, b: ops.bias_gelu(x, b, weights_ready=True),
        torchs=torch_bias_gelu,
        cost=op_cost("bias_gelu", matrix(cols), vector()),
        fields=fields,
    )
    for op, torchs in (
        ("silu_mul", torch_silu_mul),
        ("gelu_mul", torch_gelu_mul),
        ("swiglu_clamped", torch_swiglu_clamped),
    ):
        compare(
            bench,
            op,
            make=lambda: (matrix(2 * cols),),
            ours=getattr(ops, op),
            torchs=torchs,
            cost=op_cost(op, matrix(2 * cols)),
            fields=fields,
        )
    for out_quant in ("fp8", "fp8_group"):
        compare(
            bench,
            "silu_mul",
            make=lambda: (matrix(2 * cols),),
            ours=lambda x, q=out_quant: ops.silu_mul(x, out_quant=q),
            torchs=None,
            cost=op_cost("silu_mul", matrix(2 * cols), out_quant=out_quant),
            fields={**fields, "out_quant": out_quant},
        )


def main() -> None:
    bench = Bench.from_args(__doc__)
    for dtype in dtypes(bench):
        for rows, cols in shapes(bench):
            activations(bench, rows, cols, dtype)


if __name__ == "__main__":
    main()
