"""The ``highwater`` command. Exit codes: 0 done, 1 the run failed, 2 bad input (one line on stderr)."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..memory.errors import DoesNotFit, InvalidInput, one_line
from ..memory.options.placement import AUTO
from .server.address import DEFAULT_PORT, LOOPBACK

if TYPE_CHECKING:
    from .commands.hardware import Hardware

__all__ = ["main"]

PROFILE_HELP = (
    "auto, 1 to 5, a name that `highwater profiles` prints, a budget such as 6GiB, or a profile with changes, "
    "such as 4,diffusion=2GiB,prefetch=2 (files only)"
)
DEVICES_HELP = (
    'hardware to simulate instead of using the machine, such as "gpu:0=16GiB@25GB/s,gpu:1=10GiB@12GB/s,host=32GiB"'
)
COMFYUI_HELP = "ComfyUI's folder; default: $COMFYUI_DIR, the ComfyUI with this pack, or ~/comfy/ComfyUI"


# A value that starts like an option, and an option that may take a value.
NEGATIVE, OPTION = re.compile(r"-[.\d]"), re.compile(r"--[a-z][a-z-]*")
# What is wrong with a path that was named; anything else, such as a full disk, fails the run.
NOT_USABLE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


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


def join_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with values such as -1GiB joined to their option by "=": they look like options."""
    joined: list[str] = []
    for argument in arguments:
        if NEGATIVE.match(argument) and joined and OPTION.fullmatch(joined[-1]) and "--" not in joined:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = build_parser().parse_args(join_values(sys.argv[1:] if arguments is None else arguments))
        return int(options.command(options))
    except InvalidInput as error:
        print(f"highwater: {one_line(str(error))}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from .runner.runner import NodeFailed

        if not isinstance(error, DoesNotFit | NodeFailed):
            raise
        print(f"highwater: {one_line(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `highwater profiles | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"highwater: {one_line(describe(error))}", file=sys.stderr)
        return 2 if error.errno in NOT_USABLE else 1
    except KeyboardInterrupt:
        print("highwater: interrupted", file=sys.stderr)
        return 130


def describe(error: OSError) -> str:
    """Return what the system says of a file or folder that a command cannot read or write."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def build_parser() -> Parser:
    about = "A memory manager for ComfyUI and diffusers: plan, run, and see where weights are kept."
    parser = Parser(prog="highwater", description=about)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, command: Any, text: str) -> Parser:
        added: Parser = commands.add_parser(name, help=text, description=text)
        added.register("action", None, StoreOnce)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        return added

    demo = add(
        "demo", run_demo, "run example workflows that do not fit in memory together, and draw a chart of the memory"
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="folder for images and report")
    run = add("run", run_workflows, "run workflows in API format one after the other, with one memory manager")
    run.add_argument("workflows", nargs="+", type=Path, metavar="WORKFLOW.json")
    run.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="folder for the images")
    verify = add("verify", run_verify, "run one step of a workflow with Highwater and without, and compare bit by bit")
    verify.add_argument("workflow", type=Path, metavar="WORKFLOW.json")
    plan = add("plan", run_plan, "print where each part would be kept; reads only file headers, and moves nothing")
    plan.add_argument("paths", nargs="+", type=Path, metavar="WORKFLOW.json|FILE.safetensors")
    plan.add_argument("--profile", default=AUTO, metavar="TEXT", help=PROFILE_HELP)
    plan.add_argument("--placement", default=AUTO, help="devices, such as gpu:0&gpu:1 (files only)")
    plan.add_argument("--precision", help="as stored, fp8 scaled or by profile (files only); default: by profile")
    add("profiles", run_profiles, "list the profiles with all their values")
    devices = add("devices", run_devices, "list devices with total and free memory, and settings that hide devices")
    needs = add("needs", run_needs, "list how much memory models needed beside their weights in earlier runs")
    needs.epilog = "The table names components and devices by the first digits of a digest: the file stores no names."
    needs.add_argument("--reset", action="store_true", help="delete these values; a running ComfyUI keeps its own")
    needs.add_argument(
        "--file", type=Path, metavar="FILE", help="only this file; default: the user's file and ComfyUI's"
    )
    needs.add_argument("--comfyui", type=Path, metavar="DIR", help=COMFYUI_HELP)
    doctor = add("doctor", run_doctor, "check whether Highwater works in ComfyUI, and what prevents it")
    doctor.add_argument("--comfyui", type=Path, metavar="DIR", help=COMFYUI_HELP)
    serve = add("serve", run_serve, "start the ComfyUI web page with these nodes, without ComfyUI's backend")
    serve.add_argument("--host", default=LOOPBACK, help="the address to listen on")
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help="the port to listen on")
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name of this server for browsers, such as box.local; can be repeated",
    )
    serve.add_argument("--out", type=Path, default=Path("out/serve"), metavar="DIR", help="folder for the images")
    for command in (demo, run, verify, plan, devices, serve):
        command.add_argument("--devices", metavar="TEXT", help=DEVICES_HELP)
    for command in (demo, run, verify, plan, serve):
        command.add_argument(
            "--models", type=Path, metavar="DIR", help="ComfyUI's models folder; default: tiny example pipelines"
        )
    return parser


# -- commands


def run_demo(options: argparse.Namespace) -> int:
    import torch

    from .commands.console import Console
    from .commands.demo import choose_hardware, run_demo
    from .commands.session import make_runner

    console = Console(quiet=options.json)
    hardware = described(options) or choose_hardware()
    if hardware is not None:
        hardware.simulate()
        torch.set_num_threads(1)  # for matrices this small more threads only wait for each other
        console.say(f"Simulated devices: {hardware}")
    runner = make_runner(models_directory(options), output_directory(options))
    report = run_demo(runner, options.out, console, simulated=hardware is not None)
    finish(options, report)
    return 0


def run_workflows(options: argparse.Namespace) -> int:
    from .commands.console import Console
    from .commands.session import load_workflows, make_runner, run_workflow

    simulate(options)
    console = Console(quiet=options.json)
    runner = make_runner(models_directory(options), output_directory(options))
    for name, workflow in load_workflows(options.workflows):
        console.title(f"Run {name}")
        run_workflow(runner, name, workflow, console)
    report = runner.manager.report()
    console.show_summary(report)
    finish(options, report)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    from .commands.console import Console
    from .commands.verifying import verify_workflow

    simulate(options)
    found = verify_workflow(options.workflow, models=models_directory(options))
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        Console().say(found.text())
    return 0 if found.is_equal else 1


def finish(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print the report as JSON if asked for, and give all memory back."""
    from ..memory import default_manager

    if options.json:
        print(json.dumps(report))
    default_manager().release_all()


def run_plan(options: argparse.Namespace) -> int:
    from ..nodes.answers import plans_text
    from ..nodes.plans import plan_files
    from .commands.planning import machine_for, plan_workflow

    hardware = described(options)
    files = [path for path in options.paths if path.suffix != ".json"]
    plans = {}
    if files:
        plans["files"] = plan_files(
            files,
            machine_for(hardware),
            profile=options.profile,
            placement=options.placement,
            precision=options.precision,
        )
    for path in options.paths:
        if path.suffix == ".json":
            plans |= plan_workflow(path, hardware, models_directory(options))
    if options.json:
        print(json.dumps({name: plan.to_json() for name, plan in plans.items()}))
        return 0
    print(plans_text(plans))
    return 0


def run_profiles(options: argparse.Namespace) -> int:
    from ..nodes.answers import describe_profiles
    from .commands.console import Console

    answer = describe_profiles()
    if options.json:
        print(json.dumps(answer))
    else:
        Console().show_profiles(answer["profiles"])
    return 0


def run_devices(options: argparse.Namespace) -> int:
    from ..nodes.answers import describe_devices
    from .commands.console import Console

    simulate(options)
    from ..memory import MemoryManager

    answer = describe_devices(MemoryManager(), os.environ)
    if options.json:
        print(json.dumps(answer))
    else:
        Console().show_devices(answer["devices"], answer["hidden_by"])
    return 0


def run_needs(options: argparse.Namespace) -> int:
    from ..nodes.learned_needs import describe_needs, forget_needs
    from .commands.console import Console
    from .commands.doctor import find_needs_files

    paths = find_needs_files(options.file, options.comfyui, os.environ)
    is_named = options.file is not None
    files = (forget_needs if options.reset else describe_needs)(paths, are_named=is_named)
    if options.json:
        print(json.dumps({"files": files}))
    else:
        Console().show_needs(files)
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    from .commands.console import Console
    from .commands.doctor import examine

    answer = examine(options.comfyui, os.environ)
    if options.json:
        print(json.dumps(answer))
    else:
        Console().show_findings(answer)
    return 0


def run_serve(options: argparse.Namespace) -> int:
    from .commands.session import make_runner
    from .server.app import serve

    simulate(options)
    announce = (lambda url: print(json.dumps({"url": url}), flush=True)) if options.json else None
    runner = make_runner(models_directory(options), output_directory(options))
    serve(runner, host=options.host, port=options.port, allowed_hosts=options.allow_host, announce=announce)
    return 0


# -- what they share


def described(options: argparse.Namespace) -> Hardware | None:
    from .commands.hardware import parse_hardware

    return parse_hardware(options.devices) if options.devices is not None else None


def simulate(options: argparse.Namespace) -> None:
    """Make the described hardware this process's accelerators, if there is a description."""
    hardware = described(options)
    if hardware is not None:
        hardware.simulate()


def models_directory(options: argparse.Namespace) -> Path:
    """Return the models folder: the one that was named, else a cache of tiny pipelines that is filled on demand."""
    if options.models is not None:
        if not options.models.is_dir():
            raise InvalidInput(f"{options.models}: no such folder; --models expects ComfyUI's models folder")
        return Path(options.models)
    from ..memory.user_folders import cache_folder
    from ..nodes.pipelines.tiny_pipelines import ensure_pipelines

    cache = cache_folder()
    if cache is None:
        raise InvalidInput("no cache folder found for the tiny models; name one with --models DIR or in XDG_CACHE_HOME")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the libraries ask the network even for local folders
    ensure_pipelines(cache / "models" / "diffusers")
    return cache / "models"


def output_directory(options: argparse.Namespace) -> Path:
    """Return the output folder; it is made when something is written."""
    if options.out.exists() and not options.out.is_dir():
        raise InvalidInput(f"{options.out}: is a file; --out expects a folder")
    return Path(options.out)
