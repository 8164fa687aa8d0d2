"""The weights of a component in its files, found by the names that its module gives them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .component import Component, TensorSpec
from .file_origin import Origin
from .file_reader import OpenFiles, Target, WeightsFile
from .loading import Loading
from .safetensors_header import TensorHeader, read_header

__all__ = ["WeightsSource"]


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
        self.keeps_pages = False
        """Whether the system keeps what is read in its cache: RAM has room for it."""
        self.loading: Loading | None = None
        """How the module got the weights that it has; None where that is not known, and it may have others."""
        for path in paths:
            header = read_header(path)
            file = WeightsFile(header)
            for tensor in header.tensors:
                if tensor.name.startswith(prefix):
                    self.files[tensor.name[len(prefix) :]] = file, tensor

    def add_mapped(self, name: str, file: WeightsFile, tensor: TensorHeader) -> None:
        """Have a weight that its module holds in a mapping of a file."""
        self.files[name] = file, tensor
        self.mapped.add(name)

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
        stored_name = next((name for name in (spec.name, *spec.other_names) if name in self.files), None)
        if self.loading is None or stored_name is None or not self.holds(spec):
            return None
        file, tensor = self.files[stored_name]
        identity = self.loading.file_at(file.path)
        return None if identity is None else Origin(identity, tensor)

    def alias(self, name: str, stored_name: str) -> None:
        """Add a name by which a weight is found."""
        self.files[name] = self.files[stored_name]

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename weights, by their old names; all at once, because a new name may be another weight's old one."""
        self.files.update({new: self.files[old] for old, new in names.items()})
        self.mapped = {names.get(name, name) for name in self.mapped}

    def alias_tied(self, component: Component) -> None:
        """Make each tied weight known by the name that its component gives it, whichever of its names the files have.

        To be called before weights are read by their component's names.
        """
        for spec in all_tensors(component):
            stored_name = next((name for name in (spec.name, *spec.other_names) if name in self.files), spec.name)
            if stored_name != spec.name:
                self.alias(spec.name, stored_name)

    def holds(self, spec: TensorSpec) -> bool:
        """Whether a file has a weight as it is, to the byte, under any name of a tied one."""
        stored_name = next((name for name in (spec.name, *spec.other_names) if name in self.files), None)
        if spec.leaves or stored_name is None:
            return False
        tensor = self.files[stored_name][1]
        return (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)

    def position_of(self, name: str) -> tuple[str, int]:
        """Return in which file a weight lies, and where it begins there."""
        file, tensor = self.files[name]
        return str(file.path), tensor.begin

    def are_replaced(self, names: Iterable[str]) -> bool:
        """Whether the paths of weights lead to other files than those that were read, or to none."""
        return all(
            file.is_replaced() for file in {id(file): file for file, _ in (self.files[name] for name in names)}.values()
        )

    def covers(self, component: Component) -> bool:
        """Whether the files have every weight of a component; buffers are few bytes and may be elsewhere."""
        return not self.find_lacking(component)

    def find_lacking(self, component: Component, *, among_mapped: bool = False) -> frozenset[str]:
        """Return the names of the blocks of which the files do not have every weight, ``""`` for the non-block ones.

        ``among_mapped``: only what was mapped counts as being there.
        """
        blocks = [*component.blocks, component.non_block]
        has = [
            all(self.holds(spec) and (spec.name in self.mapped or not among_mapped) for spec in block.tensors)
            for block in blocks
        ]
        return frozenset(block.name for block, has_all in zip(blocks, has, strict=True) if not has_all)

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
        by_file: dict[WeightsFile, list[Target]] = defaultdict(list)
        for name, *rest in targets:
            file, tensor = self.files[name]
            by_file[file].append((tensor.name, *rest))
        num_before = 0
        begin_s = time.perf_counter()
        were_cached = []
        for file, parts in by_file.items():
            tell = None if progress is None else count_on(progress, num_before)
            were_cached.append(
                file.read_into(
                    parts,
                    progress=tell,
                    drop_pages=handles_pages and not self.keeps_pages,
                    keep_pages=handles_pages and self.keeps_pages,
                    files=files,
                )
            )
            num_before += sum(part[1].nbytes for part in parts)
        self.read_bytes += num_before
        self.read_s += time.perf_counter() - begin_s
        return all(were_cached)


def all_tensors(component: Component) -> list[TensorSpec]:
    return [tensor for block in [*component.blocks, component.non_block] for tensor in block.tensors] + [
        *component.buffers
    ]


def count_on(progress: Callable[[int], None], num_before: int) -> Callable[[int], None]:
    return lambda num_done: progress(num_before + num_done)
