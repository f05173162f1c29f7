"""Writing a checkpoint: shards of safetensors, into a folder that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

_COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "*.tiktoken",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


@contextmanager
def new_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into, which takes the name ``path`` when the block ends well.

    Until then it is hidden beside ``path``; it is removed if the block raises.

    Raises:
        ValueError: there is something at ``path``, unless it is a checkpoint and ``overwrite``.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise ValueError(f"out: expected a folder that is new or empty (or overwrite): {path}")
        if not (path / "config.json").is_file():
            raise ValueError(f"out: expected a folder with a config.json to overwrite: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    before = made.with_name(f"{made.name}.before")
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        if path.exists():
            path.rename(before)
        made.rename(path)
    except BaseException:  # an interrupt too
        shutil.rmtree(made, ignore_errors=True)
        if before.exists() and not path.exists():
            before.rename(path)
        raise
    shutil.rmtree(before, ignore_errors=True)


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
