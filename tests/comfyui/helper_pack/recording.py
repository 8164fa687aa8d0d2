"""Forwards whose allocations are recorded, as core's compiler does from 0.35 on; this core has none.

HIGHWATER_TEST_RECORDS says by what: "stand-in" is `highwater_test_recorder`, "aimdo" comfy-aimdo's own (0.6.0; it ends
the process where the stand-in tells of a fault). With " unguarded" behind it nothing can be paused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["TestRecord", "TestRecordControl", "TestRecorded"]

WAY, _, HOW = os.environ.get("HIGHWATER_TEST_RECORDS", "").partition(" ")


class AimdoRecorder:
    """comfy-aimdo's recording of the default stream of the first device, called as core calls it."""

    def __init__(self) -> None:
        import comfy_aimdo.malloc_graph

        self.record = comfy_aimdo.malloc_graph.record
        self.stream = SimpleNamespace(device=SimpleNamespace(index=0), cuda_stream=0)
        self.graphs: dict[int, Any] = {}
        self.active: set[int] = set()
        self.num_recorded = self.num_pauses = 0
        sys.modules["torch_npu"].driver.library.fake_cuda_take_allocations(1)

    @property
    def faults(self) -> list[str]:
        return [
            f"{graph.rogue_count} allocations outlive a block" for graph in self.graphs.values() if graph.rogue_count
        ]

    def here(self) -> Any:
        return self.graphs.get(get_ident()) if get_ident() in self.active else None

    def begin(self) -> None:
        if get_ident() in self.graphs:
            self.graphs[get_ident()].push()
        else:
            self.graphs[get_ident()] = self.record(self.stream)
        self.active.add(get_ident())
        self.num_recorded += 1

    def iterate(self, name: str | None) -> None:
        self.graphs[get_ident()].iterate(name)

    def end(self) -> None:
        self.graphs[get_ident()].pop()
        self.active.discard(get_ident())

    def abort(self) -> None:
        graph = self.graphs.pop(get_ident(), None)
        if graph is not None and get_ident() in self.active:
            graph.abort()
        self.active.discard(get_ident())

    def forget(self) -> None:
        self.graphs.clear()
        self.num_recorded = self.num_pauses = 0

    def pause_malloc_graph(self, sync: bool = False) -> Pausing:
        return Pausing(self, sync)


class Pausing:
    """As core's: it looks for the recording at both ends."""

    def __init__(self, recorder: AimdoRecorder, sync: bool) -> None:
        self.recorder, self.sync = recorder, sync

    def __enter__(self) -> None:
        graph = self.recorder.here()
        if graph is not None:
            graph.pause(sync=self.sync)
            self.recorder.num_pauses += 1

    def __exit__(self, *_: Any) -> None:
        graph = self.recorder.here()
        if graph is not None:
            graph.resume(sync=self.sync)


def start() -> Any:
    if not WAY:
        return None
    if WAY == "aimdo":
        recorder: Any = AimdoRecorder()
    else:
        from highwater_test_recorder import Recorder

        folder = sys.modules["torch_npu"].SETTINGS["build_directory"]
        recorder = Recorder(os.path.join(folder, "highwater_simdevice.so"))
        recorder.take_allocations()
    if HOW != "unguarded":
        import comfy.model_prefetch

        comfy.model_prefetch.pause_malloc_graph = recorder.pause_malloc_graph
    return recorder


recorder = start()


def recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Record what a function allocates; its result is copied, in a pause: it is the caller's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.begin()
        try:
            result = forward(*args, **kwargs)
            with recorder.pause_malloc_graph():
                copied = copies(result)
            del result
        except BaseException:
            recorder.abort()
            raise
        recorder.end()
        return copied

    return call


def copies(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copies(item) for name, item in value.items()}
    return type(value)(copies(item) for item in value) if isinstance(value, list | tuple) else value


class Block:
    """One block of a transformer in a scope of its own; as core writes blocks for its compiler, it works in place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        recorder.iterate(self.name)
        result = extra["original_block"](args)
        kept = {name: args[name].copy_(tensor) for name, tensor in result.items()}
        del result
        recorder.iterate(None)
        return kept


class TestRecord:
    """Records the forwards of a Flux, as a whole and each block in it."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        apply = recorded(lambda apply_model, given: apply_model(given["input"], given["timestep"], **given["c"]))
        patched.set_model_unet_function_wrapper(apply)
        inner = patched.model.diffusion_model
        for kind, blocks in (("double_block", inner.double_blocks), ("single_block", inner.single_blocks)):
            for number in range(len(blocks)):
                patched.set_model_patch_replace(Block(f"{kind} {number}"), "dit", kind, number)
        return (patched,)


class RecordedModel:
    """A ControlNet's model, called in a recording."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forward = recorded(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class TestRecordControl:
    """Records the forwards of a ControlNet, as a whole."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"control_net": ("CONTROL_NET",)}})
    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, control_net: Any) -> tuple[Any]:
        patched = control_net.copy()
        patched.control_model = RecordedModel(control_net.control_model)
        return (patched,)


class TestRecorded:
    """Tells what the recordings met until now, and forgets it."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"after": ("*",)}})
    RETURN_TYPES = ()
    FUNCTION = "tell"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def tell(self, after: Any) -> dict[str, Any]:
        told = {"faults": recorder.faults[:20], "recorded": [recorder.num_recorded], "pauses": [recorder.num_pauses]}
        recorder.forget()
        return {"ui": told}
