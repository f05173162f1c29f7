"""The demo models' corpus: CPython's standard library and documentation as one archive.

An archive is a `.tar.xz` of text files. Packing is deterministic (sorted names, no times, no
owners), so the same folders give the same bytes, and the SHA-256 of an archive names a corpus.
"""

from __future__ import annotations

import ast
import hashlib
import io
import lzma
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SUFFIXES = (".py", ".rst", ".rst.txt")
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "lib-dynload", "_bundled", "encoded_modules"}
)
TOPICS = "pydoc_data/topics.py"
MAX_FILE_BYTES = 1_000_000
# A file of numbers (an encoding table, a Unicode list) is mostly digits and signs.
MIN_LETTER_SHARE = 0.4
# A version of a file that is already in the corpus shares most of its lines with it.
MIN_NEW_LINE_SHARE = 0.5
MIN_LINE_LENGTH = 12


@dataclass(frozen=True)
class Document:
    """One file: its path in the archive and its text with `\\n` line ends."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    """Documents to learn from and documents that only the evaluation reads."""

    train: list[Document]
    held_out: list[Document]


def topic_text(source: str) -> str:
    """The help texts inside `pydoc_data/topics.py`, whose value is one dict of strings."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return "\n\n".join(topics[key].strip() for key in sorted(topics)) + "\n"
    raise ValueError(f"{TOPICS}: expected a dict literal, found none")


def read_document(root: Path, path: Path) -> Document | None:
    """The text of a file, or None where it is not UTF-8, too large, or a table of numbers."""
    raw = path.read_bytes()
    if not raw or len(raw) > MAX_FILE_BYTES:
        return None
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None  # The standard library tests other encodings; the models learn UTF-8 only.
    name = path.relative_to(root).as_posix()
    if name == TOPICS:
        return Document(name, topic_text(text))
    visible = sum(not c.isspace() for c in text)
    letters = sum(c.isascii() and c.isalpha() for c in text)
    if visible == 0 or letters < MIN_LETTER_SHARE * visible:
        return None
    return Document(name, text)


def files_of(root: Path) -> list[Path]:
    """Python and reStructuredText files below `root`, sorted by path."""
    if not root.is_dir():
        raise NotADirectoryError(f"corpus folder: expected a directory, got {root}")
    return sorted(
        path
        for path in root.rglob("*")
        if path.name.endswith(SUFFIXES)
        and path.is_file()
        and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )


def distinct_lines(text: str) -> set[int]:
    """Hashes of the stripped lines that are long enough to be telling."""
    lines = (line.strip() for line in text.split("\n"))
    return {
        int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest(), "little")
        for line in lines
        if len(line) >= MIN_LINE_LENGTH
    }


def gather(roots: Iterable[Path]) -> list[Document]:
    """Documents of all folders without near-duplicates; earlier folders take precedence.

    A document stays when at least half of its distinct lines are new, so of several versions of
    a module only the first one seen stays, also where it moved to another folder. Names begin
    with the folder's name, and a number where two folders have the same name.
    """
    documents: list[Document] = []
    labels: set[str] = set()
    seen: set[int] = set()
    roots = list(roots)
    # The topics are rendered from the reference manual, so one of the two is enough.
    has_docs = any(path.name.endswith(SUFFIXES[1:]) for r in roots for path in files_of(r))
    for position, root in enumerate(roots):
        label = root.resolve().name
        label = f"{label}-{position}" if label in labels else label
        labels.add(label)
        for path in files_of(root):
            document = read_document(root, path)
            if document is None or (has_docs and document.name == TOPICS):
                continue
            lines = distinct_lines(document.text)
            if len(lines - seen) < max(1, MIN_NEW_LINE_SHARE * len(lines)):
                continue
            seen |= lines
            documents.append(Document(f"{label}/{document.name}", document.text))
    return documents


def write_archive(documents: Iterable[Document], path: Path) -> None:
    """Write a `.tar.xz` whose bytes depend on names and texts alone."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for document in sorted(documents, key=lambda d: d.name):
            data = document.text.encode()
            member = tarfile.TarInfo(document.name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(raw.getvalue(), preset=6))


def read_archive(path: Path) -> list[Document]:
    """The documents of an archive that `write_archive` wrote, sorted by name."""

    def members() -> Iterator[Document]:
        with tarfile.open(path, mode="r:xz") as tar:
            for member in tar:
                stream = tar.extractfile(member)
                if stream is None:
                    raise ValueError(f"{path}: expected plain files only, found {member.name}")
                yield Document(member.name, stream.read().decode())

    documents = sorted(members(), key=lambda d: d.name)
    if not documents:
        raise ValueError(f"{path}: expected at least one document, found none")
    return documents


def split(documents: Iterable[Document], held_out_percent: float) -> Split:
    """Split by a hash of the file's own name, so that a file's versions fall on one side.

    The test of a module is held out with it (`test_json.py` with `json.py`): it names the same
    things, and a model that has read one has half read the other.
    """
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        name = re.sub(r"(\.py|\.rst|\.rst\.txt)$", "", PurePosixPath(document.name).name)
        stem = re.sub(r"^_*(test_)?", "", name)
        if stem in ("init__", "main__"):
            stem = PurePosixPath(document.name).parent.name
        digest = hashlib.blake2b(stem.encode(), digest_size=8).digest()
        share = int.from_bytes(digest, "little") / 2**64
        (held_out if share < held_out_percent / 100 else train).append(document)
    if not train or not held_out:
        raise ValueError(
            f"held_out_percent: expected files on both sides of the split, got {len(train)} to "
            f"train on and {len(held_out)} held out at {held_out_percent}%"
        )
    return Split(train, held_out)
