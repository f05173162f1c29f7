"""``attn_implementation="ridgeline"`` gives the tokens that transformers' own attention gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    BlipTextConfig,
    BlipTextModel,
    CompileConfig,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import tiny_model
from ridgeline.integrations import transformers as integration
from ridgeline.integrations.key_ranges import KeyRanges
from tiny_model import one_thread  # noqa: F401

WINDOW = 11
LENGTH = 29  # longer than the window: prefill and decode both cross it
NEW_TOKENS = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": {},  # GQA
    "mistral": {"sliding_window": WINDOW},  # a window in every layer
    "gemma2": {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 48},  # caps
    "gemma3_text": {"head_dim": 32, "sliding_window": WINDOW},  # layers alternate
    "gpt_oss": {"head_dim": 32, "sliding_window": WINDOW} | MOE,  # sinks
    "gpt2": {},  # learned positions
}


def paddings(device: str) -> dict[str, Tensor]:
    """Attention masks of three rows; no window is all padding, where transformers disagrees."""
    whole = torch.ones(3, LENGTH, dtype=torch.int64, device=device)
    left = whole.clone()
    left[1, :3], left[2, :8] = 0, 0
    holes = whole.clone()
    holes[1, 5:7] = 0
    return {"none": whole, "left": left, "right": left.flip(1), "within": holes}


PADDINGS = list(paddings("cpu"))


@dataclass(frozen=True)
class Model:
    model: PreTrainedModel
    ids: Tensor

    def use(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)

    def logits(self, mask: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            return self.model(self.ids * mask, attention_mask=mask, **options).logits

    def generate(self, mask: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            return self.model.generate(
                self.ids * mask,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )


def make(folder: Path, architecture: str) -> Model:
    integration.enable()
    model = tiny_model.save_model(folder, architecture, **ARCHITECTURES[architecture])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2)
    ids = torch.randint(
        1, tiny_model.VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    return Model(model, ids)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_importing_ridgeline_imports_no_transformers():
    code = "import ridgeline, sys; assert 'transformers' not in sys.modules, 'transformers'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_enabling_changes_no_model_and_twice_is_once(plain: Model):
    before = len(AttentionInterface())
    integration.enable()
    assert len(AttentionInterface()) == before
    plain.use("eager")
    assert plain.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("padding", PADDINGS)
def test_logits_and_tokens(tiny: Model, padding: str):
    mask = paddings("cpu")[padding]
    tiny.use("eager")
    logits, tokens = tiny.logits(mask), tiny.generate(mask)
    tiny.use("ridgeline")
    at_tokens = mask[..., None]  # at padding the ops give zeros, eager attention an average
    torch.testing.assert_close(
        tiny.logits(mask) * at_tokens, logits * at_tokens, rtol=1e-4, atol=1e-3
    )
    assert torch.equal(tiny.generate(mask), tokens)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_static_cache(tiny: Model, padding: str):
    mask, options = paddings("cpu")[padding], {"cache_implementation": "static"}
    tiny.use("eager")
    tokens = tiny.generate(mask, **options, disable_compile=True)
    tiny.use("ridgeline")
    assert torch.equal(tiny.generate(mask, **options, disable_compile=True), tokens)


def test_chunks_of_a_prompt(plain: Model):
    mask = paddings("cpu")["none"]
    plain.use("eager")
    tokens = plain.generate(mask)
    plain.use("ridgeline")
    assert torch.equal(plain.generate(mask, prefill_chunk_size=10), tokens)


def test_what_the_ops_do_not_express_is_said(plain: Model, caplog: pytest.LogCaptureFixture):
    module = torch.nn.Identity()
    q = torch.randn(1, 2, 4, 16)
    mask = torch.rand(1, 1, 4, 4) > 0.3
    mask |= torch.eye(4, dtype=torch.bool)
    integration._logger.warning_once.cache_clear()
    integration._logger.addHandler(caplog.handler)
    out, _ = integration.attention_forward(module, q, q, q, mask)
    integration._logger.removeHandler(caplog.handler)
    assert "not on the ops: a mask that is not padding" in caplog.text
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("architecture", ["bloom", "mpt", "megatron-bert"])
@pytest.mark.parametrize("padding", ["none", "left", "within"])
def test_attention_that_cannot_be_replaced_keeps_its_masks(architecture: str, padding: str):
    """transformers takes a registered function for these models too, and asks it for masks only."""
    integration.enable()
    shape = {"hidden_size": 32, "d_model": 32, "vocab_size": 99, "intermediate_size": 64}
    for heads, layers in (("n_head", "n_layer"), ("n_heads", "n_layers")):
        shape |= {heads: 2, layers: 2}
    shape |= {"num_attention_heads": 2, "num_hidden_layers": 2}
    mask, results = paddings("cpu")[padding], []
    for implementation in ("eager", "ridgeline"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **shape)
        model = AutoModel.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            out = model(mask.cumsum(1), attention_mask=mask).last_hidden_state
        results.append(out * mask[..., None])
    torch.testing.assert_close(*results)


def test_so_does_attention_in_a_file_of_its_own():
    """Vision and text of Blip are apart, and the text's attention alone cannot be replaced."""
    integration.enable()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    mask, results = paddings("cpu")["left"], []
    for implementation in ("eager", "ridgeline"):
        torch.manual_seed(0)
        config = BlipTextConfig(**shape, num_attention_heads=2, vocab_size=99)
        config._attn_implementation = implementation
        model = BlipTextModel(config, add_pooling_layer=False).eval()
        with torch.no_grad():
            out = model(mask.cumsum(1), attention_mask=mask, is_decoder=True).last_hidden_state
        results.append(out * mask[..., None])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dims", [(20, 20), (24, 16)], ids=["odd", "values narrower"])
def test_heads_that_the_ops_do_not_take(dims: tuple[int, int]):
    q, v = torch.randn(2, 2, 5, dims[0]), torch.randn(2, 2, 5, dims[1])
    ranges = torch.tensor([[0, 5, 5], [2, 5, 5]], dtype=torch.int32)
    packed = KeyRanges(ranges, True, None).pack(q.device)
    out, _ = integration.attention_forward(torch.nn.Identity(), q, q, v, packed)
    mask = KeyRanges.unpack(packed).mask(5, 5, q.device)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, v, attn_mask=mask)
    torch.testing.assert_close(out, expected.transpose(1, 2).nan_to_num())


def test_dropout_is_refused():
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(ValueError, match="dropout: expected 0.0"):
        integration.attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_encoder_with_padding(side: str):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = BertModel(BertConfig(**shape, intermediate_size=96, vocab_size=99)).eval()
    mask = paddings("cpu")[side]
    ids = torch.randint(1, 99, mask.shape)
    results = []
    for implementation in ("eager", "ridgeline"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(ids, attention_mask=mask).last_hidden_state * mask[..., None])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# ---- Compiled -----------------------------------------------------------------------------------


def test_compiled_with_and_without_padding(plain: Model):
    plain.use("ridgeline")
    masks = paddings("cpu")
    compiled = torch.compile(plain.model, backend="aot_eager", fullgraph=True)
    for padding in ("none", "left"):
        mask = masks[padding]
        with torch.no_grad():
            actual = compiled(plain.ids * mask, attention_mask=mask).logits
        at_tokens = mask[..., None]
        expected = plain.logits(mask)
        torch.testing.assert_close(actual * at_tokens, expected * at_tokens, rtol=1e-4, atol=1e-3)


def test_generation_with_a_compiled_step(plain: Model):
    mask = paddings("cpu")["left"]
    plain.use("eager")
    tokens = plain.generate(mask)
    plain.use("ridgeline")
    how = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    options = {"cache_implementation": "static", "compile_config": how}
    assert torch.equal(plain.generate(mask, **options), tokens)


def test_exported_without_a_cache(plain: Model):
    plain.use("ridgeline")
    with torch.no_grad():
        program = torch.export.export(plain.model, (plain.ids,), {"use_cache": False})
        actual = program.module()(plain.ids, use_cache=False).logits
    expected = plain.logits(torch.ones_like(plain.ids))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


# ---- Continuous batching ------------------------------------------------------------------------


def skip_unless_paged(model: PreTrainedModel) -> None:
    if model.config._attn_implementation != "paged|ridgeline":
        pytest.skip("continuous batching of this transformers takes its own attention alone")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss"])
def test_continuous_batching(architecture: str, device: str, tmp_path: Path):
    generation = pytest.importorskip("transformers.generation.configuration_utils")
    overrides = ARCHITECTURES[architecture]
    if "sliding_window" in overrides:
        overrides = overrides | {"sliding_window": 32}  # a multiple of the cache's block
    integration.enable()
    model = tiny_model.save_model(tmp_path, architecture, **overrides).to(device)
    prompts = [tiny_model.prompt_of(n) for n in (5, 40, 70)]
    outputs = {}
    for implementation in ("paged|eager", "paged|ridgeline"):
        model.set_attn_implementation(implementation)
        if implementation == "paged|ridgeline":
            skip_unless_paged(model)
        how = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
        cache = generation.ContinuousBatchingConfig(
            block_size=16,
            num_blocks=40,
            max_batch_tokens=32,  # prompts are cut into chunks
        )
        results = model.generate_batch(
            inputs=prompts,
            generation_config=how,
            continuous_batching_config=cache,
            progress_bar=False,
        )
        outputs[implementation] = [results[key].generated_tokens for key in sorted(results)]
    assert outputs["paged|ridgeline"] == outputs["paged|eager"]


def test_paged_attention_belongs_to_continuous_batching(plain: Model):
    plain.use("paged|ridgeline")
    skip_unless_paged(plain.model)
    with pytest.raises(ValueError, match="generate_batch"):
        plain.logits(torch.ones_like(plain.ids))


# ---- On a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("padding", PADDINGS)
def test_bfloat16_is_as_near_to_float32_as_eager_attention(tiny: Model, padding: str):
    mask = paddings("cuda")[padding]
    tiny.use("eager")
    exact = tiny.logits(mask.cpu())
    errors = {}
    low = Model(type(tiny.model)(tiny.model.config).to(torch.bfloat16), tiny.ids.cuda())
    low.model.load_state_dict(tiny.model.state_dict())
    low.model.cuda().eval()
    for implementation in ("eager", "ridgeline"):
        low.use(implementation)
        wrong = (low.logits(mask).float().cpu() - exact) * mask.cpu()[..., None]
        errors[implementation] = wrong.abs().mean()
    assert errors["ridgeline"] <= 2 * errors["eager"]


def test_decode_graphs_are_of_a_gpu(plain: Model):
    with pytest.raises(ValueError, match="expected on a CUDA device, got cpu"):
        integration.DecodeGraphs(plain.model)


class OnAGpu:
    """Says that it is, for graphs whose capture runs the step, and whose replay does nothing."""

    device = torch.device("cuda")

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def forward(self, **kwargs: Any) -> Any:
        return self._model(**kwargs)


CACHES = {"cache", "past_key_values"} & signature(LlamaForCausalLM.forward).parameters.keys()


@pytest.mark.parametrize("name", sorted(CACHES | {"past_key_values"}))
def test_a_captured_step_has_the_cache_by_any_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """transformers 5.24 gave it another, and takes the old one too."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    llama = make(tmp_path, "llama")
    llama.use("ridgeline")
    model, ids = llama.model, llama.ids

    def run(forward: Any) -> list[Any]:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        with torch.no_grad():
            model(ids[:, :-2], **{name: cache})
            steps = [forward(input_ids=ids[:, [i]], **{name: cache}) for i in (-2, -1)]
        assert all(step[name] is cache for step in steps)
        return steps

    expected = run(model)
    graphs = integration.DecodeGraphs(OnAGpu(model))
    for want, got in zip(expected, run(graphs), strict=True):
        assert type(got) is type(want) and got.keys() == want.keys()
        assert torch.equal(got.logits, want.logits)
    assert graphs._step.graph.replay.call_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generation_by_decode_graphs(tiny: Model, padding: str):
    mask = paddings("cuda")[padding]
    options = {"cache_implementation": "static", "disable_compile": True}
    tiny.use("ridgeline")
    model = Model(tiny.model.cuda(), tiny.ids.cuda())
    tokens = model.generate(mask, **options)
    graphs = integration.DecodeGraphs(model.model)
    with pytest.raises(ValueError, match="replaced already"):
        integration.DecodeGraphs(model.model)
    twice = [model.generate(mask, **options) for _ in range(2)]  # the cache is used again
    graphs.undo()
    last = model.generate(mask, **options)
    tiny.model.cpu()
    assert all(torch.equal(other, tokens) for other in (*twice, last))


@pytest.mark.gpu
def test_a_captured_step_gives_the_tokens_of_eager_steps(plain: Model):
    model, ids = plain.model.cuda(), plain.ids.cuda()
    plain.use("ridgeline")
    tokens = Model(model, ids).generate(torch.ones_like(ids))[:, LENGTH:]
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + NEW_TOKENS)
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        position = torch.full((3, 1), LENGTH, device="cuda")
        if model.config.sliding_window if hasattr(model.config, "sliding_window") else None:
            pytest.skip("transformers counts a sliding static cache on the host")

        def step() -> Tensor:
            out = model(token, past_key_values=cache, position_ids=position)
            return out.logits[:, -1:].argmax(-1)

        actual = [token.clone()]
        token.copy_(step())
        actual.append(token.clone())
        position.add_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(step())
            position.add_(1)
        for _ in range(NEW_TOKENS - 2):
            graph.replay()
            actual.append(token.clone())
    plain.model.cpu()
    assert torch.equal(torch.cat(actual, 1), tokens)
