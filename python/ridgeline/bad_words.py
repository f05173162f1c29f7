"""Token sequences that an output must not hold."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")
_ANY, _NONE = -1, -2  # no token ids


class BadWords:
    """Finds, on the device, the tokens that would end a banned sequence in one output.

    It follows the output there because the host sees a token only after the next one is under way.
    """

    def __init__(self, banned: list[list[int]], device: torch.device) -> None:
        """``banned``: sequences of at least one token."""
        reach = max(map(len, banned)) - 1
        starts = [[_ANY] * (reach + 1 - len(ids)) + ids[:-1] for ids in banned]
        shape = (len(banned), reach)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=device).view(shape)
        self._ends = torch.tensor([ids[-1] for ids in banned], device=device)
        self._newest = torch.full((reach,), _NONE, dtype=torch.int32, device=device)

    def restart(self, output: list[int]) -> None:
        """The output is this now."""
        reach = self._newest.shape[0]
        newest = ([_NONE] * reach + output)[len(output) :]
        self._newest = self._newest.new_tensor(newest)

    def push(self, token: Tensor) -> None:
        """``token``: int32 ``[1]``, on the device."""
        if self._newest.shape[0]:
            self._newest = torch.cat((self._newest[1:], token))

    def exclude(self, bias: Tensor) -> None:
        """Adds -inf to the ``bias`` (``[vocab]``) of every token that must not come next."""
        ends_one = ((self._starts == self._newest) | (self._starts == _ANY)).all(dim=1)
        values = torch.zeros_like(ends_one, dtype=bias.dtype).masked_fill_(ends_one, NEVER)
        bias.index_put_((self._ends,), values, accumulate=True)
