"""Calls of the driver that fail while a prompt runs, each at several places, with and without the pack."""

from __future__ import annotations

import contextlib
from typing import Any

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import PromptResult

from .hosts import MIB, Part, Rig, difference, kept_by, leave

__all__ = ["measure_faults"]

# comfy-aimdo keeps 256 MiB free: not all of the larger model's 11 pages find room, so some leave for others.
FREE_BYTES = (256 + 352) * MIB
WIDE, SMALL = Loaders(engine="dynamic", profile="300MiB"), Loaders(engine="blocks")
PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
# Every allocation of torch is one: a prompt makes thousands.
MORE_PLACES = {"cuMemAlloc": {"first": 0.0, "5%": 0.05, "20%": 0.2, "middle": 0.5, "80%": 0.8, "last": 1.0}}
# Where one of these fails, the driver keeps the bytes: they cannot come back.
FREEING = {"cuMemFree", "cuMemUnmap", "cuMemRelease"}
# Made once in a process, for a locked buffer: reached in a new one only.
ONCE = {"cuMemAllocHost"}
SURVIVED, NOT_REACHED = "survived", "not reached"


class FaultedHost:
    """A host that runs one prompt over and over; where it did not survive a fault, the next begins in a new one."""

    def __init__(self, rig: Rig, *, with_pack: bool) -> None:
        self.rig, self.with_pack = rig, with_pack
        self.stack = contextlib.ExitStack()
        self.start()
        self.expected = kept_by(*self.run())
        first_calls = self.read()["driver"]["calls"]
        self.host.forget()
        self.host.ask_devices("reset")
        self.run()
        calls = self.read()["driver"]["calls"]
        self.num_calls = {name: count or first_calls[name] * (name in ONCE) for name, count in calls.items()}
        """Of each function in a prompt that begins with nothing loaded."""
        self.host.forget()

    def start(self) -> None:
        self.stack.close()
        self.host = self.stack.enter_context(self.rig.start(with_pack=self.with_pack))
        leave(self.host, FREE_BYTES)
        self.host.ask_devices("reset")

    def stop(self) -> None:
        self.stack.close()

    def read(self) -> Any:
        return self.host.ask_devices("read")

    def bytes_in_use(self) -> int:
        return int(self.read()["devices"][0]["used_bytes"])

    def run(self) -> tuple[Graph, PromptResult]:
        """Sample with a model of core's dynamic VRAM, then with one that blocks move, if there is the pack."""
        graph = Graph()
        for name, loaders in (("wide_flux", WIDE), ("tiny_flux", SMALL)):
            model = (loaders if self.with_pack else CORE).diffusion_model(graph, f"{name}.safetensors")
            graph.add("TestHold", value=model)
            graph.keep(sample_flux(graph, model, steps=1), name)
        return graph, self.host.run(graph.nodes)

    def fail(self, function: str, share: float) -> str:
        """Fail a call of a prompt; returns SURVIVED, NOT_REACHED, or what did not go on."""
        if function in ONCE:
            self.start()
        nth = 1 + int(share * (self.num_calls[function] - 1))
        try:
            outcome = self.judge(function, nth)
        except RuntimeError as error:  # of the harness: no answer to a prompt
            outcome = "the process ends" if self.host.process.poll() is not None else f"no answer: {error}"[:40]
        except OSError:
            outcome = "the process ends"
        if outcome != SURVIVED:
            self.start()
        return outcome

    def judge(self, function: str, nth: int) -> str:
        before = self.bytes_in_use()
        self.host.ask_devices("reset")
        self.host.ask_devices("fail_call", function=function, nth=nth)
        graph, result = self.run()
        num_calls = self.read()["driver"]["calls"][function]
        self.host.ask_devices("fail_call", function=function, nth=0)
        if num_calls < nth:
            return NOT_REACHED
        if result.outcome == "success" and difference(kept_by(graph, result), self.expected) != "equal":
            return "a wrong result"
        graph, result = self.run()
        if result.outcome != "success":
            return "the next prompt fails"
        if difference(kept_by(graph, result), self.expected) != "equal":
            return "the next result is wrong"
        self.host.forget()
        left = self.bytes_in_use() - before
        return SURVIVED if left <= 0 or function in FREEING else f"{left} bytes stay"


def measure_faults(rig: Rig) -> Part:
    """Fail each function that a prompt calls, at some of its calls, without and with the pack; about four minutes."""
    outcomes: dict[bool, dict[tuple[str, str], str]] = {}
    called: dict[bool, dict[str, int]] = {}
    for with_pack in (False, True):
        faulted = FaultedHost(rig, with_pack=with_pack)
        called[with_pack] = faulted.num_calls
        outcomes[with_pack] = {
            (function, place): faulted.fail(function, share)
            for function, num_calls in faulted.num_calls.items()
            for place, share in list(MORE_PLACES.get(function, PLACES).items())[:num_calls]
        }
        faulted.stop()
    core, ours = ({at: said for at, said in outcomes[pack].items() if said != NOT_REACHED} for pack in (False, True))
    rows, lost = [], []
    for function in called[True]:
        here = {place: said for (name, place), said in ours.items() if name == function}
        if not here:
            continue
        at_core = {place: said for (name, place), said in core.items() if name == function}
        not_survived = {place: said for place, said in here.items() if said != SURVIVED}
        lost += [place for place in not_survived if at_core.get(place, SURVIVED) == SURVIVED]
        rows.append(
            {
                "function": function,
                "calls": called[True][function],
                "failed": len(here),
                "survived": len(here) - len(not_survived),
                "core: failed": len(at_core),
                "core: survived": sum(said == SURVIVED for said in at_core.values()),
                "not survived": told(not_survived) or "",
                "core does not survive": told({place: said for place, said in at_core.items() if said != SURVIVED}),
            }
        )
    total = {"function": "all", "not survived": "", "core does not survive": ""}
    for column in ("calls", "failed", "survived", "core: failed", "core: survived"):
        total[column] = sum(row[column] for row in rows)
    rows.append({column: total[column] for column in rows[0]})
    sentence = (
        'Calls of the driver that fail with "out of memory" while a prompt runs that samples with both engines '
        "(without the pack: with core's twice). Survived: the prompt ends with an error or the right result, the next "
        "one with the right result, and /free gives every byte back that the driver took back."
    )
    num_survived = sum(said == SURVIVED for said in ours.values())
    return Part(sentence=sentence, rows=rows, num_held=num_survived, num_checks=num_survived + len(lost))


def told(outcomes: dict[str, str]) -> str:
    return "; ".join(f"{place}: {said}" for place, said in outcomes.items())
