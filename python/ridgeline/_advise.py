"""Which quantisation pays at which number of rows, from the machine's roofs: before any is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline import ops
from ridgeline.nn.kinds import stacked_experts
from ridgeline.nn.linear import Linear
from ridgeline.roofline.cost import Cost, op_cost
from ridgeline.roofline.machine import Roofs, measure_roofs

Shape = tuple[int, int] | tuple[int, int, int, int]  # the latter of experts
_GROUP, _MOST_ROWS = 128, 1 << 16
_EQUAL = 0.999  # a share of a time that is no less
_OF_EXPERTS = {"int8": "16 bits", "w4a8": "int4"}  # products of experts that are another scheme's
_CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "w4a8": torch.float8_e4m3fn}  # of inputs


@dataclass(frozen=True)
class Advice:
    """Predicted times of all products of a model.

    Attributes:
        machine: whose roofs were taken.
        rows: the numbers of rows (tokens of a step) looked at.
        microseconds: scheme -> the sum of all products' floors, one value a number of rows.
        pays_below: scheme -> the number of rows from which on it is no faster than "16 bits";
            None: it always is.
    """

    machine: str
    rows: tuple[int, ...]
    microseconds: dict[str, tuple[float, ...]]
    pays_below: dict[str, int | None]

    def best(self, rows: int) -> str:
        """The scheme of the least time at one of ``rows``; of those within 0.1% the widest."""
        if rows not in self.rows:
            raise ValueError(f"rows: expected one of {list(self.rows)}, got {rows}")
        at = self.rows.index(rows)
        most = min(times[at] for times in self.microseconds.values()) / _EQUAL
        return next(name for name, times in self.microseconds.items() if times[at] <= most)

    def __str__(self) -> str:
        names = list(self.microseconds)
        lines = [f"{self.machine}: floors of all products, us", _line("rows", names)]
        for i, rows in enumerate(self.rows):
            lines.append(_line(str(rows), [f"{self.microseconds[n][i]:.1f}" for n in names]))
        ends = [self.pays_below.get(name) for name in names]
        lines.append(_line("pays below", ["-" if end is None else str(end) for end in ends]))
        return "\n".join(lines)


def advise_quantization(
    model_or_shapes: nn.Module | Iterable[Shape],
    rows: int | Sequence[int] = (1, 8, 32, 64, 128, 256, 1024, 8192),
    *,
    roofs: Roofs | None = None,
) -> Advice:
    """Predicts what each scheme makes of a model's matrix products, without running one.

    A product takes at least the longer of its bytes at the read roof and its operations at the
    roof of its unit. A quantised weight has fewer bytes; its unit may be faster too. So a scheme
    that shrinks weights alone stops paying where the products become compute-bound; one that also
    multiplies in 8 bits does not. Kernels stay above these floors: ``benchmarks/table.py`` prints
    both side by side.

    Args:
        model_or_shapes: a module tree, of which all ``nn.Linear`` and :class:`ridgeline.nn.Linear`
            count, and experts as ``transformers`` keeps them; or ``(N, K)`` of each weight, or
            ``(N, K, experts, top)`` of that of each expert, of which a token meets ``top``.
        rows: tokens a step, one number or several of at least 1: the batch size in decode, the
            chunk in prefill.
        roofs: of the machine meant; None: this machine's, measured (about a second on a GPU).

    Raises:
        ValueError: no products; a number of rows or a size below 1; more experts a token than
            there are; experts whose router does not say how many a token meets.
        TypeError: shapes that are no two or four integers; rows that are no integers.

    The schemes: "16 bits"; "int4" (groups of 128) with 16-bit products; "fp8" and "int8" with
    both operands in 8 bits, where ``roofs`` has their rate ("int8" is as fast as "fp8"), and there
    "w4a8": the weights of "int4" by inputs in fp8. Experts stay in 16 bits under "int8", and meet
    inputs in 16 bits under "w4a8", as in this library. Tokens are taken to choose theirs at random,
    and those that none chooses not to be read.
    """
    weights = _weights(model_or_shapes)
    counts = [rows] if isinstance(rows, int) else rows
    if not isinstance(counts, Sequence) or not all(map(_is_count, counts)):
        raise TypeError(f"rows: expected integers, got {rows!r}")
    if not counts or min(counts) < 1:
        raise ValueError(f"rows: expected numbers of at least 1, got {counts}")
    if roofs is None:
        roofs = measure_roofs()

    def total(name: str, count: int) -> float:
        return sum(
            roofs.floor_us(_cost(name, weight, count, roofs), reads_only=True) for weight in weights
        )

    def is_no_faster(name: str, count: int) -> bool:
        return total(name, count) >= _EQUAL * total("16 bits", count)

    eight = [name for name in ("fp8", "int8") if {name, "fp8"} & roofs.flops.keys()]
    schemes = ["16 bits", *eight, "int4", *(["w4a8"] if "fp8" in eight else [])]
    return Advice(
        machine=roofs.name,
        rows=tuple(counts),
        microseconds={name: tuple(total(name, count) for count in counts) for name in schemes},
        pays_below={name: _first(partial(is_no_faster, name)) for name in schemes[1:]},
    )


class _Weight(NamedTuple):
    """``[N, K]``, or that of each expert, of which a token meets ``top``."""

    N: int
    K: int
    experts: int = 1
    top: int = 1


def _weights(model_or_shapes: Any) -> list[_Weight]:
    if isinstance(model_or_shapes, nn.Module):
        kinds = (nn.Linear, Linear)
        linears = (m for m in model_or_shapes.modules() if isinstance(m, kinds))
        weights = [_Weight(m.out_features, m.in_features) for m in linears]
        weights += _weights_of_experts(model_or_shapes)
    elif isinstance(model_or_shapes, Iterable):
        weights = [_checked(shape) for shape in model_or_shapes]
    else:
        message = "model_or_shapes: expected a module or (N, K) of each weight"
        raise TypeError(f"{message}, got {model_or_shapes!r}")
    if not weights:
        raise ValueError("model_or_shapes: expected at least one linear layer, got none")
    for weight in weights:
        if min(weight) < 1:
            raise ValueError(f"model_or_shapes: expected sizes of at least 1, got {weight}")
        if weight.top > weight.experts:
            raise ValueError(f"model_or_shapes: expected top <= experts, got {weight}")
    return weights


def _weights_of_experts(model: nn.Module) -> Iterator[_Weight]:
    """The block around them, or the router in it, knows ``top_k``."""
    for name, module, stacked in stacked_experts(model):
        block = model.get_submodule(name.rpartition(".")[0])
        found = {getattr(m, "top_k", None) for m in (block, *block.children())}
        tops = [top for top in found if isinstance(top, int)]
        if len(tops) != 1:
            message = f"model_or_shapes: expected one top_k beside the experts {name!r}"
            raise ValueError(f"{message}, got {tops}")
        for weight in stacked:
            experts, N, K = weight.shape
            if getattr(module, "is_transposed", False):
                N, K = K, N
            yield _Weight(N, K, experts, tops[0])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(shape: Shape) -> _Weight:
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) not in (2, 4) or not all(map(_is_count, sizes)):
        message = "model_or_shapes: expected (N, K) of each weight, or (N, K, experts, top)"
        raise TypeError(f"{message}, got {shape!r}")
    return _Weight(*sizes)


def _cost(name: str, weight: _Weight, rows: int, roofs: Roofs) -> Cost:
    """Of the experts that ``rows`` tokens choose at random."""
    N, K, experts, top = weight
    if experts > 1:
        name = _OF_EXPERTS.get(name, name)
    cost = _cost_of_one(name, N, K, rows * top, roofs)
    touched = experts * (1 - (1 - top / experts) ** rows)
    each = _cost_of_one(name, N, K, 0, roofs).bytes
    return replace(cost, bytes=round(cost.bytes + (touched - 1) * each))


def _cost_of_one(name: str, N: int, K: int, rows: int, roofs: Roofs) -> Cost:
    """Of a weight, and of tensors that are not there."""

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    x = empty(rows, K, dtype=_CODES.get(name, torch.bfloat16))
    of_x = empty(rows, dtype=torch.float32) if name in _CODES else None
    if name == "16 bits":
        cost = op_cost("linear", x, empty(N, K))
    elif name in ("int4", "w4a8"):
        packed = empty(-(-N // 16), -(-K // 64), 32, 4, dtype=torch.int32)
        scales = empty(-(-K // _GROUP), N)
        int4 = ops.Int4Weight(packed, scales, None, None, N=N, K=K, group=_GROUP)
        cost = op_cost("int4_linear", x, int4, x_scale=of_x)
    else:
        weight, of_weight = empty(N, K, dtype=x.dtype), empty(N, dtype=torch.float32)
        cost = op_cost(f"{name}_linear", x, weight, of_weight, x_scale=of_x)
    if cost.unit in roofs.flops:
        return cost
    wide = "bf16" if "bf16" in roofs.flops else "fp32"
    return Cost(cost.bytes, cost.flops, "fp8" if cost.unit == "int8" else wide)


def _first(holds: Callable[[int], bool]) -> int | None:
    """The least number of rows for which ``holds``, if it does for all that are larger."""
    if not holds(_MOST_ROWS):
        return None
    low, high = 0, _MOST_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _line(first: str, values: Sequence[str]) -> str:
    return f"{first:>10}" + "".join(f"{value:>12}" for value in values)
