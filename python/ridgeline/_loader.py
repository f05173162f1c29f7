"""Loads the compiled core once: ``_C`` (schemas, CPU ops, engine), then ``_cuda.so`` if it can.

A CUDA part that cannot be loaded never breaks the import: the reason is kept as text, shown by
``ridgeline.info()`` and raised when a CUDA tensor reaches an op.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline import _C as _core  # importing it registers the ops

_DRIVER_FOR_CUDA_13 = 13000


@dataclass(frozen=True)
class CudaPart:
    """What became of ``_cuda.so``: loaded, or the reason why not."""

    loaded: bool
    reason: str
    architectures: tuple[str, ...] = ()


def _cuda_version_of_driver() -> int:
    """The newest CUDA that the driver serves, as 1000 * major + 10 * minor."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _reason_not_to_load(path: Path) -> str:
    if not path.exists():
        return "this build has no CUDA part (_cuda.so is absent): build with RIDGELINE_CUDA=ON"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch finds no usable CUDA device"
    driver = _cuda_version_of_driver()
    if driver < _DRIVER_FOR_CUDA_13:
        return (
            "the NVIDIA driver is too old for CUDA 13: it supports CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}, driver 580 or later is needed"
        )
    return ""


def _load_cuda() -> CudaPart:
    path = Path(_core.__file__).parent / "_cuda.so"  # beside _C, also in an editable install
    reason = _reason_not_to_load(path)
    if reason:
        return CudaPart(False, reason)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return CudaPart(False, f"loading {path} failed: {error.__cause__ or error}")
    core, cuda = torch.ops.ridgeline.build_id(), torch.ops.ridgeline.cuda_build_id()
    if core != cuda:
        return CudaPart(False, f"_C is of build {core}, _cuda.so of build {cuda}: reinstall both")
    architectures = tuple(re.split("[,; ]+", torch.ops.ridgeline.cuda_architectures()))
    return CudaPart(True, "", architectures)


def _refuse_cuda_tensors(part: CudaPart) -> torch.library.Library:
    """Makes every op answer a CUDA tensor with the reason why it cannot serve it."""
    library = torch.library.Library("ridgeline", "IMPL", "CUDA")
    for name in _op_names():

        def refuse(*args: object, name: str = name, **kwargs: object) -> None:
            raise RuntimeError(f"ridgeline::{name} cannot take CUDA tensors: {part.reason}")

        library.impl(name, refuse)
    return library


def _op_names() -> list[str]:
    prefix = "ridgeline::"
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)]
    with_tensors = [n for n in names if "Tensor" in str(torch._C._get_schema(n, ""))]
    return sorted(n.removeprefix(prefix) for n in with_tensors)


CUDA = _load_cuda()
_refusals = None if CUDA.loaded else _refuse_cuda_tensors(CUDA)
