"""The demo models' training tool, at a size that trains in seconds, and what it made."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import demo_corpus  # noqa: E402
import train_demo  # noqa: E402
from demo_model import Decoder, load_model, save_model, train_tokenizer  # noqa: E402

BUNDLED = [ROOT / "models" / "demo", ROOT / "models" / "demo-draft"]
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of some modules of the running interpreter and of one page of text."""
    folder = tmp_path_factory.mktemp("corpus")
    source = folder / "lib"
    (source / "site-packages").mkdir(parents=True)
    (source / "site-packages" / "other.py").write_text("nobody_reads_this = True\n")
    standard = Path(json.__file__).parents[1]
    for name in ("ast", "bisect", "calendar", "csv", "enum", "heapq", "random", "shlex", "types"):
        (source / f"{name}.py").write_bytes((standard / f"{name}.py").read_bytes())
    (source / "table.py").write_text("t = [" + "0x1f, 77, " * 500 + "]\n")
    newer = folder / "newer"
    newer.mkdir()
    lines = (standard / "ast.py").read_text().splitlines(keepends=True)
    (newer / "renamed.py").write_text("".join(lines[: len(lines) * 3 // 4]))
    (newer / "page.rst").write_text("A page\n======\n\nSome words about this page, in one line.\n")
    archive = folder / "corpus.tar.xz"
    train_demo.main(["pack", "--out", str(archive), str(newer), str(source)])
    return archive


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    options = (
        "--tiny --steps 30 --batch-tokens 512 --context 64 --evaluation-tokens 2000 --samples 1 "
        "--device cpu --held-out-percent 30"
    )
    given = ["--corpus", str(corpus), "--out", str(out), "--archive", str(out / "packed")]
    train_demo.main(["train", *given, *options.split()])
    return out


def test_pack_is_deterministic_and_drops_what_it_says(corpus: Path, tmp_path: Path) -> None:
    documents = demo_corpus.read_archive(corpus)
    names = [document.name for document in documents]
    assert "newer/renamed.py" in names and "newer/page.rst" in names and "lib/heapq.py" in names
    assert "lib/ast.py" not in names, "a near-duplicate of renamed.py"
    assert "lib/table.py" not in names, "a table of numbers"
    assert not any("other" in name for name in names), "site-packages"
    again = tmp_path / "again.tar.xz"
    demo_corpus.write_archive(reversed(documents), again)
    assert again.read_bytes() == corpus.read_bytes()


def test_split_goes_by_file_and_keeps_a_module_with_its_test_and_page() -> None:
    paths = ("a/{}.py", "b/test/test_{}.py", "c/{}.rst.txt", "d/_{}.py", "e/{}/__init__.py")
    documents = [
        demo_corpus.Document(path.format(f"name{i}"), "") for i in range(200) for path in paths
    ]
    parts = demo_corpus.split(documents, 20)
    assert len(parts.train) + len(parts.held_out) == len(documents)
    held_out = {document.name for document in parts.held_out}
    for i in range(200):
        assert len(held_out.intersection(path.format(f"name{i}") for path in paths)) in (0, 5)
    assert 0.1 < len(parts.held_out) / len(documents) < 0.3
    assert demo_corpus.split(reversed(documents), 20).held_out == parts.held_out[::-1]
    with pytest.raises(ValueError, match="held_out_percent"):
        demo_corpus.split(documents, 0)


def test_loss_falls_and_the_card_says_so(trained: Path) -> None:
    for name in ("demo", "demo-draft"):
        report = json.loads((trained / name / "training.json").read_text())
        before, after = report["held_out_before"]["loss"], report["held_out_after"]["loss"]
        assert after < before - 0.3
        card = (trained / name / "README.md").read_text()
        assert f"{before:.4f}" in card and f"{after:.4f}" in card
        assert f"{report['parameters']:,}" in card
        assert str(trained) not in card, "a card names no path of the machine it was made on"
        assert (trained / "packed" / f"{name}.tar.gz").is_file()
    assert 0 < report["draft_agreement"]["acceptance"] < 1


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_transformers_reads_the_same_model(trained: Path, name: str) -> None:
    check_against_transformers(trained / name)


def check_against_transformers(folder: Path) -> None:
    """Logits and token ids agree with transformers'; text survives a round trip."""
    ours = load_model(folder)
    theirs, notes = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return x  # é, 中, \t12345\n\n\nclass A(B):\r\n\tpass\n"
    ids = tokenizer(text)["input_ids"]
    plain = train_demo.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ids == plain.encode(text).ids
    assert tokenizer.decode(ids) == text == plain.decode(ids)
    assert (
        tokenizer.eos_token_id == theirs.config.eos_token_id == plain.token_to_id("<|endoftext|>")
    )
    tokens = torch.tensor([ids])
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        torch.testing.assert_close(ours.eval()(tokens), expected, rtol=1e-4, atol=1e-4)


def test_sizes_are_as_designed() -> None:
    main, draft = (Decoder(config) for config in (train_demo.MAIN, train_demo.DRAFT))
    assert 6e6 <= main.parameter_count() <= 12e6
    assert 2 * main.parameter_count() < 16.5e6
    assert 0.08 < draft.parameter_count() / main.parameter_count() < 0.12
    assert train_demo.MAIN.vocab_size == train_demo.DRAFT.vocab_size


def test_too_small_a_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size.*4096"):
        train_tokenizer(iter(["few words"]), 4096)
    tokenizer = train_tokenizer(iter(["few words"]), 260)
    config = replace(train_demo.TINY_DRAFT, vocab_size=260)
    save_model(tmp_path, Decoder(config), tokenizer)
    tokens = train_demo.encode([demo_corpus.Document("a", "few")], tokenizer, torch.device("cpu"))
    with pytest.raises(ValueError, match="context"):
        train_demo.fit(load_model(tmp_path), tokens, tokens, train_demo.Recipe(seconds=1, steps=1))


@pytest.mark.skipif(not BUNDLED[0].is_dir(), reason="models/ is not filled")
def test_bundled_models_are_what_their_cards_say() -> None:
    files = [path for folder in BUNDLED for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20e6
    configs = (train_demo.MAIN, train_demo.DRAFT)
    for folder, config in zip(BUNDLED, configs, strict=True):
        report = json.loads((folder / "training.json").read_text())
        model = load_model(folder)
        assert model.config == config
        assert model.parameter_count() == report["parameters"]
        assert report["held_out_after"]["loss"] < 0.5 * report["held_out_before"]["loss"]
        check_against_transformers(folder)
    tables = [(folder / "tokenizer.json").read_bytes() for folder in BUNDLED]
    assert tables[0] == tables[1]
