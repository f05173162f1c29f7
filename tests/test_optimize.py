"""``optimize_`` swaps what it has tried, changes no result, says what it left, and is undone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import ridgeline
import tiny_model
from tiny_model import one_thread  # noqa: F401

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WINDOW = {"sliding_window": 11}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 48} | WINDOW
MOE = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LAYER, ATTENTION = "layer (norms and residuals in the products)", "attention (qkv, rope)"
# Of each architecture of two layers: what is swapped and how often, what must be left.
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "llama": ({}, {LAYER: 2, "rmsnorm": 5, "linear": 1}, "Embedding"),
    "mistral": (WINDOW, {LAYER: 2}, "Embedding"),
    "qwen2": ({}, {LAYER: 2}, "Embedding"),
    "qwen3": ({"head_dim": 32}, {LAYER: 2, "rmsnorm": 9}, "Embedding"),
    "gemma2": (GEMMA, {ATTENTION: 2, "mlp (gelu_tanh_mul)": 2, "rmsnorm": 9}, "Gemma2DecoderLayer"),
    "phi3": ({"sliding_window": None}, {"mlp (silu_mul)": 2, "linear": 5}, "Phi3DecoderLayer"),
    "glm": ({"head_dim": 32}, {"mlp (silu_mul)": 2, "linear": 9}, "GlmAttention"),
    "gpt2": ({}, {"layernorm": 5, "linear": 1}, "Conv1D"),
    "gpt_neox": ({}, {"layernorm": 5, "linear + gelu": 2}, "Embedding"),
    "qwen3_moe": (MOE, {ATTENTION: 2, "rmsnorm": 9}, "Qwen3MoeTopKRouter"),
}


def generate(model: PreTrainedModel) -> Tensor:
    """Greedy tokens of a batch with padding on the left."""
    ids = torch.randint(1, tiny_model.VOCAB, (3, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :8] = 0, 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(ids * mask, attention_mask=mask, eos_token_id=None, **options)


def counts(done: ridgeline.Optimized) -> dict[str, int]:
    whats = [what for _, what in done.swapped]
    return {what: whats.count(what) for what in whats}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    overrides, swaps, left = ARCHITECTURES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_model.save_model(folder, request.param, **overrides), swaps, left


def test_tokens_and_state_stay_and_undo_undoes(case: Any):
    model, swaps, left = case
    tokens, state = generate(model), copy.deepcopy(model.state_dict())
    attention = model.config._attn_implementation
    done = ridgeline.optimize_(model)
    assert swaps.items() <= counts(done).items(), str(done)
    assert left in {kind for _, kind, _ in done.left}, str(done)
    assert model.config._attn_implementation == "ridgeline"
    assert torch.equal(generate(model), tokens)
    now = model.state_dict()
    assert now.keys() == state.keys() and all(torch.equal(now[k], state[k]) for k in state)
    done.undo()
    done.undo()
    assert model.config._attn_implementation == attention
    assert all("forward" not in module.__dict__ for module in model.modules())
    storages = [p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()]
    assert all(storages), "weights are views no more"
    assert torch.equal(generate(model), tokens)


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    return tiny_model.save_llama(tmp_path, hidden_size=128, intermediate_size=256)


FORMATS = {
    "int4": ("int4", {"group_size": 32}),
    "int4 with zeros": ("int4", {"zero_point": True}),
    "w4a8": ("w4a8", {}),
    "fp8": ("fp8", {}),
    "fp8 inputs": ("fp8", {"dynamic": True}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_quantised_model(llama: PreTrainedModel, name: str, device: str):
    fmt, options = FORMATS[name]
    if device == "cuda":
        llama = llama.to(device, torch.bfloat16)
    ridgeline.quantize_(llama, fmt, **options)
    ids = torch.randint(1, tiny_model.VOCAB, (2, 21), device=device)
    with torch.no_grad():
        expected = llama(ids).logits
        done = ridgeline.optimize_(llama)
        actual = llama(ids).logits
    assert counts(done)[LAYER] == 2
    # In bfloat16 the roundings between the ops differ, and inputs between two codes follow them.
    bound = 1e-4 if device == "cpu" else 2e-1 if name in ("w4a8", "fp8 inputs") else 1e-1
    assert (actual - expected).norm() <= bound * expected.norm()


def test_quantising_comes_first(llama: PreTrainedModel):
    done = ridgeline.optimize_(llama)
    with pytest.raises(ValueError, match="not optimised yet"):
        ridgeline.quantize_(llama, "fp8")
    with pytest.raises(ValueError, match="not optimised yet"):
        ridgeline.optimize_(llama)
    done.undo()
    ridgeline.optimize_(llama)


def test_compiled_copied_inferred_and_under_autocast(llama: PreTrainedModel):
    plain = copy.deepcopy(llama)
    ridgeline.optimize_(llama)
    ids = torch.randint(1, tiny_model.VOCAB, (2, 21))
    with torch.no_grad():
        expected = llama(ids).logits
        compiled = torch.compile(llama, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(ids).logits, expected)
        assert torch.equal(copy.deepcopy(llama)(ids).logits, expected)
        program = torch.export.export(llama, (ids,), {"use_cache": False})
        assert any("ridgeline" in str(node.target) for node in program.graph.nodes)
        with torch.autocast("cpu", torch.bfloat16):
            low, rival = llama(ids).logits, plain(ids).logits
    with torch.inference_mode():
        assert torch.equal(llama(ids).logits, expected)
    assert low.dtype == rival.dtype
    assert (low - expected).norm() <= 2 * (rival - expected).norm()
    assert torch.equal(llama(ids).logits.detach(), expected), "gradients recorded, not asked for"
    with pytest.raises(NotImplementedError, match="has no backward"):
        llama(ids).logits.sum().backward()


def test_a_saved_model_is_the_loaded_one(llama: PreTrainedModel):
    ids = torch.randint(1, tiny_model.VOCAB, (2, 21))
    ridgeline.optimize_(llama)
    loaded = pickle.loads(pickle.dumps(llama))
    with torch.no_grad():
        expected = llama(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
        loaded.model.embed_tokens.weight.zero_()
        assert torch.equal(llama(ids).logits, expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["dense", *FORMATS])
def test_weights_loaded_later_are_used(llama: PreTrainedModel, name: str, assign: bool):
    other, ids = copy.deepcopy(llama), torch.arange(1, 12)[None]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
        for model in (llama, other) if name != "dense" else ():
            ridgeline.quantize_(model, FORMATS[name][0], **FORMATS[name][1])
        state = copy.deepcopy(other.state_dict())
        done = [ridgeline.optimize_(model) for model in (llama, other)]
        llama.load_state_dict(state, assign=assign)
        assert torch.equal(llama(ids).logits, other(ids).logits)
        done[0].undo()
        llama.load_state_dict(state, assign=assign)
        assert not any(module._load_state_dict_post_hooks for module in llama.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_modules(device: str):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 96), nn.GELU("tanh"), nn.Dropout(0.1),
        nn.Linear(96, 64), nn.ReLU(), nn.RMSNorm(64), nn.Linear(64, 8), nn.Tanh(),
    ).to(device, dtype).eval()  # fmt: skip
    x = torch.randn(5, 64, device=device, dtype=dtype)
    with torch.no_grad():
        expected = block(x)
        done = ridgeline.optimize_(block)
        actual = block(x)
    assert dict(done.swapped)[""] == "layernorm_gelu, linear + gelu_tanh, linear + relu"
    assert dict(done.swapped)["7"] == "rmsnorm" and dict(done.swapped)["8"] == "linear"
    torch.testing.assert_close(actual, expected, rtol=2e-2 if device == "cuda" else 1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, nn.Linear])
def test_what_is_swapped_takes_any_strides(kind: Any):
    """As Mamba's layers do, which project the transposed output of a convolution."""
    module = nn.ModuleList([kind(*(64, 32)[: 1 + (kind is nn.Linear)])])
    x = torch.randn(3, 64, 5).transpose(1, 2)
    with torch.no_grad():
        expected = module[0](x)
        assert len(ridgeline.optimize_(module).swapped) == 1
        torch.testing.assert_close(module[0](x), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # whole layers, and their parts
def test_embeddings_may_have_any_strides(tmp_path: Path, architecture: str):
    """As a soft prompt has that is expanded over the batch."""
    model = tiny_model.save_model(tmp_path, architecture)
    x = torch.randn(1, 9, 64)
    with torch.no_grad():
        expected = model(inputs_embeds=x.repeat(3, 1, 1)).logits
        ridgeline.optimize_(model)
        for embeds in (x.expand(3, 9, 64), x.transpose(0, 1).expand(9, 3, 64).transpose(0, 1)):
            actual = model(inputs_embeds=embeds).logits
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_norm_whose_weight_is_narrower_than_its_input_keeps_its_own_forward():
    """As Mamba's last norm is, which reads a residual in float32."""
    norm = nn.ModuleList([WideNorm(), nn.Linear(64, 64)]).bfloat16()
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected, narrow = norm[0](x), norm[0](x.bfloat16())
        assert ("0", "rmsnorm") in ridgeline.optimize_(norm).swapped
        assert torch.equal(norm[0](x), expected) and norm[0](x).dtype == torch.float32
        torch.testing.assert_close(norm[0](x.bfloat16()), narrow, rtol=2e-2, atol=1e-2)


class WideNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(64) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def test_what_has_no_op_of_its_dtype_is_left():
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.RMSNorm(8)).double()
    done = ridgeline.optimize_(module)
    assert done.swapped == [] and {name for name, _, _ in done.left} >= {"0", "2", "3"}
    assert "no op for torch.float64" in str(done)


class OtherGelu(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class OtherLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (nn.Linear(16, 16), OtherGelu()),
        lambda: (OtherLayerNorm(16), nn.GELU()),
        lambda: (nn.LayerNorm(16), OtherGelu()),
    ],
)
def test_what_only_looks_like_a_row_is_left(parts: Any):
    block, x = nn.Sequential(*parts()), torch.randn(3, 16)
    with torch.no_grad():
        expected = block(x)
        ridgeline.optimize_(block)
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("first", [nn.Linear(16, 16), nn.LayerNorm(16)])
@pytest.mark.parametrize("hooked", [0, 1])
def test_hooks_on_a_row_are_called(first: nn.Module, hooked: int):
    block, seen = nn.Sequential(copy.deepcopy(first), nn.GELU()), []
    block[hooked].register_forward_hook(lambda module, args, out: seen.append(module))
    ridgeline.optimize_(block)
    with torch.no_grad():
        seen.clear()
        block(torch.randn(3, 16))
    assert seen == [block[hooked]]


@pytest.mark.parametrize("hooked", ["self_attn.q_norm", "mlp.act_fn", "mlp.down_proj"])
def test_hooks_on_parts_of_a_layer_are_called(tmp_path: Path, hooked: str):
    model, seen = tiny_model.save_model(tmp_path, "qwen3", head_dim=32), []
    part = model.model.layers[0].get_submodule(hooked)
    part.register_forward_hook(lambda module, args, out: seen.append(module))
    ridgeline.optimize_(model)
    with torch.no_grad():
        seen.clear()
        model(torch.arange(1, 9)[None])
    assert seen == [part]


def test_a_replaced_forward_in_a_row_is_called():
    block, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(3, 16)
    block[0].forward = lambda x: -x
    ridgeline.optimize_(block)
    assert torch.equal(block(x), torch.relu(-x))


class OtherNorm(nn.Module):
    """Looks like a norm of the mean square, and is one of the largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class OtherEps(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 10 * self.eps) * self.weight


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("module", [OtherNorm(), OtherEps(16, 1e-6), Twice(16, 16)])
def test_what_only_looks_alike_is_left(module: nn.Module):
    tree = nn.ModuleDict({"it": module}).eval()
    done = ridgeline.optimize_(tree)
    assert not done.swapped
    ((name, kind, reason),) = done.left
    assert (name, kind) == ("it", type(module).__name__) and reason in str(done)


class NewAttention(LlamaAttention):
    """As transformers names the cache from 5.24 on."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kw):
        return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kw)


class OldAttention(LlamaAttention):
    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kw
    ):
        args = (hidden_states, position_embeddings, attention_mask, past_key_values)
        return super().forward(*args, **kw)


class Cache:
    """Keeps the keys and values of one layer, and what else it is told."""

    def __init__(self) -> None:
        self.state: tuple[Tensor, ...] = ()
        self.told: set[str] = set()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **told: Any) -> Any:
        assert layer_idx == 0
        self.told |= told.keys()
        new = (key, value)
        self.state = tuple(torch.cat(pair, 2) for pair in zip(self.state or new, new, strict=True))
        if self.state[0].shape == key.shape:
            return new
        return self.state


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (NewAttention, "cache", {"kwargs"}),
        (NewAttention, "past_key_values", {"kwargs"}),  # which transformers takes until 5.40
        (OldAttention, "past_key_values", set()),
    ],
)
def test_the_cache_is_found_by_its_name(llama: PreTrainedModel, kind: Any, name: str, told: set):
    llama.set_attn_implementation("sdpa")
    attention = llama.model.layers[0].self_attn
    attention.__class__ = kind
    x, angles = torch.randn(2, 5, 128), torch.randn(2, 5, attention.head_dim // 2).repeat(1, 1, 2)
    new_name = "past_key_values" if kind is OldAttention else "cache"

    def run(name: str, cache: Cache) -> Tensor:
        parts = [slice(0, 4), slice(4, 5)]
        given = ((x[:, p], (angles[:, p].cos(), angles[:, p].sin())) for p in parts)
        return torch.cat([attention(*args, None, **{name: cache})[0] for args in given], 1)

    with torch.no_grad():
        expected = run(new_name, Cache())
        done = ridgeline.optimize_(nn.ModuleDict({"it": attention}).eval())
        assert ("it", ATTENTION) in done.swapped
        cache = Cache()
        torch.testing.assert_close(run(name, cache), expected, rtol=1e-4, atol=1e-5)
    assert cache.told == told


class TurnedAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, turn=0, **kw):
        return super().forward(hidden_states.roll(turn, 1), position_embeddings, None, **kw)


class TurnedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, turn=0, **kw):
        return super().forward(hidden_states.roll(turn, 1), **kw)


@pytest.mark.parametrize("of_layer", [False, True])
def test_a_forward_that_may_be_told_more_is_left(llama: PreTrainedModel, of_layer: bool):
    """A trial without it is the same."""
    layer = llama.model.layers[1]
    name = "model.layers.1" if of_layer else "model.layers.1.self_attn"
    if of_layer:
        layer.__class__ = TurnedLayer
    else:
        layer.self_attn.__class__ = TurnedAttention
    done = ridgeline.optimize_(llama)
    reasons = {name: reason for name, _, reason in done.left}
    assert reasons[name] == "its forward takes turn, which is not known"
    assert counts(done)[LAYER] == 1


@pytest.mark.parametrize("key", ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"])
def test_parameters_of_strides_that_no_op_reads_are_left(key: str):
    layers = [nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)]
    module, x = nn.Sequential(*layers), torch.randn(5, 64)
    own = module.get_parameter(key)
    own.data = torch.stack([own.data, own.data], -1)[..., 0]
    with torch.no_grad():
        expected = module(x)
        done = ridgeline.optimize_(module)
        torch.testing.assert_close(module(x), expected)
    assert key.split(".")[0] in {name for name, _, _ in done.left}


def test_hooks_and_replaced_forwards_are_left():
    tree = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    tree[0].register_forward_hook(lambda *_: None)
    tree[1].forward = lambda x: x
    done = ridgeline.optimize_(tree)
    assert not done.swapped and len(done.left) == 2
