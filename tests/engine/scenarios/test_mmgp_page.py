"""Every example of the page for users of mmgp runs, on models and a machine that are small."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import highwater
from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines

PAGE = Path(highwater.__path__[0], "docs", "mmgp.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = [
    pytest.param(code, id=f"{section}-{number}")
    for section, text in SECTIONS.items()
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples name: a tiny Flux, its transformer with the config inside, and a checkpoint."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "flux").symlink_to(ensure_pipelines(folder / "pipelines")["tiny-flux"])
    weights = load_file(folder / "flux/transformer/diffusion_pytorch_model.safetensors")
    config = (folder / "flux/transformer/config.json").read_bytes()
    metadata = {"config_base64": base64.b64encode(config).decode()}
    save_file(weights, folder / "flux_transformer.safetensors", metadata)
    parts = {"vae.": {"weight": torch.zeros(3)}, "transformer.": weights}
    whole = {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}
    save_file(whole, folder / "checkpoint.safetensors")
    return folder


@pytest.fixture
def default(machine, monkeypatch: pytest.MonkeyPatch):
    """The manager that examples get without naming one."""
    with machine(96) as manager:
        monkeypatch.setattr("highwater.memory.manager.default.made", [manager])
        yield manager


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(
    code: str, models: Path, default, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(code, "docs/mmgp.md", "exec"), names)  # noqa: S102 (our own page)
    if "managed" in names:
        assert default.bytes_moved() > 0, "nothing was computed on a device"
        assert not default.members
        if "load_model" in names:
            assert names["managed"].plan["text_encoder_2"].tier == "disk"
    if "show" in names:
        told = re.findall(r"^(\w+): (\d+) of (\d+) bytes$", capsys.readouterr().out, re.MULTILINE)
        ends = [component for component, done, total in told if done == total]
        assert sorted(ends) == sorted(["text_encoder", "text_encoder_2", "transformer", "vae"] * 2)  # packed, loaded
    if "image" in names:
        assert names["image"].size == (256, 256)
    if "load_weights" in names:
        want = load_file("flux/transformer/diffusion_pytorch_model.safetensors")
        state = names["transformer"].state_dict()
        assert all(torch.equal(state[name], tensor.to(state[name].dtype)) for name, tensor in want.items())


def test_each_function_of_the_table_has_an_example() -> None:
    """And each link of the table leads to one."""
    links = re.findall(r"\]\(#([\w.]+)\)", PAGE)
    anchors = {section.replace(".", ""): text for section, text in SECTIONS.items()}
    assert len(links) == 6
    assert all("```python" in anchors[link] for link in links)
