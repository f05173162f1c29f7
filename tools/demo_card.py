"""The demo models' cards: README.md for readers, training.json with the same numbers."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch

from demo_model import write_json


@dataclass(frozen=True)
class Report:
    """Everything a card says. Losses are nats a token on the held-out files."""

    name: str
    parameters: int
    config: dict[str, Any]
    corpus_sha256: str
    held_out_percent: float
    train_documents: int
    train_bytes: int
    train_tokens: int
    held_out_documents: int
    held_out_bytes: int
    held_out_tokens: int
    held_out_before: dict[str, float]
    held_out_after: dict[str, float]
    draft_agreement: dict[str, float] | None
    history: dict[str, Any]
    recipe: dict[str, Any]
    machine: str
    versions: dict[str, str]
    date: str
    command: str
    samples: list[str]


def machine_name(device: torch.device) -> str:
    """The device a run used, in words."""
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
    }


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, python, demo]
---

# {name}

{purpose}
It is a Llama-style decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied
embeddings) in Hugging Face's layout, in bf16.

| | |
|---|---|
| parameters | {parameters:,} |
| layers | {layers} |
| hidden size, feed-forward size | {hidden}, {ffn} |
| query heads, key-value heads, head size | {heads}, {kv_heads}, {head_dim} |
| vocabulary | {vocab:,} tokens, byte-level BPE |
| context | {context:,} tokens |
| training text | {train_documents:,} files, {train_bytes:,} bytes, {train_tokens:,} tokens |
| held-out text | {held_out_documents} files, {held_out_bytes:,} bytes, {held_out_tokens:,} tokens |
| tokens seen | {tokens_seen:,} ({epochs:.1f} passes, {steps:,} steps) |
| held-out loss before training | {before_loss:.4f} nats a token ({before_bits:.4f} bits a byte) |
| held-out loss after training | {after_loss:.4f} nats a token ({after_bits:.4f} bits a byte) |
{agreement}| training time | {seconds:.0f} s on {machine} |
| versions | {versions} |
| date | {date} |

## Data

Text that ships with CPython: standard library sources with their tests, and the documentation's
reStructuredText, without near-duplicates and tables of numbers. {held_out_percent} percent of the
files are held out whole, by a hash of their name that puts a module, its test and its page on one
side. The tokenizer and the gradients never see them; they only choose which weights are kept. The
corpus archive's SHA-256 is
`{corpus_sha256}`.

## Training

{method}

The loss before is of the random initialisation, the loss after of this folder's bf16 weights,
both over disjoint windows of {window:,} held-out tokens. The weights kept are those of the
evaluation with the lowest held-out loss (step {best_step:,} of {steps:,}).

```
python tools/train_demo.py pack --out corpus.tar.xz FOLDER...
{command}
```

`FOLDER...` are a documentation source folder and the standard libraries of several Python versions,
newest first; without folders, `pack` takes the running interpreter's. The schedule follows elapsed
time, so a second run comes close to these numbers and does not repeat them; `--steps` makes the
schedule independent of the clock. `training.json` has all settings and the course of the losses.

## Limits

Made for tests, demonstrations and benchmarks of an inference library. It writes text that looks
like Python and its documentation; the code is seldom right and names things that do not exist. It
knows no natural language beyond that documentation and follows no instructions. Do not run what it
writes.

## Licence

The weights are under the Apache License 2.0. They were trained on text under the Python Software
Foundation License Version 2, copyright the Python Software Foundation; CPython's sources also hold
parts under other permissive licences named in its documentation ("History and License").

## A sample

Temperature 0.8 within the 40 most likely tokens, seed 7:

````
{sample}
````
"""


def write_card(folder: Path, report: Report) -> None:
    """Write README.md and training.json into a model's folder."""
    c, history, recipe = report.config, report.history, report.recipe
    distilled = recipe["distilled"]
    purpose = (
        "A draft for speculative decoding with the model `demo` beside it: the same vocabulary, "
        "about a tenth of\nthe size."
        if distilled
        else "A language model small enough to live in a source repository."
    )
    method = (
        "Trained to match `demo`'s distribution over the vocabulary on random crops of the "
        "training text"
        if distilled
        else "Trained for next-token cross-entropy on random crops of the training text"
    )
    agreement = ""
    if report.draft_agreement is not None:
        agreement = (
            f"| same most likely token as `demo` | {report.draft_agreement['greedy']:.1%} |\n"
            "| expected acceptance at temperature 1 | "
            f"{report.draft_agreement['acceptance']:.1%} |\n"
        )
    text = CARD.format(
        name=report.name,
        held_out_percent=report.held_out_percent,
        purpose=purpose,
        method=f"{method}: Muon for the matrices, AdamW for the embedding and the norms, "
        f"peak rate {recipe['matrix_lr']}, cosine to zero, weight decay {recipe['weight_decay']}, "
        f"dropout {recipe['dropout']}, {recipe['batch_tokens']:,} tokens a step.",
        parameters=report.parameters,
        layers=c["num_hidden_layers"],
        hidden=c["hidden_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        ffn=c["intermediate_size"],
        vocab=c["vocab_size"],
        context=c["max_position_embeddings"],
        train_documents=report.train_documents,
        train_bytes=report.train_bytes,
        train_tokens=report.train_tokens,
        held_out_documents=report.held_out_documents,
        held_out_bytes=report.held_out_bytes,
        held_out_tokens=report.held_out_tokens,
        tokens_seen=history["tokens_seen"],
        epochs=history["tokens_seen"] / report.train_tokens,
        steps=history["steps"],
        best_step=history["best_step"],
        before_loss=report.held_out_before["loss"],
        before_bits=report.held_out_before["bits_per_byte"],
        after_loss=report.held_out_after["loss"],
        after_bits=report.held_out_after["bits_per_byte"],
        agreement=agreement,
        seconds=history["seconds"],
        machine=report.machine,
        versions=", ".join(f"{k} {v}" for k, v in report.versions.items()),
        date=report.date,
        corpus_sha256=report.corpus_sha256,
        window=recipe["context"],
        command=report.command,
        sample=report.samples[0].strip("\n") if report.samples else "",
    )
    (folder / "README.md").write_text(text)
    write_json(folder / "training.json", asdict(report))
