"""What is installed, what is loaded, and why something is not."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass

import torch

from ridgeline._loader import CUDA
from ridgeline._version import __version__


@dataclass(frozen=True)
class Info:
    """Versions and parts of this installation; ``str()`` of it is a small table."""

    ridgeline: str
    build: str
    python: str
    torch: str
    cpu_threads: int
    cuda_loaded: bool
    cuda_reason: str
    cuda_architectures: tuple[str, ...]
    torch_cuda: str | None
    devices: tuple[str, ...]

    def __str__(self) -> str:
        rows = {name: value for name, value in asdict(self).items() if value != ""}
        width = max(len(name) for name in rows)
        return "\n".join(f"{name:<{width}}  {_text(value)}" for name, value in rows.items())


def _text(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def info() -> Info:
    """Versions, architectures, which parts are loaded, and why one is not."""
    count = torch.cuda.device_count() if CUDA.loaded else 0
    return Info(
        ridgeline=__version__,
        build=torch.ops.ridgeline.build_id(),
        python=platform.python_version(),
        torch=torch.__version__,
        cpu_threads=torch.get_num_threads(),
        cuda_loaded=CUDA.loaded,
        cuda_reason=CUDA.reason,
        cuda_architectures=CUDA.architectures,
        torch_cuda=torch.version.cuda,
        devices=tuple(torch.cuda.get_device_name(i) for i in range(count)),
    )
