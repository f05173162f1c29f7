"""Int4 weights: quantising, packing and unpacking, in plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.ops._nibbles import pack_nibbles, unpack_nibbles

_SYMMETRIC_ZERO, _MOST = 8, 15
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Int4Weight:
    """A weight ``[N, K]`` in 4-bit integers: ``value = (q - zero) * scale``, ``q`` in 0 to 15.

    Attributes:
        packed: int32 ``[ceil(N / 16), ceil(K / 64), 32, 4]``, one layout for every device
            (``Int4Layout`` in ``csrc/kernels/gemm.h``); rows and columns beyond the matrix are
            padding.
        scales: ``[groups, N]``, float32, float16 or bfloat16: the dtype of the output.
        zeros: uint8 ``[groups, N]``, 0 to 15, or None: 8 everywhere.
        perm: int32 ``[K]`` or None: column ``c`` of the packed matrix is column ``perm[c]`` of the
            weight, as activation order needs it.
        N: rows, the output features.
        K: columns, the input features.
        group: consecutive packed columns that share a scale.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    N: int
    K: int
    group: int

    @classmethod
    def from_quantized(
        cls,
        q: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        group_index: Tensor | None = None,
    ) -> Int4Weight:
        """Packs integers that were quantised elsewhere (GPTQ, AWQ).

        Args:
            q: ``[N, K]``, integers 0 to 15.
            scales: ``[groups, N]``, floating.
            zeros: ``[groups, N]``, integers 0 to 15, or None for 8.
            group_index: ``[K]``, the group of each column (``g_idx`` of GPTQ), each group equally
                often; None: in order. Columns out of order are sorted by group and ``perm`` set.

        Raises:
            ValueError: shapes disagree, codes or zero points that are no integers from 0 to 15, K
                is not divisible by the group, or a group size that is neither a multiple of 32 nor
                all of K.
        """
        _expect(q.dim() == 2, f"q: expected 2 dimensions, got shape {list(q.shape)}")
        N, K = q.shape
        _expect_codes(q, "q")
        _expect(
            scales.dim() == 2 and scales.shape[1] == N and scales.dtype in _FLOATS,
            f"scales: expected floating [groups, {N}], got {scales.dtype} {list(scales.shape)}",
        )
        groups = scales.shape[0]
        _expect(
            K % max(groups, 1) == 0 and (groups > 0) == (K > 0),
            f"q: expected K divisible by {groups} groups, got K = {K}",
        )
        group = checked_group(K // groups if groups else -1, K)
        _expect(
            zeros is None or zeros.shape == scales.shape,
            f"zeros: expected the shape of scales, {list(scales.shape)}, "
            f"got {None if zeros is None else list(zeros.shape)}",
        )
        if zeros is not None:
            _expect_codes(zeros, "zeros")
        perm = None if group_index is None else _order_of(group_index, groups, group)
        return cls(
            packed=pack_nibbles(q if perm is None else q[:, perm.long()], _SYMMETRIC_ZERO),
            scales=scales.contiguous(),
            zeros=None if zeros is None else zeros.to(torch.uint8).contiguous(),
            perm=perm,
            N=N,
            K=K,
            group=group,
        )

    def quantized(self) -> Tensor:
        """The integers, uint8 ``[N, K]``, in the weight's own column order."""
        q = unpack_nibbles(self.packed)[: self.N, : self.K]
        if self.perm is None:
            return q
        return torch.empty_like(q).index_copy_(1, self.perm.long(), q.contiguous())

    def dequantize(self) -> Tensor:
        """The weight that the op multiplies by, ``[N, K]`` in the dtype of the scales.

        ``(q - zero) * scale`` in float32, rounded once. Every backend uses these values, but Hopper
        where rows are few or of fp8: sums are scaled there, and the weights not rounded.
        """
        packed_order = unpack_nibbles(self.packed)[: self.N, : self.K].float()
        groups = torch.arange(self.K, device=packed_order.device) // self.group
        scales = self.scales.float()[groups].t()
        zeros = _SYMMETRIC_ZERO if self.zeros is None else self.zeros.float()[groups].t()
        values = ((packed_order - zeros) * scales).to(self.scales.dtype)
        if self.perm is None:
            return values.contiguous()
        return torch.empty_like(values.contiguous()).index_copy_(1, self.perm.long(), values)

    def to(self, device: torch.device | str) -> Int4Weight:
        """The same weight on another device."""
        return Int4Weight(
            packed=self.packed.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            perm=None if self.perm is None else self.perm.to(device),
            N=self.N,
            K=self.K,
            group=self.group,
        )


@dataclass(frozen=True)
class Int4Experts:
    """The :class:`Int4Weight` of each expert, one after the other.

    Attributes:
        packed: int32 ``[experts, N / 16, ceil(K / 64), 32, 4]``.
        scales: ``[experts, groups, N]``, the dtype of the output.
        zeros: uint8 ``[experts, groups, N]``, or None: 8 everywhere.
        N, K, group: those of one expert.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    N: int
    K: int
    group: int

    @classmethod
    def from_rows(cls, weight: Int4Weight, experts: int) -> Int4Experts:
        """From the rows of all experts as one weight.

        Raises:
            ValueError: experts do not begin at multiples of 16 rows, or columns are permuted.
        """
        if experts < 1 or weight.N % (16 * experts) != 0:
            raise ValueError(
                f"weight: expected {experts} experts of a multiple of 16 rows, got {weight.N} rows"
            )
        if weight.perm is not None:
            raise ValueError("weight.perm: expected None, got a tensor")

        def split(rows: Tensor) -> Tensor:
            return rows.unflatten(1, (experts, -1)).transpose(0, 1).contiguous()

        return cls(
            packed=weight.packed.unflatten(0, (experts, -1)),
            scales=split(weight.scales),
            zeros=None if weight.zeros is None else split(weight.zeros),
            N=weight.N // experts,
            K=weight.K,
            group=weight.group,
        )

    def dequantize(self) -> Tensor:
        """The weights that the op multiplies by, ``[experts, N, K]`` in the dtype of the scales."""
        return torch.stack([
            Int4Weight(
                packed=self.packed[e],
                scales=self.scales[e],
                zeros=None if self.zeros is None else self.zeros[e],
                perm=None,
                N=self.N,
                K=self.K,
                group=self.group,
            ).dequantize()
            for e in range(len(self.packed))
        ])  # fmt: skip


def pack_int4(weight: Tensor, group_size: int = 128, zero_point: bool = False) -> Int4Weight:
    """Quantises ``[N, K]`` to 4 bits, round to nearest, one scale a row and group of columns.

    Args:
        weight: ``[N, K]``, float32, float16 or bfloat16.
        group_size: columns a scale covers: a multiple of 32 that divides K, or -1 for all of K.
        zero_point: an integer zero point a group, so that minimum and maximum are both reached;
            otherwise the range is symmetric, ``-8`` to ``7`` times the scale.

    Returns:
        An :class:`Int4Weight` whose scales have the dtype of ``weight``. A group with NaN
        dequantises to NaN.

    Raises:
        ValueError: K is not divisible by the group, or dtype or shape are not as above.
    """
    _expect(
        weight.dim() == 2 and weight.dtype in _FLOATS,
        f"weight: expected floating [N, K], got {weight.dtype} {list(weight.shape)}",
    )
    N, K = weight.shape
    group = checked_group(group_size, K)
    columns = weight.detach().float().reshape(N, K // group, group)
    scales, zeros = int4_grid(columns, weight.dtype, zero_point)
    q = int4_codes(columns, scales.unsqueeze(-1), zeros.unsqueeze(-1)).nan_to_num_(0)
    return Int4Weight(
        packed=pack_nibbles(q.to(torch.uint8).reshape(N, K), _SYMMETRIC_ZERO),
        scales=scales.to(weight.dtype).t().contiguous(),
        zeros=zeros.to(torch.uint8).t().contiguous() if zero_point else None,
        perm=None,
        N=N,
        K=K,
        group=group,
    )


def int4_grid(columns: Tensor, dtype: torch.dtype, zero_point: bool) -> tuple[Tensor, Tensor]:
    """The scale and zero point that the last dimension's values need, both float32.

    Args:
        columns: float32 ``[..., group]``.
        dtype: that the scales are kept in, which they are rounded to.
        zero_point: minimum and maximum are both reached; otherwise zero is 8.
    """
    tiny = torch.finfo(dtype).tiny
    if zero_point:
        low, high = columns.amin(-1).clamp(max=0), columns.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=tiny).to(dtype).float()
        return scales, (-low / scales).round().clamp(0, 15)
    scales = (columns.abs().amax(-1) / 7).clamp(min=tiny).to(dtype).float()
    return scales, torch.full_like(scales, _SYMMETRIC_ZERO)


def int4_codes(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The nearest of 0 to 15 for ``(code - zero) * scale``, float32."""
    return (values / scales).round_().add_(zeros).clamp_(0, 15)


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _expect_codes(codes: Tensor, name: str) -> None:
    """Others would spill into the bits of their neighbours."""
    whole = not (codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool)
    _expect(whole, f"{name}: expected integers from 0 to 15, got {codes.dtype}")
    if codes.numel():
        low, high = (int(value) for value in codes.aminmax())
        _expect(
            low >= 0 and high <= _MOST,
            f"{name}: expected integers from 0 to 15, got {low} to {high}",
        )


def checked_group(group: int, K: int) -> int:
    """The group as columns; -1 is all of them."""
    if isinstance(group, bool) or not isinstance(group, int):
        raise TypeError(f"group_size: expected an integer, got {group!r}")
    columns = max(K, 1) if group == -1 else group
    _expect(
        columns > 0 and (columns % 32 == 0 or columns == max(K, 1)),
        f"group_size: expected -1 or a multiple of 32, got {group}",
    )
    _expect(K % columns == 0, f"weight: expected K divisible by the group {columns}, got K = {K}")
    return columns


def _order_of(group_index: Tensor, groups: int, group: int) -> Tensor | None:
    """The permutation that sorts columns by group; None if they are sorted."""
    size = groups * group
    _expect(
        group_index.shape == (size,) and not bool((group_index < 0).any()),
        f"group_index: expected [{size}] numbers of groups, got {list(group_index.shape)}"
        + (f" from {int(group_index.min())} on" if group_index.numel() else ""),
    )
    counts = torch.bincount(group_index.long(), minlength=groups)
    _expect(
        counts.numel() == groups and bool((counts == group).all()),
        f"group_index: expected each of {groups} groups {group} times, got {counts.tolist()}",
    )
    order = torch.argsort(group_index, stable=True).to(torch.int32)
    return None if bool((group_index.diff() >= 0).all()) else order
