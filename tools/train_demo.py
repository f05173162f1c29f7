#!/usr/bin/env python3
"""Make the two models in models/: a small Llama-style decoder and a draft a tenth of its size.

    python tools/train_demo.py pack --out corpus.tar.xz [FOLDER...]
    python tools/train_demo.py train --corpus corpus.tar.xz --out models --minutes 8

`pack` collects Python's standard library (default: the running interpreter's) and any folders of
reStructuredText into one archive; `train` needs nothing else, and no network. The draft learns the
main model's distributions, so that the main model accepts more of what it drafts. The text held
out for evaluation is chosen by file and is seen neither by the tokenizer nor by the models.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
import sysconfig
import tarfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo_card import Report, machine_name, versions, write_card
from demo_corpus import gather, read_archive, split, write_archive
from demo_model import Decoder, ModelConfig, load_model, save_model, train_tokenizer
from demo_training import (
    Evaluation,
    History,
    Recipe,
    Tokens,
    agreement,
    encode,
    evaluate,
    fit,
    sample,
)

MAIN = ModelConfig()
DRAFT = ModelConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
# A small pair, to try the whole path on a CPU in a minute.
TINY = {"vocab_size": 512, "max_position_embeddings": 256}
TINY_MAIN = replace(
    MAIN,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    **TINY,
)
TINY_DRAFT = replace(DRAFT, hidden_size=64, intermediate_size=64, num_hidden_layers=1, **TINY)
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self",
    "import os\nimport sys\n\ndef main():\n    parser = argparse.ArgumentParser(",
)
# Share of the training time that the draft gets, and seconds kept for saving and samples.
DRAFT_SHARE = 0.3
CLOSING_SECONDS = 20.0


@dataclass(frozen=True)
class Run:
    """What both models of one run share."""

    arguments: argparse.Namespace
    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    corpus_sha256: str
    recipe: Recipe

    def log(self, text: str) -> None:
        print(text, flush=True)


def train_one(
    run: Run,
    name: str,
    config: ModelConfig,
    seconds: float,
    dropout: float,
    teacher: Decoder | None,
) -> Decoder:
    """Train, save, reload and measure one model, and write its card."""
    torch.manual_seed(run.recipe.seed)
    device, context = run.train.ids.device, run.recipe.context
    model = Decoder(config, dropout).to(device)
    limit = run.arguments.evaluation_tokens
    before = evaluate(model, run.held_out, context, limit)
    run.log(f"{name}: {model.parameter_count():,} parameters, held-out {before.loss:.4f} at start")
    recipe = replace(run.recipe, seconds=max(1.0, seconds))
    history = fit(
        model,
        run.train,
        run.held_out,
        recipe,
        teacher=teacher,
        evaluation_tokens=limit,
        log=run.log,
    )
    folder = run.arguments.out / name
    save_model(folder, model, run.tokenizer)
    stored = load_model(folder).to(device)
    after = evaluate(stored, run.held_out, context, limit)
    run.log(f"{name}: held-out {after.loss:.4f} as stored, {after.bits_per_byte:.4f} bits a byte")
    write_report(run, name, stored, before, after, history, recipe, dropout, teacher)
    return stored


def write_report(
    run: Run,
    name: str,
    stored: Decoder,
    before: Evaluation,
    after: Evaluation,
    history: History,
    recipe: Recipe,
    dropout: float,
    teacher: Decoder | None,
) -> None:
    """Print samples, then write the model's card and its numbers."""
    shown = PROMPTS[: run.arguments.samples]
    texts = [sample(stored, run.tokenizer, prompt, 120, seed=7) for prompt in shown]
    for text in texts:
        run.log(f"--- sample of {name}\n{text}")
    fit_with = (
        None
        if teacher is None
        else agreement(
            stored, teacher, run.held_out, min(run.recipe.context, len(run.held_out.ids) - 1)
        )
    )
    if fit_with is not None:
        run.log(f"{name}: agreement with its target on held-out text {fit_with}")
    settings = {**asdict(recipe), "dropout": dropout, "distilled": teacher is not None}
    report = Report(
        name=name,
        parameters=stored.parameter_count(),
        config=asdict(stored.config),
        corpus_sha256=run.corpus_sha256,
        held_out_percent=run.arguments.held_out_percent,
        train_documents=run.train.documents,
        train_bytes=run.train.text_bytes,
        train_tokens=len(run.train.ids),
        held_out_documents=run.held_out.documents,
        held_out_bytes=run.held_out.text_bytes,
        held_out_tokens=len(run.held_out.ids),
        held_out_before=asdict(before),
        held_out_after=asdict(after),
        draft_agreement=fit_with,
        history=asdict(history),
        recipe=settings,
        machine=machine_name(run.train.ids.device),
        versions=versions(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        command=repeatable(run.arguments.given),
        samples=texts,
    )
    write_card(run.arguments.out / name, report)


def repeatable(given: list[str]) -> str:
    """The command of a card: as given, with plain names for this machine's paths."""
    words = ["python", "tools/train_demo.py"]
    plain = {"--corpus": "corpus.tar.xz", "--out": "models", "--archive": None}
    joined = [part for word in given for part in word.split("=", 1)]
    while joined:
        word = joined.pop(0)
        if word not in plain:
            words.append(word)
            continue
        joined.pop(0)
        name = plain[word]
        words += [] if name is None else [word, name]
    return shlex.join(words)


def archive(folder: Path, target: Path) -> None:
    """One compressed archive of a model folder, for machines that give back few files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)


def train(arguments: argparse.Namespace) -> None:
    """Tokenizer, main model, draft, cards; all within `arguments.minutes` of wall-clock time."""
    deadline = time.perf_counter() + 60 * arguments.minutes
    device = torch.device(arguments.device)
    torch.set_float32_matmul_precision("high")
    main, draft = (TINY_MAIN, TINY_DRAFT) if arguments.tiny else (MAIN, DRAFT)
    digest = hashlib.sha256(arguments.corpus.read_bytes()).hexdigest()
    parts = split(read_archive(arguments.corpus), arguments.held_out_percent)
    tokenizer = train_tokenizer((d.text for d in parts.train), main.vocab_size)
    recipe = Recipe(
        seconds=0.0,
        steps=arguments.steps,
        batch_tokens=arguments.batch_tokens,
        context=min(arguments.context, main.max_position_embeddings),
        matrix_lr=arguments.lr,
        vector_lr=arguments.lr,
        weight_decay=arguments.weight_decay,
        seed=arguments.seed,
        compile=arguments.compile,
    )
    run = Run(
        arguments,
        tokenizer,
        encode(parts.train, tokenizer, device),
        encode(parts.held_out, tokenizer, device),
        digest,
        recipe,
    )
    run.log(
        f"{run.train.documents} files, {len(run.train.ids):,} tokens to train on; "
        f"{run.held_out.documents} files, {len(run.held_out.ids):,} tokens held out"
    )
    left = deadline - time.perf_counter() - CLOSING_SECONDS
    target = train_one(run, "demo", main, left * (1 - DRAFT_SHARE), arguments.dropout, None)
    left = deadline - time.perf_counter() - CLOSING_SECONDS / 2
    train_one(run, "demo-draft", draft, left, 0.0, target)
    if arguments.archive is not None:
        for name in ("demo", "demo-draft"):
            archive(arguments.out / name, arguments.archive / f"{name}.tar.gz")


def pack(arguments: argparse.Namespace) -> None:
    """Write the corpus archive and say what is in it."""
    folders = arguments.folders or [Path(sysconfig.get_path("stdlib"))]
    documents = gather(folders)
    write_archive(documents, arguments.out)
    packed = arguments.out.stat().st_size
    size = sum(len(d.text.encode()) for d in documents)
    print(f"{arguments.out}: {len(documents)} files, {size:,} bytes of text, {packed:,} packed")


def parser() -> argparse.ArgumentParser:
    """The command line: pack, train."""
    top = argparse.ArgumentParser(description="Pack a corpus; train the demo models.")
    commands = top.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="collect the corpus into one archive")
    packing.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    packing.add_argument("--out", type=Path, required=True)
    packing.set_defaults(run=pack)
    training = commands.add_parser("train", help="train both models from an archive")
    training.set_defaults(run=train)
    add = training.add_argument
    add("--corpus", type=Path, required=True)
    add("--out", type=Path, required=True, help="folder that gets demo/ and demo-draft/")
    add("--archive", type=Path, help="folder that also gets one .tar.gz a model")
    add("--minutes", type=float, default=8.0, help="wall-clock time for everything")
    add("--steps", type=int, help="steps a model, instead of a share of the time")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch-tokens", type=int, default=Recipe.batch_tokens)
    add("--context", type=int, default=Recipe.context)
    add("--lr", type=float, default=Recipe.matrix_lr)
    add("--weight-decay", type=float, default=Recipe.weight_decay)
    add("--dropout", type=float, default=0.1, help="of the main model; the draft has none")
    add("--held-out-percent", type=float, default=2.5)
    add("--evaluation-tokens", type=int, help="evaluate on so many held-out tokens only")
    add("--samples", type=int, default=len(PROMPTS))
    add("--seed", type=int, default=Recipe.seed)
    add("--compile", action="store_true", help="torch.compile the training step")
    add("--tiny", action="store_true", help="a very small pair, to try the path on a CPU")
    return top


def main(given: list[str]) -> None:
    arguments = parser().parse_args(given)
    arguments.given = given
    arguments.run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
