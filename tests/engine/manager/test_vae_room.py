"""What leaves for a VAE before it decodes in tiles: what is done, and nothing of a diffusion model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile

MIB = 1 << 20
X = torch.ones(4, 256)
BLOCK_BYTES = 256 * 256 * 4 + 256 * 4


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def load(manager: Any, name: str, kind: str) -> Any:
    """Load a module as a host does, and compute once."""
    module = Stack().eval().requires_grad_(False)
    (member,), _ = manager.add(
        {name: module},
        kinds={name: kind},
        placement=parse_placement("gpu:0", devices=["gpu:0"]),
        profile=parse_profile("auto", devices=["gpu:0"]),
        precision=Precision.AS_STORED,
        name=None,
        node_id=None,
        is_hosted=True,
    )
    manager.hosting.load(member)
    module(X.to("sim:0"))
    return member


def held(manager: Any, member: Any) -> int:
    return manager.ledger.held(member.id, "gpu:0")


@torch.no_grad()
def test_text_encoders_give_what_a_decode_lacks_and_the_model_nothing(machine) -> None:
    with machine(64) as manager:
        model, text, vae = (load(manager, kind, kind) for kind in ("diffusion", "text", "vae"))
        whole, spoken, own = (held(manager, member) for member in (model, text, vae))
        room = manager.vae_room.beside("gpu:0", vae.id)
        assert room.free_bytes == manager.devices["gpu:0"].free_bytes()
        assert 0 < room.idle_bytes <= spoken
        freed = manager.vae_room.clear("gpu:0", vae.id, 3 * BLOCK_BYTES, "the VAE decodes")
        assert 3 * BLOCK_BYTES <= freed < 5 * BLOCK_BYTES
        assert manager.vae_room.clear("gpu:0", vae.id, 64 * MIB, "the VAE decodes") + freed >= room.idle_bytes
        assert (held(manager, model), held(manager, vae)) == (whole, own)
        assert manager.vae_room.beside("gpu:0", vae.id).idle_bytes == 0
        (event, *_) = [event for event in manager.report()["events"] if event["kind"] == "evict"]
        assert event["component"] == text.id
        assert event["reason"].startswith("the VAE decodes")


@torch.no_grad()
def test_what_is_kept_or_computes_gives_nothing(machine) -> None:
    with machine(64, low=2 * MIB, high=3 * MIB) as manager:
        kept, busy, vae = (load(manager, name, kind) for name, kind in (("a", "text"), ("b", "text"), ("c", "vae")))
        manager.commands.keep([kept], True)
        with manager.lease(busy):
            room = manager.vae_room.beside("gpu:0", vae.id)
        assert (room.idle_bytes, room.kept_bytes) == (0, 2 * MIB)
        assert manager.vae_room.beside("gpu:0", vae.id).idle_bytes > 0


@pytest.mark.parametrize(("is_retry", "kind"), [(False, "plan"), (True, "recover")])
def test_tiles_are_in_the_event_log(machine, is_retry: bool, kind: str) -> None:
    with machine(64) as manager:
        manager.vae_room.note("gpu:0", "vae", 5 * MIB, "VAE decode in tiles of 512 px", is_retry=is_retry)
        (event,) = manager.report()["events"][-1:]
        assert (event["kind"], event["component"], event["bytes"]) == (kind, "vae", 5 * MIB)
        assert event["reason"] == "VAE decode in tiles of 512 px"


def test_only_accelerators_are_seen(machine) -> None:
    with machine(64) as manager:
        assert [manager.vae_room.sees(name) for name in ("gpu:0", "cpu", "gpu:7")] == [True, False, False]
