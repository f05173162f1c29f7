"""Every op of the library: one module a family, each with signature, fake and cost together.

All ops take CPU or CUDA tensors, work under ``torch.compile(fullgraph=True)`` and in CUDA graphs,
accumulate in float32 and accept length 0 everywhere.
"""

from ridgeline.ops.activation import bias_gelu, gelu_mul, silu_mul
from ridgeline.ops.reduction import row_reduce, softmax
from ridgeline.ops.quantize import quantize_fp8
from ridgeline.ops.norm import add_rmsnorm, layernorm, layernorm_gelu, rmsnorm

__all__ = [
    "quantize_fp8",
    "softmax",
    "row_reduce",
    "silu_mul",
    "gelu_mul",
    "bias_gelu",
    "add_rmsnorm",
    "layernorm",
    "layernorm_gelu",
    "rmsnorm",
]
