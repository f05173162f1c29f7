"""``experts_implementation="ridgeline"`` gives the tokens that transformers' own experts give."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations import finegrained_fp8, moe

import ridgeline
import tiny_model
from ridgeline.integrations import transformers as integration
from ridgeline.integrations import transformers_experts
from tiny_model import one_thread  # noqa: F401

pytestmark = pytest.mark.skipif(
    not hasattr(finegrained_fp8, "FP8ExpertsInterface"), reason="transformers before 5.5"
)
LENGTH, NEW_TOKENS = 29, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": MLA  # weights that do not sum to one, and experts that all tokens meet
    | {"v_head_dim": 24, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2}
    | {"topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1},
}


def make(folder: Path, architecture: str, **overrides: Any) -> PreTrainedModel:
    integration.enable()
    given = {"num_experts_per_tok": 2} | ARCHITECTURES.get(architecture, {}) | overrides
    return tiny_model.save_model(folder, architecture, **given)


def prompts(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Three rows and their attention mask, padding on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, tiny_model.VOCAB, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :8] = 0, 0
    return (ids * mask).to(device), mask.to(device)


def logits(model: PreTrainedModel, device: str = "cpu") -> Tensor:
    ids, mask = prompts(device)
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits


def generate(model: PreTrainedModel, device: str = "cpu", **options: Any) -> Tensor:
    ids, mask = prompts(device)
    how = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **how, **options
        )


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def qwen(tmp_path: Path) -> PreTrainedModel:
    return make(tmp_path, "qwen3_moe")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """What the log says, once more."""
    transformers_experts._logger.warning_once.cache_clear()
    transformers_experts._logger.addHandler(caplog.handler)
    yield caplog
    transformers_experts._logger.removeHandler(caplog.handler)


@pytest.fixture
def on_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the ops computes experts."""
    monkeypatch.delattr(moe, "grouped_mm_experts_forward")


# ---- Models -------------------------------------------------------------------------------------


def test_enabling_changes_no_model_and_twice_is_once(qwen: PreTrainedModel):
    before = len(moe.ALL_EXPERTS_FUNCTIONS)
    integration.enable()
    assert len(moe.ALL_EXPERTS_FUNCTIONS) == before
    assert qwen.config._experts_implementation != "ridgeline"


@pytest.mark.usefixtures("on_the_ops")
def test_logits_and_tokens(tiny: PreTrainedModel):
    tiny.set_experts_implementation("eager")
    expected, tokens = logits(tiny), generate(tiny)
    tiny.set_experts_implementation("ridgeline")
    torch.testing.assert_close(logits(tiny), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(generate(tiny), tokens)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(tiny, **static), tokens)


@pytest.mark.usefixtures("on_the_ops")
def test_loaded_with_attention_and_experts(tmp_path: Path):
    model = make(tmp_path, "mixtral")
    names = {"attn_implementation": "ridgeline", "experts_implementation": "ridgeline"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **names)
    assert loaded.config._experts_implementation == "ridgeline"
    model.set_experts_implementation("eager")
    assert torch.equal(generate(loaded), generate(model))


@pytest.mark.usefixtures("on_the_ops")
def test_compiled(qwen: PreTrainedModel):
    qwen.set_experts_implementation("ridgeline")
    expected = logits(qwen)
    compiled = torch.compile(qwen, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), expected, rtol=1e-4, atol=1e-3)
    torch._dynamo.reset()


def test_a_backward_is_refused(qwen: PreTrainedModel):
    qwen.set_experts_implementation("ridgeline")
    with pytest.raises(NotImplementedError, match="has no backward"):
        qwen(prompts()[0]).logits.sum().backward()


def test_transposed_weights_are_left_to_transformers_and_said(
    tmp_path: Path, said: pytest.LogCaptureFixture
):
    model = make(tmp_path, "gpt_oss", head_dim=32, num_local_experts=4)
    model.set_experts_implementation("grouped_mm")
    expected = logits(model)
    model.set_experts_implementation("ridgeline")
    assert torch.equal(logits(model), expected)
    assert "GptOssExperts not on the ops: weights of [experts, in, out]" in said.text


# ---- Modules ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Weights as ``use_experts_implementation`` says that they are."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, hidden, inner = config.experts, config.hidden, config.inner
        rows = inner if config.no_gate else 2 * inner
        up = "up_proj" if config.no_gate else "gate_up_proj"
        shapes = {up: (rows, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"{up}_bias": (rows,), "down_proj_bias": (hidden,)}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            values = torch.randn(self.num_experts, *shape, generator=generator) * 0.1
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.post_expert_norm = nn.LayerNorm(hidden).requires_grad_(False)
        self.act_fn = ACT2FN[config.act]

    def forward(self, *inputs: Tensor) -> Tensor:
        raise AssertionError("eager")


class Clamped(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2].clamp(-0.1, 0.1)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def experts_module(
    device: str = "cpu",
    *,
    base: type[nn.Module] = Experts,
    act: str = "silu",
    shape: tuple[int, int, int] = (6, 32, 48),
    **flags: Any,
) -> nn.Module:
    unknown = flags.keys() - signature(moe.use_experts_implementation).parameters.keys()
    if unknown:
        pytest.skip(f"this transformers has no {unknown}")
    decorated = moe.use_experts_implementation(type("Decorated", (base,), {}), **flags)
    config = SimpleNamespace(act=act, no_gate=flags.get("has_gate") is False)
    config.experts, config.hidden, config.inner = shape
    config._experts_implementation = "ridgeline"
    integration.enable()
    return decorated(config).to(device)


def inputs(
    module: nn.Module, tokens: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, module.config.hidden, generator=generator).to(device, dtype)
    chosen = torch.randint(module.num_experts, (tokens, 3), generator=generator).to(device)
    return x, chosen, torch.rand(tokens, 3, generator=generator).to(device, dtype)


def by_loops(
    module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor, flags: dict[str, Any]
) -> Tensor:
    """Of the same weights in float64, one choice after the other."""
    module, x, weights = module.cpu().double(), x.cpu().double(), weights.cpu().double()
    out = torch.zeros_like(x)
    name = "up_proj" if flags.get("has_gate") is False else "gate_up_proj"
    for token, expert, weight in zip(range(len(x)), chosen.tolist(), weights):
        for e, w in zip(expert, weight):
            if e >= module.num_experts:
                continue
            hidden = getattr(module, name)[e] @ x[token]
            if flags.get("has_bias"):
                hidden = hidden + getattr(module, f"{name}_bias")[e]
            gated = name == "gate_up_proj"
            hidden = module._apply_gate(hidden) if gated else module.act_fn(hidden)
            made = module.down_proj[e] @ hidden
            if flags.get("has_bias"):
                made = made + module.down_proj_bias[e]
            if flags.get("has_post_expert_norm"):
                made = module.post_expert_norm(made)
            out[token] += w * made
    return out


KINDS: dict[str, dict[str, Any]] = {
    "gates of SiLU": {},
    "with biases": {"has_bias": True},
    "gates of another activation": {"act": "gelu"},
    "a gate of its own": {"base": Clamped, "has_bias": True, "is_concatenated": False},
    "no gate": {"act": "relu2", "has_gate": False},
    "no gate, biases": {"act": "silu", "has_gate": False, "has_bias": True},
    "a norm behind": {"has_post_expert_norm": True},
}


@pytest.mark.usefixtures("on_the_ops")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_what_a_module_says_is_done(kind: str, tokens: int, device: str):
    flags = KINDS[kind]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    module = experts_module(device, **flags).to(dtype)
    given = inputs(module, tokens, device, dtype)
    actual = module(*given)
    assert actual.dtype == dtype
    expected = by_loops(module, *given, flags).to(dtype)
    tolerance = 1e-5 if device == "cpu" else 3e-2
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("on_the_ops")
@pytest.mark.parametrize("device", DEVICES)
def test_experts_of_other_ranks_add_nothing(device: str):
    """transformers gives them the number behind the last, and no weight."""
    flags = {"has_bias": True}
    module = experts_module(device, **flags).to(torch.bfloat16)
    x, chosen, weights = inputs(module, 20, device, torch.bfloat16)
    chosen[::2, 1] = module.num_experts
    chosen[3] = module.num_experts
    weights[chosen == module.num_experts] = 0
    actual = module(x, chosen, weights).float().cpu()
    assert not actual[3].any()
    expected = by_loops(module, x, chosen, weights, flags).float()
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.usefixtures("on_the_ops")
def test_activations_take_the_dtype_of_the_weights():
    """As autocast leaves them: a norm's output in float32 beside weights in 16 bits."""
    module = experts_module().to(torch.bfloat16)
    x, chosen, weights = inputs(module, 9, "cpu", torch.float32)
    out = module(x, chosen, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out, module(x.bfloat16(), chosen, weights).float())


REASONS = {
    "weights of [experts, in, out]": {"is_transposed": True, "shape": (4, 32, 32)},
    "1024 experts, more than 1023": {"shape": (1024, 8, 8)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_the_ops_do_not_take_is_said(reason: str, said: pytest.LogCaptureFixture):
    module = experts_module(**REASONS[reason])
    if "is_transposed" in REASONS[reason]:
        module.gate_up_proj.data = module.gate_up_proj.data.transpose(1, 2).contiguous()
    given = inputs(module, 5, "cpu", torch.float32)
    expected = moe.grouped_mm_experts_forward(module, *given)
    assert torch.equal(module(*given), expected)
    assert f"Decorated not on the ops: {reason}" in said.text


@pytest.mark.gpu
@pytest.mark.parametrize("reason, dtype, inner", [
    ("weights of torch.float32 and torch.float32 on cuda", torch.float32, 48),
    ("sizes 32 and 44, not multiples of 8", torch.bfloat16, 44),
])  # fmt: skip
def test_what_cuda_does_not_take_is_said(
    reason: str, dtype: torch.dtype, inner: int, said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """transformers' own may not take it either: that is what it is given."""
    monkeypatch.setattr(moe, "grouped_mm_experts_forward", lambda *given: given)
    module = experts_module("cuda", shape=(4, 32, inner)).to(dtype)
    given = inputs(module, 5, "cuda", dtype)
    assert all(ours is theirs for ours, theirs in zip(module(*given), (module, *given)))
    assert f"Decorated not on the ops: {reason}" in said.text


def test_fp8_of_transformers_stays_with_it(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    functions = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    monkeypatch.setitem(functions, "grouped_mm", lambda *given: given)
    integration.enable()
    given = (nn.Identity(), *(torch.zeros(1) for _ in range(3)))
    assert functions["ridgeline"](*given) == given
    assert "Identity not on the ops: weights of float8" in said.text


# ---- optimize_ ----------------------------------------------------------------------------------


def test_optimize_takes_experts_and_gives_them_back(tiny: PreTrainedModel):
    tiny.set_experts_implementation("eager")
    tokens = generate(tiny)
    done = ridgeline.optimize_(tiny)
    experts = [name for name, _ in transformers_experts.experts_of(tiny)]
    assert {(name, "experts function (eager)") for name in experts} <= set(done.swapped)
    assert experts and not {name for name, *_ in done.left} & set(experts)
    assert torch.equal(generate(tiny), tokens)
    done.undo()
    assert tiny.config._experts_implementation == "eager"


def test_optimize_leaves_all_experts_where_one_cannot_be_served(qwen: PreTrainedModel):
    before = qwen.config._experts_implementation
    experts = dict(transformers_experts.experts_of(qwen))
    next(reversed(experts.values())).num_experts = 1024
    done = ridgeline.optimize_(qwen)
    left = {name: reason for name, _, reason in done.left}
    assert left.items() >= dict.fromkeys(experts, "1024 experts, more than 1023").items()
    assert qwen.config._experts_implementation == before


@pytest.mark.usefixtures("on_the_ops")
def test_optimize_lays_transposed_weights_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """gpt-oss's: names, shapes and values stay, and undo() puts them back. Their gate, too, is the
    ops'."""
    model = make(tmp_path, "gpt_oss", head_dim=32, num_local_experts=4)
    model.set_experts_implementation("eager")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = generate(model)
    done = ridgeline.optimize_(model)
    experts = dict(transformers_experts.experts_of(model))
    assert experts and {(name, "experts function (eager)") for name in experts} <= set(done.swapped)
    for module in experts.values():
        for weight in (module.gate_up_proj, module.down_proj):
            assert weight.transpose(1, 2).is_contiguous() and not weight.is_contiguous()
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    gates: list[Tensor] = []
    gate = transformers_experts.ops.swiglu_clamped

    def seen(x: Tensor, *given: float) -> Tensor:
        gates.append(x)
        return gate(x, *given)

    monkeypatch.setattr(transformers_experts.ops, "swiglu_clamped", seen)
    assert torch.equal(generate(model), tokens)
    assert len(gates) == NEW_TOKENS * len(experts)
    done.undo()
    assert all(module.down_proj.is_contiguous() for module in experts.values())
    assert torch.equal(generate(model), tokens)


@pytest.mark.usefixtures("on_the_ops")
@pytest.mark.parametrize("device", DEVICES)
def test_transposed_weights_that_are_laid_out_give_the_same_bits(device: str):
    plain, transposed = experts_module(device), experts_module(device, is_transposed=True)
    for name in ("gate_up_proj", "down_proj"):
        own = getattr(transposed, name)
        own.data = own.data.transpose(1, 2).contiguous()
    transformers_experts.lay_out(transposed)
    given = inputs(plain, 5, device, torch.bfloat16)
    expected = plain.to(torch.bfloat16)(*given)
    assert torch.equal(transposed.to(torch.bfloat16)(*given), expected)


def test_optimize_finds_experts_that_are_there_already(qwen: PreTrainedModel):
    qwen.set_experts_implementation("ridgeline")
    done = ridgeline.optimize_(qwen)
    assert "Qwen3MoeExperts" not in {kind for _, kind, _ in done.left}
    done.undo()
    assert qwen.config._experts_implementation == "ridgeline"


# ---- On a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_bfloat16_is_as_near_to_float32_as_eager_experts(tiny: PreTrainedModel):
    tiny.set_experts_implementation("eager")
    mask = prompts()[1][..., None]
    exact = logits(tiny)
    low = type(tiny)(tiny.config).to(torch.bfloat16)
    low.load_state_dict(tiny.state_dict())
    low.cuda().eval()
    errors = {}
    for implementation in ("eager", "ridgeline"):
        low.set_experts_implementation(implementation)
        errors[implementation] = ((logits(low, "cuda").float().cpu() - exact) * mask).abs().mean()
    assert errors["ridgeline"] <= 2 * errors["eager"]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_the_ops")
def test_generation_by_decode_graphs(qwen: PreTrainedModel):
    qwen.to("cuda", torch.bfloat16)
    qwen.set_attn_implementation("ridgeline")
    qwen.set_experts_implementation("ridgeline")
    static = {"cache_implementation": "static", "disable_compile": True}
    tokens = generate(qwen, "cuda", **static)
    graphs = integration.DecodeGraphs(qwen)
    replayed = generate(qwen, "cuda", **static)
    graphs.undo()
    assert torch.equal(replayed, tokens)
