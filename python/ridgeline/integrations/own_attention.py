"""Models of transformers that ask the registered function for masks but compute attention
themselves: what it may leave out for attention of its own, they need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch


@cache
def _attends_itself(configuration: str) -> bool:
    """Whether some modelling code beside this module, as far as it is loaded, has attention that no
    registered function replaces."""
    prefix = configuration.rpartition(".")[0] + ".modeling_"
    modules = [(name, vars(m)) for name, m in list(sys.modules.items()) if name.startswith(prefix)]
    return any(
        "ALL_ATTENTION_FUNCTIONS" not in names
        and any(_is_attention(v, name) for v in names.values())
        for name, names in modules
    )


def _is_attention(value: Any, module: str) -> bool:
    """A module of attention, defined there."""
    is_module = isinstance(value, type) and issubclass(value, torch.nn.Module)
    return is_module and "Attention" in value.__name__ and value.__module__ == module


# A name is all that torch.compile takes as the argument of a constant.
attends_itself = cast(Callable[[str], bool], torch.compiler.assume_constant_result(_attends_itself))
