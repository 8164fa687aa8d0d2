"""The toy network in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file


@pytest.fixture
def file(toys, tmp_path: Path) -> Path:
    """The toy network's weights."""
    state = {name: tensor for name, tensor in toys.build_net().state_dict().items() if "gain" not in name}
    del state["out.weight"]  # tied
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"
