"""What ``config.json`` of a quantised checkpoint says holds for all its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny_model
from quantized_files import W4AFP8
from ridgeline import LLM, SamplingParams, quantize_checkpoint
from ridgeline.quant.formats import gptq_written_config
from test_models import load, logits_of
from tiny_model import one_thread  # noqa: F401

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
PROMPT = tiny_model.prompt_of(20)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def weights_of(folder: Path) -> dict[str, Any]:
    return config_of(folder)["config_groups"]["group_0"]["weights"]


# Columns of the first three products and of the last one: either may have a single group.
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (64, 128), (64, 64)])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("act_order", ["none", "group"])
def test_a_group_as_wide_as_a_weight_is_a_group(
    tmp_path: Path, hidden: int, inner: int, zero_point: bool, act_order: str
):
    source, out = tmp_path / "in", tmp_path / "out"
    tiny_model.save_llama(
        source, hidden_size=hidden, intermediate_size=inner, initializer_range=0.05
    )
    tiny_model.save_tokenizer(source)
    quantize_checkpoint(
        source,
        out,
        method="rtn" if act_order == "none" else "gptq",
        act_order=act_order,
        group_size=64,
        zero_point=zero_point,
        text=tiny_model.save_text(tmp_path / "text.txt"),
        samples=2,
        window=32,
        device="cpu",
    )
    written = config_of(out) if act_order == "group" else weights_of(out)
    assert written["group_size"] == 64 and written.get("strategy", "group") == "group"
    assert written.get("symmetric", written.get("sym")) is not zero_point
    expected = logits_of(load(source), PROMPT, torch.float32)
    actual = logits_of(load(out), PROMPT, torch.float32)
    assert (actual - expected).norm() < 0.4 * expected.norm()  # others are 1.4 apart
    with LLM(out, device="cpu", num_blocks=4) as llm:
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=2))


@pytest.mark.parametrize("zero_point", [False, True])
def test_a_group_of_all_columns_is_a_channel(tmp_path: Path, zero_point: bool):
    tiny_model.save_llama(tmp_path / "in")
    quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", group_size=-1, zero_point=zero_point, device="cpu"
    )
    load(tmp_path / "out")
    assert weights_of(tmp_path / "out")["strategy"] == "channel"
    assert "group_size" not in weights_of(tmp_path / "out")


def test_inputs_in_fp8_are_llm_compressor_s_w4afp8(tmp_path: Path):
    tiny_model.save_llama(tmp_path / "in", hidden_size=128, intermediate_size=256)
    for scheme, inputs in (("int4", None), ("w4a8", W4AFP8 | {"symmetric": True})):
        out = tmp_path / scheme
        quantize_checkpoint(tmp_path / "in", out, scheme=scheme, device="cpu")
        assert config_of(out)["format"] == "pack-quantized"
        assert weights_of(out) == {
            "type": "int", "num_bits": 4, "symmetric": True, "dynamic": False,
            "strategy": "group", "group_size": 128,
        }  # fmt: skip
        assert config_of(out)["config_groups"]["group_0"]["input_activations"] == inputs
    files = [load_file(tmp_path / kind / "model.safetensors") for kind in ("int4", "w4a8")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_rules_of_gptq_name_what_others_join():
    names = [f"m.0.attn.{name}_proj" for name in "qkv"] + ["m.0.mlp.gate_proj"]
    rules = gptq_written_config(32, zero_point=False, ignore=names)["dynamic"]
    patterns = [rule.removeprefix("-:") for rule in rules]
    assert len(patterns) == 5

    def is_left_out(module: str) -> bool:
        return any(re.match(pattern, module) for pattern in patterns)

    assert all(map(is_left_out, [*names, "m.0.attn.qkv_proj"]))
    assert not any(map(is_left_out, ["m.0.mlp.gate_up_proj", "m.0.attn.o_proj"]))


@pytest.mark.parametrize("act_order", ["none", "group"])
def test_what_is_copied_is_ignored(tmp_path: Path, act_order: str):
    """By a rule of compressed-tensors, or GPTQModel's: a name, or a match from its begin on."""
    text = {
        "vocab_size": tiny_model.VOCAB, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    }  # fmt: skip
    tiny_model.save_model(
        tmp_path / "in", "gemma3",
        text_config=text, vision_config=VISION, image_token_index=0, mm_tokens_per_image=4,
    )  # fmt: skip
    tiny_model.save_tokenizer(tmp_path / "in")
    learned = {
        "method": "gptq", "act_order": "group", "samples": 2, "window": 32,
        "text": tiny_model.save_text(tmp_path / "text.txt"),
    }  # fmt: skip
    quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", group_size=32, skip=("down_proj",), device="cpu",
        **(learned if act_order == "group" else {}),
    )  # fmt: skip
    load(tmp_path / "out")
    config = config_of(tmp_path / "out")
    if act_order == "group":
        assert all(rule.startswith("-:") for rule in config["dynamic"])
        ignore = [rule.replace("-:", "re:", 1) for rule in config["dynamic"]]
    else:
        ignore = config["ignore"]
        assert {"lm_head", "language_model.lm_head"} <= set(ignore)
    assert len(set(ignore)) == len(ignore)

    def is_ignored(module: str) -> bool:
        rules = [rule.removeprefix("re:") for rule in ignore if rule.startswith("re:")]
        return module in ignore or any(re.match(rule, module) for rule in rules)

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    copied = {name for name in tensors if name.endswith("weight") and not name.endswith("qweight")}
    copied = {name.rpartition(".")[0] for name in copied if tensors[name].dim() > 1}
    assert any("vision_tower" in name for name in copied)
    assert any("multi_modal_projector" in name for name in copied)
    assert sum("down_proj" in name for name in copied) == 2
    assert not [name for name in copied if not is_ignored(name)]
    assert is_ignored("model.vision_tower.vision_model.encoder.layers.0.mlp.fc1")
    ends = ("weight_packed", "qweight")
    packed = [name.rpartition(".")[0] for name in tensors if name.endswith(ends)]
    assert len(packed) == 12 and not any(map(is_ignored, packed))
