"""Models of transformers that ask the registered function for masks but compute attention
themselves: what it may leave out for attention of its own, they need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

import torch


def _attends_itself(configuration: str) -> bool:
    """Whether the modelling code beside this module has attention that no registered function
    replaces. Code that is not there is taken to be replaceable."""
    module = configuration.replace(".configuration_", ".modeling_")
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return "ALL_ATTENTION_FUNCTIONS" not in names and any(
        "Attention" in name and isinstance(value, type) and issubclass(value, torch.nn.Module)
        for name, value in names.items()
    )


# A name is all that torch.compile takes as the argument of a constant.
attends_itself = cast(Callable[[str], bool], torch.compiler.assume_constant_result(_attends_itself))
