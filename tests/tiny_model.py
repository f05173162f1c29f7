"""Small random models in Hugging Face layout, written by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 384
EOS = 0
_TEXT = "the quick brown fox – naïve café, 日本語 🙂 def main(): return None\n" * 8


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save_llama(folder: Path, *, max_shard_size: str = "1GB", **overrides: Any) -> PreTrainedModel:
    """A random Llama in float32, large weights: its greedy outputs have no ties and vary."""
    return save_model(folder, "llama", max_shard_size=max_shard_size, **overrides)


def save_model(
    folder: Path, model_type: str, *, max_shard_size: str = "1GB", **overrides: Any
) -> PreTrainedModel:
    """A random model of any architecture that transformers knows, as :func:`save_llama`."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    known = AutoConfig.for_model(model_type)
    shape = {key: value for key, value in shape.items() if hasattr(known, key)}
    config = AutoConfig.for_model(model_type, **(shape | overrides))
    # Of its attention kernels only the eager one has everything, soft capping among it.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0 and norms at 1, which would hide that one is left out or
        # takes another's place.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE of ``VOCAB`` tokens: every text can be encoded, characters get split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def save_text(path: Path) -> Path:
    """Some thousand tokens that no two parts of have in common."""
    numbers = torch.randint(0, 99999, (400,), generator=torch.Generator().manual_seed(3))
    path.write_text(" ".join(f"the {n} fox" for n in numbers.tolist()), encoding="utf-8")
    return path


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates, without stopping at the end-of-sequence token."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
