"""Which weights lie in a mapping of their file, with the bytes that it has.

[Note: mapped weights] Most libraries map a safetensors file and give a module tensors in that mapping: a private one,
of which the system makes a page the process's own when something writes to it. Such a weight costs no RAM of its own.
Linux tells what is mapped where (``/proc/self/maps``), and of each page whether it is still the file's
(``/proc/self/pagemap``). So no library has to be asked, and no byte is read. A weight counts if no page of it was
written to, and if only its module holds it: no other code can miss it when the module holds something in its place.
Where the system does not tell, nothing counts, and weights are packed into RAM.

A module that came without memory gets such weights, too, where it computes on the CPU (`map_own`): all processes
have their pages once. Before each pass its files are asked whether they are what they were.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from weakref import getweakrefcount

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import InvalidInput, reason_of
from ..units import PAGE_BYTES
from .component import TensorSpec
from .file_reader import WeightsFile
from .safetensors_header import TORCH_NAMES, TensorHeader, WeightsHeader, read_header
from .source import WeightsSource
from .tensor_holders import count_tensors, find_held_elsewhere

__all__ = ["find_mapped", "find_sources", "map_again", "map_own", "map_tensors", "may_be_written"]

# What an entry of the pagemap says of a page: it is in RAM or swapped out; it is the file's.
IN_USE, OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)
ENTRY_BYTES = 8


@dataclass(frozen=True, slots=True)
class FileMapping:
    """A range of addresses that shows a range of a file."""

    begin: int
    end: int
    offset: int
    """Where in the file the range begins."""
    volume: tuple[int, int]
    inode: int
    path: str


def find_sources(modules: Mapping[str, nn.Module], known: Mapping[str, WeightsSource]) -> dict[str, WeightsSource]:
    """Return the files of modules by name: those that are known, and those of weights that lie in mappings of them."""
    sources = dict(known)
    for name, module in modules.items():
        found = find_mapped(module)
        if name in sources:
            sources[name].take_mapped(found)
            sources[name].note_bare(names_without_memory(module))
        elif found is not None:
            sources[name] = found
    return sources


def names_without_memory(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's weights and buffers that are on the meta device, all names of tied ones."""
    for tensors in (module.named_parameters, module.named_buffers):
        yield from (name for name, tensor in tensors(remove_duplicate=False) if tensor.is_meta)


def find_mapped(module: nn.Module) -> WeightsSource | None:
    """Return the files of weights that a module holds in mappings of them, by their names; None if there are none.

    Buffers do not count: a forward may change them. Costs some milliseconds for each thousand weights.
    """
    found: dict[str, list[tuple[str, FileMapping]]] = {}
    mappings = list(read_mappings())
    begins = [mapping.begin for mapping in mappings]
    for name, address, end in plain_weights(module) if mappings else ():
        at = bisect_right(begins, address) - 1
        if at >= 0 and end <= mappings[at].end:
            found.setdefault(mappings[at].path, []).append((name, mappings[at]))
    source = WeightsSource(())
    elsewhere = find_held_elsewhere(all_parameters(module)) if found else set()
    with PageStates() as pages:
        for path, weights in found.items():
            header = header_of(path, weights[0][1])
            if header is None:
                continue
            stored, file = {tensor.begin: tensor for tensor in header.tensors}, WeightsFile(header)
            for name, mapping in weights:
                weight = module.get_parameter(name)
                tensor = stored.get(mapping.offset + weight.data_ptr() - mapping.begin)
                if tensor is None or not is_form_of(tensor, weight) or id(weight) in elsewhere:
                    continue
                if is_alone(weight) and not pages.are_written(weight.data_ptr(), weight.nbytes):
                    source.add_mapped(name, file, tensor)
    return source if source.files else None


def map_again(source: WeightsSource, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return weights in private mappings of their files, as their module had them, by name. Reads nothing.

    Raises:
        InvalidInput: a file is gone, or is not what it was.
    """
    by_file: dict[WeightsFile, list[tuple[str, str]]] = {}
    for name in names:
        file, tensor = source.files[name]
        by_file.setdefault(file, []).append((name, tensor.name))
    mapped = {}
    for file, tensors in by_file.items():
        found, _ = map_tensors(file, [stored_name for _, stored_name in tensors])
        mapped.update({name: found[stored_name] for name, stored_name in tensors})
    return mapped


def map_own(source: WeightsSource, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return those of some weights that can be used where they lie, in private mappings of their files, by name.

    Reads nothing.

    Raises:
        InvalidInput: as `map_again`.
    """
    return map_again(source, [spec.name for spec in specs if spec.weight_bytes and source.is_mappable(spec)])


def map_tensors(file: WeightsFile, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return tensors of a file, by their names there, in a private mapping of it, which costs no read.

    With them comes one more of them, which keeps the mapping there; None where there are no names.

    Raises:
        InvalidInput: the file is gone, or is not what it was; or torch has no such dtype.
    """
    file.check_path()
    with torch.inference_mode(False):
        try:
            with safe_open(file.path, framework="pt") as opened:
                found = {name: opened.get_tensor(name) for name in names}
                keeper = opened.get_tensor(names[0]) if names else None
        except (SafetensorError, AttributeError, OSError) as error:
            raise InvalidInput(f"{file.path}: cannot be mapped: {reason_of(error)}") from error
    file.check_path()
    return found, keeper


def may_be_written(weight: torch.Tensor) -> bool:
    """Whether anything may have written to a page of a weight that lies in a mapping; True where that is not known."""
    with PageStates() as pages:
        return pages.are_written(weight.data_ptr(), weight.nbytes)


def plain_weights(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield the names of the weights that files can have as they are, and where they lie in host memory."""
    for name, weight in module.named_parameters():
        is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
        if is_plain and weight.numel():
            yield name, weight.data_ptr(), weight.data_ptr() + weight.nbytes


def all_parameters(module: nn.Module) -> Iterator[torch.Tensor | None]:
    """Yield what every module of a tree holds as its parameters; one comes as often as it is held."""
    for part in module.modules():
        yield from part._parameters.values()


def read_mappings() -> Iterator[FileMapping]:
    """Yield the private mappings of files, by their addresses; links are resolved, so names tell nothing of a file."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines if sys.platform == "linux" else ():
        addresses, permissions, offset, volume, inode, *named = line.split(None, 5)
        path = named[0] if named else ""
        begin, end = (int(number, 16) for number in addresses.split("-"))
        major, minor = (int(number, 16) for number in volume.split(":"))
        if permissions[3] == "p" and path.startswith("/"):
            yield FileMapping(begin, end, int(offset, 16), (major, minor), int(inode), path)


def header_of(path: str, mapping: FileMapping) -> WeightsHeader | None:
    """Return the header of a mapped file; None if the path leads to another one by now, or to none."""
    try:
        header, stat = read_header(path), os.stat(path)
    except (OSError, InvalidInput):
        return None
    is_same = (os.major(stat.st_dev), os.minor(stat.st_dev)) == mapping.volume and stat.st_ino == mapping.inode
    return header if is_same and header.version.inode == mapping.inode else None


def is_form_of(tensor: TensorHeader, parameter: nn.Parameter) -> bool:
    """Whether a weight has the dtype and shape that the file gives its bytes."""
    dtype = getattr(torch, TORCH_NAMES.get(tensor.dtype, ""), None)
    return parameter.dtype is dtype and tuple(parameter.shape) == tensor.shape


def is_alone(weight: nn.Parameter) -> bool:
    """Whether no graph of autograd has a weight, no weak reference, and no other tensor its memory."""
    has_graph = weight._use_count() > 1 or weight.grad is not None  # type: ignore[attr-defined]
    return not has_graph and not getweakrefcount(weight) and count_tensors(weight) == 1


class PageStates:
    """Whether pages of private mappings are still their file's. Use it as a context manager."""

    def __init__(self) -> None:
        self.pagemap: FileIO | None = None

    def __enter__(self) -> PageStates:
        with suppress(OSError):  # another system, or one that does not tell
            self.pagemap = FileIO("/proc/self/pagemap")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.pagemap is not None:
            self.pagemap.close()

    def are_written(self, address: int, num_bytes: int) -> bool:
        """Whether anything may have written to a page of a range."""
        first, last = address // PAGE_BYTES, -(-(address + num_bytes) // PAGE_BYTES)
        if self.pagemap is None:
            return True
        try:
            read = os.pread(self.pagemap.fileno(), ENTRY_BYTES * (last - first), ENTRY_BYTES * first)
        except OSError:
            return True
        if len(read) < ENTRY_BYTES * (last - first):
            return True
        entries = np.frombuffer(read, dtype=np.uint64)
        return bool(np.any((entries & IN_USE != 0) & (entries & OF_FILE == 0)))
