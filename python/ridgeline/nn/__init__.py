"""The ops as modules for inference, each made anew or ``from_torch`` of PyTorch's own.

``from_torch`` shares the parameters it can use as they are. Modules read their weights as being at
rest (``weights_ready``): whoever writes them on another stream synchronises before the next call.
Under autocast the linear modules and :class:`Attention` take what autocast would give to PyTorch's.
"""

from ridgeline.nn.attention import Attention
from ridgeline.nn.linear import Linear, Linear4bit, LinearFP8, LinearInt8, LinearW4A8
from ridgeline.nn.mlp import GatedMLP
from ridgeline.nn.norm import LayerNorm, LayerNormGELU, RMSNorm

__all__ = [
    "Attention",
    "GatedMLP",
    "LayerNorm",
    "LayerNormGELU",
    "Linear",
    "Linear4bit",
    "LinearFP8",
    "LinearInt8",
    "LinearW4A8",
    "RMSNorm",
]
