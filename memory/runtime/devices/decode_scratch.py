"""The scratch of one device: where the encoded weights of the block that computes are decoded.

[Note: decoding beside] The calls of one stream take turns: a block's weights are decoded over those of the block
before. Micro-batches are launched one after the other and compute at the same time, so the second one would decode over
what the first one computes from. So each has scratch of its own, as many as the plan has room for, in turn; one more
micro-batch waits for the last use of its scratch. Where weights stay decoded until the pass ends, every block has its
own place, and a micro-batch that decodes there again waits for the last use of that place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...transfer.copy_stream import CopyStream, LastUse

__all__ = ["DecodeScratch"]


class DecodeScratch:
    """The parts of one device's scratch, each with its last use in this step.

    Args:
        memory: allocated in the home stream's order.
        copies: None on the CPU, where nothing computes beside anything else.
        places: of each block the bytes of its own place; None: a whole part is one block's.
        num_parts: for how many micro-batches it has room.
    """

    def __init__(
        self, memory: torch.Tensor, copies: CopyStream | None, *, places: Mapping[int, int] | None, num_parts: int
    ) -> None:
        self.copies = copies
        self.num_parts = num_parts
        self.by_block: dict[int, torch.Tensor] = {}
        self.parts: list[torch.Tensor] = []
        # The same objects every time: views of weights are cached by their ids.
        if places is not None:
            parts = torch.split(memory[: sum(places.values())], list(places.values()))
            self.by_block = dict(zip(places, parts, strict=True))
        else:
            self.parts = list(torch.split(memory, memory.numel() // num_parts))
        self.micro_batch: int | None = None
        """The number of the micro-batch that computes; None outside of micro-batches."""
        self.last_uses: dict[int, LastUse] = {}
        """By the part, or the block: its last use in this step."""

    @property
    def has_room_beside(self) -> bool:
        """Whether two micro-batches can decode at the same time."""
        return bool(self.by_block) or len(self.parts) > 1

    def begin_pass(self, micro_batch: int | None) -> None:
        """A forward begins; outside of micro-batches it is ordered behind all before."""
        self.micro_batch = micro_batch
        if not micro_batch:
            self.last_uses.clear()

    def place_for(self, block: int) -> int:
        return block if self.by_block else (self.micro_batch or 0) % len(self.parts)

    def take(self, block: int) -> torch.Tensor:
        """Return where a block's weights are decoded now, behind the last use of that by another micro-batch."""
        place = self.place_for(block)
        if place in self.last_uses and self.copies is not None:
            self.copies.await_use(*self.last_uses[place])
        return self.by_block[block] if self.by_block else self.parts[place]

    def give_back(self, block: int) -> None:
        """Note that a block has queued its last use of what `take` returned."""
        if self.micro_batch is not None and self.copies is not None:
            self.last_uses[self.place_for(block)] = self.copies.mark_use()
