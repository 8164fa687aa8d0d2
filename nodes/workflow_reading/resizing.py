"""Rules of nodes that change the size of latents and images alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .description import Size
from .node_values import MAX_NUMBER, NodeReading, Picture

__all__ = ["crop", "repeat", "resize", "same_picture", "scale", "scale_edge", "scaled", "stack", "take"]


def same_picture(name: str, node: NodeReading) -> Sequence[Any]:
    return (node.picture(name),) * 2


def resize(name: str, widths: tuple[str, str], step: int, node: NodeReading, *, smallest: int = 1) -> Sequence[Any]:
    """Give a width and a height; where one of both is 0, the shape stays.

    Args:
        smallest: what an edge is made at least, unless both are 0.
    """
    picture = node.picture(name)
    width, height = (node.whole(widget) for widget in widths)
    if width is None or height is None:
        widget = widths[width is not None]
        return (replace(picture, size=None, why=f"size: {node.name.label}: {widget} {node.why_unread(widget)}"),)
    old = picture.size
    if old is None:
        if not picture.is_single or not width or not height:
            return (picture,)
        old = Size(width=width, height=height)
    if not width and not height:
        return (replace(picture, size=old),)
    if not width:
        width = round(old.width * max(smallest, height) / old.height)
    elif not height:
        height = round(old.height * max(smallest, width) / old.width)
    edges = (max(step, max(smallest, edge) // step * step) for edge in (width, height))
    return (replace(picture, size=replace(old, **dict(zip(("width", "height"), edges, strict=True)))),)


def scale(name: str, factor: str, step: int, node: NodeReading) -> Sequence[Any]:
    by = node.number(factor)
    if by is None or by <= 0:
        return (
            replace(node.picture(name), size=None, why=f"size: {node.name.label}: {factor} {node.why_unread(factor)}"),
        )
    return (scaled(node.picture(name), by, step),)


def scaled(picture: Picture, by: float, step: int) -> Picture:
    """Return a picture of another size in whole cells."""
    if picture.size is None:
        return picture
    width, height = (
        max(step, min(MAX_NUMBER, round(edge // step * by) * step))
        for edge in (picture.size.width, picture.size.height)
    )
    return replace(picture, size=replace(picture.size, width=width, height=height))


def scale_edge(edge: Callable[[int, int], int], widget: str, name: str, node: NodeReading) -> Sequence[Any]:
    picture, wanted = node.picture(name), node.whole(widget)
    if picture.size is None or not wanted:
        return (replace(picture, size=None, why=picture.why or f"size: {node.name.label}: {widget}"),)
    return (scaled(picture, wanted / edge(picture.size.width, picture.size.height), 1),)


def repeat(name: str, node: NodeReading) -> Sequence[Any]:
    picture, amount = node.picture(name), node.whole("amount")
    if picture.size is None or amount is None:
        return (replace(picture, size=None, why=picture.why or f"size: {node.name.label}: amount"),)
    return (replace(picture, size=replace(picture.size, batch=min(MAX_NUMBER, picture.size.batch * amount))),)


def take(name: str, node: NodeReading) -> Sequence[Any]:
    """Some of a batch, which is the frames of a video when it is decoded."""
    picture, length = node.picture(name), node.whole("length")
    if picture.size is None or length is None:
        return (replace(picture, size=None, why=picture.why or f"size: {node.name.label}: length"),)
    size = picture.size
    size = replace(size, batch=min(size.batch, max(1, length))) if size.batch > 1 else size
    size = replace(size, frames=min(size.frames, max(1, length))) if not picture.is_latent else size
    return (replace(picture, size=size),)


def stack(first: str, second: str, node: NodeReading) -> Sequence[Any]:
    """Two batches as one; the second gets the size of the first."""
    picture, other = node.picture(first), node.picture(second)
    if picture.size is None or other.size is None:
        return (picture if picture.size is None else other,)
    return (replace(picture, size=replace(picture.size, batch=picture.size.batch + other.size.batch)),)


def crop(name: str, step: int, node: NodeReading) -> Sequence[Any]:
    picture, width, height = node.picture(name), node.whole("width"), node.whole("height")
    if picture.size is None or not width or not height:
        return (replace(picture, size=None, why=picture.why or f"size: {node.name.label}: width, height"),)
    size = replace(
        picture.size,
        width=min(picture.size.width, max(step, width // step * step)),
        height=min(picture.size.height, max(step, height // step * step)),
    )
    return (replace(picture, size=size),)
