"""Every op of the library: one module a family, each with signature, fake and cost together.

All ops take CPU or CUDA tensors, work under ``torch.compile(fullgraph=True)`` and in CUDA graphs,
accumulate in float32 and accept length 0 everywhere.
"""

from ridgeline.ops.activation import bias_gelu, gelu_mul, silu_mul, swiglu_clamped
from ridgeline.ops.attention import (
    attention,
    attention_varlen,
    attention_workspace_bytes,
    merge_attention,
    paged_attention,
)
from ridgeline.ops.embedding import embed
from ridgeline.ops.fp4_weight import Fp4Experts
from ridgeline.ops.gemm import int4_linear, linear
from ridgeline.ops.gemm_fp8 import fp8_linear, fp8_linear_add
from ridgeline.ops.gemm_int8 import int8_linear
from ridgeline.ops.grouped import grouped_fp8_linear, grouped_linear
from ridgeline.ops.grouped_packed import grouped_fp4_linear, grouped_int4_linear
from ridgeline.ops.int4_weight import Int4Experts, Int4Weight, pack_int4
from ridgeline.ops.kv_cache import copy_blocks, rope, rope_write_kv, write_kv
from ridgeline.ops.norm import add_rmsnorm, layernorm, layernorm_gelu, rmsnorm
from ridgeline.ops.quantize import quantize_fp8, quantize_int8
from ridgeline.ops.reduction import row_reduce, softmax
from ridgeline.ops.rope_attention import rope_paged_attention
from ridgeline.ops.routing import (
    ExpertOrder,
    Routing,
    combine_experts,
    order_experts,
    route_experts,
)
from ridgeline.ops.sampling import sample, top_logprobs

__all__ = [
    "ExpertOrder",
    "Fp4Experts",
    "Int4Experts",
    "Int4Weight",
    "Routing",
    "add_rmsnorm",
    "attention",
    "attention_varlen",
    "attention_workspace_bytes",
    "bias_gelu",
    "combine_experts",
    "copy_blocks",
    "embed",
    "fp8_linear",
    "fp8_linear_add",
    "gelu_mul",
    "grouped_fp4_linear",
    "grouped_fp8_linear",
    "grouped_int4_linear",
    "grouped_linear",
    "int4_linear",
    "int8_linear",
    "layernorm",
    "layernorm_gelu",
    "linear",
    "merge_attention",
    "order_experts",
    "pack_int4",
    "paged_attention",
    "quantize_fp8",
    "quantize_int8",
    "rmsnorm",
    "rope",
    "rope_paged_attention",
    "rope_write_kv",
    "route_experts",
    "row_reduce",
    "sample",
    "silu_mul",
    "softmax",
    "swiglu_clamped",
    "top_logprobs",
    "write_kv",
]
