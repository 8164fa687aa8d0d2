"""What the report says of a device and of a component, from the books and from the driver."""

from __future__ import annotations

from ..runtime.ledger import Ledger
from ..transfer.devices import Device
from .member import Member, Watermark
from .report import ComponentReport, DeviceReport

__all__ = ["component_report", "device_report"]


def device_report(device: Device, mark: Watermark, ledger: Ledger, peak_bytes: int) -> DeviceReport:
    total, free, reserved = device.total_bytes(), device.free_bytes(), ledger.used(device.name)
    return DeviceReport(
        name=device.name,
        total_bytes=total,
        free_bytes=free,
        watermark={"low_bytes": mark.low_bytes, "high_bytes": mark.high_bytes},
        reserved_bytes=reserved,
        other_bytes=max(0, total - free - reserved),
        peak_bytes=max(peak_bytes, device.peak_bytes()),
    )


def component_report(member: Member, ledger: Ledger) -> ComponentReport:
    attachment = member.attachment
    planned = {share.device: share.device_bytes for share in attachment.plan.shares if share.device != "cpu"}
    held = {share.device: ledger.held(member.id, share.device) for share in attachment.plan.shares}
    return ComponentReport(
        id=member.id,
        name=member.name,
        kind=attachment.component.kind,
        node_id=member.node_id,
        workflow_id=member.workflow_id,
        tiers=ledger.places(member.id),
        precision=attachment.plan.precision.value,
        in_effect=all(held[device] == num_bytes for device, num_bytes in planned.items()),
        leased=bool(member.leases),
        last_use_s=member.last_use_s,
        bytes_moved=attachment.bytes_moved,
        plan=attachment.plan.to_json(),
        num_compiles=attachment.compiled.num_compiles if attachment.compiled is not None else None,
        uncompiled_blocks=attachment.compiled.why_uncompiled() if attachment.compiled is not None else None,
    )
