"""The parameter that a module holds while its block computes; it records reads and assignments of its ``.data``.

[Note: writes in a forward] A forward may write to its weights; for example, a layer may initialise itself from its
first input. In-place writes raise the version counter of the memory from which the block computes: all views share this
counter, and the engine copies nothing there meanwhile. A tensor from ``.data`` has its own counter, and ``.data`` can
be assigned. So the parameter has a class that records every access to ``.data``; the records are checked after the
block has computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .watched_data import is_same_view

__all__ = ["ComputingWeight", "note_data"]

DATA: Any = torch.Tensor.data  # the descriptor


class ComputingWeight(nn.Parameter):
    """A weight in memory that other blocks reuse after its block has computed ([Note: writes in a forward])."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    looked: list[ComputingWeight]
    """A list of the weight's group; reading or assigning ``.data`` appends the weight to it."""
    alias: torch.Tensor | None
    """Shares its version counter with each tensor that ``.data`` returns."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter: other libraries create parameters by ``type(old)(data)``."""
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> torch.Tensor:
        alias = self.alias
        if alias is None or not is_same_view(alias, self):
            with torch.inference_mode(False):
                alias = self.alias = DATA.__get__(self)
            self.looked.append(self)
        return alias.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        DATA.__set__(self, value)
        self.looked.append(self)

    def take_written(self) -> bool:
        """Return whether it was written to through ``.data`` since the last call."""
        alias, self.alias = self.alias, None
        return alias is not None and alias._version > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def note_data(weight: torch.Tensor, looked: list[ComputingWeight]) -> torch.Tensor:
    """Record accesses to the ``.data`` of a plain parameter that the engine made; other tensors stay unchanged."""
    if type(weight) is nn.Parameter:
        weight.__class__ = ComputingWeight
        weight.looked, weight.alias = looked, None  # type: ignore[attr-defined]
    return weight
