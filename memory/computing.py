"""What a module holds for a weight while its block computes: a parameter that tells how it was written to.

[Note: writes in a forward] A forward may write to its weights, as a layer does that sets itself up by its first input.
What is written in place counts in the memory from which the block computes: all views share its version counter, and
we copy nothing there meanwhile. ``.data`` has a counter of its own, and may be pointed elsewhere; so the parameter is
of a class that notes who asks for ``.data``. What was noted is looked at when the block has computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["ComputingWeight", "note_data"]

DATA: Any = torch.Tensor.data  # the descriptor


class ComputingWeight(nn.Parameter):
    """A weight in memory that is used for others after its block ([Note: writes in a forward])."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    looked: list[ComputingWeight]
    """Takes those whose ``.data`` was read or assigned, of its unit."""
    alias: torch.Tensor | None
    """What shares a counter with all that ``.data`` returned."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter: others make new ones of the class of an old one."""
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> torch.Tensor:
        alias = self.alias
        if alias is None or alias.data_ptr() != self.data_ptr():
            with torch.inference_mode(False):
                alias = self.alias = DATA.__get__(self)
            self.looked.append(self)
        return alias.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        DATA.__set__(self, value)
        self.looked.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def note_data(weight: torch.Tensor, looked: list[ComputingWeight]) -> torch.Tensor:
    """Let a plain parameter that we made note who asks for its ``.data``; others stay as they are."""
    if type(weight) is nn.Parameter:
        weight.__class__ = ComputingWeight
        weight.looked, weight.alias = looked, None  # type: ignore[attr-defined]
    return weight
