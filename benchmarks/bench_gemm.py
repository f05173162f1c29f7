"""Matrix products with weights: few rows against the bus, many against the tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench

# K x N of common layers; the last two are no powers of two.
SHAPES = [
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (8192, 8192), (8192, 57344),
    (28672, 8192), (5120, 13824), (3584, 18944),
]  # fmt: skip
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 4096]
GROUP = 128


class Layer:
    """One weight in every format, and the tensors of one call."""

    def __init__(self, bench: Bench, M: int, K: int, N: int) -> None:
        self.bench, self.M, self.K, self.N = bench, M, K, N
        self.dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16

    def x(self) -> Tensor:
        return torch.randn(self.M, self.K, device=self.bench.device, dtype=self.dtype)

    def weight(self) -> Tensor:
        return torch.randn(self.N, self.K, device=self.bench.device, dtype=self.dtype) * 0.02

    def measure(
        self,
        op: str,
        impl: str,
        make: Callable[[], Sequence[Any]],
        call: Callable[..., Any],
        *,
        like: tuple[Any, ...],
        chained: bool = False,
        **fields: Any,
    ) -> None:
        """`like` are the op's arguments that its cost is computed from."""
        if chained and self.bench.device == "cpu":
            return
        shape = {"M": self.M, "K": self.K, "N": self.N, **fields}
        options = {"x_scale": like[3]} if len(like) > 3 else {}
        try:
            self.bench.measure(
                op=op,
                impl=impl,
                make=make,
                call=call,
                cost=op_cost(op, *like[:3], **options),
                fields={"dtype": str(self.dtype).removeprefix("torch."), **shape},
                chained=chained,
                reads_only=self.M <= 64,
            )
        except (RuntimeError, ValueError) as error:
            if impl.startswith("ridgeline"):
                raise
            print(f"{op} {impl} {shape}: {str(error).splitlines()[0]}")


def dense(layer: Layer) -> None:
    def make() -> list[Tensor]:
        return [layer.x(), layer.weight()]

    like = tuple(make())
    layer.measure("linear", "ridgeline", make, ops.linear, like=like)
    layer.measure(
        "linear", "ridgeline", make, lambda x, w: ops.linear(x, w, weights_ready=True),
        like=like, chained=True,
    )  # fmt: skip
    layer.measure(
        "linear", "ridgeline_invariant", make, lambda x, w: ops.linear(x, w, batch_invariant=True),
        like=like,
    )  # fmt: skip
    rival = "torch_eager" if layer.bench.device == "cpu" else "cublas"
    layer.measure("linear", rival, make, F.linear, like=like)


def int4(layer: Layer) -> None:
    if layer.K % GROUP:
        return
    packed = ops.pack_int4(layer.weight(), GROUP)

    def make() -> list[Tensor]:
        return [layer.x(), packed.packed.clone(), packed.scales.clone()]

    def call(x: Tensor, data: Tensor, scales: Tensor, ready: bool = False) -> Tensor:
        weight = ops.Int4Weight(data, scales, None, None, layer.N, layer.K, GROUP)
        return ops.int4_linear(x, weight, weights_ready=ready)

    like = (layer.x(), packed)
    layer.measure("int4_linear", "ridgeline", make, call, like=like, group=GROUP)
    layer.measure(
        "int4_linear", "ridgeline", make, lambda *inputs: call(*inputs, ready=True),
        like=like, group=GROUP, chained=True,
    )  # fmt: skip

    def make_w4a8() -> list[Tensor]:
        x, *weight = make()
        scale = torch.rand(layer.M, device=layer.bench.device) + 0.5
        return [x.to(torch.float8_e4m3fn), scale, *weight]

    def call_w4a8(x: Tensor, scale: Tensor, data: Tensor, scales: Tensor) -> Tensor:
        weight = ops.Int4Weight(data, scales, None, None, layer.N, layer.K, GROUP)
        return ops.int4_linear(x, weight, x_scale=scale)

    like = (make_w4a8()[0], packed)
    layer.measure("int4_linear", "ridgeline", make_w4a8, call_w4a8, like=like, group=GROUP, x="fp8")
    like = (layer.x(), packed)
    if layer.bench.device == "cpu":
        return

    def make_tinygemm() -> list[Tensor]:
        codes = torch.randint(
            0, 256, (layer.N, layer.K // 2), device=layer.bench.device, dtype=torch.uint8
        )
        scales = torch.rand(layer.K // GROUP, layer.N, 2, device=codes.device, dtype=layer.dtype)
        return [layer.x(), torch._convert_weight_to_int4pack(codes, 8), scales]

    layer.measure(
        "int4_linear", "tinygemm", make_tinygemm,
        lambda x, w, s: torch._weight_int4pack_mm(x, w, GROUP, s), like=like, group=GROUP,
    )  # fmt: skip


def fp8(layer: Layer) -> None:
    def scales(count: int) -> Tensor:
        return torch.rand(count, device=layer.bench.device) + 0.5

    def make_w8a16() -> list[Tensor]:
        return [layer.x(), layer.weight().to(torch.float8_e4m3fn), scales(layer.N)]

    def make_w8a8() -> list[Tensor]:
        x, weight, scale = make_w8a16()
        return [x.to(torch.float8_e4m3fn), weight, scale, scales(layer.M)]

    like = tuple(make_w8a16())
    layer.measure("fp8_linear", "ridgeline", make_w8a16, ops.fp8_linear, like=like, x="bf16")
    layer.measure(
        "fp8_linear", "ridgeline", make_w8a16,
        lambda x, w, s: ops.fp8_linear(x, w, s, weights_ready=True),
        like=like, x="bf16", chained=True,
    )  # fmt: skip
    like = tuple(make_w8a8())
    layer.measure(
        "fp8_linear", "ridgeline", make_w8a8,
        lambda x, w, s, xs: ops.fp8_linear(x, w, s, x_scale=xs), like=like, x="fp8",
    )  # fmt: skip
    if layer.bench.device == "cpu":
        return
    for fast, impl in ((False, "scaled_mm"), (True, "scaled_mm_fast_accum")):
        layer.measure(
            "fp8_linear", impl, make_w8a8,
            lambda x, w, s, xs, fast=fast: torch._scaled_mm(
                x, w.t(), scale_a=xs[:, None], scale_b=s[None, :], out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            ),
            like=like, x="fp8",
        )  # fmt: skip


def int8(layer: Layer) -> None:
    def codes(rows: int) -> Tensor:
        return torch.randint(
            -127, 128, (rows, layer.K), device=layer.bench.device, dtype=torch.int8
        )

    def make() -> list[Tensor]:
        scales = [torch.rand(n, device=layer.bench.device) + 0.5 for n in (layer.N, layer.M)]
        return [codes(layer.M), codes(layer.N), *scales]

    like = tuple(make())
    for chained in (False, True):
        layer.measure(
            "int8_linear", "ridgeline", make,
            lambda x, w, s, xs, ready=chained: ops.int8_linear(
                x, w, s, x_scale=xs, weights_ready=ready
            ),
            like=like, chained=chained,
        )  # fmt: skip
    if layer.bench.device == "cpu":
        return
    layer.measure(
        "int8_linear", "int_mm", make, lambda x, w, s, xs: torch._int_mm(x, w.t()), like=like
    )


def main() -> None:
    bench = Bench.from_args(__doc__)
    shapes, rows = SHAPES, ROWS
    if bench.quick:
        shapes, rows = SHAPES[1:3], [1, 16, 64, 4096]
    if bench.device == "cpu":
        shapes, rows = [(1024, 4096), (4096, 4096)], [1, 8, 64]
    for K, N in shapes:
        for M in rows:
            layer = Layer(bench, M, K, N)
            dense(layer)
            int4(layer)
            fp8(layer)
            int8(layer)


if __name__ == "__main__":
    main()
