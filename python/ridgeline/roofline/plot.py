"""The roofline as a picture: attainable rate over intensity, with measured ops on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.roofline.cost import Cost
from ridgeline.roofline.machine import Roofs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """A measured op: its name, what it must do, and the microseconds it took."""

    name: str
    cost: Cost
    us: float


def plot_roofline(roofs: Roofs, points: Iterable[Point], axes: Axes | None = None) -> Axes:
    """Draws the roofs of the machine and each point under them (needs matplotlib).

    The x axis is intensity in operations a byte, the y axis operations a second, both
    logarithmic. The slanted line is the copy bandwidth, a flat line the rate of each unit; where
    they meet is the ridge.

    Source: Williams, Waterman and Patterson, "Roofline", 2009.
    """
    import matplotlib.pyplot as plt

    points = list(points)
    axes = axes or plt.subplots(figsize=(8, 5))[1]
    intensities = [p.cost.flops / p.cost.bytes for p in points if p.cost.bytes and p.cost.flops]
    left = min([0.1, *intensities]) / 2
    right = max([1000.0, *intensities]) * 2
    top = max(roofs.flops.values())
    ridge = top / roofs.copy
    axes.plot([left, ridge], [left * roofs.copy, top], color="black", linewidth=1.5)
    for unit, rate in roofs.flops.items():
        start = rate / roofs.copy
        axes.plot([start, right], [rate, rate], color="black", linewidth=1.0)
        axes.text(right, rate, f" {unit}", va="center")
    for point in points:
        if not (point.cost.bytes and point.cost.flops):
            continue
        x = point.cost.flops / point.cost.bytes
        y = point.cost.flops / point.us * 1e6
        axes.plot([x], [y], marker="o")
        axes.annotate(point.name, (x, y), textcoords="offset points", xytext=(6, -4))
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        xlabel="operations per byte",
        ylabel="operations per second",
        title=roofs.name,
    )
    return axes
