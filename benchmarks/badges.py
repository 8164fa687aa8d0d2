"""What badges and the memory panel cost a run: measuring its nodes, telling the page, and answering what it asks.

The run is the demo's: the tiny Flux in 4 steps on a simulated device, after a first one, so that nothing is loaded from
files. The time of each part, and of the run, is CPU time of this process, the smallest of many; how often each part
comes in a run is counted. The page asks some time after a message, and once a second while a node reports its progress:
once for all that came meanwhile. An answer is timed with everything that aiohttp does for it; another process asks,
over one connection, as a browser does. Nothing of that happens while nothing runs; the last row counts. The ratio is of
the badges alone: the panel is closed until a user opens it, and then asks as often, for more.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from highwater.headless import simdevice

from .case import Result

# As web/server.js has them.
ASK_S, ASK_IN_NODE_S = 0.2, 1.0
# What the page asks for while the panel is closed. Compared with what a page really asks in tests/web/test_browser.py.
NOW = "components,loaders,open_nodes"
# What it asks for while the panel is open and a run goes on, of what came since the last answer. Compared with what a
# page really asks in tests/comfyui/test_panel.py.
PANEL = "devices,components,loaders,open_nodes,runs,nodes,samples,events"
NUM_RUNS = 5
NUM_CALLS = 200
NUM_TURNS = 5
IDLE_S = 3.0
TARGET = 0.005


# A client: each turn asks so many times, one after the other.
ASK = """
import http.client, sys
port, path, number = sys.argv[1:]
server = http.client.HTTPConnection("127.0.0.1", int(port))
def ask():
    server.request("GET", path)
    with server.getresponse() as answer:
        assert answer.status == 200 and answer.read()
ask()
print("ready", flush=True)
for _ in sys.stdin:
    for _ in range(int(number)):
        ask()
    print("done", flush=True)
    print("ready", flush=True)
"""


def smallest_ms(call: Callable[[], Any], num_calls: int = NUM_CALLS) -> float:
    """Return the smallest CPU milliseconds of a call in this process."""
    best = float("inf")
    for _ in range(num_calls):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return 1e3 * best


def num_asks(wishes: Iterable[tuple[float, float]]) -> int:
    """Return how often a page asks: once for all that comes meanwhile, when the first of it may wait no longer.

    Args:
        wishes: when something came, and how long an answer to it may wait, in seconds.
    """
    asked, due = 0, float("inf")
    for now, delay_s in sorted(wishes):
        if now > due:
            asked, due = asked + 1, float("inf")
        due = min(due, now + delay_s)
    return asked + (due < float("inf"))


def measure() -> Result:
    """Measure all of it; half a minute."""
    simdevice.install("sim", num_devices=1)
    simdevice.configure([simdevice.SimDeviceSpec(total_bytes=64 << 20)])
    with tempfile.TemporaryDirectory() as folder:
        return measure_in(Path(folder))


def measure_in(folder: Path) -> Result:
    from highwater.headless.commands.demo import WORKFLOWS
    from highwater.headless.commands.session import make_runner
    from highwater.headless.runner.workflow import parse_workflow
    from highwater.nodes.pipelines.diffusers_pipelines import import_diffusers
    from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines

    import_diffusers()
    runner = make_runner(folder / "models", folder / "out")
    ensure_pipelines(folder / "models" / "diffusers")
    manager = runner.manager
    graph = json.loads((WORKFLOWS / "demo_flux.json").read_text())
    told: list[tuple[float, dict[str, Any]]] = []
    progress: list[float] = []
    runs: list[tuple[float, int, int, int]] = []
    manager.subscribe(lambda message: told.append((time.perf_counter(), message)))

    def listen(event: str, *details: Any) -> None:
        if event == "progress":
            progress.append(time.perf_counter())

    for seed in range(NUM_RUNS + 1):
        own = copy.deepcopy(graph)
        next(node for node in own.values() if "seed" in node["inputs"])["inputs"]["seed"] = seed
        told.clear(), progress.clear()
        begin = time.process_time()
        result = runner.run(parse_workflow(own, source="demo_flux"), name="demo_flux", listener=listen)
        seconds = time.process_time() - begin
        queue_is_empty = time.perf_counter()
        asks = num_asks(
            [
                *((at, ASK_S) for at in [*(at for at, _ in told), queue_is_empty]),
                *((at, ASK_IN_NODE_S) for at in progress),
            ]
        )
        if seed:  # the first one loads from files
            runs.append((seconds, len(result.executed), len(told), asks))
    messages = [message for _, message in told]
    run_s, num_nodes, num_messages, asked = min(runs)
    answer_ms = asyncio.run(answers(runner, f"only={NOW}"))
    # Since the run began: an answer within it has less to tell.
    panel_ms = asyncio.run(answers(runner, f"only={PANEL}&after={manager.report({'runs'})['runs'][-1]['begin_s']}"))

    numbers = itertools.count()

    def run_node() -> None:
        manager.begin_node(str(next(numbers)), "node", workflow_id="demo_flux")
        manager.end_node()

    manager.begin_run("idle", "idle")
    node_ms = smallest_ms(run_node)
    manager.end_run()
    message_ms = smallest_ms(lambda: [json.dumps(message) for message in messages]) / len(messages)
    told.clear()
    time.sleep(IDLE_S)
    rows: list[dict[str, str | float | int]] = [
        {"what": "a node begins and ends", "times in a run": num_nodes, "ms each": node_ms, "ms": num_nodes * node_ms},
        {"what": "a message", "times in a run": num_messages, "ms each": message_ms, "ms": num_messages * message_ms},
        {"what": "an answer", "times in a run": asked, "ms each": answer_ms, "ms": asked * answer_ms},
    ]
    cost_ms = sum(float(row["ms"]) for row in rows)
    rows.append({"what": "all, of a run", "times in a run": 1, "ms each": 1e3 * run_s, "ms": cost_ms})
    with_panel_ms = cost_ms + asked * (panel_ms - answer_ms)
    rows.append({"what": "an answer, panel open", "times in a run": asked, "ms each": panel_ms, "ms": asked * panel_ms})
    rows.append({"what": "all, panel open", "times in a run": 1, "ms each": 1e3 * run_s, "ms": with_panel_ms})
    rows.append(
        {"what": f"messages in {IDLE_S:.0f} s without a run", "times in a run": len(told), "ms each": 0.0, "ms": 0.0}
    )
    return Result(
        question="What badges cost a run of the tiny Flux with 4 steps, in CPU milliseconds.",
        rows=rows,
        ratio=cost_ms / 1e3 / run_s,
        meaning=f"of the run's time, target below {TARGET}",
    )


async def answers(runner: Any, words: str) -> float:
    """Return the CPU milliseconds of an answer to what the page asks while a run goes on, in the fastest turn."""
    from aiohttp.test_utils import TestServer

    from highwater.headless.comfy_stub.comfy_api import list_node_classes
    from highwater.headless.server.app import make_app

    best = float("inf")
    with tempfile.TemporaryDirectory() as user:
        app = make_app(runner, list_node_classes(), user_directory=Path(user))
        async with TestServer(app) as server:
            arguments = (str(server.port), f"/highwater/report?{words}", str(NUM_CALLS))
            pipe = asyncio.subprocess.PIPE
            asking = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ASK, *arguments, stdin=pipe, stdout=pipe
            )
            assert asking.stdin is not None and asking.stdout is not None
            for _ in range(NUM_TURNS):
                await asking.stdout.readline()  # it is ready
                begin = time.process_time()
                asking.stdin.write(b"go\n")
                await asking.stdout.readline()
                best = min(best, time.process_time() - begin)
            asking.stdin.close()
            assert await asking.wait() == 0
    return 1e3 * best / NUM_CALLS
