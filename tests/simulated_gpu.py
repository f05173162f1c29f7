"""Loads the CUDA part where there is no GPU, as far as that goes: up to the first kernel.

Stand-ins for libtorch_cuda.so and the driver let the dynamic loader and the registration of all
ops run, so that a missing symbol or a schema that does not fit is found on any machine. Each load
is in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ridgeline

CORE = Path(ridgeline._C.__file__)
CUDA = CORE.parent / "_cuda.so"

_SCRIPT = """
import ctypes, json, sys
import torch
settings = json.loads(sys.argv[1])
for library in settings["libraries"]:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 0
import ridgeline
from ridgeline._loader import _op_names, _refusals
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
info = ridgeline.info()
print(json.dumps({
    "loaded": info.cuda_loaded,
    "reason": info.cuda_reason,
    "architectures": info.cuda_architectures,
    "with_kernel": [n for n in _op_names() if has_kernel("ridgeline::" + n, "CUDA")],
    "without_kernel": [n for n in _op_names() if not has_kernel("ridgeline::" + n, "CUDA")],
    "refusing": _refusals is not None,
}))
"""


@dataclass(frozen=True)
class Loaded:
    """What the loader made of an installation."""

    loaded: bool
    reason: str
    architectures: list[str]
    with_kernel: list[str]
    without_kernel: list[str]
    refusing: bool


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def stand_in(folder: Path, name: str, source: str) -> Path:
    """A shared library that passes for ``name``: once loaded, the loader finds it by that name."""
    path, text = folder / name, folder / f"{name}.cpp"
    text.write_text(source)
    options = ["-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run([str(compiler()), *options, text, "-o", path], check=True)
    return path


def python_with(site: Path) -> list[str]:
    """A command that runs the script that follows, with ``site`` before all other packages.

    Without the site module (-S), since an editable install hooks itself before every path there.
    """
    paths = [str(site), *(path for path in sys.path if path)]
    start = f"import sys; sys.path[:] = {paths!r}; exec(sys.argv.pop(1))"
    return [sys.executable, "-S", "-c", start]


def load(folder: Path, *, cuda: bytes | None = None, driver: int = 13000) -> Loaded:
    """Imports a copy of the installed package with these bytes as its ``_cuda.so``."""
    package = folder / "site" / "ridgeline"
    package.mkdir(parents=True)
    for file in Path(ridgeline.__file__).parent.iterdir():
        if file.name not in (CORE.name, CUDA.name):
            (package / file.name).symlink_to(file)
    shutil.copy(CORE, package)
    (package / "_cuda.so").write_bytes(CUDA.read_bytes() if cuda is None else cuda)

    torch_cuda = stand_in(
        folder,
        "libtorch_cuda.so",
        'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n',
    )
    driver_library = stand_in(
        folder,
        "libcuda.so.1",
        f'extern "C" int cuDriverGetVersion(int* v) {{ *v = {driver}; return 0; }}\n',
    )
    settings = {"libraries": [str(torch_cuda), str(driver_library)]}
    result = subprocess.run(
        [*python_with(package.parent), _SCRIPT, json.dumps(settings)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return Loaded(**json.loads(result.stdout.splitlines()[-1]))
