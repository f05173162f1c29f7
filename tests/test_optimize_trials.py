"""What a trial on random inputs could miss is looked for, and such a module is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import OlmoConfig, OlmoForCausalLM

import ridgeline


class Gated(nn.Module):
    """``kind``: what changes nothing at first, or nothing small."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down_proj, self.act_fn, self.kind = nn.Linear(96, 64), nn.SiLU(), kind
        if kind == "adapter":
            self.adapter = nn.Linear(64, 64)
            nn.init.zeros_(self.adapter.weight), nn.init.zeros_(self.adapter.bias)
        if kind == "scale":
            self.scale = nn.Parameter(torch.ones(64))
        if kind == "buffer":
            self.register_buffer("scale", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x).clamp(-9, 9) if self.kind == "clamp" else self.up_proj(x)
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * up)
        y = y + self.adapter(x) if self.kind == "adapter" else y
        return y * self.scale if self.kind in ("scale", "buffer") else y


@pytest.mark.parametrize("kind", ["adapter", "scale", "buffer", "clamp", "none"])
def test_an_mlp_with_more_than_a_trial_shows_is_left(kind: str):
    torch.manual_seed(0)
    module = nn.Sequential(Gated(kind)).eval()
    done = ridgeline.optimize_(module)
    assert (("0", "mlp (silu_mul)") in done.swapped) == (kind == "none")
    left: Any = {name: reason for name, _, reason in done.left}
    reasons = {"adapter": "it has adapter.weight too", "scale": "it has scale too"}
    assert left.get("0", "").startswith(reasons.get(kind, ""))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(64, 96), nn.Linear(96, 64), nn.GELU()

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc2(input=self.act(self.fc1(hidden))) * scale


def test_arguments_that_were_not_tried_go_to_the_forward_itself():
    torch.manual_seed(0)
    module, x = nn.ModuleList([Gated("none"), Scaled()]), torch.randn(3, 64)
    norm, row = nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    module.extend([norm, row])
    calls = [
        lambda: module[0](x=x),
        lambda: module[1](hidden=x),
        lambda: module[1](x, 3.0),
        lambda: module[1](x, scale=3.0),
        lambda: norm(input=x),
        lambda: row(input=x),
    ]
    with torch.no_grad():
        expected = [call() for call in calls]
        assert len(ridgeline.optimize_(module).swapped) == 4
        for call, want in zip(calls, expected, strict=True):
            torch.testing.assert_close(call(), want)


@pytest.mark.parametrize("clip", [None, 8.0])
def test_attention_that_clamps_large_values_is_left(clip: float | None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = OlmoConfig(vocab_size=64, num_hidden_layers=1, clip_qkv=clip, pad_token_id=0, **sizes)
    config.eos_token_id = 1
    model = OlmoForCausalLM(config).eval()
    nn.init.normal_(model.model.layers[0].self_attn.v_proj.weight, 0, 0.1)
    swapped = [what for _, what in ridgeline.optimize_(model).swapped]
    assert ("attention (qkv, rope)" in swapped) == (clip is None)
