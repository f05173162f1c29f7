"""``quantize_checkpoint`` leaves its folder whole or as it was, and removes nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_model
from ridgeline import quantize_checkpoint
from ridgeline._quantize.files import new_folder
from tiny_model import one_thread  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_model.save_llama(made, hidden_size=128, intermediate_size=256)
    tiny_model.save_tokenizer(made)
    return made


class Stop(BaseException):
    """As an interrupt: no Exception."""


def test_an_interrupt_leaves_what_was_there(folder: Path, tmp_path: Path):
    def stop(done: int, total: int) -> None:
        assert done and total == 14
        raise Stop

    out = tmp_path / "below" / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(folder, out, device="cpu", progress=stop)
    assert list((tmp_path / "below").iterdir()) == []
    quantize_checkpoint(folder, out, device="cpu")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(Stop):
        quantize_checkpoint(folder, out, device="cpu", overwrite=True, scheme="fp8", progress=stop)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    quantize_checkpoint(folder, out, device="cpu", overwrite=True, scheme="fp8")
    assert list((tmp_path / "below").iterdir()) == [out]
    assert "float-quantized" in (out / "config.json").read_text()


def test_folders_that_do_not_do(folder: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="text: expected a file of text"):
        quantize_checkpoint(folder, tmp_path / "out", text=tmp_path / "none", device="cpu")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="a folder without the model in it"):
        quantize_checkpoint(folder, folder, overwrite=True)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="out: expected a folder that is new or empty"):
        quantize_checkpoint(folder, taken, device="cpu")
    with pytest.raises(ValueError, match="a folder with a config.json to overwrite"):
        quantize_checkpoint(folder, taken, device="cpu", overwrite=True)
    assert (taken / "notes.txt").read_text() == "mine"
    done = tmp_path / "done"
    quantize_checkpoint(folder, done, device="cpu")
    with pytest.raises(ValueError, match="a checkpoint that is not quantised yet"):
        quantize_checkpoint(done, tmp_path / "again", device="cpu")


def all_below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_is_read_is_not_overwritten(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    inner, text = out / "inner", out / "vocabulary.txt"  # named as a checkpoint's own
    shutil.copytree(folder, out)
    shutil.copytree(folder, inner)
    text.write_text("a text")
    (tmp_path / "link").symlink_to(inner)
    linked = tmp_path / "linked"  # a folder whose files are elsewhere
    linked.mkdir()
    for file in folder.iterdir():
        shutil.copyfile(file, linked / file.name)
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(out / "model.safetensors")
    before = all_below(tmp_path)
    for source in (inner, tmp_path / "link", linked, out):
        with pytest.raises(ValueError, match="out: expected a folder without the model in it"):
            quantize_checkpoint(source, out, overwrite=True, device="cpu")
    with pytest.raises(ValueError, match="out: expected a folder without the text in it"):
        quantize_checkpoint(folder, out, overwrite=True, device="cpu", text=text)
    assert all_below(tmp_path) == before


@pytest.mark.parametrize("name", ["notes/todo.txt", "notes.txt", "tokenizer.d/own", "adapter.bin"])
def test_what_no_checkpoint_has_is_not_overwritten(folder: Path, tmp_path: Path, name: str):
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    before = all_below(tmp_path)
    with pytest.raises(ValueError, match=f"also holds {name.partition('/')[0]}$"):
        quantize_checkpoint(folder, out, overwrite=True, device="cpu")
    assert all_below(tmp_path) == before
    assert list(tmp_path.iterdir()) == [out]


def test_what_came_meanwhile_is_not_overwritten(tmp_path: Path):
    with pytest.raises(ValueError, match="new or empty"):
        with new_folder(tmp_path / "out", overwrite=False):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "config.json").write_text("of another run")
    assert all_below(tmp_path) == {"out/config.json": b"of another run"}


def test_a_link_to_a_checkpoint_stays_one(tmp_path: Path):
    target, link = tmp_path / "disk" / "out", tmp_path / "link"
    target.mkdir(parents=True)
    (target / "config.json").write_text("old")
    link.symlink_to(target)
    with new_folder(link, overwrite=True) as made:
        (made / "config.json").write_text("new")
    assert link.is_symlink() and (target / "config.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json", "disk", "link", "out",
    ]  # fmt: skip


# After either rename, or when the folder that has been replaced is about to be removed.
@pytest.mark.parametrize(("step", "expected"), [(1, "old"), (2, "new"), (3, "new")])
def test_an_interrupt_of_the_last_steps_leaves_nothing_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, expected: str
):
    out, steps = tmp_path / "out", []
    out.mkdir()
    (out / "config.json").write_text("old")

    def then_stop(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        steps.append(call)
        if call is rename:
            call(*args, **options)
        if len(steps) == step:
            raise Stop
        if call is not rename:
            call(*args, **options)

    rename, rmtree = Path.rename, shutil.rmtree
    monkeypatch.setattr(Path, "rename", lambda *args: then_stop(rename, *args))
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **o: then_stop(rmtree, *a, **o))
    with pytest.raises(Stop):
        with new_folder(out, overwrite=True) as made:
            (made / "config.json").write_text("new")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "config.json").read_text() == expected
