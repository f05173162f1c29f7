"""Every op of the library: one module a family, each with signature, fake and cost together.

All ops take CPU or CUDA tensors, work under ``torch.compile(fullgraph=True)`` and in CUDA graphs,
accumulate in float32 and accept length 0 everywhere.
"""

from ridgeline.ops.norm import add_rmsnorm, layernorm, layernorm_gelu, rmsnorm

__all__ = [
    "add_rmsnorm",
    "layernorm",
    "layernorm_gelu",
    "rmsnorm",
]
