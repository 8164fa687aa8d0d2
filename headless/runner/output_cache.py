"""What nodes returned, kept across runs and found again by the signature of their inputs.

As ComfyUI's RAM-pressure cache: results of other workflows stay until memory is short, so a second run of an
earlier workflow finds its pipeline loaded.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...memory.units import KEPT_RAM_SHARE
from .node_inputs import Link
from .workflow import WorkflowNode

__all__ = ["CacheEntry", "OutputCache", "sign_node"]

MAX_ENTRIES = 256


class Unrepeatable(Exception):
    """A value that equals nothing, not even itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """The output values of a node, and what the page shows on it."""

    values: tuple[Any, ...]
    ui: Mapping[str, list[Any]]


class OutputCache:
    """Entries by signature, least recently used first. Dropping an entry may free a pipeline."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.max_entries = max_entries
        self.entries: OrderedDict[str, CacheEntry] = OrderedDict()

    def find(self, signature: str | None) -> CacheEntry | None:
        """Return the entry and mark it as just used."""
        if signature is None or signature not in self.entries:
            return None
        self.entries.move_to_end(signature)
        return self.entries[signature]

    def store(self, signature: str | None, entry: CacheEntry) -> None:
        """Keep an entry, unless it could never be found again."""
        if signature is not None:
            self.entries[signature] = entry
            self.entries.move_to_end(signature)

    def trim(self, needed: Collection[str | None]) -> None:
        """Drop the oldest entries, but none that is needed, while there are too many or RAM is short."""
        for signature in [signature for signature in self.entries if signature not in needed]:
            if len(self.entries) <= self.max_entries and not host_memory_is_short():
                return
            del self.entries[signature]

    def clear(self) -> None:
        """Drop everything, which releases every loaded pipeline."""
        self.entries.clear()


def host_memory_is_short() -> bool:
    from ...memory.transfer.devices import HostMemory

    memory = HostMemory.now()
    return memory.free_bytes < memory.total_bytes * KEPT_RAM_SHARE


def sign_node(node: WorkflowNode, fingerprint: Any, ancestors: Mapping[str, str | None]) -> str | None:
    """Return a digest of all that decides a node's output: class, values, fingerprint, ancestors' signatures.

    The node's id and title do not count, so equal nodes share a result, unless the node is not idempotent.
    None when the output cannot be found again: something here, or in an ancestor, equals nothing.
    """
    links = {name: link for name, link in node.inputs.items() if isinstance(link, Link)}
    values = {name: value for name, value in node.inputs.items() if name not in links}
    sources = {name: [ancestors[link.node_id], link.output] for name, link in links.items()}
    if any(signature is None for signature, _ in sources.values()):
        return None
    owner = node.id if node.schema.not_idempotent else None
    try:
        text = canonical_text([node.schema.node_id, owner, fingerprint, values, sources])
    except Unrepeatable:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_text(value: Any) -> str:
    """Return a text that is equal for equal plain values.

    Raises:
        Unrepeatable: NaN, which a node returns as its fingerprint to run every time, or no plain value.
    """
    if value is None or isinstance(value, (bool, int, str, bytes)) or (value == value and type(value) is float):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mapping):
        items = sorted((canonical_text(key), canonical_text(content)) for key, content in value.items())
        return "{" + ", ".join(f"{key}: {content}" for key, content in items) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(canonical_text, value)) + "]"
    raise Unrepeatable
