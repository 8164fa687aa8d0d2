"""Weights that several components share: one of them owns such a weight, the others borrow it.

[Note: sharing] A weight rests in one place and is on one device at a time, so of the components that hold it one owns
it and the others borrow it. The owner moves it, and the ledger counts it for the owner. While a borrower computes, a
pass of the owner is open, too. A part that is in two components has the owner's hooks only. A weight that is also used
outside of its block is in no block. No shared weight is encoded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..units import format_bytes

__all__ = ["NOTHING_SHARED", "Shared", "find_shared"]


@dataclass(frozen=True, eq=False)
class Shared:
    """The weights that one component shares. Tensors are given by id, as the modules hold them now."""

    borrowed: Mapping[int, str] = field(default_factory=dict)
    """The tensors that another component owns, with its name."""
    lent: Mapping[int, tuple[frozenset[nn.Module], ...]] = field(default_factory=dict)
    """The tensors that others borrow: for each place in a borrower, the modules that contain it."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """By owner, the name of one borrowed weight, as an example for messages."""
    texts: tuple[str, ...] = ()
    """How much of it others own, one line each for the plan."""

    @property
    def owners(self) -> tuple[str, ...]:
        """The components that this one borrows from, in their order."""
        return tuple(self.samples)


NOTHING_SHARED = Shared()


def find_shared(modules: Mapping[str, nn.Module], same: Mapping[int, int] | None = None) -> dict[str, Shared]:
    """Return what each of these components shares with the others; the first component that holds a weight owns it.

    Args:
        same: by the id of another tensor of a managed weight, such as its weight store, the id of what the module has.
    """
    same = same or {}
    owners: dict[int, str] = {}
    borrowed: defaultdict[str, dict[int, str]] = defaultdict(dict)
    samples: defaultdict[str, dict[str, str]] = defaultdict(dict)
    num_bytes: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    lent: defaultdict[str, dict[int, list[frozenset[nn.Module]]]] = defaultdict(dict)
    for name, module in modules.items():
        for path, tensor in named_tensors(module):
            number = same.get(id(tensor), id(tensor))
            owner = owners.setdefault(number, name)
            if owner == name:
                continue
            if id(tensor) not in borrowed[name]:
                num_bytes[name][owner] += tensor.nbytes
            borrowed[name][id(tensor)] = owner
            samples[name].setdefault(owner, path)
            lent[owner].setdefault(number, []).append(frozenset(modules_above(module, path)))
    order = {name: place for place, name in enumerate(modules)}
    return {
        name: Shared(
            borrowed=borrowed[name],
            lent={number: tuple(places) for number, places in lent[name].items()},
            samples={owner: samples[name][owner] for owner in sorted(samples[name], key=order.__getitem__)},
            texts=tuple(
                f"shares {format_bytes(num_bytes[name][owner])} with {owner}, which counts them; for example {path}"
                for owner, path in samples[name].items()
            ),
        )
        for name in modules
        if name in borrowed or name in lent
    }


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight and buffer at each of its places."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def modules_above(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules that contain a weight, the outermost first."""
    yield module
    for part in path.split(".")[:-1]:
        module = module._modules[part]  # type: ignore[assignment]
        yield module
