"""What the two shared objects ask of the machine: symbols, libraries, architectures."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import simulated_gpu
from simulated_gpu import CORE, CUDA

TORCH_CPU = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

# Symbols of libtorch_cuda that _cuda.so calls; a CPU build of torch has only the others.
FROM_TORCH_CUDA = {"aoti_torch_get_current_cuda_stream"}

needs_cuda_part = pytest.mark.skipif(not CUDA.exists(), reason="built without CUDA")
needs_compiler = pytest.mark.skipif(
    simulated_gpu.compiler() is None or torch.cuda.is_available(),
    reason="there is no C++ compiler, or a GPU whose driver is no stand-in",
)
needs_binutils = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(path: Path, *options: str) -> set[str]:
    """Dynamic symbols without their versions."""
    lines = output_of("nm", "-D", *options, path).splitlines()
    return {line.split(maxsplit=2 if line[0] != " " else 1)[-1].split("@")[0] for line in lines}


def needed(path: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", path)))


def parts() -> list[object]:
    return [
        pytest.param(CORE, id="core"),
        pytest.param(CUDA, id="cuda", marks=needs_cuda_part),
    ]


@needs_binutils
@pytest.mark.parametrize("path", parts())
def test_torch_is_reached_through_the_stable_abi_alone(path: Path) -> None:
    names = symbols(path, "--demangle")
    assert any(name.startswith("aoti_torch_") for name in names), "the table was read"
    assert not [name for name in names if re.search(r"\b(at|c10)::", name)]


@needs_binutils
@pytest.mark.parametrize("path", parts())
def test_needs_torch_and_the_system_only(path: Path) -> None:
    """No CUDA runtime, no cuBLAS, no driver: each would be one more version to agree on."""
    found = needed(path)
    torch_libraries = {name for name in found if "torch" in name}
    expected = {"libtorch_cpu.so"} if path == CORE else {"libtorch_cpu.so", "libtorch_cuda.so"}
    assert torch_libraries == expected
    system = r"(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux[-\w]*)\.so\.\d+"
    assert not [n for n in found - torch_libraries if not re.fullmatch(system, n)]
    assert "RUNPATH" not in output_of("readelf", "-d", path)


@needs_binutils
@pytest.mark.parametrize("path", parts())
def test_is_stripped(path: Path) -> None:
    assert ".symtab" not in output_of("readelf", "-S", "--wide", path)


@needs_cuda_part
@needs_binutils
def test_every_torch_symbol_of_the_cuda_part_exists() -> None:
    """_cuda.so is loaded for the first time on a machine with a GPU: nothing may be missing."""
    wanted = {
        name for name in symbols(CUDA, "--undefined-only") if re.match("aoti_torch|torch_", name)
    }
    missing = wanted - symbols(TORCH_CPU, "--defined-only")
    assert missing <= FROM_TORCH_CUDA


def fat_binary_entries(data: bytes) -> Iterator[tuple[str, int]]:
    """("elf" or "ptx", compute capability) of each entry of each fat binary in a file.

    A fat binary is a header (magic, version, header size, size of what follows) and entries, each
    with kind, header size, payload size and, at byte 28, the architecture.
    """
    magic = struct.pack("<I", 0xBA55ED50)
    start = data.find(magic)
    while start >= 0:
        header, size = struct.unpack_from("<HQ", data, start + 6)
        entry, end = start + header, start + header + size
        while entry < end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            yield {1: "ptx", 2: "elf"}.get(kind, f"kind {kind}"), arch
            entry += entry_header + payload
        start = data.find(magic, end)


def cuobjdump() -> str | None:
    """The disassembler of a toolkit, or the one that Triton carries."""
    beside_triton = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(beside_triton) if beside_triton.exists() else None)


@needs_cuda_part
@needs_compiler
def test_carries_code_for_each_architecture(tmp_path: Path) -> None:
    """The architectures that the library names are those of its code, no fewer and no more."""
    expected = set()
    for name in simulated_gpu.load(tmp_path).architectures:
        kind = "ptx" if name.endswith("-virtual") else "elf"
        expected.add((kind, int(re.match(r"\d+", name)[0])))
    assert set(fat_binary_entries(CUDA.read_bytes())) == expected


@needs_cuda_part
@needs_compiler
@pytest.mark.skipif(cuobjdump() is None, reason="cuobjdump is not installed")
def test_code_has_the_instructions_of_its_architecture(tmp_path: Path) -> None:
    """A fat binary's header does not tell sm_90a from sm_90: kernels of Hopper's own instructions
    are code of the first, all others of the second."""
    names = simulated_gpu.load(tmp_path).architectures
    listed = output_of(str(cuobjdump()), "--list-elf", CUDA)
    expected = {f"sm_{name}" for name in names if not name.endswith("-virtual")}
    expected |= {"sm_90"} & {name.removesuffix("a") for name in expected}
    assert set(re.findall(r"sm_\d+[af]?", listed)) == expected
