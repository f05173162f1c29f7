"""The package as installed: what it says about itself, and that it builds from a source archive."""

from __future__ import annotations

import ast
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import ridgeline
import simulated_gpu
from ridgeline import _loader
from simulated_gpu import CUDA

ROOT = Path(__file__).resolve().parents[1]
MAX_WHEEL_BYTES = 2_000_000  # without CUDA

without_cuda = pytest.mark.skipif(ridgeline.info().cuda_loaded, reason="the CUDA ops are loaded")
needs_cuda_part = pytest.mark.skipif(
    not CUDA.exists() or simulated_gpu.compiler() is None or torch.cuda.is_available(),
    reason="built without CUDA, there is no C++ compiler, or there is a GPU to load it on",
)


# ---- What it says about itself ----------------------------------------------------------------


def test_info_names_versions_and_parts() -> None:
    info = ridgeline.info()
    assert info.ridgeline == ridgeline.__version__
    assert info.torch == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{16}", info.build)
    assert info.cuda_loaded == (info.cuda_reason == ""), "a part that is absent has a reason"
    for line in ("ridgeline", "torch", "cuda_loaded", "cuda_architectures"):
        assert re.search(rf"^{line} ", str(info), re.MULTILINE)


@pytest.mark.gpu
def test_info_on_a_gpu() -> None:
    info = ridgeline.info()
    assert info.devices and info.cuda_architectures
    assert torch.version.cuda == info.torch_cuda


@without_cuda
def test_the_reason_is_kept_without_cuda() -> None:
    assert ridgeline.info().cuda_reason == _loader.CUDA.reason != ""


@without_cuda
def test_every_op_refuses_cuda_tensors_with_the_reason() -> None:
    names = _loader._op_names()
    assert "rmsnorm" in names and "build_id" not in names
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in names if not has_kernel(f"ridgeline::{name}", "CUDA")] == []
    # Without a GPU there are no CUDA tensors: send the call where one would send it.
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x = torch.ones(1, 8)
    with pytest.raises(RuntimeError, match="rmsnorm cannot take CUDA tensors: ") as error:
        torch.ops.ridgeline.rmsnorm.default.redispatch(cuda, x, x[0], 1e-6, 0.0, False)
    assert ridgeline.info().cuda_reason in str(error.value)


@pytest.mark.parametrize(
    "version, available, driver, reason",
    [
        (None, False, 0, "is a build without CUDA"),
        ("13.0", False, 0, "no usable CUDA device"),
        ("12.8", True, 12080, r"supports CUDA 12\.8, driver 580 or later"),
        ("13.0", True, 13000, "^$"),
    ],
)
def test_reasons_in_order(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    version: str | None,
    available: bool,
    driver: int,
    reason: str,
) -> None:
    part = tmp_path / "_cuda.so"
    assert re.search("RIDGELINE_CUDA=ON", _loader._reason_not_to_load(part)), "the file is absent"
    part.touch()
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(_loader, "_cuda_version_of_driver", lambda: driver)
    assert re.search(reason, _loader._reason_not_to_load(part))


def stub_names(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Dotted names of the classes, functions and attributes that a stub declares."""
    names = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= {prefix + node.name} | stub_names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(prefix + node.target.id)
    return names


def test_the_stub_of_the_core_is_true() -> None:
    """mypy believes the stub; this holds it to the module, in both directions."""
    stub = Path(ridgeline.__file__).parent / "_C.pyi"
    declared = stub_names(ast.parse(stub.read_text()).body)
    for name in declared:
        if name.rpartition(".")[2].startswith("__"):
            continue  # a protocol of the interpreter: __buffer__ has no name before Python 3.12
        operator.attrgetter(name)(ridgeline._C)
    engine = ridgeline._C.engine
    for kind in (value for value in vars(engine).values() if isinstance(value, type)):
        public = {name for name in vars(kind) if not name.startswith("_")}
        missing = {f"engine.{kind.__name__}.{name}" for name in public} - declared
        assert f"engine.{kind.__name__}" in declared and not missing


# ---- Loading the CUDA part --------------------------------------------------------------------


@needs_cuda_part
def test_cuda_part_registers_every_op(tmp_path: Path) -> None:
    result = simulated_gpu.load(tmp_path)
    assert (result.loaded, result.reason, result.refusing) == (True, "", False)
    assert result.with_kernel and not result.without_kernel


@needs_cuda_part
def test_cuda_part_of_another_build_is_not_used(tmp_path: Path) -> None:
    """The core's id is replaced in a copy: the same code, as if built from other sources."""
    own = ridgeline.info().build
    data = CUDA.read_bytes()
    # A compiler may keep the id as text or as the numbers that make it.
    halves = (own[:8].encode(), own[8:].encode())
    assert all(half in data for half in halves)
    for half in halves:
        data = data.replace(half, b"0" * 8)
    result = simulated_gpu.load(tmp_path, cuda=data)
    assert not result.loaded and result.refusing
    assert own in result.reason and "0" * 16 in result.reason


@needs_cuda_part
@pytest.mark.parametrize(
    "original, replacement, reason",
    [
        (b"\x7fELF", b"text", "invalid ELF header"),
        (b"libtorch_cuda.so", b"libtorch_gone.so", "libtorch_gone.so: cannot open"),
        (b"aoti_torch_get_dtype", b"aoti_torch_got_dtype", "undefined symbol: aoti_torch_got"),
    ],
)
def test_broken_cuda_part_is_a_reason(
    tmp_path: Path, original: bytes, replacement: bytes, reason: str
) -> None:
    result = simulated_gpu.load(tmp_path, cuda=CUDA.read_bytes().replace(original, replacement))
    assert not result.loaded and result.refusing
    assert re.match(f"loading .*_cuda.so failed: .*{reason}", result.reason)


@needs_cuda_part
def test_old_driver_is_a_reason(tmp_path: Path) -> None:
    result = simulated_gpu.load(tmp_path, driver=12080)
    assert not result.loaded and result.refusing
    assert "driver is too old" in result.reason


# ---- Building from a source archive -----------------------------------------------------------

needs_build_tools = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("build", "pip", "scikit_build_core", "pybind11"))),
    reason="the build tools are not installed",
)


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    options = ("--sdist", "--no-isolation", "--skip-dependency-check")
    run(sys.executable, "-m", "build", *options, "-o", folder, ROOT, cwd=folder)
    (archive,) = folder.glob("ridgeline-*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the archive, in a path with a space, without git, without CUDA."""
    folder = tmp_path_factory.mktemp("a path with spaces")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (source,) = folder.glob("ridgeline-*")
    no_git = folder / "no git"
    no_git.mkdir()
    (no_git / "git").write_text("#!/bin/sh\necho git was called >&2\nexit 127\n")
    (no_git / "git").chmod(0o755)
    own_tools = str(Path(sys.executable).parent)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SKBUILD_", "MAKE"))}
    env["PATH"] = os.pathsep.join([str(no_git), own_tools, env["PATH"]])
    env["SKBUILD_CMAKE_DEFINE"] = "RIDGELINE_CUDA=OFF"
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    run(sys.executable, "-m", *command, str(source), cwd=folder, env=env)
    (built,) = folder.glob("ridgeline-*.whl")
    return built


@pytest.mark.slow
@needs_build_tools
def test_sdist_holds_the_sources_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for file in ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "Makefile"):
        assert file in names
    for folder in ("csrc", "cmake", "python"):
        kept = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
        }
        assert kept <= names
    built = r"\.(so|o|pyc|whl|jsonl)$|^(\.git|\.venv|build|dist)/"
    assert not [name for name in names if re.search(built, name)]


@pytest.mark.slow
@needs_build_tools
def test_wheel_is_small_and_complete(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        text = archive.read(metadata).decode()
        assert b"ridgeline=ridgeline.cli:main" in archive.read(entry_points).replace(b" ", b"")
    assert f"\nVersion: {ridgeline.__version__}\n" in text
    assert "\nRequires-Python: >=3.10\n" in text
    assert [
        line for line in text.splitlines() if "Requires-Dist" in line and "extra" not in line
    ] == ["Requires-Dist: torch>=2.10"]
    assert {"ridgeline/py.typed", "ridgeline/_C.pyi", "ridgeline/ops/norm.py"} <= set(names)
    outside = [n for n in names if not n.startswith(("ridgeline/", "ridgeline-"))]
    assert not outside
    (core,) = (n for n in names if re.fullmatch(r"ridgeline/_C\..*so", n))


@pytest.mark.slow
@needs_build_tools
def test_installed_wheel_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site packages"
    command = ["pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    run(sys.executable, "-m", *command, cwd=tmp_path)
    script = (
        "import torch, ridgeline\n"
        "x = torch.full((2, 8), 3.0)\n"
        "assert torch.allclose(ridgeline.ops.rmsnorm(x, torch.ones(8)), torch.ones(2, 8))\n"
        "print(ridgeline.__file__)\n"
        "print(ridgeline.info().cuda_reason)\n"
    )
    place, reason = run(*simulated_gpu.python_with(site), script, cwd=tmp_path).splitlines()
    assert Path(place).is_relative_to(site)
    assert "RIDGELINE_CUDA=ON" in reason


# ---- Options of the build ---------------------------------------------------------------------


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "a build"), "-G", "Ninja", python]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


needs_cmake = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None,
    reason="cmake or ninja is not installed",
)


@needs_cmake
@needs_build_tools
def test_jobs_are_limited_by_memory(tmp_path: Path) -> None:
    result = configure(tmp_path, "-DRIDGELINE_CUDA=OFF", "-DRIDGELINE_MEMORY_MB=2100")
    assert result.returncode == 0, result.stderr
    rules = "".join(file.read_text() for file in (tmp_path / "a build").rglob("*.ninja"))
    assert "pool ridgeline_compile\n  depth = 1\n" in rules
    assert rules.count("pool = ridgeline_compile") > 5


@needs_cmake
@needs_build_tools
def test_a_compiler_that_does_not_serve_is_named(tmp_path: Path) -> None:
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
    old.chmod(0o755)
    problem = f"{old} is of release 12.4, 13.0 or later is needed"
    found = configure(tmp_path, f"-DRIDGELINE_NVCC={old}")
    assert found.returncode == 0, "AUTO goes on without CUDA"
    assert "CUDA ops are not built" in found.stdout and problem in found.stdout
    found = configure(tmp_path, f"-DRIDGELINE_NVCC={old}", "-DRIDGELINE_CUDA=ON")
    assert found.returncode != 0 and problem in " ".join(found.stderr.split())


@needs_cmake
@needs_build_tools
@pytest.mark.parametrize(
    "option, message",
    [
        ("-DRIDGELINE_CUDA=YES", "expected AUTO, ON or OFF, got 'YES'"),
        ("-DRIDGELINE_CUDA_ARCHS=sm_90", "expected entries such as 80, 90a or 90-virtual"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, option: str, message: str) -> None:
    found = configure(tmp_path, option)
    assert found.returncode != 0 and message in " ".join(found.stderr.split())
