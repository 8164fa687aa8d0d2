"""What a device of a given room lacks of each part as it computes, if it keeps the bytes that were used last."""

from __future__ import annotations

__all__ = ["Room"]


class Room:
    """A device that holds parts by the byte: the one that computes wholly, of the others what was used last.

    Nothing is copied ahead, streamed, or kept for computing: arithmetic, with which every engine is compared.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.held: dict[str, int] = {}
        """Bytes of each part, the one used last at the end."""

    def use(self, part: str, part_bytes: int) -> int:
        """Bring the whole part; returns the bytes of it that were missing.

        Raises:
            ValueError: the part is larger than the room.
        """
        if part_bytes > self.num_bytes:
            raise ValueError(f"{part} has {part_bytes} bytes, more than the room of {self.num_bytes}")
        missing = part_bytes - self.held.pop(part, 0)
        excess = sum(self.held.values()) + part_bytes - self.num_bytes
        for other in list(self.held):
            leaving = min(max(excess, 0), self.held[other])
            self.held[other] -= leaving
            excess -= leaving
        self.held[part] = part_bytes
        return missing

    def forget(self, part: str) -> None:
        """Drop a part whose program has dropped it."""
        self.held.pop(part, None)
