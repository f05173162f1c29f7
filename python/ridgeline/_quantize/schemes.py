"""What a weight is rounded to: 4-bit integers in groups, fp8, int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.models.linear import meets_fp8
from ridgeline.ops.int4_weight import checked_group, int4_codes, int4_grid
from ridgeline.quant.stored import FP8_BLOCK, GroupedCodes, ScaledCodes

SCHEMES = ("int4", "w4a8", "fp8", "int8")
GRANULARITIES = ("tensor", "row", "block")
_SHRINKS = tuple(1 - 0.05 * step for step in range(1, 11))  # of a group's range, for the search


@dataclass(frozen=True)
class Grid:
    """The values that codes can mean: ``(code - zero) * scale``.

    Attributes:
        scales, zeros: float32 ``[N, groups]``.
        stored: scales as :class:`ScaledCodes` has them; None: of 4-bit integers.
    """

    scales: Tensor
    zeros: Tensor
    stored: Tensor | None = None


@dataclass(frozen=True)
class Scheme:
    """A kind of codes and what shares a scale.

    Attributes:
        format: "int4", "fp8" or "int8".
        group_size: of int4: columns that share a scale; -1: all.
        zero_point: of int4: a group has one, else codes are symmetric.
        granularity: of fp8, what shares a scale. int8 has one a row.
        dtype: that the scales of int4 are kept in.
        fp8_inputs: of int4: inputs are rounded to fp8 (w4a8).
    """

    format: str
    group_size: int = 128
    zero_point: bool = False
    granularity: str = "row"
    dtype: torch.dtype = torch.float32
    fp8_inputs: bool = False

    def group(self, K: int) -> int:
        """Columns of a row that share a scale."""
        if self.format == "int4":
            return K if self.group_size == -1 else self.group_size
        return FP8_BLOCK if self.block else K

    @property
    def block(self) -> tuple[int, int] | None:
        is_block = self.format == "fp8" and self.granularity == "block"
        return (FP8_BLOCK, FP8_BLOCK) if is_block else None

    @property
    def of_experts(self) -> bool:
        """Whether there is a product of experts with such weights."""
        return self.format in ("int4", "fp8")

    def check(self, name: str, N: int, K: int, *, last: bool) -> None:
        """Raises ValueError for a weight ``[N, K]`` that cannot be quantised so.

        ``last``: no other's rows follow in the same product.
        """
        if self.format == "int4":
            try:
                checked_group(self.group_size, K)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if self.fp8_inputs and not meets_fp8(self.group(K), K):
            raise ValueError(
                f"{name}: group_size: expected -1 or a multiple of 128 for inputs in fp8, "
                f"got {self.group_size}"
            )
        if self.block is not None and N % FP8_BLOCK and not last:
            raise ValueError(
                f"granularity: {name} has {N} rows, and others follow in the same product: "
                f"expected rows divisible by {FP8_BLOCK} for blocks"
            )

    def grid(self, weight: Tensor, moments: Tensor | None = None) -> Grid:
        """For float32 ``[N, K]``; one group may be given alone.

        Args:
            moments: ``[K, K]`` of the inputs: a group's range is then cut to what loses least of
                its product with them. Of int4 only.
        """
        N, K = weight.shape
        if self.format == "int8":
            scale = ops.quantize_int8(weight)[1].flatten()
            return Grid(scale[:, None], torch.zeros_like(scale)[:, None], scale)
        if self.format == "fp8":
            scale = ops.quantize_fp8(weight, self.granularity)[1]  # type: ignore[arg-type]
            rows = scale if self.block else scale.expand(N, 1)
            rows = rows.repeat_interleave(FP8_BLOCK, 0)[:N] if self.block else rows
            return Grid(rows, torch.zeros_like(rows), scale if self.block else scale.flatten())
        columns = weight.unflatten(1, (-1, min(self.group(K), K)))
        scales, zeros = int4_grid(columns, self.dtype, self.zero_point)
        if moments is not None:
            scales, zeros = self._clipped(columns, scales, zeros, moments)
        return Grid(scales, zeros)

    def _clipped(
        self, columns: Tensor, scales: Tensor, zeros: Tensor, moments: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Source: Lin et al., "AWQ", 2023: the search of its implementation."""
        groups, width = columns.shape[1:]
        blocks = moments.unflatten(0, (groups, width)).unflatten(2, (groups, width))
        blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, width, width]

        def error(scales: Tensor, zeros: Tensor) -> Tensor:
            codes = int4_codes(columns, scales.unsqueeze(-1), zeros.unsqueeze(-1))
            lost = codes.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).sub_(columns)
            return torch.einsum("ngi,gij->ngj", lost, blocks).mul_(lost).sum(-1)

        least = error(scales, zeros)
        for shrink in _SHRINKS:
            tried = int4_grid(columns * shrink, self.dtype, self.zero_point)
            lost = error(*tried)
            better = lost < least
            least = torch.where(better, lost, least)
            scales, zeros = (torch.where(better, *pair) for pair in zip(tried, (scales, zeros)))
        return scales, zeros

    def codes(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """The nearest codes as float32; shapes broadcast."""
        if self.format == "int4":
            return int4_codes(values, scales, zeros)
        if self.format == "int8":
            return (values / scales).round().clamp(-127, 127)
        return (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def weight(
        self, codes: Tensor, grid: Grid, group_index: Tensor | None = None
    ) -> GroupedCodes | ScaledCodes:
        """The codes ``[N, K]`` and what they mean."""
        if grid.stored is not None:
            kind = torch.int8 if self.format == "int8" else torch.float8_e4m3fn
            return ScaledCodes(codes.to(kind), grid.stored, self.block)
        zeros = grid.zeros.t().to(torch.uint8).contiguous() if self.zero_point else None
        scales = grid.scales.t().to(self.dtype).contiguous()
        return GroupedCodes(
            codes.to(torch.uint8), scales, zeros, group_index, fp8_inputs=self.fp8_inputs
        )

    def nearest(self, weight: Tensor, moments: Tensor | None = None) -> GroupedCodes | ScaledCodes:
        """Rounds float32 ``[N, K]`` to nearest; ``moments`` as for :meth:`grid`."""
        if self.format == "int8":
            codes, scale = ops.quantize_int8(weight)
            return ScaledCodes(codes, scale.flatten())
        if self.format == "fp8":
            codes, scale = ops.quantize_fp8(weight, self.granularity)  # type: ignore[arg-type]
            return ScaledCodes(codes, scale if self.block else scale.flatten(), self.block)
        grid = self.grid(weight, moments)
        columns = weight.unflatten(1, (grid.scales.shape[1], -1))
        codes = self.codes(columns, grid.scales.unsqueeze(-1), grid.zeros.unsqueeze(-1))
        return self.weight(codes.flatten(1), grid)
