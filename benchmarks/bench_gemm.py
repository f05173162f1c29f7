"""Matrix products with weights: few rows against the bus, many against the tensor cores.

``--rows 16 64``: those rows of x alone, by all shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from ridgeline.roofline.timing import COLD_BYTES
from timer import Bench

# K x N of common layers; the last two are no powers of two.
SHAPES = [
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (8192, 8192), (8192, 57344),
    (28672, 8192), (5120, 13824), (3584, 18944),
]  # fmt: skip
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192]
GROUP = 128
FP8 = torch.float8_e4m3fn


class Layer:
    """One weight in every format, and the tensors of one call."""

    def __init__(self, bench: Bench, M: int, K: int, N: int) -> None:
        self.bench, self.M, self.K, self.N = bench, M, K, N
        self.dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16

    def x(self) -> Tensor:
        return torch.randn(self.M, self.K, device=self.bench.device, dtype=self.dtype)

    def weight(self) -> Tensor:
        return torch.randn(self.N, self.K, device=self.bench.device, dtype=self.dtype) * 0.02

    def scales(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.bench.device) + 0.5

    def measure(
        self,
        op: str,
        make: Callable[[], Sequence[Any]],
        calls: dict[str, Callable[..., Any]],
        *,
        like: tuple[Any, ...],
        chained: bool = False,
        **fields: Any,
    ) -> None:
        """Times `calls`, ours first, by turns. `like` are the op's arguments that its cost is
        computed from; `make` may make more, for the others."""
        if self.bench.device == "cpu":
            if chained:
                return
            calls = {name: calls[name] for name in calls if name.startswith(("ridgeline", "torch"))}
        shape = {"M": self.M, "K": self.K, "N": self.N, **fields}
        usable = {}
        for impl, call in calls.items():
            try:
                call(*make())
                usable[impl] = call
            except (RuntimeError, ValueError) as error:
                if impl.startswith("ridgeline"):
                    raise
                print(f"{op} {impl} {shape}: {str(error).splitlines()[0]}")
        options = {"x_scale": like[3]} if len(like) > 3 else {}
        cost = op_cost(op, *like[:3], **options)
        self.bench.compare(
            op=op,
            calls=usable,
            make=make,
            cost=cost,
            fields={"dtype": str(self.dtype).removeprefix("torch."), **shape},
            chained=chained,
            reads_only=self.M <= 64,
            launches=20 if cost.flops < 1e12 else 5,
            touched=cost.bytes,
            least_sets=min(64, max(2, -(-COLD_BYTES // cost.bytes))),
        )

    def invariant(
        self, op: str, make: Callable[[], Sequence[Any]], call: Callable[..., Any], **others: Any
    ) -> None:
        """What it costs that bits do not depend on M: by itself, for of many rows it is slow, and
        who has the turn after it would find the card cool."""
        if self.M <= 512:
            calls = {"ridgeline_invariant": partial(call, batch_invariant=True)}
            self.measure(op, make, calls, **others)


def dense(layer: Layer) -> None:
    def make() -> list[Tensor]:
        return [layer.x(), layer.weight()]

    like = tuple(make())
    rival = "torch_eager" if layer.bench.device == "cpu" else "cublas"
    layer.measure("linear", make, {"ridgeline": ops.linear, rival: F.linear}, like=like)
    layer.invariant("linear", make, ops.linear, like=like)
    calls = {"ridgeline": lambda x, w: ops.linear(x, w, weights_ready=True)}
    layer.measure("linear", make, calls, like=like, chained=True)


def int4(layer: Layer) -> None:
    """Weights of 4 bits and x of 16 or 8, beside cuBLAS with a weight kept in bf16."""
    if layer.K % GROUP:
        return
    packed = ops.pack_int4(layer.weight(), GROUP)

    def weights() -> list[Tensor]:
        return [packed.packed.clone(), packed.scales.clone()]

    def make() -> list[Tensor]:
        return [layer.x(), *weights(), layer.weight()]

    def call(x: Tensor, data: Tensor, scales: Tensor, *_: Tensor, **options: Any) -> Tensor:
        weight = ops.Int4Weight(data, scales, None, None, layer.N, layer.K, GROUP)
        return ops.int4_linear(x, weight, **options)

    def cublas(x: Tensor, data: Tensor, scales: Tensor, dense: Tensor, *_: Tensor) -> Tensor:
        return F.linear(x, dense)

    like = (layer.x(), packed)
    calls = {"ridgeline": call, "cublas_bf16": cublas}
    layer.measure("int4_linear", make, calls, like=like, group=GROUP)
    layer.invariant("int4_linear", lambda: make()[:3], call, like=like, group=GROUP)
    calls = {"ridgeline": lambda *inputs: call(*inputs, weights_ready=True)}
    layer.measure("int4_linear", lambda: make()[:3], calls, like=like, group=GROUP, chained=True)

    def make_w4a8() -> list[Tensor]:
        x, *others = make()
        return [x, *others, x.to(FP8), layer.scales(layer.M)]

    def call_w4a8(
        x: Tensor, data: Tensor, scales: Tensor, dense: Tensor, codes: Tensor, x_scale: Tensor,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        return call(codes, data, scales, x_scale=x_scale, **options)

    like = (make_w4a8()[4], packed)
    calls = {"ridgeline": call_w4a8, "cublas_bf16": cublas}
    layer.measure("int4_linear", make_w4a8, calls, like=like, group=GROUP, x="fp8")
    calls = {"ridgeline": lambda *inputs: call_w4a8(*inputs, weights_ready=True)}
    layer.measure(
        "int4_linear", make_w4a8, calls, like=like, group=GROUP, x="fp8", chained=True
    )  # fmt: skip


def tinygemm(layer: Layer) -> None:
    """PyTorch's product of 4 bits, up to the rows where cuBLAS is faster."""
    if layer.K % GROUP or layer.M > 64 or layer.bench.device == "cpu":
        return

    def make() -> list[Tensor]:
        shape, device = (layer.N, layer.K // 2), layer.bench.device
        codes = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
        scales = layer.scales(layer.K // GROUP, layer.N, 2).to(layer.dtype)
        return [layer.x(), torch._convert_weight_to_int4pack(codes, 8), scales]

    calls = {"tinygemm": lambda x, w, s: torch._weight_int4pack_mm(x, w, GROUP, s)}
    like = (layer.x(), ops.pack_int4(layer.weight(), GROUP))
    layer.measure("int4_linear", make, calls, like=like, group=GROUP)


def fp8(layer: Layer) -> None:
    def make_w8a16() -> list[Tensor]:
        return [layer.x(), layer.weight().to(FP8), layer.scales(layer.N)]

    def make_w8a8() -> list[Tensor]:
        x, weight, scale = make_w8a16()
        return [x.to(FP8), weight, scale, layer.scales(layer.M)]

    def w8a8(x: Tensor, w: Tensor, s: Tensor, xs: Tensor, **options: Any) -> Tensor:
        return ops.fp8_linear(x, w, s, x_scale=xs, **options)

    def scaled_mm(fast: bool) -> Callable[..., Tensor]:
        return lambda x, w, s, xs: torch._scaled_mm(
            x, w.t(), scale_a=xs[:, None], scale_b=s[None, :], out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )  # fmt: skip

    for x, make, call in (("bf16", make_w8a16, ops.fp8_linear), ("fp8", make_w8a8, w8a8)):
        like = tuple(make())
        calls: dict[str, Callable[..., Any]] = {"ridgeline": call}
        if x == "fp8":
            calls |= {"scaled_mm": scaled_mm(False), "scaled_mm_fast_accum": scaled_mm(True)}
        layer.measure("fp8_linear", make, calls, like=like, x=x)
        layer.invariant("fp8_linear", make, call, like=like, x=x)
        calls = {"ridgeline": partial(call, weights_ready=True)}
        layer.measure("fp8_linear", make, calls, like=like, x=x, chained=True)


def fp8_weight_blocks(layer: Layer) -> None:
    """x in bf16, a scale a block of 128 x 128 weights."""

    def make() -> list[Tensor]:
        scale = layer.scales(-(-layer.N // 128), -(-layer.K // 128))
        return [layer.x(), layer.weight().to(FP8), scale]

    like = tuple(make())
    calls = {"ridgeline": ops.fp8_linear}
    layer.measure("fp8_linear", make, calls, like=like, x="bf16", scales="blocks")


def fp8_blocks(layer: Layer) -> None:
    """A scale a block of 128 x 128 weights and a group of 128 columns of x."""

    def make() -> list[Tensor]:
        groups = layer.K // 128
        x_scale, scale = layer.scales(layer.M, groups), layer.scales(layer.N // 128, groups)
        return [layer.x().to(FP8), layer.weight().to(FP8), scale, x_scale]

    def scaled_mm(x: Tensor, w: Tensor, s: Tensor, xs: Tensor) -> Tensor:
        xs = xs.view(xs.shape[::-1]).t()  # cuBLAS takes the scales of x by columns
        return torch._scaled_mm(
            x, w.t(), scale_a=xs, scale_b=s.t(), out_dtype=torch.bfloat16, use_fast_accum=False
        )

    calls = {
        "ridgeline": lambda x, w, s, xs: ops.fp8_linear(x, w, s, x_scale=xs),
        "scaled_mm": scaled_mm,
    }
    layer.measure("fp8_linear", make, calls, like=tuple(make()), x="fp8", scales="blocks")


def int8(layer: Layer) -> None:
    def codes(rows: int) -> Tensor:
        return torch.randint(
            -127, 128, (rows, layer.K), device=layer.bench.device, dtype=torch.int8
        )

    def make() -> list[Tensor]:
        return [codes(layer.M), codes(layer.N), layer.scales(layer.N), layer.scales(layer.M)]

    def call(x: Tensor, w: Tensor, s: Tensor, xs: Tensor, ready: bool = False) -> Tensor:
        return ops.int8_linear(x, w, s, x_scale=xs, weights_ready=ready)

    like = tuple(make())
    calls = {"ridgeline": call, "int_mm": lambda x, w, s, xs: torch._int_mm(x, w.t())}
    layer.measure("int8_linear", make, calls, like=like)
    calls = {"ridgeline": partial(call, ready=True)}
    layer.measure("int8_linear", make, calls, like=like, chained=True)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=int, nargs="+", help="of x, each by all shapes")
    given, others = parser.parse_known_args()
    bench = Bench.from_args(__doc__, others)
    shapes, rows = SHAPES, given.rows or ROWS
    if bench.quick and not given.rows:
        shapes, rows = SHAPES[1:3], [1, 16, 32, 64, 128, 4096]
    if bench.device == "cpu":
        shapes, rows = [(1024, 4096), (4096, 4096)], given.rows or [1, 8, 64]
    for K, N in shapes:
        for M in rows:
            layer = Layer(bench, M, K, N)
            for measure in (dense, int4, tinygemm, fp8, fp8_weight_blocks, int8):
                measure(layer)
    if bench.device == "cpu" or given.rows:
        return
    fp8_blocks(Layer(bench, 4096, 16384, 7168))
    if bench.quick:  # 4 bits have more to show: between few rows and many, and of a long K
        for K, N in SHAPES:
            for M in [1, 16, 64, 128, 256, 512, 4096] if K == 14336 else [128, 256, 512, 4096]:
                int4(Layer(bench, M, K, N))


if __name__ == "__main__":
    main()
