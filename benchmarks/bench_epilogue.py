"""What a product pays for what is fused into it: epilogues, and the norm ahead of few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from ridgeline.roofline.timing import COLD_BYTES
from timer import Bench

SHAPE = (4096, 28672)  # K x N: gate and up of Llama-3.1-8B
GROUP = 128
FP8 = torch.float8_e4m3fn

Options = dict[str, Any]
Call = tuple[tuple[Any, ...], Options]


class Product:
    """One product in every format, and what may be fused into it."""

    def __init__(self, bench: Bench, M: int, K: int, N: int) -> None:
        self.bench, self.M, self.K, self.N = bench, M, K, N
        self.dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.bench.device, dtype=self.dtype)

    def scales(self, count: int) -> Tensor:
        return torch.rand(count, device=self.bench.device) + 0.5

    def fused(self) -> dict[str, Callable[[], Options]]:
        """What is fused -> the arguments it takes."""
        kinds: dict[str, Callable[[], Options]] = {
            "bias_gelu": lambda: {"bias": self.tensor(self.N), "activation": "gelu"},
            "silu_mul": lambda: {"activation": "silu_mul"},
            "residual": lambda: {"residual": self.tensor(self.M, self.N)},
        }
        norm = {"norm": lambda: {"norm_weight": self.tensor(self.K)}}
        return kinds | (norm if self.M <= 16 else {})

    def linear(self) -> Call:
        return (self.tensor(self.M, self.K), self.tensor(self.N, self.K) * 0.02), {}

    def w8a16(self) -> Call:
        x, weight = self.linear()[0]
        return (x, weight.to(FP8), self.scales(self.N)), {}

    def w8a8(self) -> Call:
        x, weight, scale = self.w8a16()[0]
        options = {"x_scale": self.scales(self.M), "out_dtype": self.dtype}
        return (x.to(FP8), weight, scale), options

    def int4(self) -> Call:
        x, weight = self.linear()[0]
        return (x, ops.pack_int4(weight, GROUP)), {}

    def measure(
        self, op: str, make: Callable[[], Call], name: str, make_fused: Callable[[], Options]
    ) -> None:
        """The product with it and without, by turns, and 16 bits by PyTorch's own operations."""

        def make_all() -> list[Any]:
            args, options = make()
            return [args, options, make_fused(), *tensors_of(args)]

        def with_it(args: tuple[Any, ...], options: Options, more: Options, *_: Tensor) -> Any:
            if name == "added":
                return ops.fp8_linear_add(*args, x_scale=options["x_scale"], **more)
            return getattr(ops, op)(*args, **options, **more)

        def without(args: tuple[Any, ...], options: Options, more: Options, *_: Tensor) -> Tensor:
            return getattr(ops, op)(*args, **options)

        calls = {"ridgeline": with_it, "ridgeline_plain": without}
        if op == "linear":
            calls["torch_eager"] = lambda args, options, more, *_: by_torch(*args, **more)
        args, options, more, *_ = make_all()
        cost = op_cost(op, *args, **options, **more)
        dtypes = (str(t.dtype).removeprefix("torch.") for t in (self.linear()[0][0], args[0]))
        shape = {"M": self.M, "K": self.K, "N": self.N, "fused": name}
        self.bench.compare(
            op=op, calls=calls, make=make_all, cost=cost, reads_only=self.M <= 64,
            fields=dict(zip(("dtype", "x"), dtypes)) | shape, touched=cost.bytes,
            least_sets=min(64, max(2, -(-COLD_BYTES // cost.bytes))),
        )  # fmt: skip


def by_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    if norm_weight is not None:
        x = F.rms_norm(x, x.shape[-1:], norm_weight, 1e-6)
    out = F.linear(x, weight, bias)
    if activation == "silu_mul":
        gate, up = out.chunk(2, -1)
        return F.silu(gate) * up
    out = F.gelu(out) if activation == "gelu" else out
    return out if residual is None else out + residual


def tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    """Those of a call, which the timer counts."""
    nested = [[x.packed, x.scales] if isinstance(x, ops.Int4Weight) else [x] for x in args]
    return [tensor for tensors in nested for tensor in tensors]


def main() -> None:
    bench = Bench.from_args(__doc__)
    shape, rows = SHAPE, [1, 4, 8, 16, 32, 64, 512, 4096]
    if bench.quick:
        rows = [1, 16, 4096]
    if bench.device == "cpu":
        shape, rows = (1024, 4096), [1, 8]
    for M in rows:
        product = Product(bench, M, *shape)
        for name, make_fused in product.fused().items():
            eight = product.w8a16 if name == "norm" else product.w8a8  # codes take no norm
            product.measure("linear", product.linear, name, make_fused)
            product.measure("fp8_linear", eight, name, make_fused)
            product.measure("int4_linear", product.int4, name, make_fused)
        if M > 64:  # where one kernel adds in place; the cost is that of a residual
            product.measure("fp8_linear", product.w8a8, "added", product.fused()["residual"])


if __name__ == "__main__":
    main()
