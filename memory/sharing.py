"""What several components have in common: weights of one of them that others hold, too.

[Note: sharing] A weight rests in one place and is on one device at a time, so of the components that hold it one owns
it and the others borrow: the owner's units move it, the owner's books count it, and entering a borrower opens a pass
of the owner as well, for as long as its own. A part that hangs in two components has the owner's hooks alone. What is
used outside of a block of the owner stays beside the blocks. Nothing that is shared is brought into eight bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .units import format_bytes

__all__ = ["NOTHING_SHARED", "Shared", "find_shared"]


@dataclass(frozen=True, eq=False)
class Shared:
    """What one component has in common with others. Tensors by their ids, as the modules hold them now."""

    borrowed: Mapping[int, str] = field(default_factory=dict)
    """The tensors that belong to another component, with its name."""
    lent: Mapping[int, tuple[frozenset[nn.Module], ...]] = field(default_factory=dict)
    """The tensors that others hold, too: for each place there the modules around it."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """What another component owns of this one: the name here of one weight, by the owner's name."""
    texts: tuple[str, ...] = ()
    """For people: how much is another's."""

    @property
    def owners(self) -> tuple[str, ...]:
        """The components that this one borrows from, in their order."""
        return tuple(self.samples)


NOTHING_SHARED = Shared()


def find_shared(modules: Mapping[str, nn.Module], same: Mapping[int, int] | None = None) -> dict[str, Shared]:
    """Return what each of these components has in common with the others; what several hold the first of them owns.

    Args:
        same: for tensors that stand for one that a managed module holds now, such as its master, the id of that.
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
                f"{format_bytes(num_bytes[name][owner])} are {owner}'s, and count there: {path} and the like"
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
    """Yield the modules that a weight is in, the outermost first."""
    yield module
    for part in path.split(".")[:-1]:
        module = module._modules[part]  # type: ignore[assignment]
        yield module
