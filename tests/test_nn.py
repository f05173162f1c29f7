"""Modules made from PyTorch's compute what those compute; trees are quantised in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ridgeline
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def on(device: str, module: Any) -> Any:
    """Random norms and biases too: those that PyTorch starts with hide what is left out."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return module.to(device, DTYPES[device]).eval()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= BOUNDS[expected.dtype], f"relative difference {error:.1e}"


def pairs() -> dict[str, tuple[nn.Module, Any]]:
    """PyTorch's module and what is made from it."""
    norm, gelu = nn.LayerNorm(64), nn.GELU("tanh")
    return {
        "rmsnorm": (nn.RMSNorm(64, 1e-3), ridgeline.nn.RMSNorm.from_torch),
        "rmsnorm, eps of the dtype": (nn.RMSNorm(64), ridgeline.nn.RMSNorm.from_torch),
        "layernorm": (nn.LayerNorm(64, 1e-3), ridgeline.nn.LayerNorm.from_torch),
        "layernorm without bias": (
            nn.LayerNorm(64, bias=False),
            ridgeline.nn.LayerNorm.from_torch,
        ),
        "layernorm and gelu": (
            nn.Sequential(norm, gelu),
            lambda both: ridgeline.nn.LayerNormGELU.from_torch(both[0], both[1]),
        ),
        "linear": (nn.Linear(64, 40), ridgeline.nn.Linear.from_torch),
        "linear without bias": (nn.Linear(64, 40, bias=False), ridgeline.nn.Linear.from_torch),
        "attention": (SelfAttention(False), SelfAttention.ours),
        "causal attention": (SelfAttention(True), SelfAttention.ours),
        "gated mlp": (Gated(F.silu, "silu_mul"), Gated.ours),
        "gated mlp, tanh": (Gated(nn.GELU("tanh"), "gelu_tanh_mul"), Gated.ours),
    }


class SelfAttention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.inner, self.causal = nn.MultiheadAttention(64, 4, batch_first=True), causal

    def ours(self) -> nn.Module:
        return ridgeline.nn.Attention.from_torch(self.inner, causal=self.causal)

    def forward(self, x: Tensor) -> Tensor:
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return self.inner(x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=False)[0]


class Gated(nn.Module):
    def __init__(self, activation: Any, name: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation, self.name = activation, name

    def ours(self) -> nn.Module:
        return ridgeline.nn.GatedMLP.from_torch(self.gate, self.up, self.down, self.name)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", pairs())
def test_from_torch(name: str, device: str):
    theirs, make = pairs()[name]
    theirs = on(device, theirs)
    ours = make(theirs)
    x = torch.randn(2, 9, 64, device=device, dtype=DTYPES[device])
    with torch.inference_mode():
        assert_same(ours(x), theirs(x))
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), ours(x))


def strided(shape: tuple[int, ...], like: Tensor) -> dict[str, Tensor]:
    """Inputs of this shape that modules of PyTorch take as they are."""
    x = torch.randn(shape).to(like)
    return {
        "columns first": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "every other column": x.repeat_interleave(2, -1)[..., ::2],
        "sequence first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "a part": torch.cat((x, x), -1)[..., : shape[-1]],
        "one token for all": x[:, :1].expand(shape),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", pairs())
def test_any_strides_will_do(name: str, device: str):
    theirs, make = pairs()[name]
    ours = make(on(device, theirs))
    with torch.inference_mode():
        for x in strided((3, 5, 64), next(ours.parameters())).values():
            assert torch.equal(ours(x), ours(x.contiguous()))


@pytest.mark.parametrize("shape", [(0, 5, 64), (2, 0, 64)])
@pytest.mark.parametrize("name", pairs())
def test_no_rows_give_no_rows(name: str, shape: tuple[int, ...]):
    theirs, make = pairs()[name]
    ours = make(on("cpu", theirs))
    with torch.inference_mode():
        assert ours(torch.randn(shape)).shape == (*shape[:2], 40 if "linear" in name else 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_an_eps_of_none_is_what_pytorch_takes(dtype: torch.dtype, device: str):
    norm = nn.RMSNorm(64).to(device, dtype)
    x = torch.full((2, 64), 1e-3, device=device, dtype=dtype)
    with torch.no_grad():
        expected, actual = norm(x), ridgeline.nn.RMSNorm.from_torch(norm)(x)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=0)


def test_parameters_are_shared():
    linear, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    assert ridgeline.nn.Linear.from_torch(linear).weight is linear.weight
    assert ridgeline.nn.LayerNorm.from_torch(norm).bias is norm.bias
    assert ridgeline.nn.RMSNorm(8, offset=1.0).weight.eq(0).all()


REFUSED = {
    "normalized_shape": lambda: ridgeline.nn.LayerNorm.from_torch(nn.LayerNorm((4, 8))),
    "without weight": lambda: ridgeline.nn.RMSNorm.from_torch(
        nn.RMSNorm(8, elementwise_affine=False)
    ),
    "batch_first": lambda: ridgeline.nn.Attention.from_torch(nn.MultiheadAttention(8, 2)),
    "add_zero_attn": lambda: ridgeline.nn.Attention.from_torch(
        nn.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)
    ),
    "up: expected the weight of gate": lambda: ridgeline.nn.GatedMLP.from_torch(
        nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(8, 8)
    ),
    "multiple of 6 rows": lambda: ridgeline.nn.Attention(
        ridgeline.nn.Linear(8, 32), ridgeline.nn.Linear(8, 8), 4, 1
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_module_cannot_be_made_of_is_named(message: str):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


# ---- Quantising ---------------------------------------------------------------------------------

FORMATS = {
    "int4": ("int4", {}),
    "int4, zero points": ("int4", {"group_size": 32, "zero_point": True}),
    "w4a8": ("w4a8", {}),
    "fp8": ("fp8", {}),
    "fp8, inputs too": ("fp8", {"dynamic": True}),
    "int8": ("int8", {}),
}


def tree() -> nn.Module:
    body = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 100))
    return nn.ModuleDict({"body": body, "lm_head": nn.Linear(100, 7), "odd": nn.Linear(30, 8)})


def dequantised(linear: nn.Linear, name: str, x: Tensor) -> Tensor:
    """What the quantised layer computes, from the reference values of its weight."""
    fmt, options = FORMATS[name]
    weight = linear.weight.detach()
    if fmt == "w4a8" or options.get("dynamic"):
        codes, scales = ops.quantize_fp8(x)
        x = codes.to(x.dtype) * scales.to(x.dtype)
    if fmt in ("int4", "w4a8"):
        return F.linear(x, ops.pack_int4(weight, **options).dequantize(), linear.bias)
    if fmt == "int8":
        (q, scale), (codes, scales) = ops.quantize_int8(weight), ops.quantize_int8(x)
        return F.linear(codes.float() * scales, q.float() * scale, linear.bias.float()).to(x.dtype)
    q, scale = ops.quantize_fp8(weight)
    return F.linear(x, (q.float() * scale).to(x.dtype), linear.bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_layers_are_quantised_in_place(name: str, device: str):
    module = on(device, tree())
    body = copy.deepcopy(module["body"])
    fmt, options = FORMATS[name]
    done = ridgeline.quantize_(module, fmt, **options)
    assert {"body.0", "body.2"} <= set(done.layers)
    assert dict(done.left)["lm_head"] == "named in skip"
    assert done.bytes_after < done.bytes_before * (0.6 if fmt in ("fp8", "int8") else 0.4)
    x = torch.randn(3, 256, device=device, dtype=DTYPES[device])
    with torch.inference_mode():
        assert_same(module["body"][0](x), dequantised(body[0], name, x))
        compiled = torch.compile(module["body"], fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), module["body"](x))
        for y in strided((3, 5, 256), x).values():
            assert torch.equal(module["body"](y), module["body"](y.contiguous()))


class CastsToWeight(nn.Module):
    """As T5's and many others' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wi(x))
        return self.wo(x.to(self.wo.weight.dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_layers_whose_weight_is_read_beside_them_are_left(name: str):
    fmt, options = FORMATS[name]
    encoder = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)  # has a fast path
    module = nn.ModuleList([encoder, CastsToWeight()]).eval()
    x = torch.randn(2, 5, 128)
    with torch.inference_mode():
        expected = module[0](x)
        done = ridgeline.quantize_(module, fmt, **options)
        torch.testing.assert_close(module[0](x), expected)
        module[1](x)
    assert done.layers == ("1.wi",)
    assert dict(done.left)["0.linear1"] == "its weight is read by the TransformerEncoderLayer"


def test_a_replaced_forward_is_left():
    module = nn.Sequential(nn.Linear(64, 64))
    module[0].forward = lambda x: -x
    assert dict(ridgeline.quantize_(module, "fp8").left) == {"0": "its forward is replaced"}


def test_a_layer_that_a_format_cannot_hold_is_left_and_named():
    done = ridgeline.quantize_(tree(), "int4")
    assert "K divisible by the group" in dict(done.left)["odd"]
    assert "2 linear layers quantised" in str(done) and "left: odd" in str(done)


@pytest.mark.parametrize("fmt", ["int2", "int3", ""])
def test_a_format_without_an_op_is_refused(fmt: str):
    with pytest.raises(ValueError, match="format: expected 'int4', 'w4a8', 'fp8'"):
        ridgeline.quantize_(tree(), fmt)


def test_skip_takes_names_ends_and_patterns():
    done = ridgeline.quantize_(tree(), "fp8", skip=("body.*", "odd"))
    assert done.layers == ("lm_head",)


def test_a_single_layer_cannot_be_replaced_in_place():
    with pytest.raises(ValueError, match="got a linear layer"):
        ridgeline.quantize_(nn.Linear(64, 64), "fp8")


def test_a_layer_with_two_names_stays_one_layer():
    layer = nn.Linear(64, 64)
    module = nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer))
    done = ridgeline.quantize_(module, "fp8")
    assert done.layers == ("0",) and not done.left
    assert module[0] is module[1][1] and module[0] is not layer


def test_a_layer_is_left_if_one_of_its_names_is_skipped():
    layer = nn.Linear(64, 64)
    module = nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer))
    for skip in ("0", "1.1"):
        done = ridgeline.quantize_(module, "fp8", skip=(skip,))
        assert done.left == (("0", "named in skip"),) and not done.layers
        assert module[0] is module[1][1] is layer


def test_subclasses_and_hooks_are_left():
    class Adapter(nn.Linear):
        pass

    module = nn.Sequential(Adapter(64, 64), nn.Linear(64, 64))
    module[1].register_forward_hook(lambda *_: None)
    done = ridgeline.quantize_(module, "fp8")
    assert not done.layers
    assert dict(done.left) == {
        "0": "a Adapter may do more than a linear layer",
        "1": "it has hooks",
    }


@pytest.mark.parametrize("name", FORMATS)
def test_state_is_saved_loaded_and_moved(name: str):
    fmt, options = FORMATS[name]
    first, second = tree(), tree()
    for module in (first, second):
        ridgeline.quantize_(module, fmt, **options)
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 256)
    with torch.inference_mode():
        assert torch.equal(first["body"](x), second["body"](x))
        low = first["body"].to(torch.bfloat16)
        assert low(x.bfloat16()).dtype == torch.bfloat16
    if fmt == "fp8":
        assert low[0].weight.dtype == torch.float8_e4m3fn
        assert low[0].weight_scale.dtype == torch.float32


@pytest.mark.parametrize("fmt", [None, "int4", "w4a8", "fp8"])
def test_autocast_gives_the_dtype_that_linear_layers_have(fmt: str | None):
    linear = nn.Linear(128, 64).bfloat16()
    module = nn.Sequential(linear)
    if fmt is None:
        module[0] = ridgeline.nn.Linear.from_torch(linear)
    else:
        ridgeline.quantize_(module, fmt)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(3, 128)).dtype == torch.bfloat16
