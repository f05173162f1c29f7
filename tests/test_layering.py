"""Who may include whom, and where each kind of code may stand: the tree's one-way dependencies.

Every rule is about direct includes; since what a folder may include obeys rules at least as
strict, they hold for everything that an include pulls in.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
MAX_LINES = 350
# Which code of the build a device can run is asked in one file; the build passes the answer.
BUILD_GUARDS = {"device/properties.cuh": {"RIDGELINE_SM90A"}}

CUDA = r"(cuda|cu[A-Z]|cub/|cooperative_groups|cutlass|cute/|thrust|mma\.h|nv/)"
TORCH = r"(torch/|ATen|c10/)"
PYTHON = r"(pybind11|Python\.h)"

# Project folders that each kind of file may include, and outside headers that it may not.
MAY_INCLUDE: dict[str, tuple[str, str]] = {
    "common": (r"common/", f"{CUDA}|{TORCH}|{PYTHON}"),
    "engine": (r"(engine|common)/", f"{CUDA}|{TORCH}|{PYTHON}"),
    "cpu": (r"(cpu|common)/|kernels/\w+\.h$", f"{CUDA}|{TORCH}|{PYTHON}"),
    "device/ptx": (r"device/ptx/|common/", f"{TORCH}|{PYTHON}"),
    "device": (r"(device|common)/", f"{TORCH}|{PYTHON}"),
    "kernels/*.h": (r"(common/|kernels/\w+\.h$)", f"{CUDA}|{TORCH}|{PYTHON}"),
    "kernels": (r"(device|common)/|kernels/\w+\.c?u?h$", f"{TORCH}|{PYTHON}"),
    "bindings": (r"(bindings|engine|cpu|common)/|kernels/\w+\.h$|build_info\.h$", "(ATen|c10/)"),
}


def kind_of(path: PurePosixPath) -> str | None:
    """The row of MAY_INCLUDE for a path relative to csrc."""
    if path.parts[0] == "kernels" and path.suffix == ".h":
        return "kernels/*.h"
    folder = str(path.parent)
    return folder if folder in MAY_INCLUDE else None


def without_comments(text: str, *, strings: bool = True) -> str:
    """Code without comments, and without the contents of string literals if not ``strings``."""

    def replace(match: re.Match[str]) -> str:
        if match[0].startswith("/"):
            return " "
        return match[0] if strings else '""'

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', replace, text, flags=re.DOTALL)


def include_violations(path: PurePosixPath, code: str) -> list[str]:
    kind = kind_of(path)
    if kind is None:
        return [f"is in a folder that has no rule: {path.parent}"]
    allowed, forbidden = MAY_INCLUDE[kind]
    found = []
    for opening, header in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', code, re.M):
        if opening == '"' and not re.match(allowed, header):
            found.append(f"{kind} may not include {header}")
        if opening == "<" and re.match(forbidden, header):
            found.append(f"{kind} may not include <{header}>")
    if re.search(r"#\s*include\s*<torch", code) and re.search(r"#\s*include\s*<pybind11", code):
        found.append("pybind11 and torch headers are in one file")
    return found + family_violations(path, code)


def family_violations(path: PurePosixPath, code: str) -> list[str]:
    """A kernel includes headers of one family: attention.h and attention_*.h, say."""
    if path.parts[0] != "kernels" or path.suffix not in {".cu", ".cuh"}:
        return []
    headers = re.findall(r'#\s*include\s*"kernels/(\w+)\.c?u?h"', code)
    families = sorted({header.split("_")[0] for header in headers})
    return [f"includes headers of the families {', '.join(families)}"] if families[1:] else []


def text_violations(path: PurePosixPath, code: str) -> list[str]:
    """Where assembly, shuffles, torch's names and macros may stand."""
    in_ptx = path.parts[:2] == ("device", "ptx")
    rules = [
        (r"\basm\b", in_ptx, "asm stands in device/ptx/ only"),
        (
            r"__shfl_\w+|__(reduce|match)_\w+_sync",
            in_ptx or str(path) == "device/reduce.cuh",
            "shuffles stand in device/reduce.cuh only",
        ),
        (r"\btorch::", path.parts[0] == "bindings", "torch is named in bindings/ only"),
        (r"\b(at|c10)::", False, "at:: and c10:: are no part of the stable ABI"),
        (r"^\s*#\s*define\b", False, "macros are not defined"),
        (
            r"__(global|device)__|<<<",
            path.suffix in {".cu", ".cuh"},
            "device code stands in .cu and .cuh files only",
        ),
    ]
    found = [
        message for pattern, fine, message in rules if not fine and re.search(pattern, code, re.M)
    ]
    # The only conditional compilation asks what the compiler targets, and the build guards.
    known = {"defined", "__has_include"} | BUILD_GUARDS.get(str(path), set())
    for condition in re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*)$", code, re.M):
        names = set(re.findall(r"[A-Za-z_]\w*", condition)) - known
        own = sorted(name for name in names if not name.startswith("__"))
        if own:
            found.append(f"#if asks about {', '.join(own)}, not about the compiler's target")
    if path.suffix in {".h", ".cuh"} and "#pragma once" not in code:
        found.append("has no #pragma once")
    return found


def violations(path: str, text: str) -> list[str]:
    """Every rule that the file breaks; ``path`` is relative to csrc."""
    pure = PurePosixPath(path)
    found = include_violations(pure, without_comments(text))
    return found + text_violations(pure, without_comments(text, strings=False))


def sources() -> list[str]:
    files = (ROOT / "csrc").rglob("*")
    return sorted(f.relative_to(ROOT / "csrc").as_posix() for f in files if f.suffix in SUFFIXES)


def test_every_source_keeps_to_its_layer() -> None:
    assert len(sources()) > 20, "the tree was found"
    broken = [
        f"csrc/{path}: {problem}"
        for path in sources()
        for problem in violations(path, (ROOT / "csrc" / path).read_text())
    ]
    assert not broken, "\n".join(broken)


def test_csrc_holds_sources_only() -> None:
    files = [f for f in (ROOT / "csrc").rglob("*") if f.is_file()]
    assert not [str(f) for f in files if f.suffix not in SUFFIXES]


def test_kernel_sources_are_built() -> None:
    """A source that no list names would be neither compiled nor tested."""
    lists = (ROOT / "CMakeLists.txt").read_text()
    named = set(re.findall(r"[\w/.]+", lists))
    built = {path for path in sources() if path.endswith(".cpp")}
    assert not [path for path in sorted(built) if f"csrc/{path}" not in named]
    kernels = {Path(path).stem for path in sources() if path.endswith(".cu")}
    assert not sorted(kernels - named)


def test_files_are_short() -> None:
    """A file beyond the limit is asked to split: reported, as there may be a reason."""
    files = [*(ROOT / "csrc").rglob("*"), *(ROOT / "python").rglob("*.py*")]
    for file in files:
        if file.is_file() and file.suffix in {*SUFFIXES, ".py", ".pyi"}:
            lines = len(file.read_text().splitlines())
            if lines > MAX_LINES:
                name = file.relative_to(ROOT)
                warnings.warn(f"{name}: {lines} lines, {MAX_LINES} asked for", stacklevel=1)


# Each rule, broken once: (path, text, part of the message).
BROKEN = [
    ("engine/a.cpp", "#include <cuda_runtime.h>", "may not include <cuda_runtime.h>"),
    ("engine/a.cpp", "#include <torch/library.h>", "may not include <torch/library.h>"),
    ("engine/a.cpp", "#include <Python.h>", "may not include <Python.h>"),
    ("engine/a.cpp", '#include "kernels/norm.h"', "engine may not include kernels/norm.h"),
    ("common/a.cpp", '#include "engine/a.h"', "common may not include engine/a.h"),
    ("common/a.cpp", "#include <cuda_fp16.h>", "may not include <cuda_fp16.h>"),
    ("cpu/a.cpp", '#include "device/vec.cuh"', "cpu may not include device/vec.cuh"),
    ("cpu/a.cpp", '#include "kernels/a.cuh"', "cpu may not include kernels/a.cuh"),
    ("cpu/a.cpp", "#include <pybind11/pybind11.h>", "may not include <pybind11"),
    ("device/a.cu", '#include "kernels/norm.h"', "device may not include kernels/norm.h"),
    ("device/ptx/a.cu", '#include "device/vec.cuh"', "ptx may not include device/vec.cuh"),
    ("kernels/a.h", "#pragma once\n#include <cuda_bf16.h>", "may not include <cuda_bf16.h>"),
    ("kernels/a.h", '#pragma once\n#include "device/vec.cuh"', "may not include device/vec.cuh"),
    ("kernels/a.h", "#pragma once\n__global__ void f();", "device code stands in"),
    ("kernels/a.cu", '#include "kernels/b.cu"', "may not include kernels/b.cu"),
    ("kernels/a.cu", '#include "bindings/norm.h"', "may not include bindings/norm.h"),
    ("kernels/a.cu", "#include <torch/csrc/stable/tensor.h>", "may not include <torch"),
    ("kernels/a.cu", '#include "kernels/a.h"\n#include "kernels/b.h"', "families a, b"),
    ("kernels/a.cu", 'asm volatile("nop;");', "asm stands"),
    ("kernels/a.cu", "x = __shfl_xor_sync(~0u, x, 1);", "shuffles stand"),
    ("kernels/a.cu", "x = __reduce_add_sync(~0u, x);", "shuffles stand"),
    ("kernels/a.cu", "x = __match_any_sync(~0u, x);", "shuffles stand"),
    ("device/vec.cuh", "#pragma once\nx = __shfl_down_sync(~0u, x, 1);", "shuffles stand"),
    ("cpu/a.cpp", "torch::stable::Tensor x;", "torch is named"),
    ("bindings/a.cpp", "at::Tensor x;", "at:: and c10::"),
    ("bindings/a.cpp", "#include <ATen/ATen.h>", "may not include <ATen"),
    ("bindings/a.cpp", "#include <torch/a.h>\n#include <pybind11/a.h>", "in one file"),
    ("bindings/a.cpp", '#include "device/vec.cuh"', "bindings may not include device"),
    ("common/a.h", "#pragma once\n#define MAX 1", "macros are not defined"),
    ("common/a.h", "#pragma once\n#ifdef RIDGELINE_FAST", "asks about RIDGELINE_FAST"),
    ("common/a.h", "#ifndef A_H", "asks about A_H"),
    ("device/a.cuh", "#pragma once\n#ifdef RIDGELINE_SM90A", "asks about RIDGELINE_SM90A"),
    ("device/properties.cuh", "#pragma once\n#ifdef RIDGELINE_FAST", "about RIDGELINE_FAST"),
    ("common/a.h", "int a();", "no #pragma once"),
    ("other/a.cpp", "int a;", "no rule"),
]


@pytest.mark.parametrize("path, text, message", BROKEN)
def test_a_breach_is_seen(path: str, text: str, message: str) -> None:
    assert any(message in problem for problem in violations(path, text)), violations(path, text)


FINE = [
    ("kernels/a.cu", "// asm(...) and __shfl_xor_sync are elsewhere\nint a;"),
    ("kernels/a.cu", "/* asm\n torch:: */ int a;"),
    ("kernels/a.cu", 'const char* a = "at::Tensor";'),
    ("kernels/a.cu", '#include <cuda_bf16.h>\n#include "kernels/a.h"\n#include "kernels/a_b.h"'),
    ("device/ptx/a.cuh", '#pragma once\n#if __CUDA_ARCH__ >= 900\nasm("nop;");\n#endif'),
    ("device/properties.cuh", "#pragma once\n#ifdef RIDGELINE_SM90A\n#endif"),
    ("bindings/a.cpp", "#include <torch/csrc/stable/tensor.h>\ntorch::stable::Tensor x;"),
    ("engine/a.cpp", '#include <vector>\n#include "common/check.h"\nformat::number x;'),
]


@pytest.mark.parametrize("path, text", FINE)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert violations(path, text) == []
