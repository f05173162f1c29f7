"""Checkpoints that ``quantize_checkpoint`` writes mean what they compute."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny_model
from quantized_files import words
from ridgeline import LLM, SamplingParams, quantize_checkpoint
from ridgeline._quantize import calibration
from ridgeline._quantize.calibration import Layerwise, windows_of
from ridgeline._quantize.recipe import METHODS
from ridgeline.cli import main
from ridgeline.models.decoder import Decoder
from ridgeline.quant.compressed_tensors import written
from ridgeline.quant.stored import GroupedCodes
from ridgeline.tokenizer import Tokenizer
from test_models import load, logits_of
from test_quantized_checkpoints import rounded_inputs, values_of
from tiny_model import one_thread  # noqa: F401

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.05}
SMALL = {"samples": 8, "window": 32, "device": "cpu"}
PROMPT = tiny_model.prompt_of(20)
CASES = [(scheme, method, {}) for scheme, names in METHODS.items() for method in names] + [
    ("int4", "rtn", {"group_size": 32, "zero_point": True}),
    ("int4", "rtn", {"group_size": -1}),
    ("int4", "awq", {"group_size": 64, "clip": True}),
    ("int4", "gptq", {"group_size": 32, "zero_point": True, "act_order": "group"}),
    ("int4", "gptq", {"group_size": 32, "act_order": "static"}),
    ("w4a8", "awq+gptq", {"group_size": -1, "act_order": "static", "clip": True}),
    ("fp8", "rtn", {"granularity": "tensor"}),
    ("fp8", "gptq", {"granularity": "block"}),
    ("int8", "smoothquant", {"alpha": 0.8, "skip": ("down_proj",)}),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose blocks of fp8 can be stacked, with a tokenizer."""
    made = tmp_path_factory.mktemp("model")
    tiny_model.save_llama(made, num_key_value_heads=4, **SHAPE)
    tiny_model.save_tokenizer(made)
    return made


def unpacked(packed: Tensor, count: int) -> Tensor:
    """The low 4 bits first, along the last dimension."""
    nibbles = [(packed.long() >> shift) & 15 for shift in range(0, 32, 4)]
    return torch.stack(nibbles, -1).flatten(-2)[..., :count]


def meant(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict that files stand for, as their formats are described."""
    state = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{module}.")}
        if end == "weight_packed":
            N, K = own["weight_shape"].tolist()
            scale = own["weight_scale"].float()
            zeros = torch.full_like(scale, 8)
            if "weight_zero_point" in own:
                zeros = unpacked(own["weight_zero_point"].t(), N).t().float()
            index = torch.arange(K) // (K // scale.shape[1])
            q = unpacked(tensor, K).float()
            state[f"{module}.weight"] = (q - zeros[:, index]) * scale[:, index]
        elif end == "qweight":
            q, index = unpacked(tensor.t(), 8 * len(tensor)).float(), own["g_idx"].long()
            zeros = unpacked(own["qzeros"], len(q)).t().float()
            state[f"{module}.weight"] = (q - zeros[:, index]) * own["scales"].t().float()[:, index]
        elif end == "weight" and f"{module}.weight_scale" in tensors:
            scale = tensors[f"{module}.weight_scale"]
            if scale.dim() == 2 and scale.shape[1] > 1 or scale.shape[0] not in (1, len(tensor)):
                scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                scale = scale[: tensor.shape[0], : tensor.shape[1]]
            state[name] = tensor.float() * scale
        elif not end.startswith("weight_") and end not in ("qzeros", "scales", "g_idx"):
            state[name] = tensor.float()
    return state


@pytest.mark.parametrize(
    ("scheme", "method", "options"), CASES, ids=lambda value: str(value).replace(" ", "")
)
def test_what_is_loaded_is_the_dequantised_model(
    folder: Path, text: Path, tmp_path: Path, scheme: str, method: str, options: dict[str, Any]
):
    out = tmp_path / "out"
    result = quantize_checkpoint(
        folder, out, scheme=scheme, method=method, text=text, **SMALL, **options
    )
    assert result.matrices == (14 if "skip" not in options else 12)
    assert result.bytes_after < 0.6 * result.bytes_before
    state = meant(load_file(out / "model.safetensors"))
    decoder = load(out)
    for i, layer in enumerate(decoder.layers):
        rows = [state[f"model.layers.{i}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(values_of(layer.qkv, torch.float32), torch.cat(rows))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.load_state_dict(state, strict=True)
    if scheme != "int4":  # inputs are rounded to 8 bits too
        columns = 128 if options.get("granularity") == "block" else None
        for name, module in model.named_modules():
            if name.endswith("_proj") and "down_proj" not in options.get("skip", ()):
                module.register_forward_pre_hook(rounded_inputs(columns, scheme == "int8"))
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    actual = logits_of(decoder, PROMPT, torch.float32)
    bound = 1e-4 if scheme == "int4" else 0.05  # an input between two codes may fall to either
    assert (actual - expected).norm() < bound * expected.norm()


def test_rounding_to_nearest_is_what_llm_does_while_loading(folder: Path, tmp_path: Path):
    for scheme in METHODS:
        quantize_checkpoint(folder, tmp_path / scheme, scheme=scheme, device="cpu")
        with LLM(folder, device="cpu", num_blocks=4, quantization=scheme) as one:
            expected = one.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))
        with LLM(tmp_path / scheme, device="cpu", num_blocks=4) as other:
            actual = other.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))
        assert actual[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "scheme, method", [("int4", "awq+gptq"), ("w4a8", "gptq"), ("int8", "smoothquant")]
)
def test_the_loss_is_that_of_the_files(
    folder: Path, text: Path, tmp_path: Path, scheme: str, method: str
):
    """The layers run while quantising are those that a loader makes of the result."""
    result = quantize_checkpoint(
        folder, tmp_path / "out", scheme=scheme, method=method, text=text, seed=1, **SMALL
    )
    tokenizer = Tokenizer(folder / "tokenizer.json")
    (ids,) = windows_of(text, tokenizer, SMALL["samples"], SMALL["window"], 1).held_out
    for model, loss in ((folder, result.loss_before), (tmp_path / "out", result.loss_after)):
        logits = logits_of(load(model), ids.tolist(), torch.float32)
        expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:].long())
        assert loss == pytest.approx(float(expected), rel=1e-4)
    record = json.loads((tmp_path / "out" / "ridgeline_quantization.json").read_text())
    assert record["recipe"]["seed"] == 1 and record["result"]["held_out"] == 31


def test_the_loss_is_taken_of_some_tokens_at_a_time(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, logits = [], Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: rows.append(len(x)) or logits(self, x))

    def loss(name: str) -> float | None:
        return quantize_checkpoint(folder, tmp_path / name, text=text, **SMALL).loss_before

    whole = loss("whole")
    monkeypatch.setattr(calibration, "_LOSS_TOKENS", 24)
    assert loss("parts") == pytest.approx(whole, rel=1e-6)
    assert rows == [31, 31, 24, 7, 24, 7]


def test_windows_are_of_the_text_and_no_two_overlap(folder: Path, text: Path):
    tokenizer = Tokenizer(folder / "tokenizer.json")
    windows = windows_of(text, tokenizer, 24, 32, seed=0)
    assert windows.seen.shape == (24, 32) and windows.held_out.shape == (3, 32)
    (ids,) = tokenizer.encode([text.read_text()])
    starts = {tuple(ids[i : i + 32]): i for i in range(0, len(ids), 32)}
    found = [
        starts[tuple(row)] for part in (windows.seen, windows.held_out) for row in part.tolist()
    ]
    assert len(set(found)) == 27
    again = windows_of(text, tokenizer, 24, 32, seed=0)
    assert torch.equal(again.seen, windows.seen)
    assert not torch.equal(windows_of(text, tokenizer, 24, 32, seed=1).seen, windows.seen)


def test_shards_and_the_tokenizer_go_along(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    quantize_checkpoint(folder, out, device="cpu", shard_bytes=30_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0].endswith(f"-of-{len(files):05d}.safetensors")
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not list(out.glob("part-*"))
    whole = tmp_path / "whole"
    quantize_checkpoint(folder, whole, device="cpu")
    assert (whole / "model.safetensors").is_file()
    expected = logits_of(load(whole), PROMPT, torch.float32)
    assert torch.equal(logits_of(load(out), PROMPT, torch.float32), expected)


def test_the_same_arguments_write_the_same_bytes(folder: Path, text: Path, tmp_path: Path):
    for name in ("a", "b"):
        quantize_checkpoint(folder, tmp_path / name, method="awq+gptq", text=text, **SMALL)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_loss_that_rises_is_told_by_who_writes_and_who_reads(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def quantize(name: str, *losses: float) -> None:
        left = list(losses)
        monkeypatch.setattr(Layerwise, "loss", lambda self, hidden, ids: left.pop(0))
        quantize_checkpoint(folder, tmp_path / name, text=text, **SMALL)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize("fine", 2.0, 2.0599)
        LLM(tmp_path / "fine", device="cpu", num_blocks=4).close()
    told = r"int4 by rtn .* rose by 5.0%, from 2.000 to 2.100"
    with pytest.warns(UserWarning, match=told):
        quantize("worse", 2.0, 2.1)
    with pytest.warns(UserWarning, match=told):
        LLM(tmp_path / "worse", device="cpu", num_blocks=4).close()
    path, out = tmp_path / "worse" / "ridgeline_quantization.json", tmp_path / "worse"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not what quantize wrote"):
        LLM(out, device="cpu", num_blocks=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int3"}, "scheme: expected one of 'int4', 'w4a8', 'fp8', 'int8', got 'int3'"),
        ({"method": "smoothquant"}, "method: expected one of 'rtn', 'awq', .*got 'smoothquant'"),
        ({"method": "gptq"}, "text: 'gptq' learns from a text: expected a file, got none"),
        ({"clip": True}, "text: 'clip' learns from a text"),
        ({"group_size": 48}, "q_proj: group_size: expected -1 or a multiple of 32, got 48"),
        ({"group_size": 96}, "q_proj: weight: expected K divisible by the group 96, got K = 128"),
        ({"scheme": "fp8", "zero_point": True}, "zero_point: not an option of fp8 by rtn"),
        ({"scheme": "w4a8", "zero_point": True}, "zero_point: not an option of w4a8 by rtn"),
        (
            {"scheme": "w4a8", "group_size": 64},
            "q_proj: group_size: expected -1 or a multiple of 128 for inputs in fp8, got 64",
        ),
        ({"scheme": "w4a8", "method": "smoothquant"}, "method: expected one of 'rtn', 'awq'"),
        (
            {"scheme": "w4a8", "method": "gptq", "act_order": "group"},
            "act_order group: not an option of w4a8 by gptq",
        ),
        ({"act_order": "group"}, "act_order: not an option of int4 by rtn"),
        ({"granularity": "block"}, "granularity: not an option of int4"),
        ({"scheme": "int8", "group_size": 32}, "group_size: not an option of int8 by rtn"),
        ({"alpha": 0.7}, "alpha: not an option of int4 by rtn"),
        ({"damping": 0.1}, "damping: not an option of int4 by rtn"),
        ({"scheme": "fp8", "clip": True}, "clip: not an option of fp8 by rtn"),
        (
            {"scheme": "fp8", "method": "gptq", "act_order": "group"},
            "act_order group: not an option of fp8 by gptq",
        ),
        ({"method": "gptq", "damping": 0}, "damping: expected a number from 1e-06 to 1, got 0"),
        ({"window": 15}, "window: expected a number from 16"),
        ({"seed": True}, "seed: expected an integer, got True"),
        ({"group_size": 64.0}, "group_size: expected an integer, got 64.0"),
        ({"samples": 1.5}, "samples: expected an integer, got 1.5"),
        ({"window": None}, "window: expected an integer, got None"),
        ({"zero_point": "x"}, "zero_point: expected a bool, got 'x'"),
        ({"skip": 5}, "skip: expected a name or a list of names, got 5"),
        ({"skip": "dawn_proj"}, "skip: expected names of modules, 'dawn_proj' is that of none"),
        ({"shard_bytes": 0}, "shard_bytes: expected a positive integer, got 0"),
        ({"alpha": 2.0}, "alpha: expected a number from 0 to 1, got 2.0"),
        ({"samples": 0}, "samples: expected a number from 1"),
        ({"skip": ("q_proj",)}, "skip: expected all of one product or none of .*q_proj"),
        ({"skip": ("*",)}, "skip: expected to leave something"),
        ({"dtype": "float8"}, "dtype must be one of 'auto', .*got 'float8'"),
        ({"device": "tpu"}, "device must be"),
        (
            {"text": "short"},
            r"expected at least 288 tokens for 8 windows of 32 and 1 held out, got",
        ),
        ({"text": "binary"}, "text: expected UTF-8"),
    ],
)
def test_mistakes_leave_nothing(folder: Path, tmp_path: Path, options: dict, message: str):
    (tmp_path / "short").write_text("a short text")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    options = SMALL | options
    if "text" in options:
        options["text"] = tmp_path / options["text"]
    with pytest.raises((ValueError, TypeError), match=message):
        quantize_checkpoint(folder, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "short"]


def test_weights_that_are_not_finite_are_refused(folder: Path, tmp_path: Path):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    tensors, name = load_file(copy / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ValueError, match=f"not all values are finite in: {name}"):
        quantize_checkpoint(copy, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_blocks_whose_rows_do_not_join_are_refused(tmp_path: Path):
    tiny_model.save_llama(tmp_path / "in", **SHAPE)  # 64 rows of keys
    blocks = {"scheme": "fp8", "granularity": "block", "device": "cpu"}
    with pytest.raises(ValueError, match="k_proj has 64 rows, and others follow"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", **blocks)


def test_packing_is_that_of_the_format():
    """Eight codes a word, the first lowest; odd rows and columns padded."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (12, 64), generator=draw).to(torch.uint8)
    zeros = torch.randint(0, 16, (2, 12), generator=draw).to(torch.uint8)
    tensors = written(GroupedCodes(q, torch.rand(2, 12, generator=draw), zeros))
    assert torch.equal(tensors["weight_packed"], words(q, 4))
    padded = torch.cat((zeros, torch.zeros(2, 4, dtype=torch.uint8)), 1)
    assert torch.equal(tensors["weight_zero_point"], words(padded, 4).t())
    assert tensors["weight_shape"].tolist() == [12, 64]


def test_the_command_writes_and_reports(folder: Path, text: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    always = ["quantize", str(folder), str(out), "--device", "cpu"]
    calibrated = ["--text", str(text), "--samples", "8", "--window", "32"]
    assert main([*always, "--method", "gptq", "--act-order", "static", *calibrated]) == 0
    printed = capsys.readouterr().out
    assert "14 matrices in int4 by gptq" in printed and "loss of 31 held-out tokens" in printed
    assert main(always) == 2
    assert "ridgeline: error: out: expected a folder that is new" in capsys.readouterr().err
    assert main([*always, "--overwrite", "--scheme", "int8"]) == 0
    assert "loss: not measured without a text" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "method"), [("int4", "awq+gptq"), ("int8", "smoothquant")])
def test_the_gpu_writes_what_the_cpu_does(
    folder: Path, text: Path, tmp_path: Path, scheme: str, method: str
):
    """In float16 sums differ and so do codes, each of which moves those after it."""
    options = SMALL | {"text": text, "scheme": scheme, "method": method}
    cpu = quantize_checkpoint(folder, tmp_path / "cpu", **options)
    gpu = quantize_checkpoint(
        folder, tmp_path / "gpu", **(options | {"device": "cuda", "dtype": "float16"})
    )
    assert cpu.loss_after is not None and gpu.loss_after is not None
    assert gpu.loss_after == pytest.approx(cpu.loss_after, rel=0.01)
    cpu_logits = logits_of(load(tmp_path / "cpu"), PROMPT, torch.float32)
    gpu_logits = logits_of(load(tmp_path / "gpu"), PROMPT, torch.float32)
    assert (cpu_logits - gpu_logits).norm() < 0.6 * cpu_logits.norm()  # others are 1.4 apart
