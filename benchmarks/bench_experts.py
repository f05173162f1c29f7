"""Products with experts' weights: few tokens against the bus, many against the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline.cost import Cost
from ridgeline.roofline.timing import COLD_BYTES
from timer import Bench

# Experts, chosen by a token, K, N of the first product: Mixtral's and Qwen3-30B-A3B's.
SHAPES = [(8, 2, 4096, 28672), (128, 8, 2048, 1536)]
GPT_OSS = (32, 4, 2880, 5760)  # gpt-oss-20b's, which files have in 4-bit floats
GROUP = 128  # columns that share a scale of int4
FP4_GROUP = 32
BLOCK = 128  # rows and columns that share one of fp8 by blocks
TOKENS = [1, 4, 16, 64, 256, 1024, 8192]
FP8 = torch.float8_e4m3fn

Part = tuple[int, int, int]  # an expert, its first row and the one after its last


@dataclass
class Layer:
    """Experts' weights of one shape, made once a format, and tokens that choose at random.

    A call touches some experts alone, so sets of inputs share the weights and touch others in turn:
    with the same ones each time, small experts would be read from L2.
    """

    bench: Bench
    experts: int
    chosen: int
    K: int
    N: int
    tokens: int = 0
    kept: dict[str, list[list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = torch.float32 if self.bench.device == "cpu" else torch.bfloat16

    def choose(self, tokens: int) -> None:
        draw = torch.Generator().manual_seed(tokens)
        self.tokens = tokens
        choice = torch.rand(tokens, self.experts, generator=draw).topk(self.chosen).indices
        names, self.choice = choice.flatten().unique(return_inverse=True)
        self.touched = len(names)
        self.names = torch.randperm(self.experts, generator=draw)

    def routing(self, turn: int) -> tuple[Tensor, Tensor, list[Part]]:
        """Offsets, rows, and the same on the host; the experts of each turn follow the last's."""
        choice = self.names[(self.choice + turn * self.touched) % self.experts]
        order = choice.argsort(stable=True)
        offsets = torch.searchsorted(choice[order], torch.arange(self.experts + 1), out_int32=True)
        bounds = offsets.tolist()
        parts = [(e, a, b) for e, (a, b) in enumerate(zip(bounds, bounds[1:])) if a < b]
        device = self.bench.device
        return offsets.to(device), (order // self.chosen).int().to(device), parts

    def weights(self, name: str, make: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
        """As many copies as exceed the caches when all experts are touched."""
        if name not in self.kept:
            self.kept[name] = [make()]
            size = sum(t.nbytes for t in self.kept[name][0])
            self.kept[name] += [make() for _ in range(-(-COLD_BYTES // size) - 1)]
        return self.kept[name]

    def dense(self) -> list[Tensor]:
        shape = (self.experts, self.N, self.K)
        return [torch.randn(shape, device=self.bench.device, dtype=self.dtype) * 0.02]

    def fp8(self) -> list[Tensor]:
        scales = torch.rand(self.experts, self.N, device=self.bench.device) + 0.5
        return [self.dense()[0].to(FP8), scales]

    def fp8_blocks(self) -> list[Tensor]:
        blocks = (self.experts, -(-self.N // BLOCK), -(-self.K // BLOCK))
        scales = torch.rand(blocks, device=self.bench.device) + 0.5
        return [self.weights("fp8", self.fp8)[0][0].clone(), scales]

    def int4(self) -> list[Tensor]:
        shape = (self.experts, self.N // 16, self.K // 64, 32, 4)
        codes = torch.randint(-(2**31), 2**31, shape, device=self.bench.device, dtype=torch.int32)
        groups = (self.experts, self.K // GROUP, self.N)
        return [codes, torch.rand(groups, device=self.bench.device).to(self.dtype)]

    def fp4(self) -> list[Tensor]:
        shape, device = (self.experts, self.N, self.K // FP4_GROUP), self.bench.device
        exponents = torch.randint(119, 124, shape, dtype=torch.uint8, device=device)
        codes = torch.randint(0, 256, (*shape, FP4_GROUP // 2), dtype=torch.uint8, device=device)
        return [ops.Fp4Experts.from_mxfp4(codes, exponents).packed]

    def tinygemm(self) -> list[Tensor]:
        shape = (self.experts, self.N, self.K // 2)
        codes = torch.randint(0, 256, shape, device=self.bench.device, dtype=torch.uint8)
        packed = torch.stack([torch._convert_weight_to_int4pack(of_one, 8) for of_one in codes])
        groups = (self.experts, self.K // GROUP, self.N, 2)
        return [packed, torch.rand(groups, device=self.bench.device).to(self.dtype)]

    def x(self) -> Tensor:
        return torch.randn(self.tokens, self.K, device=self.bench.device, dtype=self.dtype)

    def measure(
        self,
        op: str,
        weights: dict[str, list[list[Tensor]]],
        calls: dict[str, Callable[..., Tensor]],
        bits: float,
        make_x: Callable[[], list[Tensor]] | None = None,
        **fields: Any,
    ) -> None:
        """`calls` take the tokens, the weights of their name (others: the first's), offsets, rows
        and parts; `bits` are those of a weight."""
        rows = self.tokens * self.chosen
        make_x = make_x or (lambda: [self.x()])
        of_x, unit = make_x()[0].element_size(), "fp32" if self.bench.device == "cpu" else "bf16"
        moved = int(self.touched * self.N * self.K * bits / 8) + of_x * self.tokens * self.K
        moved += self.dtype.itemsize * rows * self.N
        cost = Cost(moved, 2 * rows * self.N * self.K, "fp8" if of_x == 1 else unit)
        turns = count()

        def make() -> list[Any]:
            turn = next(turns)
            lap = turn * self.touched // self.experts
            sets = {name: copies[lap % len(copies)] for name, copies in weights.items()}
            return [sets, make_x(), self.routing(turn), *(t for w in sets.values() for t in w)]

        def bound(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
            own = name if name in weights else next(iter(weights))
            return lambda sets, x, routing, *_: call(*x, *sets[own], *routing)

        bound_calls = {name: bound(name, call) for name, call in calls.items()}
        for name in list(calls)[1:]:
            try:
                bound_calls[name](*make())
            except (RuntimeError, ValueError) as error:  # this build of PyTorch lacks it
                print(f"{op} {name}: {str(error).splitlines()[0]}")
                del bound_calls[name]
        shape = {"experts": self.experts, "chosen": self.chosen, "touched": self.touched}
        dtype = str(self.dtype).removeprefix("torch.")
        self.bench.compare(
            op=op, calls=bound_calls, make=make, cost=cost, reads_only=rows <= 64 * self.touched,
            fields={"dtype": dtype, **fields, "tokens": self.tokens, **shape, "K": self.K,
                    "N": self.N},
            launches=20 if self.tokens < 1024 else 5, touched=moved,
            least_sets=max(2, -(-COLD_BYTES // moved)),
        )  # fmt: skip


def one_by_one(x: Tensor, weight: Tensor, _: Any, rows: Tensor, parts: list[Part]) -> Tensor:
    """A product an expert, by cuBLAS."""
    gathered = x[rows]
    return torch.cat([F.linear(gathered[a:b], weight[e]) for e, a, b in parts])


def dense(layer: Layer) -> None:
    def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, rows: Tensor, _: Any) -> Tensor:
        return torch._grouped_mm(x[rows], weight.transpose(1, 2), offs=offsets[1:])

    calls = {
        "ridgeline": lambda x, w, offsets, rows, _: ops.grouped_linear(x, w, offsets, rows=rows),
        "torch_grouped_mm": grouped_mm,
        "one_by_one": one_by_one,
    }
    weights = {"ridgeline": layer.weights("dense", layer.dense)}
    layer.measure("grouped_linear", weights, calls, 8.0 * layer.dtype.itemsize)


def fp8(layer: Layer) -> None:
    """Weights of fp8 with tokens of 16 bits, beside weights kept in bf16; with scales of blocks;
    and both in fp8, by rows and by blocks."""

    def codes(across: int = 1) -> list[Tensor]:
        scale = torch.rand(layer.tokens, across, device=layer.bench.device) + 0.5
        return [layer.x().to(FP8), scale]

    def ours(x: Tensor, w: Tensor, s: Tensor, offsets: Tensor, rows: Tensor, _: Any) -> Tensor:
        return ops.grouped_fp8_linear(x, w, s, offsets, rows=rows)

    def ours_fp8(
        x: Tensor, x_scale: Tensor, w: Tensor, s: Tensor, offsets: Tensor, rows: Tensor, _: Any
    ) -> Tensor:
        scale = x_scale.squeeze(1)
        return ops.grouped_fp8_linear(
            x, w, s, offsets, rows=rows, x_scale=scale, out_dtype=layer.dtype
        )

    def scaled_grouped_mm(
        x: Tensor, xs: Tensor, w: Tensor, s: Tensor, offsets: Tensor, rows: Tensor, _: Any
    ) -> Tensor:
        x, xs = x.view(torch.uint8)[rows].view(FP8), xs[rows].view(-1)
        return torch._scaled_grouped_mm(
            x, w.transpose(1, 2), xs, s, offs=offsets[1:], out_dtype=layer.dtype,
            use_fast_accum=True,
        )  # fmt: skip

    bits = 8 + 32 / layer.K
    ours_weights = {"ridgeline": layer.weights("fp8", layer.fp8)}
    expanded = {"one_by_one_expanded": layer.weights("dense", layer.dense)}
    calls = {"ridgeline": ours, "one_by_one_expanded": one_by_one}
    layer.measure("grouped_fp8_linear", ours_weights | expanded, calls, bits, x="bf16")
    blocks = {"ridgeline": layer.weights("fp8 blocks", layer.fp8_blocks)}
    layer.measure(
        "grouped_fp8_linear", blocks, {"ridgeline": ours}, 8 + 32 / BLOCK**2, x="bf16",
        scales="blocks",
    )  # fmt: skip
    calls = {"ridgeline": ours_fp8}
    if layer.bench.device != "cpu":
        calls["torch_scaled_grouped_mm"] = scaled_grouped_mm
    layer.measure("grouped_fp8_linear", ours_weights, calls, bits, codes, x="fp8")
    layer.measure(
        "grouped_fp8_linear", blocks, {"ridgeline": ours_fp8}, 8 + 32 / BLOCK**2,
        lambda: codes(-(-layer.K // BLOCK)), x="fp8", scales="blocks",
    )  # fmt: skip


def int4(layer: Layer) -> None:
    """Weights of 4 bits, beside weights kept in bf16 and, of few rows, tinygemm."""

    def ours(
        x: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor, rows: Tensor, _: Any
    ) -> Tensor:
        weight = ops.Int4Experts(packed, scales, None, layer.N, layer.K, GROUP)
        return ops.grouped_int4_linear(x, weight, offsets, rows=rows)

    def tinygemm(
        x: Tensor, packed: Tensor, scales: Tensor, _: Any, rows: Tensor, parts: list[Part]
    ) -> Tensor:
        gathered = x[rows]
        return torch.cat([
            torch._weight_int4pack_mm(gathered[a:b], packed[e], GROUP, scales[e])
            for e, a, b in parts
        ])  # fmt: skip

    weights = {"ridgeline": layer.weights("int4", layer.int4)}
    weights["one_by_one_expanded"] = layer.weights("dense", layer.dense)
    calls: dict[str, Callable[..., Tensor]] = {"ridgeline": ours, "one_by_one_expanded": one_by_one}
    if layer.bench.device != "cpu" and layer.tokens * layer.chosen <= 16 * layer.touched:
        weights["one_by_one_tinygemm"] = layer.weights("tinygemm", layer.tinygemm)
        calls["one_by_one_tinygemm"] = tinygemm
    bits = 4 + 8 * layer.dtype.itemsize / GROUP
    layer.measure("grouped_int4_linear", weights, calls, bits, group=GROUP)


def fp4(layer: Layer) -> None:
    """Weights of 4-bit floats, beside weights kept in bf16."""

    def ours(x: Tensor, packed: Tensor, offsets: Tensor, rows: Tensor, _: Any) -> Tensor:
        weight = ops.Fp4Experts(packed, layer.N, layer.K)
        return ops.grouped_fp4_linear(x, weight, offsets, rows=rows)

    weights = {"ridgeline": layer.weights("fp4", layer.fp4)}
    weights["one_by_one_expanded"] = layer.weights("dense", layer.dense)
    calls: dict[str, Callable[..., Tensor]] = {"ridgeline": ours, "one_by_one_expanded": one_by_one}
    bits = 4 + 8 / FP4_GROUP
    layer.measure("grouped_fp4_linear", weights, calls, bits, group=FP4_GROUP)


def main() -> None:
    bench = Bench.from_args(__doc__)
    shapes, tokens = SHAPES, TOKENS
    if bench.quick:
        tokens = [1, 64, 8192]
    if bench.device == "cpu":
        shapes, tokens = [(8, 2, 512, 1024)], [1, 64]
    for shape in shapes:
        layer = Layer(bench, *shape)
        for number in tokens:
            layer.choose(number)
            dense(layer)
            fp8(layer)
            int4(layer)
            fp4(layer)
    if bench.device != "cpu":
        layer = Layer(bench, *GPT_OSS)
        for number in tokens:
            layer.choose(number)
            fp4(layer)


if __name__ == "__main__":
    main()
