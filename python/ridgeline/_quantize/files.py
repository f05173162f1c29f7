"""Writing a checkpoint: shards of safetensors, into a folder that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

_COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "*.tiktoken",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
RECORD = "ridgeline_quantization.json"
_WRITTEN = (
    *_COPIED, "config.json", "*.safetensors", "model.safetensors.index.json", RECORD,
    "processor_config.json", "quantize_config.json",  # of other writers
)  # fmt: skip


@contextmanager
def new_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes the name ``path`` when the block ends well.

    Until then it is hidden beside ``path``; it is removed if the block raises.

    Raises:
        ValueError: there is something at ``path``, unless it is a checkpoint, nothing else is
            with it, and ``overwrite``. Asked before the block and again after it.
    """
    path = path.resolve()  # a link stays one
    _check_replaceable(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    before = made.with_name(f"{made.name}.before")
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        _check_replaceable(path, overwrite)
        if path.exists():
            path.rename(before)
        made.rename(path)
    finally:  # after an interrupt too, between any two steps
        if before.exists() and not path.exists():
            before.rename(path)
        _remove(made if made.exists() else before)  # there is one of them at most


def check_apart(target: Path, **sources: Path | None) -> None:
    """Raises ValueError if one of the files and folders, or a link in one, leads into ``target``.

    ``sources``: by what they are, for the message.
    """
    for what, source in sources.items():
        if source is None:
            continue
        for path in (source, *source.glob("*")):
            if path.resolve().is_relative_to(target.resolve()):
                raise ValueError(f"out: expected a folder without the {what} in it, got {target}")


def _check_replaceable(path: Path, overwrite: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"out: expected a folder that is new or empty (or overwrite): {path}")
    if not (path / "config.json").is_file():
        raise ValueError(f"out: expected a folder with a config.json to overwrite: {path}")
    others = sorted(
        entry.name
        for entry in path.iterdir()
        if not entry.is_file() or not any(fnmatchcase(entry.name, known) for known in _WRITTEN)
    )
    if others:
        raise ValueError(
            f"out: expected a checkpoint and nothing else to overwrite, {path} also holds "
            + ", ".join(others[:8])
        )


def _remove(folder: Path) -> None:
    """An interrupt meanwhile is raised when all of it is gone."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def copy_others(source: Path, target: Path) -> None:
    """The tokenizer, and what else goes with a model but is neither weights nor ``config.json``."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


class ShardWriter:
    """Keeps tensors until they fill a file.

    Args:
        limit: bytes of a file, unless one tensor has more.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"shard_bytes: expected a positive integer, got {limit!r}")
        self._folder, self._limit = folder, limit
        self._kept: dict[str, Tensor] = {}
        self._file_of: dict[str, int] = {}
        self._count = self._kept_bytes = self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._kept and self._kept_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._kept[name] = tensor.cpu().contiguous()
        self._kept_bytes += tensor.nbytes

    def close(self) -> None:
        """Writes the rest, and the index if there are several files."""
        self._flush()
        if self._count == 1:
            self._part(1).rename(self._folder / "model.safetensors")
            return
        count = range(1, self._count + 1)
        names = [f"model-{i:05d}-of-{self._count:05d}.safetensors" for i in count]
        for i, name in enumerate(names):
            self._part(i + 1).rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._bytes},
            "weight_map": {tensor: names[i - 1] for tensor, i in sorted(self._file_of.items())},
        }
        write_json(self._folder / "model.safetensors.index.json", index)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._count += 1
        save_file(self._kept, self._part(self._count), metadata={"format": "pt"})
        self._file_of |= dict.fromkeys(self._kept, self._count)
        self._bytes += self._kept_bytes
        self._kept, self._kept_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
