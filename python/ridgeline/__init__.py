"""LLM inference: attention, paged KV cache, fused norms, quantised GEMM, and a small engine."""

from ridgeline import _loader, ops
from ridgeline._debug import debug_checks
from ridgeline._info import info
from ridgeline._version import __version__

__all__ = ["__version__", "debug_checks", "info", "ops"]
