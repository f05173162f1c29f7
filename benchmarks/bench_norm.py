"""Norms, plain, with a residual, quantised and with GELU, beside eager and compiled PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from row_ops import compare, dtypes, name_of, shapes
from timer import Bench

F = torch.nn.functional


def torch_rmsnorm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def torch_add_rmsnorm(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(r.add_(x), x.shape[-1:], w, 1e-6)


def torch_rmsnorm_fp8(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, x.shape[-1:], w, 1e-6).float()
    scale = y.abs().amax(-1, keepdim=True) / 448
    return (y / scale).to(torch.float8_e4m3fn), scale


def torch_layernorm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def torch_layernorm_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b))


def norms(bench: Bench, rows: int, cols: int, dtype: torch.dtype) -> None:
    def matrix() -> Tensor:
        return torch.randn(rows, cols, device=bench.device, dtype=dtype)

    def vector() -> Tensor:
        return torch.randn(cols, device=bench.device, dtype=dtype)

    x, v = matrix(), vector()
    fields = {"rows": rows, "cols": cols, "dtype": name_of(dtype)}
    compare(
        bench,
        "rmsnorm",
        make=lambda: (matrix(), vector()),
        ours=lambda x, w: ops.rmsnorm(x, w, weights_ready=True),
        torchs=torch_rmsnorm,
        cost=op_cost("rmsnorm", x, v),
        fields=fields,
    )
    for out_quant, torchs in (("fp8", torch_rmsnorm_fp8), ("fp8_group", None)):
        compare(
            bench,
            "rmsnorm",
            make=lambda: (matrix(), vector()),
            ours=lambda x, w, q=out_quant: ops.rmsnorm(x, w, out_quant=q, weights_ready=True),
            torchs=torchs,
            cost=op_cost("rmsnorm", x, v, out_quant=out_quant),
            fields={**fields, "out_quant": out_quant},
        )
    compare(
        bench,
        "add_rmsnorm",
        make=lambda: (matrix(), matrix(), vector()),
        ours=lambda x, r, w: ops.add_rmsnorm(x, r, w, weights_ready=True),
        torchs=torch_add_rmsnorm,
        cost=op_cost("add_rmsnorm", x, x, v),
        fields=fields,
    )
    for out_quant in ("fp8", "fp8_group"):
        compare(
            bench,
            "add_rmsnorm",
            make=lambda: (matrix(), matrix(), vector()),
            ours=lambda x, r, w, q=out_quant: ops.add_rmsnorm(
                x, r, w, out_quant=q, weights_ready=True
            ),
            torchs=None,
            cost=op_cost("add_rmsnorm", x, x, v, out_quant=out_quant),
            fields={**fields, "out_quant": out_quant},
        )
    for op, torchs in (("layernorm", torch_layernorm), ("layernorm_gelu", torch_layernorm_gelu)):
        function = getattr(ops, op)
        compare(
            bench,
            op,
            make=lambda: (matrix(), vector(), vector()),
            ours=lambda x, w, b, f=function: f(x, w, b, weights_ready=True),
            torchs=torchs,
            cost=op_cost(op, x, v, v),
            fields=fields,
        )


def main() -> None:
    bench = Bench.from_args(__doc__)
    for dtype in dtypes(bench):
        for rows, cols in shapes(bench):
            norms(bench, rows, cols, dtype)


if __name__ == "__main__":
    main()
