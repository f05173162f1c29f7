"""What ``config.json`` of a quantised checkpoint says holds for all its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_model
from ridgeline import LLM, SamplingParams, quantize_checkpoint
from test_models import load, logits_of
from tiny_model import one_thread  # noqa: F401

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
