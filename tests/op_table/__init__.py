"""Rows of the op table: what the generic tests of test_ops.py need to check an op on every device,
dtype and through every transform. Tensors are recipes, made on the device under test.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """Where and how a sample's tensors are made."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator  # on the CPU, so that every device sees the same values


class Lazy:
    """A tensor to be made later; view operations on it are recorded and applied then."""

    def __init__(self, make: Callable[[Context], Tensor]) -> None:
        self._make = make

    def __call__(self, context: Context) -> Tensor:
        return self._make(context)

    def _then(self, operation: Callable[[Tensor], Tensor]) -> Lazy:
        return Lazy(lambda context: operation(self._make(context)))

    def __getitem__(self, index: Any) -> Lazy:
        return self._then(lambda t: t[index])

    def t(self) -> Lazy:
        return self._then(lambda t: t.t())

    def transpose(self, a: int, b: int) -> Lazy:
        return self._then(lambda t: t.transpose(a, b))

    def view(self, *shape: int) -> Lazy:
        return self._then(lambda t: t.view(*shape))

    def to(self, *args: Any) -> Lazy:
        return self._then(lambda t: t.to(*args))

    def set(self, index: Any, value: float) -> Lazy:
        """With `value` written at `index` (inf, NaN and other special inputs)."""

        def write(tensor: Tensor) -> Tensor:
            tensor[index] = value
            return tensor

        return self._then(write)


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Lazy:
    """Normal values of standard deviation `scale`; dtype None is the dtype under test."""

    def make(context: Context) -> Tensor:
        values = torch.randn(shape, generator=context.generator, dtype=torch.float32) * scale
        return values.to(dtype or context.dtype).to(context.device)

    return Lazy(make)


def uniform(
    *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
) -> Lazy:
    """Uniform values in [low, high)."""

    def make(context: Context) -> Tensor:
        values = torch.rand(shape, generator=context.generator, dtype=torch.float32)
        values = values * (high - low) + low
        return values.to(dtype or context.dtype).to(context.device)

    return Lazy(make)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Lazy:
    """Integers in [low, high)."""

    def make(context: Context) -> Tensor:
        values = torch.randint(low, high, shape, generator=context.generator)
        return values.to(dtype).to(context.device)

    return Lazy(make)


def tensor(values: Any, dtype: torch.dtype | None = None) -> Lazy:
    """The given values; dtype None is the dtype under test."""
    return Lazy(lambda c: torch.tensor(values, dtype=dtype or c.dtype, device=c.device))


def full(shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Lazy:
    """One value everywhere."""
    return Lazy(lambda c: torch.full(tuple(shape), value, dtype=dtype or c.dtype, device=c.device))


def arange(count: int, dtype: torch.dtype = torch.int32) -> Lazy:
    """0, 1, … count - 1."""
    return Lazy(lambda c: torch.arange(count, dtype=dtype, device=c.device))


class Sample:
    """One call of an op: why this point is there, and the keyword arguments."""

    def __init__(self, why: str, **inputs: Any) -> None:
        self.why = why
        self.inputs = inputs

    def make(self, context: Context) -> dict[str, Any]:
        return {k: v(context) if isinstance(v, Lazy) else v for k, v in self.inputs.items()}


class Error(Sample):
    """A call that must be refused with a message that matches."""

    def __init__(self, match: str, *, dtype: torch.dtype | None = None, **inputs: Any) -> None:
        super().__init__(match, **inputs)
        self.match = match
        self.dtype = dtype


Bound = Callable[[Tensor], Any]


@dataclass(frozen=True)
class OpCase:
    """All that is checked of one op.

    Attributes:
        name: of the op in ``ridgeline.ops``, and the test id.
        op: called with a sample's keyword arguments.
        reference: the same in plain torch; floating tensors come in float64 on the CPU.
        competitor: the same in plain torch in the dtype under test: the allowed error is twice
            its error plus one rounding of the reference.
        bound: in place of a competitor: the allowed absolute error from the reference, or "exact".
        mutates: arguments changed in place; the reference returns them after the outputs.
        graph_safe: may be captured in a CUDA graph (all are, unless they allocate by content).
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Sequence[Sample]
    competitor: Callable[..., Any] | None = None
    bound: Bound | str | None = None
    errors: Sequence[Error] = ()
    mutates: Sequence[str] = ()
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    devices: Sequence[str] = ("cpu", "cuda")
    graph_safe: bool = True
    tags: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        assert (self.competitor is None) != (self.bound is None), (
            f"{self.name}: give a competitor or a bound"
        )


def all_cases() -> list[OpCase]:
    """The cases of every family module of this package."""
    cases = []
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        cases += importlib.import_module(f"{__name__}.{module}").CASES
    return cases
