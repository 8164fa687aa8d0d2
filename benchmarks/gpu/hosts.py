"""Part c: the real ComfyUI with models larger than what is left of the card, under core's engines and under ours.

Each session is a host of its own: it loads one model, with so much of the card free, and later with more or less. The
most telling come first: 8 GB free under every engine, with a switch to a second model and back.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from highwater.tests.comfyui.graphs import Graph, Link, new_run
from highwater.tests.comfyui.host_process import HostDidNotStart, HostFiles, HostProcess, find_host

from ..case import Result
from ..comfy import DEVICE_BYTES, KEEP_LOADED, KEPT_BY_CORE
from .model_file import SHAPES, NoTimeToWrite, Shape, ensure_model, remove_models
from .record import RecordedRow, cell
from .setting import TIME_IS_UP, Setting

__all__ = ["run", "tabulate"]

PACK = Path(__file__).with_name("host_pack")
NUM_STEPS = 4
# What a host takes to start and to load; less time than that is left for the next --resume. The model file is written
# before, if it is not there.
SESSION_S = 45
LOADER = "HighwaterLoadDiffusionModel"
STATIC = "--disable-dynamic-vram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Who moves the weights: core's loader or ours, and in which kind of host."""

    label: str
    input: str = ""
    """What our loader's input ``engine`` gets; empty: core's loader."""
    arguments: tuple[str, ...] = ()

    @property
    def is_static(self) -> bool:
        return STATIC in self.arguments


ENGINES = (
    Engine(label="core, dynamic"),
    Engine(label="ours, blocks", input="blocks"),
    Engine(label="core, static", arguments=(STATIC,)),
    Engine(label="ours, dynamic", input="dynamic"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One host: a model, an engine, the GB to leave free one after the other, and whether it switches models."""

    shape: str
    engine: Engine
    free_gb: tuple[int, ...]
    switches: bool = False

    def key(self, what: int | str) -> str:
        return f"{self.shape}, {self.engine.label}, {f'{what} GB free' if isinstance(what, int) else what}"

    @property
    def keys(self) -> list[str]:
        return [self.key(gb) for gb in self.free_gb] + ([self.key(SWITCH)] if self.switches else [])


SWITCH = "switch"
TURNS = ("A", "B", "A again", "B again")
SESSIONS = (
    *(Session(shape="Flux 12B", engine=engine, free_gb=(8,), switches=True) for engine in ENGINES),
    *(Session(shape="Flux 12B", engine=engine, free_gb=(24, 16, 12)) for engine in ENGINES),
    *(Session(shape="Wan 14B", engine=engine, free_gb=(12,)) for engine in ENGINES),
)


def run(setting: Setting) -> None:
    files = find_host()
    if files is None:
        for session in SESSIONS:
            for key in session.keys:
                setting.add(key, {}, "no ComfyUI: name one in COMFYUI_DIR, its Python in COMFYUI_PYTHON")
        return
    broken: dict[tuple[str, ...], str] = {}
    for session in SESSIONS:
        missing = [key for key in session.keys if not setting.is_measured(key)]
        if not missing:
            continue
        problem = broken.get(session.engine.arguments, "")
        if not problem and setting.left_s() > SESSION_S:
            try:
                run_session(setting, files, session)
                problem = "the session gave no such row"
            except NoTimeToWrite as error:
                problem = f"{TIME_IS_UP}: {error}"
            except Exception as error:
                problem = TIME_IS_UP if setting.left_s() <= 1 else describe(error)
                if isinstance(error, HostDidNotStart):  # nor will it the next time
                    broken[session.engine.arguments] = problem
        for key in missing:
            if key not in {
                row.key for row in setting.record.rows(setting.part) if row.key in missing and not row.error
            }:
                setting.add(key, {}, problem or TIME_IS_UP)
    if all(setting.is_measured(key) for session in SESSIONS for key in session.keys):
        remove_models(setting.rehearses)


def describe(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[0][:120]}{' ... ' + lines[-1][:120] if len(lines) > 1 else ''}"


def run_session(setting: Setting, files: HostFiles, session: Session) -> None:
    """Measure what is missing of a session."""
    shape = SHAPES[session.shape]
    models = ensure_model(shape, setting.rehearses, lambda: setting.left_s() - SESSION_S)
    with start_host(setting, files, session, models) as host:
        bench = Bench(setting=setting, host=host, session=session, shape=shape)
        levels = [free_gb for free_gb in session.free_gb if not setting.is_measured(session.key(free_gb))]
        for number, free_gb in enumerate(levels):
            bench.measure_level(free_gb, is_fresh=not number)
        if session.switches and not setting.is_measured(session.key(SWITCH)):
            bench.measure_switch(is_fresh=not levels)


class MeasuringHost(HostProcess):
    """A host that finds what the Python of the benchmark finds: its packages may be in folders of their own."""

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        here = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        rig = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in here]
        return {**environment, "PYTHONPATH": os.pathsep.join([*rig, *here])}


@contextlib.contextmanager
def start_host(setting: Setting, files: HostFiles, session: Session, models: Path) -> Iterator[HostProcess]:
    """Start a host, which is killed when the part's time is up."""
    static = session.engine.is_static
    where: dict[str, Any] = {"on_gpu": True}
    if setting.rehearses:
        where = {"total_bytes": [DEVICE_BYTES], "strict": False, "dynamic": "" if static else "core"}
    host = MeasuringHost(files, models=models, arguments=[*KEEP_LOADED, *session.engine.arguments], **where)
    (host.base / "custom_nodes" / "highwater_gpu").symlink_to(PACK)
    page = host.base / "page"  # nothing is shown: the host need not have its own
    page.mkdir()
    (page / "index.html").write_text("<html></html>")
    host.arguments += ["--front-end-root", str(page)]

    def stop() -> None:
        if hasattr(host, "process"):
            host.process.kill()

    timer = threading.Timer(max(1.0, setting.left_s()), stop)
    timer.start()
    try:
        with host:
            yield host
    finally:
        timer.cancel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A host that measures."""

    setting: Setting
    host: HostProcess
    session: Session
    shape: Shape

    def measure_level(self, free_gb: int, *, is_fresh: bool) -> None:
        """Write the row of one amount of free memory: first image, steps, then copies in a prompt of their own."""
        if not is_fresh:
            self.host.forget()
        free = self.leave_free(free_gb)
        self.host.post("/highwater_gpu/watch")
        first_s, latent = self.sample()
        self.sample()
        seen = self.host.get("/highwater_gpu/seen")
        values = {
            "first_image_s": first_s if is_fresh else None,
            "s_per_step": seen.get("s_per_step"),
            "peak_bytes": seen["peak_bytes"],
            "free_bytes": free,
            "patcher": seen.get("patcher"),
            **self.host_bytes(),
        }
        self.host.post("/highwater_gpu/watch")
        self.sample(counts_copies=True)
        seen = self.host.get("/highwater_gpu/seen")
        values |= {"copied_bytes": seen.get("copied_bytes"), "overlap": seen.get("overlap")}
        values |= {"digest": digest(latent), "finite": all(bool(part.isfinite().all()) for part in latent.values())}
        self.setting.add(self.session.key(free_gb), values)

    def measure_switch(self, *, is_fresh: bool) -> None:
        """Write what prompts take that turn to a second model and back, after one that loads the first."""
        if is_fresh:  # an earlier run measured the level
            self.leave_free(self.session.free_gb[-1])
            self.sample()
        times = {turn: self.sample(other=turn.startswith("B"))[0] for turn in TURNS}
        self.setting.add(self.session.key(SWITCH), {"seconds": times, **self.host_bytes()})

    def leave_free(self, free_gb: int) -> int:
        free_bytes = free_gb * 10**9
        if self.setting.rehearses:  # a tiny model is 7.8 MiB, and core keeps some memory for itself
            free_bytes = KEPT_BY_CORE + (free_gb << 19)
        return self.host.post("/highwater_gpu/leave", {"free_bytes": free_bytes})["free_bytes"]

    def host_bytes(self) -> dict[str, int]:
        memory = psutil.Process(self.host.process.pid).memory_info()
        return {"rss_bytes": memory.rss, "rss_in_files_bytes": getattr(memory, "shared", 0)}

    def sample(
        self, *, other: bool | int = False, counts_copies: bool = False
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Run one prompt; returns its seconds and what it made.

        Raises:
            RuntimeError: it failed, or this pack's loader cannot take this engine.
        """
        num_steps = 2 if counts_copies else NUM_STEPS
        graph = Graph()
        model = self.load(graph, f"{'other_' if other else ''}{self.shape.name}.safetensors")
        model = graph.add(
            "GpuMeasure", model=model, num_steps=num_steps, counts_copies=counts_copies, run=next(new_run)
        )
        graph.keep(self.sampler(graph, model, num_steps))
        begin_s = time.monotonic()
        result = self.host.run(graph.nodes)
        seconds = time.monotonic() - begin_s
        if result.outcome != "success":
            raise RuntimeError(result.brief_error or result.outcome)
        return seconds, result.kept()

    def load(self, graph: Graph, name: str) -> Link:
        engine = self.session.engine
        if not engine.input:
            return graph.add("UNETLoader", unet_name=name, weight_dtype="default")
        inputs = self.host.get(f"/object_info/{LOADER}")[LOADER]["input"]
        if "engine" in {**inputs.get("required", {}), **inputs.get("optional", {})}:
            chosen = {"engine": engine.input}
        elif engine.input == "blocks":
            chosen = {}
        else:
            raise RuntimeError(f"{LOADER} has no input engine: this version loads blocks only")
        request = {"profile": "auto", "precision": "as stored", "placement": "default"}
        return graph.add(LOADER, unet_name=name, **request, **chosen)

    def sampler(self, graph: Graph, model: Link, num_steps: int) -> Link:
        tiny = self.setting.rehearses
        tokens, width = self.shape.text_tokens[tiny], self.shape.text_width[tiny]
        positive = graph.conditioning(1, num_tokens=tokens, width=width)
        if self.shape.name == "wan":
            size = {"width": 64, "height": 64, "length": 5} if tiny else {"width": 832, "height": 480, "length": 33}
            latent = graph.add("EmptyHunyuanLatentVideo", **size, batch_size=1)
        else:
            side = 64 if tiny else 1024
            latent = graph.add("EmptySD3LatentImage", width=side, height=side, batch_size=1)
        return graph.sampler(model, positive, positive, latent, steps=num_steps)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a few digits that are the same for the same bits."""
    import hashlib

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


# -- the tables


def tabulate(rows: Sequence[RecordedRow], setting: Setting) -> list[Result]:
    by_key = {row.key: row for row in rows}
    steps, switches, ratios, switch_ratios = [], [], [], []
    for session in SESSIONS:
        for free_gb in session.free_gb:
            row = by_key.get(session.key(free_gb))
            if row is None:
                continue
            beside = {engine.label: peer(by_key, session, engine, free_gb) for engine in ENGINES}
            ratio = over(row.values.get("s_per_step"), beside["core, dynamic"].get("s_per_step"))
            if ratio is not None and session.engine.input:
                ratios.append(ratio)
            steps.append(describe_level(session, free_gb, row, ratio, beside))
        row = by_key.get(session.key(SWITCH))
        if session.switches and row is not None:
            times = row.values.get("seconds", {})
            core = peer(by_key, session, ENGINES[0], SWITCH).get("seconds", {})
            ratio = over(times.get("A again"), core.get("A again"))
            if ratio is not None and session.engine.input:
                switch_ratios.append(ratio)
            switches.append(describe_switch(session, row, ratio))
    machine = setting.card["name"]
    results = []
    if steps:
        question = (
            f"ComfyUI {find_version()} on {machine}, the rest of the card filled: random bf16 models, {NUM_STEPS} "
            "steps, 1024 x 1024 for Flux and 832 x 480 x 33 for Wan. First image: from the prompt's arrival in a new "
            "host, the file in the system's cache; only of what a host runs first. Copies are those of one step; peaks "
            "are the driver's, beside the context. RSS in files is what the system may drop."
        )
        meaning = "seconds per step, ours over core's dynamic VRAM at the same free memory, worst of them"
        results.append(Result(question=question, rows=steps, ratio=max(ratios, default=float("nan")), meaning=meaning))
    if switches:
        question = f"A prompt of {NUM_STEPS} steps each, in turn of two models of the same size, with 8 GB free."
        meaning = "seconds of A again, ours over core's dynamic VRAM, worst of them"
        ratio = max(switch_ratios, default=float("nan"))
        results.append(Result(question=question, rows=switches, ratio=ratio, meaning=meaning))
    return results


def peer(by_key: Mapping[str, RecordedRow], session: Session, engine: Engine, what: int | str) -> Mapping[str, Any]:
    """Return what another engine took for the same."""
    row = by_key.get(Session(shape=session.shape, engine=engine, free_gb=()).key(what))
    return row.values if row is not None else {}


def over(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def find_version() -> str:
    files = find_host()
    if files is None:
        return ""
    found = re.search(r'__version__ = "(.*)"', (files.directory / "comfyui_version.py").read_text())
    return found[1] if found else ""


def describe_level(
    session: Session, free_gb: int, row: RecordedRow, ratio: float | None, beside: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    values = row.values
    reference = beside["core, static"].get("digest")
    same = "-" if not reference or not values.get("digest") else str(values["digest"] == reference)
    return {
        "model": session.shape,
        "engine": session.engine.label,
        "free, GB": str(free_gb),
        "s/step": cell(row.error) or in_s(values.get("s_per_step")),
        "over core dynamic": in_ratio(ratio),
        "to device, GB/step": in_gb(values.get("copied_bytes")),
        "overlap": "-" if values.get("overlap") is None else f"{values['overlap']:.0%}",
        "peak device, GB": in_gb(values.get("peak_bytes")),
        "RSS, GB": in_gb(values.get("rss_bytes")),
        "of it in files, GB": in_gb(values.get("rss_in_files_bytes")),
        "first image, s": in_s(values.get("first_image_s")),
        "patcher": str(values.get("patcher") or "-"),
        "as core static": {"True": "equal", "False": "DIFFERS"}.get(same, "-"),
    }


def describe_switch(session: Session, row: RecordedRow, ratio: float | None) -> dict[str, str]:
    times = row.values.get("seconds", {})
    return {
        "model": session.shape,
        "engine": session.engine.label,
        **{f"{name}, s": cell(row.error) or in_s(times.get(name)) for name in TURNS},
        "over core dynamic": in_ratio(ratio),
        "RSS, GB": in_gb(row.values.get("rss_bytes")),
    }


def in_s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def in_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def in_gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.4g}"
