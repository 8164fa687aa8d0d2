"""Explains torch's error about tensors on two devices: names the component, the block and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..blocks.weight_group import WeightGroup
from .thread_stacks import CALL_OF_A_MODULE

__all__ = ["explain_mismatch", "find_failed", "likely_remedy"]

# The beginnings of torch's errors about devices.
BEGINNINGS = (
    r"Expected all tensors to be on the same device",
    r"(\w+\(\): )?([Ee]xpected )?[\w, ]+ (expected )?to be (on|in) (the )?same device, but ",
    r"i?stft input and window must be on the same device but got ",
    r"Input and \w+ tensors are not at the same device, found ",
    r"Expected query, key, and value to have the same device type, but got ",
    r"Tensor on device \S+ is not on the expected device ",
    r"Tensor for .* is on CPU,.* but expected (it|them) to be on ",
    r"indices should be either on cpu or on the same device as the indexed tensor ",
    # From a convolution. If both types are on one device, it is an error about dtypes.
    r"Input type \((?P<kind>torch\.(\w+\.)?)\w+Tensor\) and \w+ type \((?!(?P=kind)\w+Tensor)",
    # From another library's operator. Torch's own device-only operators (fused cells) are chosen by their input.
    r"Could not run '(?!aten::)\S+' with arguments from the 'CPU' backend",
)
MISMATCH = re.compile("|".join(BEGINNINGS))
DEVICE = re.compile(r"(?<!either on )\b(cpu|meta|[a-z]+:\d+)\b", re.I)
CPU_TYPE = re.compile(r"\(torch\.[A-Z]\w+Tensor\)")


def explain_mismatch(
    error: BaseException | None,
    owner: str,
    where: str,
    at: str,
    devices: Mapping[str, str],
    *,
    streams: bool,
    likely: str | None = None,
) -> str | None:
    """Return a line that replaces torch's message; None for all other errors.

    Args:
        where: "in block NAME" or the like.
        at: the name of the device on which that part computed.
        devices: the names of the component's devices by torch's names, the device of the non-block weights first.
        streams: whether blocks of the component stream.
        likely: the remedy for a tensor that was found in the block and may be to blame.
    """
    if type(error) not in (RuntimeError, NotImplementedError):  # torch raises no subclass for this
        return None
    told = str(error).split("\n", 1)[0]
    if not MISMATCH.match(told):
        return None
    met = {device.lower() for device in DEVICE.findall(told)} | {"cpu" for _ in CPU_TYPE.findall(told)}
    strangers = sorted(met.difference(devices))
    if not strangers and len(devices) > 1:
        names = [name for device, name in devices.items() if device in met or len(met) < 2]
        return (
            f"{owner} cannot be split: {where} an operation got tensors on {' and '.join(names)}; "
            f"place it on {next(iter(devices.values()))} alone ({told})"
        )
    if not strangers and type(error) is NotImplementedError:
        return None  # the component computes on the CPU, which lacks the operator
    stranger = strangers[0] if strangers else "another device"
    remedies = ["make it on the input's device"]
    if likely is not None:
        remedies = [f"{likely}; else {remedies[0]}"]
    elif streams and stranger in ("cpu", "meta"):
        remedies.append(
            "choose a profile with all blocks resident, or larger blocks, if the module uses weights of a block, or "
            "their .device, outside the block"
        )
    if likely is None:
        remedies.append("call reprofile() if layers were added")
    return f"{owner}: a tensor on {stranger} was used with weights on {at} {where}: {'; '.join(remedies)} ({told})"


def find_failed(error: BaseException, blocks: Mapping[nn.Module, int]) -> int | None:
    """Return the block in whose call an exception was raised, by its traceback; None if in none.

    Args:
        blocks: the numbers of the blocks, by their modules.
    """
    trace, number = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code is CALL_OF_A_MODULE:
            number = blocks.get(trace.tb_frame.f_locals["self"], number)
        trace = trace.tb_next
    return number


def likely_remedy(modules: Iterable[nn.Module], groups: Iterable[WeightGroup]) -> str | None:
    """Return what helps if a tensor is to blame that a failed block is not loaded with; None without such a tensor.

    Args:
        modules: the modules of the block.
        groups: what it is loaded with.
    """
    known = {owner for group in groups for slot in group.slots for owner in slot.owners}
    for block in modules:
        for path, module in block.named_modules():
            for name, weight in (*module._parameters.items(), *module._buffers.items()):
                if weight is not None and (module, name) not in known:
                    added = f"{path}.{name}".removeprefix(".")
                    return f"call reprofile() if weight {added!r} of the block was added or replaced"
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.device.type in ("cpu", "meta"):
                    plain = f"{path}.{name}".removeprefix(".")
                    what = f"{plain!r} of the block, a plain attribute"
                    return f"if it is {what}, register it as a buffer and call reprofile()"
    return None
