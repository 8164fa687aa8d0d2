"""What the storage forms lose, and what they save: of single weights, of whole models, of a text encoder, of a step."""

from .case import measure

__all__ = ["measure"]
