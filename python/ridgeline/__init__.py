"""LLM inference: attention, paged KV cache, fused norms, quantised GEMM, and a small engine."""

from ridgeline import _loader as _loader
from ridgeline import integrations, nn, ops
from ridgeline._advise import Advice, advise_quantization
from ridgeline._debug import debug_checks
from ridgeline._explain import Explanation, explain
from ridgeline._info import info
from ridgeline._optimize import Optimized, optimize_
from ridgeline._quantize.checkpoint import quantize_checkpoint
from ridgeline._quantize.modules import Quantized, quantize_
from ridgeline._quantize.recipe import QuantizedCheckpoint
from ridgeline._quantize.smooth import Observed, observe, smooth_
from ridgeline._version import __version__
from ridgeline.llm import LLM
from ridgeline.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Stats,
    StreamOutput,
)
from ridgeline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "Advice",
    "CompletionOutput",
    "Explanation",
    "Logprob",
    "Observed",
    "Optimized",
    "Quantized",
    "QuantizedCheckpoint",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Stats",
    "StreamOutput",
    "__version__",
    "advise_quantization",
    "debug_checks",
    "explain",
    "info",
    "integrations",
    "nn",
    "observe",
    "ops",
    "optimize_",
    "quantize_",
    "quantize_checkpoint",
    "smooth_",
]
