"""Described hardware as this process's accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...memory.errors import InvalidInput

if TYPE_CHECKING:
    from ...nodes.described_hardware import Hardware

__all__ = ["simulate"]


def simulate(hardware: Hardware) -> None:
    """Make this process's accelerators be these; before anything asks torch for its devices.

    Raises:
        InvalidInput: the simulated devices have to be compiled once, and there is no C++ compiler.
    """
    from ...nodes.pipeline_predictions import know_rates
    from .. import simdevice

    try:
        simdevice.install("sim", num_devices=len(hardware.devices))
    except simdevice.CompilerMissing as error:
        raise InvalidInput(str(error)) from None
    simdevice.configure(
        [
            simdevice.SimDeviceSpec(
                total_bytes=device.total_bytes,
                h2d_bytes_per_s=device.simulated_link_bytes_per_s,
                d2h_bytes_per_s=device.simulated_link_bytes_per_s,
                peer_bytes_per_s=device.simulated_link_bytes_per_s,
                **({"flops_per_s": device.flops_per_s} if device.flops_per_s else {}),
            )
            for device in hardware.devices
        ],
        pinned_bytes=hardware.pinned_bytes,
    )
    know_rates(hardware.rates)
