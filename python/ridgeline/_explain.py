"""What an op would do with given arguments: which kernels, how cut, and why not a faster one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ridgeline import ops
from ridgeline.roofline.cost import Cost, costed_ops, op_cost
from ridgeline.roofline.machine import Roofs
from ridgeline.roofline.timing import Timing, time_call


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: the kernel with its template arguments, which hold dtype and tile.
        grid: blocks in x, y and z. threads: a block has.
        shared_bytes: shared memory of a block. registers, spilled_bytes: of a thread.
        blocks_per_sm: how many fit at once. architecture: of the loaded code, 90 for compute 9.0.
        chained: may start before the kernel ahead ends (programmatic dependent launch).
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    registers: int
    spilled_bytes: int
    blocks_per_sm: int
    architecture: int
    chained: bool

    def __str__(self) -> str:
        grid = " x ".join(str(n) for n in self.grid if n > 1) or "1"
        spills = f", {self.spilled_bytes} bytes spilled" if self.spilled_bytes else ""
        chained = ", chained" if self.chained else ""
        return (
            f"{self.name}\n    {grid} blocks of {self.threads} threads, "
            f"{self.blocks_per_sm} an SM; {self.shared_bytes} bytes shared, "
            f"{self.registers} registers{spills}; code for {self.architecture}{chained}"
        )


@dataclass(frozen=True)
class Explanation:
    """The route of one call; ``print`` it.

    Attributes:
        op, device: what was asked.
        kernels: in launch order; empty on the CPU.
        choices: what was cut how, in words. slower: why a slower kernel stands in for a faster one.
        cost: the bytes the op must move and the operations it must do.
        floor_us: the least time on this device, and what bounds it; None without ``roofs``.
        measured: the time it takes, and whether it read memory rather than caches; None unless
            it was to be measured.
    """

    op: str
    device: str
    kernels: tuple[Kernel, ...]
    choices: tuple[str, ...]
    slower: tuple[str, ...]
    cost: Cost
    floor_us: float | None = None
    bound: str | None = None
    measured: Timing | None = None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.op} on {self.device}"
        for choice in self.choices:
            yield f"  {choice}"
        for kernel in self.kernels:
            yield f"  {kernel}"
        for reason in self.slower:
            yield f"  not faster because {reason}"
        yield f"  must move {self.cost.bytes:,} bytes and do {self.cost.flops:,} operations"
        if self.floor_us is not None:
            yield f"  at least {self.floor_us:.2f} us here, bound by {self.bound}"
        if self.measured is not None:
            where = "" if self.measured.cold else ", in caches"
            if self.measured.cold and self.floor_us:
                where = f", {self.floor_us / self.measured.us:.0%} of the roof"
            yield f"  takes {self.measured.us:.2f} us{where}"


def explain(
    op: str,
    /,
    *args: Any,
    strict: bool = False,
    roofs: Roofs | None = None,
    measure: bool = False,
    **kwargs: Any,
) -> Explanation:
    """What ``ridgeline.ops.<op>(*args, **kwargs)`` would launch; nothing of it is written.

    Args:
        op: name of an op of :mod:`ridgeline.ops`.
        args, kwargs: as for the op; on a GPU they are checked as in a real call.
        strict: raise where a slower kernel stands in for a faster one, instead of saying so.
        roofs: of the device (:func:`ridgeline.roofline.machine.measure_roofs`), for the least time.
        measure: also time the op, as the benchmarks do: on a GPU in a graph, on copies of the
            tensors, at least two and as many as exceed the caches, but at most 64.

    Returns:
        An :class:`Explanation`. Arguments on the CPU have one route, the library's own loops.

    Raises:
        ValueError: no such op, or what the op itself raises.
        TypeError: an argument that the op lacks or does not have.
        RuntimeError: under ``strict``: the reasons.
    """
    if op not in costed_ops():
        raise ValueError(f"op: expected one of {', '.join(costed_ops())}; got {op!r}")
    inspect.signature(getattr(ops, op)).bind(*args, **kwargs)
    device = _device_of([*args, *kwargs.values()])
    records = _traced(op, *args, **kwargs) if device.type == "cuda" else []
    cost = op_cost(op, *args, **kwargs)
    choices = [fields[0] for kind, *fields in records if kind == "choice"]
    if device.type == "cpu":
        choices = [f"the library's loops on {torch.get_num_threads()} threads"]
    explanation = Explanation(
        op=op,
        device=_name_of(device),
        kernels=tuple(_kernel(*fields) for kind, *fields in records if kind == "launch"),
        choices=tuple(choices),
        slower=tuple(fields[0] for kind, *fields in records if kind == "slower"),
        cost=cost,
        floor_us=roofs.floor_us(cost) if roofs else None,
        bound=roofs.bound(cost) if roofs else None,
    )
    if strict and explanation.slower:
        raise RuntimeError(f"{op} does not take its fastest route: {'; '.join(explanation.slower)}")
    if measure:
        return replace(explanation, measured=_measured(device, explanation, args, kwargs))
    return explanation


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU" if device.type == "cpu" else f"the device {device}"


def _device_of(values: list[Any]) -> torch.device:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _measured(
    device: torch.device, explanation: Explanation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Timing:
    call = getattr(ops, explanation.op)

    def make() -> list[Any]:
        copies: list[Any] = []
        with torch.no_grad():
            given = _copied(args, copies), _copied(kwargs, copies)
        return [given, *copies]  # the timer counts the tensors among its inputs

    return time_call(
        make,
        lambda given, *_: call(*given[0], **given[1]),
        device=device,
        touched=explanation.cost.bytes,
    )


def _copied(value: Any, copies: list[torch.Tensor]) -> Any:
    """The value with its tensors, which are also added to ``copies``, copied.

    They keep strides and alignment: an op may choose its route by them.
    """
    if isinstance(value, torch.Tensor) and value.numel() > 0:
        offset = value.data_ptr() % 16 // value.element_size()
        span = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))
        storage = value.new_empty(offset + span)
        storage[offset:].copy_(value.as_strided((span,), (1,)))
        copies.append(storage.as_strided(value.shape, value.stride(), offset))
        return copies[-1]
    if isinstance(value, dict):
        return {key: _copied(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item, copies) for item in value)
    if is_dataclass(value) and not isinstance(value, type):  # a packed weight
        fields_of = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **_copied(fields_of, copies))
    return value


def _traced(op: str, /, *args: Any, **kwargs: Any) -> list[list[str]]:
    torch.ops.ridgeline.begin_launch_trace()
    try:
        getattr(ops, op)(*args, **kwargs)
    finally:
        trace = torch.ops.ridgeline.end_launch_trace()
    return [line.split("\t") for line in trace.splitlines()]


def _kernel(op: str, name: str, *numbers: str) -> Kernel:
    x, y, z, threads, shared, registers, local, blocks, architecture, chained = map(int, numbers)
    return Kernel(
        name=_readable(name),
        grid=(x, y, z),
        threads=threads,
        shared_bytes=shared,
        registers=registers,
        spilled_bytes=local,
        blocks_per_sm=blocks,
        architecture=architecture,
        chained=bool(chained),
    )


def _readable(name: str) -> str:
    """The kernel without its namespaces, return type, parameters and casts of constants."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"\(anonymous namespace\)::|ridgeline::(\w+::)*", "", name)
    name = re.sub(r"\([^()]*Params[^()]*\)$|\([^()]*Launch[^()]*\)$", "", name)
    return re.sub(r"\((int|bool|unsigned int)\)", "", name).replace("> >", ">>")
