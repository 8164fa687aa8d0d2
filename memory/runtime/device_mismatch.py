"""Explains torch's error about tensors on two devices: names the component, the block and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["explain_mismatch"]

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
            "choose a profile with all blocks resident if the module uses weights of a block, or their .device, "
            "outside the block"
        )
    if likely is None:
        remedies.append("call reprofile() if layers were added")
    return f"{owner}: a tensor on {stranger} was used with weights on {at} {where}: {'; '.join(remedies)} ({told})"
