"""The ``highwater`` command. Exit codes: 0 done, 1 the run failed, 2 bad input (one line on stderr)."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..memory.errors import DoesNotFit, InvalidInput, one_line
from .arguments import build_parser, join_values
from .commands.output import OUTPUT, drop_output, json_line, open_output, print_json

if TYPE_CHECKING:
    from ..memory.options.marks import Marks
    from ..nodes.described_hardware import Hardware
    from .runner.runner import WorkflowRunner

__all__ = ["main"]

# What is wrong with a path that was named; anything else, such as a full disk, fails the run.
NOT_USABLE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    open_output()
    try:
        options = build_parser().parse_args(join_values(sys.argv[1:] if arguments is None else arguments))
        code = COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
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
        drop_output()
        return 1
    except OSError as error:
        if error.filename == OUTPUT:
            drop_output()
        print(f"highwater: {one_line(describe(error))}", file=sys.stderr)
        return 2 if error.errno in NOT_USABLE else 1
    except KeyboardInterrupt:
        print("highwater: interrupted", file=sys.stderr)
        return 130


def describe(error: OSError) -> str:
    """Return what the system says of a file or folder that a command cannot read or write."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason


# -- commands


def run_demo(options: argparse.Namespace) -> int:
    import torch

    from ..memory.options.marks import HOST
    from .commands.console import Console
    from .commands.demo import choose_hardware, run_demo
    from .commands.hardware import simulate as simulate_hardware

    console = Console(quiet=options.json)
    hardware = described(options) or choose_hardware()
    if hardware is not None:
        simulate_hardware(hardware)
        torch.set_num_threads(1)  # for matrices this small more threads only wait for each other
        console.say(f"Simulated devices: {hardware}")
    runner = make_runner(options)
    has_marks = any(device != HOST for device in asked_marks(options))
    report = run_demo(runner, options.out, console, simulated=hardware is not None, has_marks=has_marks)
    finish(options, report)
    return 0


def run_workflows(options: argparse.Namespace) -> int:
    from .commands.console import Console
    from .commands.session import load_workflows, run_workflow

    simulate(options)
    console = Console(quiet=options.json)
    runner = make_runner(options)
    workflows = load_workflows(options.workflows)
    for turn, (name, workflow) in enumerate(workflows, 1):
        console.title(f"Run {name}")
        run_workflow(runner, name, workflow, console, workflows[turn:])
    report = runner.manager.report()
    console.show_summary(report)
    finish(options, report)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    from ..memory import default_manager
    from .commands.console import Console
    from .commands.verifying import verify_workflow

    marks = asked_marks(options)
    simulate(options)
    if marks:
        default_manager().commands.set_default_watermarks(marks)
    found = verify_workflow(options.workflow, models=models_directory(options))
    if options.json:
        print_json(found.to_json())
    else:
        Console().say(found.text())
    return 0 if found.is_equal else 1


def finish(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print the report as JSON if asked for, and give all memory back."""
    from ..memory import default_manager

    if options.json:
        print_json(report)
    default_manager().release_all()


def refuse_widgets_options(options: argparse.Namespace) -> None:
    """Refuse options that say what widgets of workflows say themselves. Raises `InvalidInput`."""
    from ..memory.errors import InvalidInput
    from ..memory.options.placement import AUTO

    for name, default in (("profile", AUTO), ("placement", AUTO), ("precision", None)):
        if getattr(options, name) != default:
            raise InvalidInput(f"--{name} is for model files: a workflow's loaders have a widget {name} each")


def run_plan(options: argparse.Namespace) -> int:
    from ..nodes.graph_plans import machine_for
    from ..nodes.plan_table import plan_text
    from ..nodes.plans import plan_files
    from .commands.planning import plan_workflow, refuse_picture, write_picture

    hardware, marks = described(options), asked_marks(options)
    files = [path for path in options.paths if path.suffix != ".json"]
    if not files:
        refuse_widgets_options(options)
    if options.picture is not None:
        refuse_picture(options.picture, num_plans=len(options.paths) - len(files) + bool(files))
    found: dict[str, tuple[dict[str, Any], str]] = {}
    if files:
        machine = machine_for(hardware, marks)
        plan = plan_files(
            files, machine, profile=options.profile, placement=options.placement, precision=options.precision
        )
        found["files"] = plan.to_json(), plan_text({"files": plan}, None, machine)
        if options.picture is not None:
            write_picture(options.picture, {"files": plan}, None, machine)
    for path in options.paths:
        if path.suffix == ".json":
            planned = plan_workflow(path, hardware, models_directory(options), marks)
            found[str(path)] = planned.to_json(), planned.text()
            if options.picture is not None:
                write_picture(options.picture, planned.plans, planned.run, planned.machine)
    if options.json:
        print_json({name: told for name, (told, _) in found.items()})
    else:
        print("\n\n".join(text if len(found) == 1 else f"{name}\n\n{text}" for name, (_, text) in found.items()))
    return 0


def run_quantize(options: argparse.Namespace) -> int:
    from ..memory.quantizing import quantize_file
    from .commands.console import Console

    console = Console(quiet=options.json)
    with console.byte_bar(f"to {options.to}") as tell:
        made = quantize_file(
            options.source,
            options.target,
            options.to,
            exclude=options.exclude,
            error_limit=options.error_limit,
            replaces=options.force,
            progress=tell,
        )
    if options.json:
        print_json(made.to_json())
    else:
        console.say(made.text())
    return 0


def run_profiles(options: argparse.Namespace) -> int:
    from ..nodes.command_answers import describe_profiles
    from .commands.console import Console

    answer = describe_profiles()
    if options.json:
        print_json(answer)
    else:
        Console().show_profiles(answer["profiles"])
    return 0


def run_devices(options: argparse.Namespace) -> int:
    from ..nodes.command_answers import describe_devices
    from .commands.console import Console

    simulate(options)
    from ..memory import MemoryManager

    answer = describe_devices(MemoryManager(), os.environ)
    if options.json:
        print_json(answer)
    else:
        Console().show_devices(answer["devices"], answer["findings"])
    return 0


def run_needs(options: argparse.Namespace) -> int:
    from ..nodes.learned_needs import describe_needs, forget_needs
    from .commands.console import Console
    from .commands.doctor import find_needs_files

    paths = find_needs_files(options.file, options.comfyui, os.environ)
    is_named = options.file is not None
    files = (forget_needs if options.reset else describe_needs)(paths, are_named=is_named)
    if options.json:
        print_json({"files": files})
    else:
        Console().show_needs(files)
    return 0


def run_lend(options: argparse.Namespace) -> int:
    from .commands.lending import give_back, given_back_text, lend, lent_text

    if options.give_back and (options.size is not None or options.duration is not None):
        raise InvalidInput("--give-back takes neither a size nor --for")
    if not options.give_back and (options.size is None or options.duration is None):
        raise InvalidInput("name how much and for how long, such as: highwater lend 8GiB --for 60s")
    if options.give_back:
        return tell_answer(options, lambda: give_back(options.url, options.device), given_back_text)
    return tell_answer(options, lambda: lend(options.url, options.size, options.duration, options.device), lent_text)


def run_keep(options: argparse.Namespace) -> int:
    from .commands.keeping import keep, kept_text

    return tell_answer(
        options, lambda: keep(options.url, options.component, options.at_most, kept=not options.off), kept_text
    )


def run_release(options: argparse.Namespace) -> int:
    from .commands.keeping import release, released_text

    return tell_answer(options, lambda: release(options.url, options.component, options.device), released_text)


def run_limits(options: argparse.Namespace) -> int:
    from .commands.keeping import limits_text, set_limits

    return tell_answer(options, lambda: set_limits(options.url, options.max_loaded, options.idle), limits_text)


def tell_answer(
    options: argparse.Namespace, ask: Callable[[], dict[str, Any]], text: Callable[[dict[str, Any]], str]
) -> int:
    """Print what a running host answers; exit code 1 where it does not, or refuses."""
    from .commands.running_host import HostFailed

    try:
        answer = ask()
    except HostFailed as error:
        print(f"highwater: {one_line(str(error))}", file=sys.stderr)
        return 1
    if options.json:
        print_json(answer)
    else:
        print(text(answer))
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    from .commands.console import Console
    from .commands.doctor import examine

    answer = examine(options.comfyui, os.environ)
    if options.json:
        print_json(answer)
    else:
        Console().show_findings(answer)
    return 0


def run_serve(options: argparse.Namespace) -> int:
    from .server.app import serve

    simulate(options)
    announce = (lambda url: print(json_line({"url": url}), flush=True)) if options.json else None
    runner = make_runner(options)
    serve(runner, host=options.host, port=options.port, allowed_hosts=options.allow_host, announce=announce)
    return 0


COMMANDS = {
    "demo": run_demo,
    "run": run_workflows,
    "verify": run_verify,
    "plan": run_plan,
    "quantize": run_quantize,
    "profiles": run_profiles,
    "devices": run_devices,
    "needs": run_needs,
    "lend": run_lend,
    "keep": run_keep,
    "release": run_release,
    "limits": run_limits,
    "doctor": run_doctor,
    "serve": run_serve,
}

# -- what they share


def described(options: argparse.Namespace) -> Hardware | None:
    from ..nodes.described_hardware import parse_hardware

    return parse_hardware(options.devices) if options.devices is not None else None


def asked_marks(options: argparse.Namespace) -> dict[str, Marks]:
    """Return the watermarks that the command line names, by device."""
    from ..memory.options.marks import parse_watermarks

    return parse_watermarks(options.watermark) if options.watermark is not None else {}


def make_runner(options: argparse.Namespace) -> WorkflowRunner:
    """Return a runner under the watermarks of the command line. Raises `InvalidInput` for a bad folder or mark."""
    from .commands import session

    marks = asked_marks(options)
    runner = session.make_runner(models_directory(options), output_directory(options))
    if marks:
        runner.manager.commands.set_default_watermarks(marks)
    return runner


def simulate(options: argparse.Namespace) -> None:
    """Make the described hardware this process's accelerators, if there is a description."""
    from .commands.hardware import simulate as simulate_hardware

    hardware = described(options)
    if hardware is not None:
        simulate_hardware(hardware)


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
