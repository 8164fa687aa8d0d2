"""The tensors of weights' files for another library's loader: from kept weights where there are some.

[Note: tracing] A library builds a model from a dict of tensors in its own way: it renames, splits, converts them. While
it does so, each copy of one of these tensors is seen (`torch`'s dispatch modes), so it is known afterwards which weight
has the values of which tensor of which file. A copy of kept weights is not made: the weight is pointed to them instead,
also if the library would convert the file's tensor as it copies; that one is not read then (`UnreadTensors`). Nor is
one that the library assigns or clones, and that the host converts before the context ends (`converted`). Where the
file is mapped (`map_file`) no copy is made either that would have the file's dtype: the weight is pointed to the
mapping, which costs no RAM ([Note: mapped weights] in `weights/mapped_files.py`). What was assigned, copied or
converted is known by its address. All else (transposed, joined) has no origin: it is in no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .manager.default import default_manager
from .runtime.blocks.pristine_slab import KnownOrigins
from .unread_tensors import LEAST_UNREAD_BYTES, UnreadTensors
from .weights.file_origin import FileIdentity, Origin
from .weights.file_reader import WeightsFile, torch_dtype
from .weights.mapped_files import map_tensors
from .weights.quantized_leaves import leaves_of

__all__ = ["FileTensors"]

COPY = torch.ops.aten.copy_.default
CLONE = torch.ops.aten.clone.default
COPIES = (COPY, CLONE, torch.ops.aten._to_copy.default)
# Points a tensor to other memory, or asks whether that can be: no value is read or written.
POINTING = (torch.ops.aten.set_data.default, torch.ops.aten._has_compatible_shallow_copy_type.default)
# Operators that return a view, and read no values.
VIEWS = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.unsqueeze.default,
)
PLAIN = (torch.Tensor, nn.Parameter)


class FileTensors:
    """The files of one loading, and which weights got their bytes. Use it as a context manager around the loading.

    The library gets the tensors from `read`, or reads them itself and shows them to `watch`.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[torch.Tensor, Origin]] = {}
        """What the library was given, or read, by its address."""
        self.copies: dict[int, tuple[torch.Tensor, Origin]] = {}
        """What that was copied to, by its address."""
        self.written: set[int] = set()
        """The storages, by their addresses, that the library wrote to by other means."""
        self.kept: dict[Origin, tuple[torch.Tensor, int]] = {}
        """The kept weights that the library was given, or may be given, each with its version then."""
        self.mapped: dict[int, torch.Tensor] = {}
        """For tensors in private mappings of their files, by their addresses, the same in another such mapping."""
        self.keepers: dict[int, torch.Tensor] = {}
        """For these others, by their addresses, a tensor that keeps their mapping, but has none of their memory."""
        self.unread = UnreadTensors()
        self.mode: Tracing | None = None

    def read(self, path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
        """Return the tensors and the metadata of a file of which weights are kept; None if none are.

        What was not kept is read from the file.

        Raises:
            InvalidInput: as `read_header`.
        """
        identity, header = FileIdentity.of(path)
        kept = default_manager().find_kept(identity, self.taken_beside(identity))
        if not kept:
            return None
        converted = {origin.tensor.name for origin in kept if origin.dtype is not None}
        tensors: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        unread: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):
            for tensor in header.tensors:
                dtype = torch_dtype(tensor.dtype)
                if dtype is None:
                    return None
                found = kept.get(Origin(identity, tensor))
                if found is not None:
                    tensors[tensor.name] = found
                elif tensor.name in converted and tensor.weight_bytes >= LEAST_UNREAD_BYTES:
                    tensors[tensor.name] = unread[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
                else:
                    missing.append(tensor.name)
        file = WeightsFile(header)
        tensors |= self.map_tensors(file, missing)
        self.unread.add(file, unread)
        self.kept |= {origin: (tensor, tensor._version) for origin, tensor in kept.items()}
        self.note(identity, {tensor.name: tensor for tensor in header.tensors}, tensors)
        return tensors, dict(header.metadata)

    def map_file(self, path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors and the metadata of a file, in a private mapping of it. Reads its header.

        Raises:
            InvalidInput: as `read_header`, or torch has no such dtype.
        """
        identity, header = FileIdentity.of(path)
        tensors = self.map_tensors(WeightsFile(header), [tensor.name for tensor in header.tensors])
        self.note(identity, {tensor.name: tensor for tensor in header.tensors}, tensors)
        return tensors, dict(header.metadata)

    def map_tensors(self, file: WeightsFile, names: list[str]) -> dict[str, torch.Tensor]:
        tensors, _ = map_tensors(file, names)
        others, keeper = map_tensors(file, names)
        self.mapped |= {tensor.data_ptr(): others[name] for name, tensor in tensors.items() if tensor.numel()}
        self.keepers |= {tensor.data_ptr(): keeper for tensor in others.values() if keeper is not None}
        return tensors

    def taken_beside(self, file: FileIdentity) -> set[int]:
        """Return the addresses of storages of which this loading has kept weights of other files.

        A slab may have weights of several files. None for a file that was read before: each reading gets its own.
        """
        if any(origin.file == file for origin in self.kept):
            return set()
        return {tensor.untyped_storage().data_ptr() for tensor, _ in self.kept.values()}

    def watch(self, path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note tensors that the library has read from a file itself, just now, by their names there.

        Raises `InvalidInput` as `read_header`.
        """
        identity, header = FileIdentity.of(path)
        self.note(identity, {tensor.name: tensor for tensor in header.tensors}, tensors)

    def note(self, file: FileIdentity, headers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in headers or not tensor.numel() or tensor.device.type != "cpu":
                continue
            origin = Origin(file, headers[name])
            if origin.is_form_of(tensor):
                self.known[tensor.data_ptr()] = tensor, origin

    def __enter__(self) -> FileTensors:
        self.mode = Tracing(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mode, self.mode = self.mode, None  # else the two would hold each other, and with them the files' tensors
        assert mode is not None
        mode.__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]
        unread, self.unread = self.unread, UnreadTensors()
        origins = {at: self.known.pop(at)[1] for at in list(self.known) if unread.is_unread(self.known[at][0])}
        for tensor in unread.end() if exc is None else ():
            self.known[tensor.data_ptr()] = tensor, origins[tensor.data_ptr()]

    def were_written(self) -> bool:
        """Whether the library wrote to kept weights: then they are no longer what the file has."""
        return any(tensor._version != version for tensor, version in self.kept.values())

    def origins(self, model: nn.Module) -> KnownOrigins:
        """Return what the weights of a model, which was built in this context, were read from."""
        found = {}
        for name, parameter in model.named_parameters():
            leaves = [self.origin_of(leaf) for leaf in leaves_of(parameter.detach())]
            if any(leaves):
                found[name] = tuple(leaves)
        return found

    def origins_after(self, model: nn.Module, origins: KnownOrigins) -> KnownOrigins:
        """Return the same for weights that have the same bytes in memory of their own by now, or were converted."""
        parameters = dict(model.named_parameters())
        found = {}
        for name, known in origins.items():
            leaves = leaves_of(parameters[name].detach())
            now = [
                one[1].in_dtype(leaf.dtype) if one is not None else None
                for leaf, one in zip(leaves, known, strict=True)
            ]
            found[name] = tuple(
                (leaf.data_ptr(), origin) if origin is not None and origin.is_form_of(leaf) else None
                for leaf, origin in zip(leaves, now, strict=True)
            )
        return found

    def converted(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the kept form in a dtype of what a module's weight came from, to point the weight to; reads nothing.

        None where that is not kept.
        """
        origin = self.copied_origin(weight, dtype)
        kept = self.kept.get(origin) if origin is not None else None
        if origin is None or kept is None or type(weight) is not nn.Parameter or weight.shape != kept[0].shape:
            return None
        self.copies[kept[0].data_ptr()] = kept[0], origin
        return alike(kept[0], weight)

    def origin_of(self, leaf: torch.Tensor) -> tuple[int, Origin] | None:
        if leaf.device.type != "cpu" or not leaf.numel():
            return None
        at = leaf.data_ptr()
        if leaf.untyped_storage().data_ptr() in self.written:
            return None
        for known in (self.known, self.copies):
            if at in known and known[at][1].is_form_of(leaf):
                return at, known[at][1]
        return None

    def take_there(self, source: torch.Tensor, target: torch.Tensor, origin: Origin) -> torch.Tensor | None:
        """Return a tensor that has what a copy of this one would have, if the target can be pointed to it.

        A kept weight; or a mapping, which only one gets: what is written to one weight is not written to another.
        """
        if origin in self.kept:
            kept = self.kept[origin][0]
            return kept if takes(target, kept) else None
        at, is_whole = source.data_ptr(), origin.dtype is None and source.is_contiguous()
        if is_whole and at in self.mapped and takes(target, self.mapped[at]):
            return self.mapped.pop(at)
        return None

    def clone_unread(self, source: torch.Tensor, origin: Origin) -> torch.Tensor:
        """Return a clone of a file's tensor that is not read either, as long as nothing uses it."""
        clone = torch.empty(source.shape, dtype=source.dtype)
        self.unread.add_clone(clone, source)
        self.known[clone.data_ptr()] = clone, origin
        return clone

    def copied_origin(self, source: torch.Tensor, dtype: torch.dtype) -> Origin | None:
        """Return what a copy in a dtype of what a tensor has now comes from."""
        found = self.origin_of(source) if is_plain(source) else None
        return found[1].in_dtype(dtype) if found is not None else None


class Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every copy of a file's tensors, and points the target to kept weights instead of copying them."""

    def __init__(self, files: FileTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.files = files

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in POINTING:
            return function(*args, **kwargs)
        if function not in COPIES:
            if function not in VIEWS:  # what uses a view is seen, too
                self.files.unread.read_for((args, kwargs))
            if function._schema.is_mutable:
                self.note_written(function, args)
            return function(*args, **kwargs)
        source, target = (args[1], args[0]) if function is COPY else (args[0], None)
        origin = self.files.copied_origin(
            source, (kwargs.get("dtype") or source.dtype) if target is None else target.dtype
        )
        have = self.files.take_there(source, target, origin) if origin is not None and target is not None else None
        if origin is not None and have is not None and target is not None:
            target.data = alike(have, target)
            self.files.copies[target.data_ptr()] = self.files.keepers.get(have.data_ptr(), have), origin
            return target
        if function is CLONE and origin is not None and not kwargs and self.files.unread.is_unread(source):
            return self.files.clone_unread(source, origin)
        self.files.unread.read_for((args, kwargs))
        made = function(*args, **kwargs)
        if is_plain(made):
            storage = made.untyped_storage()
            if origin is not None and storage.nbytes() == made.nbytes:
                self.files.copies[made.data_ptr()] = made, origin
                self.files.written.discard(storage.data_ptr())
            elif target is not None:
                self.files.written.add(storage.data_ptr())
        return made

    def note_written(self, function: Any, args: tuple[Any, ...]) -> None:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.is_write and is_plain(value):
                self.files.written.add(value.untyped_storage().data_ptr())


def is_plain(value: Any) -> bool:
    """Whether it is an ordinary tensor in host memory."""
    return type(value) in PLAIN and value.device.type == "cpu"


def alike(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that a target can be pointed to: of inference mode where that is."""
    if not target.is_inference():
        return source.detach()
    with torch.inference_mode():
        return torch.empty(0, dtype=source.dtype).set_(
            source.untyped_storage(), source.storage_offset(), source.shape, source.stride()
        )


def takes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a tensor can be pointed to the memory of another instead of being filled from it.

    It must be the object that a module holds: what ``.data`` or a view of one is filled through is another object.
    """
    return (
        type(target) is nn.Parameter
        and target.device.type == "cpu"
        and (target.dtype, target.shape) == (source.dtype, source.shape)
        and target.is_contiguous()
        and target.untyped_storage().nbytes() == target.nbytes  # no view of something larger
    )
