"""The weights of a component in its files, found by the names that its module gives them."""

from __future__ import annotations

import math
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch

from ..errors import InvalidInput
from .casting import EIGHT_BITS, Reading, can_cast
from .component import Component, TensorSpec, is_aligned
from .file_origin import Origin
from .file_reader import OpenFiles, Target, WeightsFile, torch_dtype
from .known_forms import encoded_form
from .loading import Loading
from .safetensors_header import TensorHeader, WeightsHeader, read_header
from .storage_form import EncodedForm
from .stored_encodings import StoredEncoding, find_encodings, leaf_name

__all__ = ["WeightsSource"]

# What libraries call the numbers by which codes of eight bits are multiplied.
SCALES = ("scale", "amax")


class WeightsSource:
    """The safetensors files of one model, or the shards of one: reads weights from where they lie. Holds headers only.

    Args:
        prefix: what names in the files have before the module's names.

    Raises:
        InvalidInput: as `read_header`.
    """

    def __init__(self, paths: Sequence[str | Path], *, prefix: str = "") -> None:
        self.files: dict[str, tuple[WeightsFile, TensorHeader]] = {}
        self.opened: OpenFiles | None = None
        self.num_holders = 0
        self.read_bytes = 0
        self.read_s = 0.0
        self.mapped: set[str] = set()
        """The weights that their module held in a mapping of the file ([Note: mapped weights] in `mapped_files.py`)."""
        self.bare = frozenset[str]()
        """The weights for which their module came without memory, by all of their names: what it computes with is what
        the file has, whatever their dtype is."""
        self.keeps_pages = False
        """Whether the system keeps what is read in its cache: RAM has room for it."""
        self.loading: Loading | None = None
        """How the module got the weights that it has; None where that is not known, and it may have others."""
        self.encoded: dict[str, StoredEncoding] = {}
        """The weights that the files have in a storage form, as far as `find_encoded` was asked for them."""
        self.headers: list[WeightsHeader] = []
        self.prefix = prefix
        for path in paths:
            header = read_header(path)
            self.headers.append(header)
            file = WeightsFile(header)
            for tensor in header.tensors:
                if tensor.name.startswith(prefix):
                    self.files[tensor.name[len(prefix) :]] = file, tensor

    def find_encoded(self) -> None:
        """Find the weights that the files have in a storage form: under their names, with their leaves beside them.

        Raises:
            InvalidInput: a format that has no form here, or a tensor of one is missing.
        """
        if self.encoded:
            return
        tensors = {name: tensor for name, (_, tensor) in self.files.items()}
        metadata = [header.metadata for header in self.headers]
        self.encoded, used = find_encodings(tensors, metadata, self.content_of, self.headers[0].path, self.prefix)
        files = {tensor.name: file for file, tensor in self.files.values()}
        for name in used:
            del self.files[name]
        for name, encoding in self.encoded.items():
            own = [*encoding.leaves, *([encoding.scale] if encoding.scale is not None else [])]
            for number, leaf in enumerate(own):
                self.files[leaf_name(name, number)] = files[leaf.name], leaf
            self.files[name] = files[own[0].name], own[0]

    def content_of(self, name: str) -> bytes:
        """Return the bytes of a small tensor."""
        room = torch.empty(self.files[name][1].weight_bytes, dtype=torch.uint8)
        self.files[name][0].read_into([(self.files[name][1].name, room)])
        return room.numpy().tobytes()

    @property
    def weight_names(self) -> list[str]:
        """The names of the weights, without those of leaves."""
        leaves = {leaf_name(name, number) for name, own in self.encoded.items() for number in range(own.num_tensors)}
        return [name for name in self.files if name not in leaves]

    def encoding_of(self, spec: TensorSpec) -> StoredEncoding | None:
        """Return in which form the files have a weight that came without memory; None if they have it in none."""
        if spec.leaves or not self.encoded or self.bare.isdisjoint((spec.name, *spec.other_names)):
            return None
        encoding = next((self.encoded[each] for each in (spec.name, *spec.other_names) if each in self.encoded), None)
        fits = encoding is not None and encoding.dtype == spec.dtype and not encoding.misfit(spec.name, spec.shape)
        return encoding if fits else None

    def has_encoded(self, spec: TensorSpec, kind: type[EncodedForm] | None) -> bool:
        """Whether the files have a weight that came without memory in a form, given by its class."""
        encoding = self.encoding_of(spec)
        return kind is not None and encoding is not None and encoding.numbers is kind.numbers

    def stored_form(self, name: str, shape: torch.Size) -> EncodedForm:
        """Return the form of a weight that the files have in one; reads the scale that it has beside its leaves."""
        encoding, scale = self.encoded[name], 1.0
        if encoding.scale is not None:
            (scale,) = struct.unpack("<f", self.content_of(leaf_name(name, len(encoding.leaves))))
            if not math.isfinite(scale):
                raise InvalidInput(f"{self.files[name][0].path}: {encoding.scale.name!r} is {scale}")
        return encoded_form(encoding.numbers).of_stored(shape, scale)

    def encoded_as(self, component: Component) -> frozenset[tuple[str, str]]:
        """Return the weights of a component's blocks that the files have in a storage form, each with its name."""
        if not self.encoded:
            return frozenset()
        found = [(spec.name, self.encoding_of(spec)) for block in component.blocks for spec in block.tensors]
        return frozenset((name, encoding.numbers.name) for name, encoding in found if encoding is not None)

    def add_mapped(self, name: str, file: WeightsFile, tensor: TensorHeader) -> None:
        """Have a weight that its module holds in a mapping of a file."""
        self.files[name] = file, tensor
        self.mapped.add(name)

    def note_bare(self, names: Iterable[str]) -> None:
        """Note for which weights, and buffers, a module comes without memory."""
        self.bare = frozenset(names)

    @property
    def paths(self) -> frozenset[str]:
        """The files that have weights of it."""
        return frozenset(str(file.path) for file, _ in self.files.values())

    @property
    def bytes_per_s(self) -> float | None:
        """How fast weights were read so far, from the disk or what the system kept of it; None before that."""
        return self.read_bytes / self.read_s if self.read_bytes and self.read_s else None

    def was_loaded(self, loading: Loading) -> None:
        """Note how the module was just made of these files, and that nothing has written to its weights since."""
        self.loading = loading

    def keep_pages(self, keeps: bool) -> None:
        """Say whether RAM has room for the pages of what is read from now on."""
        self.keeps_pages = keeps

    def warm(self, names: Iterable[str]) -> Iterator[int]:
        """Bring weights into the system's cache, file by file, as `WeightsFile.warm`."""
        by_file: dict[WeightsFile, list[str]] = defaultdict(list)
        for name in names:
            file, tensor = self.files[name]
            by_file[file].append(tensor.name)
        for file, stored_names in by_file.items():
            yield from file.warm(stored_names)

    def drop_kept(self) -> None:
        """Take what reads brought into the system's cache, and left there, out of it."""
        for file in {id(file): file for file, _ in self.files.values()}.values():
            file.drop_kept()

    def origin_of(self, spec: TensorSpec) -> Origin | None:
        """Return the tensor that a loaded module may have a weight from, by name, dtype and shape; None if unknown.

        A library may have changed the values as it loaded them.
        """
        if self.loading is None or not self.holds_as_it_is(spec):
            return None
        file, tensor = self.files[next(name for name in (spec.name, *spec.other_names) if name in self.files)]
        identity = self.loading.file_at(file.path)
        return None if identity is None else Origin(identity, tensor)

    def alias(self, name: str, stored_name: str) -> None:
        """Add a name by which a weight is found."""
        self.files[name] = self.files[stored_name]
        if stored_name not in self.encoded:
            self.encoded.pop(name, None)
        elif name != stored_name:
            self.encoded[name] = self.encoded[stored_name]
            for number in range(self.encoded[name].num_tensors):
                self.files[leaf_name(name, number)] = self.files[leaf_name(stored_name, number)]

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename weights, by their old names; all at once, because a new name may be another weight's old one."""
        moved = {new: self.encoded[old] for old, new in names.items() if old in self.encoded}
        leaves = {
            leaf_name(new, number): self.files[leaf_name(old, number)]
            for old, new in names.items()
            if old in self.encoded
            for number in range(self.encoded[old].num_tensors)
        }
        self.files.update({new: self.files[old] for old, new in names.items()} | leaves)
        for new in names.values():
            self.encoded.pop(new, None)
        self.encoded.update(moved)
        self.mapped = {names.get(name, name) for name in self.mapped}
        self.bare = frozenset(names.get(name, name) for name in self.bare)

    def alias_tied(self, component: Component) -> None:
        """Make each tied weight known by the name that its component gives it, whichever of its names the files have.

        To be called before weights are read by their component's names.
        """
        for spec in all_tensors(component):
            stored_name = next((name for name in (spec.name, *spec.other_names) if name in self.files), spec.name)
            if stored_name != spec.name:
                self.alias(spec.name, stored_name)

    def holds(self, spec: TensorSpec) -> bool:
        """Whether a file has a weight, under any name of a tied one: as it is, in a storage form, or to be cast."""
        if self.holds_as_it_is(spec) or self.encoding_of(spec) is not None:
            return True
        return self.stored_dtype(spec) is not None

    def holds_as_it_is(self, spec: TensorSpec) -> bool:
        """Whether a file has a weight to the byte."""
        tensor = self.find(spec)
        is_it = tensor is not None and (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
        return is_it and not self.is_encoded(spec)

    def is_encoded(self, spec: TensorSpec) -> bool:
        """Whether a file has a weight in a storage form."""
        return bool(self.encoded) and not self.encoded.keys().isdisjoint((spec.name, *spec.other_names))

    def stored_dtype(self, spec: TensorSpec) -> str | None:
        """Return in which other dtype a file has a weight that is cast as it is read; None if it is not.

        Only of a weight that came without memory: of any other the module may have another value than the file.
        """
        tensor = self.find(spec)
        if (
            tensor is None
            or self.is_encoded(spec)
            or tensor.shape != spec.shape
            or self.bare.isdisjoint((spec.name, *spec.other_names))
        ):
            return None
        stored = torch_dtype(tensor.dtype)
        if stored in EIGHT_BITS and self.is_scaled(tensor.name):
            return None
        return tensor.dtype if can_cast(stored, torch_dtype(spec.dtype)) else None

    def are_bare(self, component: Component) -> bool:
        """Whether a module came without memory for all weights of a component."""
        return all(not self.bare.isdisjoint((spec.name, *spec.other_names)) for spec in weights_of(component))

    def stored_as(self, component: Component) -> frozenset[tuple[str, str]]:
        """Return the weights of a component that are cast as they are read, each with the dtype that its file has."""
        found = [(spec.name, self.stored_dtype(spec)) for spec in weights_of(component)]
        return frozenset((name, dtype) for name, dtype in found if dtype is not None)

    def find(self, spec: TensorSpec) -> TensorHeader | None:
        """Return what a file has under a name of a plain weight."""
        stored_name = next((name for name in (spec.name, *spec.other_names) if name in self.files), None)
        return None if spec.leaves or stored_name is None else self.files[stored_name][1]

    @cached_property
    def scales(self) -> tuple[str, ...]:
        """The names of what may be scales in the files."""
        files = {id(file): file for file, _ in self.files.values()}.values()
        names = (name for file in files for name in file.tensors)
        return tuple(name for name in names if any(word in name.rpartition(".")[2].lower() for word in SCALES))

    def is_scaled(self, name: str) -> bool:
        """Whether a file may have a scale of a weight: below its layer, or with a name that begins as its own."""
        layer = name.rpartition(".")[0]
        return any(scale != name and scale.startswith(f"{layer}." if layer else name) for scale in self.scales)

    def torch_dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which a file has a weight; None where torch has none such."""
        return torch_dtype(self.files[name][1].dtype)

    def position_of(self, name: str) -> tuple[str, int]:
        """Return in which file a weight lies, and where it begins there."""
        file, tensor = self.files[name]
        return str(file.path), tensor.begin

    def can_map(self, component: Component, lacking: Collection[str]) -> bool:
        """Whether all weights of a component but the lacking ones can be used where they lie in their files."""
        return all(self.is_mappable(spec) for spec in weights_of(component) if spec.name not in lacking)

    def is_mappable(self, spec: TensorSpec) -> bool:
        """Whether a file has a weight to the byte, where its dtype may lie in memory, and torch has that dtype.

        Never on Windows: a mapped file cannot be replaced there.
        """
        found = self.find(spec)
        if sys.platform == "win32" or found is None or torch_dtype(found.dtype) is None:
            return False
        return self.holds_as_it_is(spec) and is_aligned(found)

    def are_replaced(self, names: Iterable[str]) -> bool:
        """Whether the paths of weights lead to other files than those that were read, or to none."""
        return all(
            file.is_replaced() for file in {id(file): file for file, _ in (self.files[name] for name in names)}.values()
        )

    def refuse_overwritten(self) -> None:
        """Refuse files that were changed where they are since they were mapped. Raises `InvalidInput`."""
        for file in {id(file): file for file, _ in self.files.values()}.values():
            file.refuse_overwritten()

    def covers(self, component: Component) -> bool:
        """Whether the files have every weight of a component; buffers are few bytes and may be elsewhere."""
        return not self.find_lacking(component)

    def covers_as_it_is(self, component: Component) -> bool:
        """Whether the files have every weight of a component to the byte."""
        return all(self.holds_as_it_is(spec) for spec in weights_of(component))

    def find_lacking(self, component: Component, *, among_mapped: bool = False) -> frozenset[str]:
        """Return the names of the weights that the files do not have.

        ``among_mapped``: only what was mapped counts as being there.
        """
        return frozenset(
            spec.name
            for spec in weights_of(component)
            if not self.holds(spec) or (among_mapped and spec.name not in self.mapped)
        )

    def take_mapped(self, other: WeightsSource | None) -> None:
        """Have as mapped what another source found so now, where it is the tensor that this one has of the name."""
        self.mapped = set()
        for name in other.mapped if other is not None else ():
            own, found = self.files.get(name), other.files[name] if other is not None else None
            if own is not None and found is not None and (own[0].version, own[1]) == (found[0].version, found[1]):
                self.mapped.add(name)

    def read_into(
        self,
        targets: Iterable[Target],
        *,
        progress: Callable[[int], None] | None = None,
        drop_pages: bool = False,
    ) -> bool:
        """Fill CPU tensors with weights, file by file; as `WeightsFile.read_into`. Progress counts through all.

        What a file has in a storage form is decoded, one weight at a time. A target of another floating dtype gets the
        whole weight, cast. That takes no memory beside the target if it is the wider one, else as much as the file has
        of the weight, of one at a time.

        While RAM has room for them (`keep_pages`) ``drop_pages`` notes the pages instead, for `drop_kept`.
        """
        with self.held() as files:
            return self.read_from(files, targets, progress, handles_pages=drop_pages)

    @contextmanager
    def held(self) -> Iterator[OpenFiles]:
        """Keep files and reading threads open for all reads within this context."""
        files = self.hold()
        try:
            yield files
        finally:
            self.let_go()

    def hold(self) -> OpenFiles:
        """Do what `held` does, until `let_go` was called as often. On Windows an open file cannot be replaced."""
        if self.opened is None:
            self.opened = OpenFiles()
        self.num_holders += 1
        return self.opened

    def let_go(self) -> None:
        self.num_holders -= 1
        if not self.num_holders and self.opened is not None:
            opened, self.opened = self.opened, None
            opened.close()

    def read_from(
        self,
        files: OpenFiles,
        targets: Iterable[Target],
        progress: Callable[[int], None] | None,
        *,
        handles_pages: bool,
    ) -> bool:
        targets = list(targets)
        if self.encoded:
            encoded = [target for target in targets if target[0] in self.encoded]
            num_bytes = sum(target[1].nbytes for target in encoded)
            others = [target for target in targets if target[0] not in self.encoded]
            num_done = 0
            for name, target, *begin in encoded:
                assert not begin and target.is_floating_point(), f"{name} is encoded in its file"
                self.read_decoded(files, name, target, handles_pages=handles_pages)
                num_done += target.nbytes
                if progress is not None:
                    progress(num_done)
            if progress is not None and num_bytes:
                progress = count_on(progress, num_bytes, sum(target[1].nbytes for target in others))
            if not others:
                return False
            targets = others
        begin_s = time.perf_counter()
        readings = [(self.files[name][0], Reading(self.files[name][1], *target)) for name, *target in targets]
        together = [(file, reading) for file, reading in readings if not reading.needs_room]
        one_by_one = [[(file, reading)] for file, reading in readings if reading.needs_room]
        num_before = 0
        were_cached = []
        for batch in (together, *one_by_one):
            by_file: dict[WeightsFile, list[Reading]] = defaultdict(list)
            for file, reading in batch:
                by_file[file].append(reading)
            for file, parts in by_file.items():
                num_bytes = sum(part.target.nbytes for part in parts)
                tell = None if progress is None else count_on(progress, num_before, num_bytes)
                were_cached.append(
                    file.read_into(
                        [part.part() for part in parts],
                        progress=tell,
                        drop_pages=handles_pages and not self.keeps_pages,
                        keep_pages=handles_pages and self.keeps_pages,
                        files=files,
                    )
                )
                for part in parts:
                    self.read_bytes += part.num_read
                    part.finish()
                if tell is not None and any(part.casts for part in parts):
                    tell(num_bytes)
                num_before += num_bytes
        self.read_s += time.perf_counter() - begin_s
        return all(were_cached)

    def read_decoded(self, files: OpenFiles, name: str, target: torch.Tensor, *, handles_pages: bool) -> None:
        """Read a weight that a file has in a storage form, and decode it."""
        encoding = self.encoded[name]
        dtype = torch_dtype(encoding.dtype)
        wide = target if target.dtype is dtype else torch.empty(target.shape, dtype=dtype)
        kind = encoded_form(encoding.numbers)
        with torch.inference_mode(False):
            leaves = [
                torch.empty(leaf.shape, dtype=leaf.dtype)
                for leaf in kind.empty_leaves(torch.empty(target.shape, dtype=dtype, device="meta"))
            ]
        to_read = [(leaf_name(name, number), leaf) for number, leaf in enumerate(leaves)]
        self.read_from(files, to_read, None, handles_pages=handles_pages)
        self.stored_form(name, target.shape).decode_into(wide, leaves)
        if wide is not target:
            target.copy_(wide)


def all_tensors(component: Component) -> list[TensorSpec]:
    return [*weights_of(component), *component.buffers]


def weights_of(component: Component) -> list[TensorSpec]:
    return [tensor for block in [*component.blocks, component.non_block] for tensor in block.tensors]


def count_on(progress: Callable[[int], None], num_before: int, most: int) -> Callable[[int], None]:
    """Return what adds what was done before; what is cast to fewer bytes counts as no more than these."""
    return lambda num_done: progress(num_before + min(num_done, most))
