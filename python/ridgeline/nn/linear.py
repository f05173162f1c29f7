"""Matrix products with a weight: dense, 4-bit, fp8, int8; one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline import ops
from ridgeline.nn.kinds import expect_kind
from ridgeline.nn.rows import rows_of


def autocast_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` where autocast may change it; its rows as the ops read them."""
    if x.dtype != dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        x = x.to(dtype)
    return rows_of(x)


def at_rest(*tensors: Tensor | None) -> None:
    """Waits until freshly made weights are there: the modules promise ``weights_ready``."""
    if any(tensor is not None and tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def _bias_of(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach().contiguous()


class Product(nn.Module):
    """``act(x @ weight.T + bias) + residual``: :meth:`product` takes what the ops fuse."""

    in_features: int
    out_features: int
    bias: Tensor | None

    def product(self, x: Tensor, **fused: Any) -> Tensor:
        """``fused``: activation, residual, norm_weight, norm_eps of :func:`ops.linear`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None, **fused: Any) -> Tensor:
    """:func:`ops.linear` of a weight at rest, in autocast's dtype where that is on."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return ops.linear(rows_of(x), weight, bias, weights_ready=True, **fused)


class Linear(Product):
    """:func:`ridgeline.ops.linear` with weight ``[out, in]`` and bias, as parameters."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **kind: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        made = nn.Linear(in_features, out_features, bias, **kind)
        self.weight, self.bias = made.weight, made.bias

    @classmethod
    def from_torch(cls, linear: nn.Linear) -> Linear:
        """Shares the parameters."""
        expect_kind("linear", linear, nn.Linear, Linear)
        module = cls(1, 1, linear.bias is not None, device="meta")
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.weight, module.bias = linear.weight, linear.bias
        return module

    def product(self, x: Tensor, **fused: Any) -> Tensor:
        return dense_product(x, self.weight, self.bias, **fused)


class Linear4bit(Product):
    """:func:`ridgeline.ops.int4_linear`; the weight is in buffers, saved with the module."""

    dynamic: ClassVar[bool] = False  # whether inputs are quantised too

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None

    def __init__(
        self, weight: ops.Int4Weight, bias: Tensor | None = None, *, persistent: bool = True
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = weight.K, weight.N, weight.group
        for name in ("packed", "scales", "zeros", "perm"):
            self.register_buffer(name, getattr(weight, name), persistent)
        self.register_buffer("bias", bias, persistent)

    @classmethod
    def from_torch(
        cls, linear: nn.Linear, group_size: int = 128, zero_point: bool = False
    ) -> Linear4bit:
        """Rounds to nearest, as :func:`ridgeline.ops.pack_int4`."""
        expect_kind("linear", linear, nn.Linear, Linear)
        weight = ops.pack_int4(linear.weight.detach(), group_size, zero_point)
        at_rest(weight.packed)
        return cls(weight, _bias_of(linear))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Codes mean something else with zero points or in another order, ``strict`` or not."""
        for name in ("zeros", "perm"):
            own, given = self._buffers[name] is not None, f"{prefix}{name}" in state_dict
            if f"{prefix}packed" in state_dict and own != given:
                words = ("none", "a tensor")
                errors.append(f"{prefix}{name}: expected {words[own]}, got {words[given]}")
                return
        args = (state_dict, prefix, metadata, strict, missing, unexpected, errors)
        super()._load_from_state_dict(*args)

    @property
    def weight(self) -> ops.Int4Weight:
        """The buffers as one; kept until they change, as making it takes as long as a launch."""
        kept, own = self.__dict__.get("_kept"), self._buffers
        if kept is not None and kept.packed is own["packed"] and kept.scales is own["scales"]:
            return kept
        kept = ops.Int4Weight(
            packed=self.packed,
            scales=self.scales,
            zeros=self.zeros,
            perm=self.perm,
            N=self.out_features,
            K=self.in_features,
            group=self.group_size,
        )
        if not torch.compiler.is_compiling():
            self.__dict__["_kept"] = kept
        return kept

    def product(self, x: Tensor, **fused: Any) -> Tensor:
        weight = self.weight
        x = autocast_input(x, weight.scales.dtype)
        return ops.int4_linear(
            x,
            weight,
            self._buffers["bias"],
            act="fp8" if self.dynamic else None,
            weights_ready=True,
            **fused,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int4, group_size={self.group_size}"


class LinearW4A8(Linear4bit):
    """:class:`Linear4bit` whose inputs are quantised too, to e4m3 with a scale a row.

    The state is that of :class:`Linear4bit`: only what becomes of inputs differs. Any group size
    will do, and zero points; but Hopper multiplies in 8 bits only where 128 divides the groups, or
    one has all columns, and there are no zero points (:func:`ridgeline.ops.int4_linear`). Elsewhere
    both operands are expanded, and nothing is gained.
    """

    dynamic = True

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8 inputs"


class LinearFP8(Product):
    """:func:`ridgeline.ops.fp8_linear`; weight and scales in buffers, saved with the module.

    Args:
        weight: float8_e4m3fn ``[out, in]``. weight_scale: float32, as the op takes it.
        dtype: of inputs and outputs.
        dynamic: inputs are quantised too, with a scale a row.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        dynamic: bool = False,
        persistent: bool = True,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight, persistent)
        self.register_buffer("weight_scale", weight_scale, persistent)
        self.register_buffer("bias", bias, persistent)
        self.dtype, self.dynamic = dtype, dynamic

    @classmethod
    def from_torch(cls, linear: nn.Linear, *, dynamic: bool = False) -> LinearFP8:
        """A scale for each output, as :func:`ridgeline.ops.quantize_fp8`."""
        expect_kind("linear", linear, nn.Linear, Linear)
        weight, scale = ops.quantize_fp8(rows_of(linear.weight.detach()), "row")
        at_rest(weight)
        bias = _bias_of(linear)
        return cls(weight, scale.flatten(), bias, dtype=linear.weight.dtype, dynamic=dynamic)

    def _apply(self, fn: Any, recurse: bool = True) -> LinearFP8:
        """``.to(dtype)`` would widen the fp8 weight and round the scales: only devices change."""
        weight, scale = self.weight, self.weight_scale
        super()._apply(fn, recurse)
        if weight.is_meta:  # no values that could be kept: to_empty
            self.weight = torch.empty_like(weight, device=self.weight.device)
            self.weight_scale = torch.empty_like(scale, device=self.weight_scale.device)
        else:
            self.weight = weight.to(self.weight.device)
            self.weight_scale = scale.to(self.weight_scale.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scale.device)).dtype
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """All 8-bit layers have the same names and shapes, and a copy would cast the codes."""
        given = state_dict.get(f"{prefix}weight")
        if given is None or given.dtype == self.weight.dtype:
            args = (state_dict, prefix, metadata, strict, missing, unexpected, errors)
            super()._load_from_state_dict(*args)
        else:
            errors.append(f"{prefix}weight: expected {self.weight.dtype}, got {given.dtype}")

    def product(self, x: Tensor, **fused: Any) -> Tensor:
        x = autocast_input(x, self.dtype)
        if not self.dynamic:
            args = (x, self.weight, self.weight_scale, self.bias)
            return ops.fp8_linear(*args, weights_ready=True, **fused)
        norm_weight, eps = fused.pop("norm_weight", None), fused.pop("norm_eps", 1e-6)
        if norm_weight is not None:
            q, scale = ops.rmsnorm(x, norm_weight, eps, out_quant="fp8", weights_ready=True)
        else:
            q, scale = ops.quantize_fp8(x, "row")
        return ops.fp8_linear(
            q,
            self.weight,
            self.weight_scale,
            self.bias,
            x_scale=scale.flatten(),
            out_dtype=self.dtype,
            weights_ready=True,
            **fused,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8{', dynamic' if self.dynamic else ''}"


class LinearInt8(LinearFP8):
    """:func:`ridgeline.ops.int8_linear`; weight and scales in buffers, saved with the module.

    Inputs are quantised with a scale a row: ``dynamic`` says nothing. Columns may be left in
    ``dtype``, as those whose inputs are so large that the others of their row would be lost.

    Args:
        outliers: int64, the columns left; the int8 weight has zeros there.
        outlier_weight: ``[out, len(outliers)]``, of ``dtype``.

    Source: Dettmers et al., "LLM.int8()", 2022: there the columns are found in every batch.
    """

    outliers: Tensor | None
    outlier_weight: Tensor | None

    def __init__(
        self,
        *args: Any,
        outliers: Tensor | None = None,
        outlier_weight: Tensor | None = None,
        persistent: bool = True,
        **kind: Any,
    ) -> None:
        super().__init__(*args, persistent=persistent, **kind)
        self.register_buffer("outliers", outliers, persistent)
        self.register_buffer("outlier_weight", outlier_weight, persistent)

    @classmethod
    def from_torch(  # type: ignore[override]
        cls, linear: nn.Linear, *, largest: Tensor | None = None, threshold: float = 6.0
    ) -> LinearInt8:
        """A scale for each output, as :func:`ridgeline.ops.quantize_int8`.

        Args:
            largest: of each input column, as :func:`ridgeline.observe` saw it; those that reach
                ``threshold`` are left.
        """
        expect_kind("linear", linear, nn.Linear, Linear)
        weight, columns = linear.weight.detach(), None
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise TypeError(f"threshold: expected a number, got {threshold!r}")
        if largest is not None:
            if largest.shape != (weight.shape[1],):
                seen, own = list(largest.shape), weight.shape[1]
                raise ValueError(f"seen: expected {own} columns, as weight has, got {seen}")
            columns = (largest >= threshold).nonzero().flatten().to(weight.device)
        kind: dict[str, Any] = {"dtype": weight.dtype}
        if columns is not None and len(columns):
            kind |= {"outliers": columns, "outlier_weight": weight[:, columns].contiguous()}
            weight = weight.index_fill(1, columns, 0.0)
        codes, scale = ops.quantize_int8(rows_of(weight))
        at_rest(codes)
        return cls(codes, scale.flatten(), _bias_of(linear), **kind)

    def product(self, x: Tensor, **fused: Any) -> Tensor:
        x = autocast_input(x, self.dtype)
        if self.outliers is None:
            args = (x, self.weight, self.weight_scale, self.bias)
            return ops.int8_linear(*args, weights_ready=True, **fused)
        assert self.outlier_weight is not None
        activation, residual = fused.pop("activation", None), fused.pop("residual", None)
        if "norm_weight" in fused:
            x = ops.rmsnorm(x, fused["norm_weight"], fused.get("norm_eps", 1e-6))
        left = ops.linear(x.index_select(-1, self.outliers), self.outlier_weight)
        x = x.index_fill(-1, self.outliers, 0.0)
        out = ops.int8_linear(x, self.weight, self.weight_scale, self.bias, residual=left)
        out = out if activation is None else _ACTIVATIONS[activation](out)
        return out if residual is None else out + residual

    def extra_repr(self) -> str:
        left = "" if self.outliers is None else f", {len(self.outliers)} columns left"
        return f"{Product.extra_repr(self)}, int8{left}"


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "silu_mul": ops.silu_mul,
    "gelu_mul": ops.gelu_mul,
}
