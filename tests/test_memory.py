"""The plan of the memory beside what is taken, and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import quantized_files
import tiny_model
from published_configs import PUBLISHED
from ridgeline import LLM
from ridgeline.cli import main
from ridgeline.kv_cache import KVCacheLayout
from ridgeline.memory import kept_weights, plan_memory, step_cost, weight_bytes
from ridgeline.models.config import ModelConfig
from ridgeline.roofline.machine import Roofs
from test_models import load
from tiny_model import one_thread  # noqa: F401

SHAPE = {"hidden_size": 128, "intermediate_size": 256}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("quantization", "hidden"),
    [(None, 128), ("int4", 128), ("int4", 192), ("w4a8", 128), ("w4a8", 192), ("fp8", 128)],
)
def test_weights_and_cache_take_what_was_predicted(
    tmp_path: Path, quantization: str | None, hidden: int
):
    """192 columns: groups of 64."""
    tiny_model.save_llama(tmp_path, hidden_size=hidden, intermediate_size=2 * hidden)
    with LLM(tmp_path, device="cpu", num_blocks=9, quantization=quantization) as llm:
        lines = {line.name: line for line in llm.memory}
    weights = lines["weights"]
    rotary = lines["rotary tables"].predicted
    assert weights.taken == pytest.approx(weights.predicted + rotary, rel=0.02)
    assert lines["KV cache"].taken == lines["KV cache"].predicted > 0


def test_bytes_of_a_known_model():
    config = ModelConfig.from_dict(LLAMA_8B)
    assert weight_bytes(config, torch.bfloat16, None) == pytest.approx(16.06e9, rel=0.001)
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    spared = weight_bytes(config, torch.bfloat16, None) - weight_bytes(
        config, torch.bfloat16, "int4"
    )
    assert spared == pytest.approx(layers * (2 - 0.5 - 2 / 128), rel=0.001)


def test_weights_quantised_in_their_files_take_what_the_files_do(tmp_path: Path, capsys):
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config = LLAMA_8B | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(3 << 20))
    assert main(["plan", str(tmp_path), "--gpu-memory", "40GiB"]) == 0
    weights = next(r for r in capsys.readouterr().out.splitlines() if r.startswith("weights"))
    assert float(weights.split()[1]) == 6.0


IN_FOUR_BITS, IN_EIGHT = 0.5 + 1 / 32, 1


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ((), IN_FOUR_BITS),
        (("--quantization", "fp8"), IN_EIGHT),
        (("--dtype", "float16"), IN_EIGHT),
    ],
    ids=["as they are", "fp8", "float16"],
)
def test_four_bit_floats_take_a_scale_for_32_columns(
    tmp_path: Path, capsys, options: tuple[str, ...], each: float
):
    """gpt-oss-20b, whose experts have 19.1e9 of its 20.9e9 weights, whatever their files. In
    float16, which no product takes by 4-bit floats, they take 8 bits."""
    config = PUBLISHED["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert main(["plan", str(tmp_path), "--gpu-memory", "80GiB", *options]) == 0
    weights = next(r for r in capsys.readouterr().out.splitlines() if r.startswith("weights"))
    megabytes = float(weights.split()[1].replace(",", ""))
    assert megabytes * 2**20 == pytest.approx(each * 19.1e9 + 2 * 1.8e9, rel=0.01)


def test_a_step_is_predicted_from_bytes_and_operations():
    config = ModelConfig.from_dict(LLAMA_8B)
    layout = KVCacheLayout.of(config, 64, "auto", torch.bfloat16)
    roofs = Roofs("h200", 4.25e12, 4.38e12, {"bf16": 750e12, "fp32": 60e12}, 2.0)
    cost = step_cost(config, layout, torch.bfloat16, None, roofs)
    # 15.0 GB at the read roof, and 128 KB a key and 32 layers.
    assert cost["fixed_us"] == pytest.approx(3427, rel=0.01)
    ((window, key_us, pair_us),) = cost["attention"]
    assert window == 0 and key_us == pytest.approx(131072 / 4.38e6, rel=0.01)
    assert pair_us == pytest.approx(32 * 4 * 4096 / 750e6, rel=0.01)
    assert cost["token_us"] == pytest.approx(2 * 6.98e9 / 750e6, rel=0.01)
    assert step_cost(config, layout, torch.bfloat16, None, None) == {}


def test_a_step_reads_weights_as_their_files_had_them(tmp_path: Path):
    """Not what they would take in 16 or 32 bits: a step would beat its own floor."""
    fixed, read = [], []
    for name, save in (
        ("dense", lambda folder: tiny_model.save_llama(folder, **SHAPE)),
        ("awq", lambda folder: quantized_files.save(folder, quantized_files.awq())),
    ):
        save(tmp_path / name)
        trace = tmp_path / f"{name}.jsonl"
        with LLM(tmp_path / name, device="cpu", num_blocks=9, trace=trace) as llm:
            head = llm._parts.runner._model.head.weight.nbytes
        start = json.loads(trace.read_text().splitlines()[0])
        fixed.append(start["settings"]["cost"]["fixed_us"])
        read.append(kept_weights(load(tmp_path / name))[0])
    # Half a byte a weight, and of each 32 a scale in float32 and a zero point; 4 bytes a weight.
    assert read[1] / read[0] == pytest.approx((0.5 + 4 / 32 + 1 / 32) / 4, rel=0.01)
    assert fixed[1] / fixed[0] == pytest.approx((read[1] + head) / (read[0] + head), rel=0.01)


def test_the_unit_that_multiplies_is_that_of_the_weights(tmp_path: Path):
    tiny_model.save_llama(tmp_path, **SHAPE)
    units = {None: "bf16", "int4": "bf16", "w4a8": "fp8", "fp8": "fp8", "int8": "int8"}
    for quantization, unit in units.items():
        assert kept_weights(load(tmp_path, quantization=quantization))[1] == unit


def test_four_bit_weights_by_fp8_inputs_take_the_bytes_of_one_and_the_rate_of_the_other():
    """But products of experts, and those of groups that 128 does not divide: 96 columns."""
    roofs = Roofs("one", 1e12, 1e12, {"bf16": 1e12, "fp8": 2e12, "fp32": 1e12}, 2.0)

    def cost(values: dict[str, Any], quantization: str) -> dict[str, Any]:
        config = ModelConfig.from_dict(values)
        layout = KVCacheLayout.of(config, 64, "auto", torch.bfloat16)
        return step_cost(config, layout, torch.bfloat16, quantization, roofs)

    w4a8, int4, fp8 = (cost(LLAMA_8B, kind) for kind in ("w4a8", "int4", "fp8"))
    assert w4a8["fixed_us"] == int4["fixed_us"] < 0.6 * fp8["fixed_us"]
    assert w4a8["token_us"] == fp8["token_us"] == int4["token_us"] / 2
    attention = 32 * 2 * (4096 * 6144 + 4096 * 4096) / 1e12 * 1e6
    experts = cost(MIXTRAL, "int4")["token_us"] - cost(MIXTRAL, "w4a8")["token_us"]
    assert experts == pytest.approx(attention / 2)
    narrow = LLAMA_8B | {"intermediate_size": 96}
    down = 32 * 2 * 4096 * 96 / 1e12 * 1e6
    rest = cost(narrow, "int4")["token_us"] - down
    assert cost(narrow, "w4a8")["token_us"] == pytest.approx(rest / 2 + down)


def test_of_experts_a_token_needs_few():
    layout = KVCacheLayout.of(ModelConfig.from_dict(MIXTRAL), 64, "auto", torch.bfloat16)
    config = ModelConfig.from_dict(MIXTRAL)
    roofs = Roofs("one", 1e12, 1e12, {"bf16": 1e12, "fp32": 1e12}, 2.0)
    assert weight_bytes(config, torch.bfloat16, None) == pytest.approx(2 * 46.7e9, rel=0.001)
    cost = step_cost(config, layout, torch.bfloat16, None, roofs)
    active = 12.9e9 - 32000 * 4096  # without the embedding
    assert cost["token_us"] + cost["row_us"] == pytest.approx(2 * active / 1e6, rel=0.01)
    assert cost["fixed_us"] == pytest.approx(2 * active / 1e6, rel=0.01)


def test_plan_prints_lines_that_add_up(tmp_path: Path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(path), "--gpu-memory", "80GiB", "--length", "4096"]) == 0
    rows = capsys.readouterr().out.splitlines()
    values = {row[:28].strip(): float(row[28:].replace(",", "")) for row in rows[1:9] if row[28:]}
    budget = values.pop("budget")
    assert budget == pytest.approx(0.9 * 80 * 1024)
    assert budget - 8 < sum(values.values()) <= budget + 1  # up to a block of 8 MiB
    assert values["weights"] == pytest.approx(16.06e9 / 2**20, rel=0.001)
    fit = next(int(row.split()[0]) for row in rows if "sequences of 4096" in row)
    assert fit == int((values["KV cache"] / 8 - 1) // 64)


def test_a_plan_of_four_bit_weights_is_the_same_by_fp8_inputs(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plans = {}
    for kind in ("int4", "w4a8", "fp8"):
        assert main(["plan", str(tmp_path), "--gpu-memory", "40GiB", "--quantization", kind]) == 0
        plans[kind] = capsys.readouterr().out
    assert plans["w4a8"] == plans["int4"] != plans["fp8"]


def test_a_plan_of_weights_that_are_quantised_already_takes_no_quantization(tmp_path: Path, capsys):
    stored = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | stored))
    arguments = ["plan", str(tmp_path), "--gpu-memory", "40GiB"]
    assert main(arguments) == 0
    assert main([*arguments, "--quantization", "fp8"]) == 2
    assert "quantization must be None for a checkpoint that is quantised already, got 'fp8'" in (
        capsys.readouterr().err
    )


def test_a_model_that_does_not_fit_is_refused_with_the_lines(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(tmp_path), "--gpu-memory", "16GB"]) == 2
    error = capsys.readouterr().err
    assert "no room for a KV cache" in error and "weights" in error and "budget" in error


def test_a_cache_of_given_size_needs_no_budget():
    config = ModelConfig.from_dict(LLAMA_8B)
    plan = plan_memory(
        config, KVCacheLayout.of(config, 64, "fp8", torch.bfloat16), torch.bfloat16,
        quantization="fp8", max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=64,
        budget=None, num_blocks=129, on_gpu=False, graphs=False,
    )  # fmt: skip
    plan.check()
    assert plan.sequences(8192) == 1 and plan.sequences(100) == 64


@pytest.mark.parametrize("text", ["", "80 parsecs", "-3GB", "GiB"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, text: str, capsys):
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), f"--gpu-memory={text}"])
    assert "expected a size" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_lines_take_about_what_was_predicted():
    config = LLAMA_8B | {"num_hidden_layers": 8}
    with LLM.from_config(config, device="cuda", max_model_len=8192) as llm:
        lines = llm.memory
        print(*lines, sep="\n")
    for line in lines[:-1]:
        assert line.taken is not None or line.name == "rotary tables", line
        # The driver counts for all programs of a GPU, tests beside this one among them.
        if line.taken is not None and line.name not in ("context and kernels", "KV cache"):
            assert abs(line.taken - line.predicted) < 0.25 * line.predicted + (256 << 20), line
