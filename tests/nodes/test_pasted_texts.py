"""The texts of a plan that are to be pasted: whatever files are called, they give the same plan again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from highwater.headless.comfy_stub import comfy_api

comfy_api.install()
from highwater.memory.errors import InvalidInput  # noqa: E402
from highwater.memory.planner.plan import Plan  # noqa: E402
from highwater.nodes.described_hardware import parse_hardware  # noqa: E402
from highwater.nodes.device_choices import resolve_placement  # noqa: E402
from highwater.nodes.plan_table import plan_text  # noqa: E402
from highwater.nodes.plans import plan_files  # noqa: E402
from highwater.nodes.widget_values import read_profile  # noqa: E402

MACHINE = parse_hardware("gpu:0=1MiB,gpu:1=1MiB,host=64MiB").machine()
NAMES = [
    "flux1-dev", "flux1-dev (1)", "Flux dev", "clip_l+t5", "a=b,c&d", "gpu:1", "gpu", "cpu", "1", "9GiB", "数字", "ü😀",
    "auto", "all", "none", "vae", "text", "model", "unlimited", "disk", "pinned", "a/b".replace("/", "\\"), "*", "-x",
]  # fmt: skip


def write(path: Path, prefix: str = "") -> Path:
    weights = {f"{prefix}layers.{number}.weight": torch.zeros(256, 256, dtype=torch.bfloat16) for number in range(6)}
    save_file(weights, path)
    return path


def plan(paths: Sequence[Path], profile: str = "auto", placement: str = "auto") -> Plan:
    return plan_files(paths, MACHINE, profile=profile, placement=placement, precision=None)


def texts(told: str) -> tuple[str, str]:
    """Return the profile and the placement that a plan says give it again."""
    found = dict(line.split(": ", 1) for line in told.splitlines() if ": " in line and not line.startswith(" "))
    return found["the same with nothing left to auto"], found["placement"]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_plan_of_a_file_says_can_be_pasted(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / f"{name}.safetensors")
    first = plan([path])
    profile, placement = texts(plan_text({"files": first}, None, MACHINE))
    again = plan([path], profile, placement)
    assert [part.shares[0].resident for part in again.components] == [
        part.shares[0].resident for part in first.components
    ]


def test_the_parts_of_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "a checkpoint.safetensors"
    parts = ("model.diffusion_model.", "first_stage_model.")
    save_file({f"{part}layers.{n}.weight": torch.zeros(64, 64) for part in parts for n in range(4)}, path)
    profile, placement = texts(plan_text({"files": plan([path])}, None, MACHINE))
    assert placement == "a_checkpoint.model=gpu:0:pinned,a_checkpoint.vae=gpu:0:pinned"
    assert plan([path], profile, "a_checkpoint.model=gpu:1")["a_checkpoint.model"].shares[0].device == "gpu:1"


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a b.safetensors"), write(tmp_path / "a_b.safetensors")]
    with pytest.raises(InvalidInput, match="two files are named 'a_b'; plan them one at a time"):
        plan(paths)


def test_the_texts_of_a_loader_of_comfyui_name_no_component(tmp_path: Path) -> None:
    """Its widgets know no name of a file."""
    first = plan([write(tmp_path / "clip_l.safetensors")])
    told = plan_text({"node 3 (Load Text Encoder)": first}, None, MACHINE, {"node 3 (Load Text Encoder)": "gpu:0"})
    profile, placement = texts(told)
    assert "clip_l" not in profile
    read_profile(profile)
    resolve_placement(placement)


def test_a_gguf_file_alone_is_planned(tmp_path: Path) -> None:
    """Before, only a workflow's."""
    gguf = pytest.importorskip("gguf", reason="NOT TESTED: GGUF files; run: pip install gguf")
    path = tmp_path / "flux1-dev Q8.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    for block in range(4):
        writer.add_tensor(f"double_blocks.{block}.proj.weight", np.zeros((512, 256), np.float16))
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    (part,) = plan([path]).components
    assert part.component == "flux1-dev_Q8" and part.weight_bytes == 4 * 512 * 256 * 2 and part.num_blocks == 4
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidInput, match=r"flux1-dev Q8\.gguf"):
        plan([path])


@pytest.mark.parametrize("placement", [None, "gpu:0", "text=gpu:0"])
def test_a_budget_in_a_profile_is_said_in_the_words_of_its_loader(tmp_path: Path, placement: str | None) -> None:
    first = plan([write(tmp_path / "a b.safetensors")], "auto,a_b=0.5MiB")
    name = "node 3 (Load Checkpoint), clip"
    told = plan_text({name: first}, None, MACHINE, {} if placement is None else {name: placement})
    (line,) = (line for line in told.splitlines() if line.startswith("profile: "))
    assert line == {None: "profile: a_b=0.5MiB", "gpu:0": "profile: 0.5MiB"}.get(placement, "profile: text=0.5MiB")
    if placement is not None:
        read_profile(line.removeprefix("profile: "))


@pytest.mark.parametrize("profile", ["auto", "0.3MiB", "gpu:0=0.3MiB,gpu:1=0.35MiB", "net=0.3MiB"])
def test_a_split_pasted_back_keeps_its_budgets(tmp_path: Path, profile: str) -> None:
    path = write(tmp_path / "net.safetensors")
    first = plan([path], profile, "gpu:0&gpu:1")
    again = plan([path], first.explicit_profile, first.placement)
    shares, others = (
        [(share.device, share.blocks, share.resident) for share in each.components[0].shares] for each in (first, again)
    )
    assert shares == others
