"""The options of every ``highwater`` command, and how its words are read."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..memory.errors import InvalidInput
from ..memory.options.placement import AUTO
from ..memory.options.precision import BY_PROFILE, precision_names
from ..memory.weights.file_layouts import FILE_FORMS
from ..memory.weights.known_forms import FORMS
from .server.address import DEFAULT_PORT, LOOPBACK

__all__ = ["build_parser", "join_values"]

PROFILE_HELP = (
    "auto, 1 to 5, a name that `highwater profiles` prints, a budget such as 6GiB, or a profile with changes, "
    "such as 4,diffusion=2GiB,prefetch=2 (files only)"
)
PRECISION_HELP = (
    f"one of: {', '.join(precision_names(FORMS))}; or one for each part, as in diffusion=fp8 scaled,text=bf16 "
    f"(files only); default: {BY_PROFILE}"
)
DEVICES_HELP = (
    "hardware to simulate instead of using the machine, such as "
    '"gpu:0=16GiB@25GB/s@80TFLOPS,gpu:1=10GiB@12GB/s,host=32GiB"'
)
WATERMARK_HELP = (
    'how much stays free, low and high mark, such as 1GiB:2GiB for each device, or "gpu:0=5%%:10%%,host=4GiB:6GiB"; '
    "a Watermark node of a workflow counts instead for its device"
)
COMFYUI_HELP = "ComfyUI's folder; default: $COMFYUI_DIR, the ComfyUI with this pack, or ~/comfy/ComfyUI"

# A value that starts like an option, and an option that may take a value.
NEGATIVE, OPTION = re.compile(r"-[.\d]"), re.compile(r"--[a-z][a-z-]*")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see {self.prog} --help")


class StoreOnce(argparse.Action):
    """Stores a value and refuses a second one, which would silently replace the first."""

    was_given = False

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if self.was_given:
            parser.error(f"{option} is given twice; it takes one value")
        self.was_given = True
        setattr(namespace, self.dest, values)


def named_path(text: str) -> Path:
    """Return a path of the command line. An empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def join_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with values such as -1GiB joined to their option by "=": they look like options."""
    joined: list[str] = []
    for argument in arguments:
        if NEGATIVE.match(argument) and joined and OPTION.fullmatch(joined[-1]) and "--" not in joined:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def build_parser() -> Parser:
    """Return the parser of the command line; ``command`` is the name of what was asked for."""
    about = "A memory manager for ComfyUI and diffusers: plan, run, and see where weights are kept."
    parser = Parser(prog="highwater", description=about)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, text: str, epilog: str | None = None) -> Parser:
        added: Parser = commands.add_parser(name, help=text, description=text, epilog=epilog)
        added.register("action", None, StoreOnce)
        added.set_defaults(command=name)
        added.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        return added

    demo = add("demo", "run example workflows that do not fit in memory together, and draw a chart of the memory")
    demo.add_argument(
        "--out", type=named_path, default=Path("out/demo"), metavar="DIR", help="folder for images and report"
    )
    run = add("run", "run workflows in API format one after the other, with one memory manager")
    run.add_argument("workflows", nargs="+", type=named_path, metavar="WORKFLOW.json")
    run.add_argument("--out", type=named_path, default=Path("out"), metavar="DIR", help="folder for the images")
    verify = add("verify", "run one step of a workflow with Highwater and without, and compare bit by bit")
    verify.add_argument("workflow", type=named_path, metavar="WORKFLOW.json")
    plan = add("plan", "print where each part would be kept; reads only file headers, and moves nothing")
    plan.add_argument("paths", nargs="+", type=named_path, metavar="WORKFLOW.json|FILE.safetensors")
    plan.add_argument("--profile", default=AUTO, metavar="TEXT", help=PROFILE_HELP)
    plan.add_argument("--placement", default=AUTO, help="devices, such as gpu:0&gpu:1 (files only)")
    plan.add_argument("--precision", help=PRECISION_HELP)
    plan.add_argument(
        "--picture", type=named_path, metavar="FILE.png", help="also draw it: a bar for each device and part of the run"
    )
    quantize = add(
        "quantize",
        "write a safetensors file with a model's weights in eight or four bits, in a format that others read, too",
        "fp8-scaled and int8: for ComfyUI's own loaders, too. qint8, qint4, qfloat8: optimum-quanto's tensors, as mmgp "
        "writes them. The weights of blocks are quantized; embedders, norms and output layers stay as they are.",
    )
    quantize.add_argument("source", type=named_path, metavar="IN.safetensors", help="of shards, any one")
    quantize.add_argument("target", type=named_path, metavar="OUT.safetensors")
    quantize.add_argument("--to", required=True, metavar="FORM", help=f"one of: {', '.join(FILE_FORMS)}")
    quantize.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="a regular expression: weights in whose names it is found stay as they are; can be repeated",
    )
    quantize.add_argument(
        "--error-limit",
        type=float,
        metavar="NUMBER",
        help="weights that would lose more, relative to their size, stay; default: twice what is usual for the form",
    )
    quantize.add_argument("--force", action="store_true", help="replace OUT if it is there already")
    add("profiles", "list the profiles with all their values")
    devices = add("devices", "list devices with total and free memory, and settings that hide devices")
    needs = add(
        "needs",
        "list how much memory models needed beside their weights in earlier runs",
        "The table names components and devices by the first digits of a digest: the file stores no names.",
    )
    needs.add_argument("--reset", action="store_true", help="delete these values; a running ComfyUI keeps its own")
    needs.add_argument(
        "--file", type=named_path, metavar="FILE", help="only this file; default: the user's file and ComfyUI's"
    )
    needs.add_argument("--comfyui", type=named_path, metavar="DIR", help=COMFYUI_HELP)
    lend = add("lend", "free memory of a running host's device for another program, for a while")
    lend.add_argument("size", nargs="?", metavar="SIZE", help="how much, such as 8GiB")
    lend.add_argument("--for", dest="duration", metavar="TIME", help="for how long, such as 60s, 5min or 1h")
    lend.add_argument("--give-back", action="store_true", help="give it back before the time is up")
    lend.add_argument("--device", metavar="NAME", help="the device, such as gpu:0; default: the only one")
    keep = add("keep", "make a running host evict one of its models last")
    keep.add_argument("component", metavar="COMPONENT", help="its id in the report")
    keep.add_argument(
        "--at-most", metavar="SIZE", help="how much of a device is kept, such as 4GiB or 50%%; default: all"
    )
    keep.add_argument("--off", action="store_true", help="evict it in the usual order again")
    release = add("release", "take models off a running host's devices now; they stay in its RAM")
    release.add_argument(
        "component", nargs="?", metavar="COMPONENT", help="its id in the report; default: all of --device"
    )
    release.add_argument(
        "--device", metavar="NAME", help="the device, such as gpu:0; default: all that the model is on"
    )
    limits = add(
        "limits",
        "limit how many models of a running host stay loaded, and for how long while idle",
        "Without an option it prints the limits. An option that is not given leaves its limit as it is.",
    )
    limits.add_argument("--max-loaded", metavar="N", help="at most so many models stay loaded; off: any number")
    limits.add_argument("--idle", metavar="TIME", help="unload what was idle for so long, such as 10min; off: never")
    for asking in (lend, keep, release, limits):
        asking.add_argument(
            "--url",
            default=f"http://{LOOPBACK}:{DEFAULT_PORT}",
            help=f"where the host listens; default: http://{LOOPBACK}:{DEFAULT_PORT}",
        )
    doctor = add("doctor", "check whether Highwater works in ComfyUI, and what prevents it")
    doctor.add_argument("--comfyui", type=named_path, metavar="DIR", help=COMFYUI_HELP)
    serve = add("serve", "start the ComfyUI web page with these nodes, without ComfyUI's backend")
    serve.add_argument("--host", default=LOOPBACK, help="the address to listen on")
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help="the port to listen on")
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name of this server for browsers, such as box.local; can be repeated",
    )
    serve.add_argument("--out", type=named_path, default=Path("out/serve"), metavar="DIR", help="folder for the images")
    for command in (demo, run, verify, plan, devices, serve):
        command.add_argument("--devices", metavar="TEXT", help=DEVICES_HELP)
    for command in (demo, run, verify, plan, serve):
        command.add_argument("--watermark", metavar="TEXT", help=WATERMARK_HELP)
        command.add_argument(
            "--models", type=named_path, metavar="DIR", help="ComfyUI's models folder; default: tiny example pipelines"
        )
    return parser
