"""The nodes for ComfyUI's own models, with a recorder in place of ComfyUI: what they ask for, and what they say."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.headless.comfy_stub.comfy_io import HiddenHolder, Input, NodeOutput
from highwater.memory.errors import InvalidInput
from highwater.memory.options.placement import AUTO_PLACEMENT, Placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import OffloadProfile, parse_profile
from highwater.memory.weights.known_forms import FORMS

comfy_api.install()
from highwater.nodes import device_choices, widget_values  # noqa: E402
from highwater.nodes.comfy_models import model_files  # noqa: E402
from highwater.nodes.comfy_models.quantize import HighwaterQuantizeFile  # noqa: E402
from highwater.nodes.comfy_models.tiny_models import tiny_models  # noqa: E402
from highwater.nodes.comfy_models.verify import HighwaterVerify  # noqa: E402
from highwater.nodes.extension import MODEL_NODES, NODE_CLASSES, HighwaterExtension  # noqa: E402
from highwater.nodes.watermark import DeviceWatermark  # noqa: E402

# Those that load or manage a model; those that verify and quantize ask for none of what these ask for.
NODES = {
    node.GET_SCHEMA().node_id.removeprefix("Highwater"): node
    for node in MODEL_NODES
    if node not in (HighwaterVerify, HighwaterQuantizeFile)
}
# Each loader with its file's input, the host's folder of it, and the call of the adaptor.
LOADERS = {
    "LoadDiffusionModel": ("unet_name", "diffusion_models", "load_diffusion_model"),
    "LoadTextEncoder": ("clip_name1", "text_encoders", "load_text_encoder"),
    "LoadVAE": ("vae_name", "vae", "load_vae"),
    "LoadCheckpoint": ("ckpt_name", "checkpoints", "load_checkpoint"),
    "LoadControlNet": ("control_net_name", "controlnet", "load_controlnet"),
    "LoadCLIPVision": ("clip_name", "clip_vision", "load_clip_vision"),
}
SECOND_FOLDERS = {"text_encoders": "clip", "diffusion_models": "unet", "controlnet": "t2i_adapter"}
MANAGERS = {"ManageModel": "model", "ManageCLIP": "clip", "ManageVAE": "vae"}
TOKENS = "text_model.embeddings.token_embedding.weight"
REQUEST = {"profile": "6GiB", "precision": "fp8 scaled", "placement": "default"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """As the adaptor's; the real one cannot be imported without ComfyUI."""

    profile: OffloadProfile
    precision: Precision | None
    placement: Placement
    node_id: str | None
    engine: str = "auto"


class Recorder(ModuleType):
    """Stands for ``nodes/host.py``: every call gives ``loaded``, and is remembered."""

    def __init__(self) -> None:
        super().__init__("highwater.nodes.host")
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: Any = "the model"
        self.notes: list[str] = []
        self.Request = Request

    def patcher_of(self, part: Any) -> Any:
        return part

    def notes_for(self, model: Any) -> list[str]:
        return self.notes if model == "the model" else []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("load_", "manage_")):
            raise AttributeError(name)
        return lambda *args: (self.calls.append((name, *args)), self.loaded)[1]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    import highwater.nodes as package

    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "highwater.nodes.host", recorder)
    monkeypatch.setattr(package, "host", recorder, raising=False)
    return recorder


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    """A models folder with one file of every kind, in the host's second folder where there are two."""
    for _, kind, _ in LOADERS.values():
        place = SECOND_FOLDERS.get(kind, kind)
        (tmp_path / place / "sub").mkdir(parents=True)
        write_tensors(tmp_path / place / "sub" / "a.safetensors", TOKENS)
        (tmp_path / place / "notes.txt").touch()
    before = folder_paths.models_directory, folder_paths.output_directory
    folder_paths.configure(models=tmp_path, output=tmp_path)
    yield tmp_path
    folder_paths.configure(models=before[0], output=before[1])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choices, "device_names", lambda: ["cpu", "gpu:0", "gpu:1"])
    monkeypatch.setattr(widget_values, "device_names", device_choices.device_names)


def write_tensors(path: Path, *names: str) -> None:
    save_file({name: np.zeros(1, np.float32) for name in names}, path)


def run(name: str, **inputs: Any) -> NodeOutput:
    return NODES[name].with_hidden(HiddenHolder(unique_id="5:7")).execute(**inputs)


def inputs_of(name: str) -> dict[str, Input]:
    return {item.id: item for item in NODES[name].GET_SCHEMA().inputs}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_asks_for_the_file_as_the_widgets_say(host: Recorder, models: Path, name: str) -> None:
    widget, kind, call = LOADERS[name]
    if name == "LoadCheckpoint":
        host.loaded = ("the model", "a clip", "a vae")
    more = {"type": "flux"} if name == "LoadTextEncoder" else {}
    path = models / SECOND_FOLDERS.get(kind, kind) / "sub" / "a.safetensors"
    output = run(name, **{widget: "sub/a.safetensors"}, **more, **REQUEST)
    profile = parse_profile("6GiB", devices=["cpu"])
    if name == "LoadCheckpoint":
        profile = profile.for_all_together(device_choices.accelerator_names())
    request = Request(profile=profile, precision=Precision.ENCODED, placement=AUTO_PLACEMENT, node_id="5:7")
    first = [str(path)] if name == "LoadTextEncoder" else str(path)
    assert host.calls == [(call, first, *more.values(), request)]
    assert output.args == (host.loaded if isinstance(host.loaded, tuple) else (host.loaded,))
    assert output.ui_dict() == {"text": []}  # sent though empty: it takes away what an earlier run said


GRAMMAR = [
    "auto",
    "1",
    "5",
    "LowRAM_LowVRAM",
    "80%",
    "gpu:0=8GiB,gpu:1=4GiB",
    "4,diffusion=2GiB,prefetch=2,pinned=none,reserve=1GiB,compile=on",
    "auto,quantize=diffusion&language,disk=text",
]


@pytest.mark.parametrize("profile", GRAMMAR)
@pytest.mark.parametrize("name", NODES)
def test_the_profile_widget_takes_the_whole_grammar(host: Recorder, two_gpus: None, name: str, profile: str) -> None:
    assert NODES[name].validate_inputs(profile=profile) is True
    if name in MANAGERS:
        run(name, **{MANAGERS[name]: "another's", **REQUEST, "profile": profile, "precision": "by profile"})
        [(_, _, request)] = host.calls
        assert request.profile == parse_profile(profile, devices=["cpu", "gpu:0", "gpu:1"])
        assert request.precision is None


@pytest.mark.parametrize("name", NODES)
def test_the_widgets_say_what_a_profile_may_be(name: str) -> None:
    inputs = inputs_of(name)
    assert "1 to 5" in inputs["profile"].options["tooltip"] and "by profile" in inputs["precision"].options["tooltip"]
    assert inputs["precision"].options["default"] == "as stored"
    if name == "LoadCheckpoint":  # its parts may have one each
        assert "diffusion=fp8 scaled,text=bf16" in inputs["precision"].options["tooltip"]
    else:
        assert inputs["precision"].options["options"] == ["as stored", *FORMS, "by profile"]


@pytest.mark.parametrize("name", MANAGERS)
def test_a_manage_node_hands_on_what_it_was_given(host: Recorder, name: str) -> None:
    host.notes = ["read again from its file", "read again from its file"]
    output = run(name, **{MANAGERS[name]: "another's"}, **REQUEST)
    [(call, given, request)] = host.calls
    assert (call, given, request.placement) == (f"manage_{MANAGERS[name]}", "another's", AUTO_PLACEMENT)
    assert output.ui_dict() == {"text": ["read again from its file"]}


def test_up_to_four_files_make_one_text_encoder(host: Recorder, models: Path) -> None:
    for name in "bcd":
        write_tensors(models / "clip" / f"{name}.safetensors", TOKENS)
    files = {"clip_name2": "b.safetensors", "clip_name3": "none", "clip_name4": "d.safetensors"}
    run("LoadTextEncoder", clip_name1="c.safetensors", type="sdxl", **files)
    [(_, paths, clip_type, request)] = host.calls
    assert [Path(path).stem for path in paths] == ["c", "b", "d"]
    assert clip_type == "stable_diffusion"  # the host's word; two files of SDXL say the rest
    stored = Precision.AS_STORED
    assert request == Request(profile=OffloadProfile(), precision=stored, placement=AUTO_PLACEMENT, node_id="5:7")


def test_a_linked_watermark_is_set_before_the_model_is_loaded(
    host: Recorder, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.loaded = ("the model", "a clip", "a vae")
    mark = DeviceWatermark.parse("*", "0", "1MiB")
    monkeypatch.setattr(DeviceWatermark, "apply", lambda self: host.calls.append(("watermark", self)) or ["small"])
    for name, (given, *_) in {**LOADERS, **{name: (given,) for name, given in MANAGERS.items()}}.items():
        assert inputs_of(name)["watermark"].optional
        more = {"type": "flux"} if name == "LoadTextEncoder" else {}
        output = run(name, **{given: "sub/a.safetensors"}, **more, **REQUEST, watermark=mark)
        assert "small" in output.ui_dict()["text"]
        (first, applied), (second, *_) = host.calls
        assert (first, applied) == ("watermark", mark) and second.startswith(("load_", "manage_"))
        host.calls.clear()


@pytest.mark.parametrize(
    "name",
    [
        TOKENS,
        "token_embedding.weight",  # OpenCLIP
        "shared.weight",  # T5
        "encoder.embed_tokens.weight",  # T5, too
        "model.embed_tokens.weight",  # language models
        "model.language_model.embed_tokens.weight",
        "model.embeddings.word_embeddings.weight",  # BERT's kin
    ],
)
def test_any_text_encoder_has_a_table_of_tokens(host: Recorder, models: Path, name: str) -> None:
    write_tensors(models / "clip" / "b.safetensors", "model.layers.0.weight", name)
    run("LoadTextEncoder", clip_name1="b.safetensors", type="wan")
    assert host.calls


@pytest.mark.parametrize(
    "name",
    [
        "double_blocks.0.img_attn.qkv.weight",
        "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight",  # inside of a checkpoint
        "diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight",
        "text_model.embeddings.position_embedding.weight",
    ],
)
@pytest.mark.parametrize("other", [{}, {"clip_name2": "sub/a.safetensors"}], ids=["alone", "beside one"])
def test_a_file_that_is_no_text_encoder_is_named(host: Recorder, models: Path, name: str, other: dict) -> None:
    """Core would make one of random weights."""
    write_tensors(models / "clip" / "b.safetensors", name)
    with pytest.raises(InvalidInput, match=r"/clip/b\.safetensors: is not a text encoder: .*; choose another file"):
        run("LoadTextEncoder", clip_name1="b.safetensors", type="flux", **other)
    assert host.calls == []


def test_projections_may_stand_beside_a_text_encoder_of_ltx(host: Recorder, models: Path) -> None:
    write_tensors(models / "clip" / "b.safetensors", "text_embedding_projection.aggregate_embed.weight")
    run("LoadTextEncoder", clip_name1="sub/a.safetensors", type="ltxv", clip_name2="b.safetensors")
    with pytest.raises(InvalidInput, match=r"b\.safetensors: is not a text encoder"):
        run("LoadTextEncoder", clip_name1="b.safetensors", type="ltxv")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("LoadDiffusionModel", "a diffusion model"), ("LoadVAE", "a VAE"), ("LoadCheckpoint", "a checkpoint")],
)
def test_what_core_does_not_recognise_is_named_in_one_line(
    host: Recorder, models: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    widget, folder, call = LOADERS[name]

    def fail(error: Exception) -> Any:
        monkeypatch.setattr(host, call, lambda *_: (_ for _ in ()).throw(error), raising=False)
        return run(name, **{widget: "sub/a.safetensors"}, **REQUEST)

    with pytest.raises(InvalidInput) as caught:
        fail(RuntimeError("ERROR: it is invalid: None\n\nIf it is from a checkpoint loader node"))
    path = folder_paths.get_full_path(folder, "sub/a.safetensors")
    assert str(caught.value) == f"{path}: is not {kind} that ComfyUI can load"
    for other in (RuntimeError("CUDA error: an illegal memory access"), AttributeError("no attribute 'patcher'")):
        with pytest.raises(type(other), match=str(other)):
            fail(other)


def test_a_checkpoint_says_what_it_lacks(host: Recorder, models: Path) -> None:
    host.loaded = ("the model", None, None)
    output = run("LoadCheckpoint", ckpt_name="sub/a.safetensors", **REQUEST)
    assert output.args == ("the model", None, None)
    assert output.ui_dict()["text"] == [f"sub/a.safetensors contains no {part}" for part in ("text encoder", "VAE")]


@pytest.mark.parametrize("name", LOADERS)
def test_the_files_are_those_of_the_hosts_folder(models: Path, name: str) -> None:
    widget, kind, _ = LOADERS[name]
    tiny = list(tiny_models(kind))
    assert inputs_of(name)[widget].options["options"] == ["sub/a.safetensors", *tiny]
    assert folder_paths.get_filename_list(kind) == ["sub/a.safetensors"]
    (folder,) = {Path(folder_paths.get_full_path(kind, "sub/a.safetensors")).parents[1]}
    (folder / "b.sft").touch()
    assert inputs_of(name)[widget].options["options"] == ["b.sft", "sub/a.safetensors", *tiny]


@pytest.mark.parametrize("name", ["../../x.safetensors", "a.safetensor", "/etc/passwd", "notes.txt", "none", ""])
def test_a_linked_name_of_no_file_is_refused(host: Recorder, models: Path, name: str) -> None:
    """The host checks what stands in the widget; a link is known only when the node runs."""
    with pytest.raises(InvalidInput, match=r"is not in the folder vae; .*allowed: sub/a\.safetensors$") as caught:
        run("LoadVAE", vae_name=name, **REQUEST)
    assert repr(name) in str(caught.value)
    assert host.calls == []


def test_a_long_list_of_files_is_cut_short(models: Path) -> None:
    for number in range(100):
        (models / "vae" / f"{number:03}.safetensors").touch()
    with pytest.raises(InvalidInput, match=r"did you mean '042\.safetensors'\? allowed: 042\.s.* and 81 more$"):
        model_files.find_model_file("vae", "042.safetensor")
    assert model_files.find_model_file("vae", "099.safetensors").endswith("099.safetensors")


@pytest.mark.parametrize(
    ("placement", "words", "said"),
    [
        ("default", "auto", ""),
        ("cpu", "cpu", ""),
        ("gpu:1", "gpu:1", ""),
        ("cuda:1", "gpu:1", ""),
        ("gpu:1&gpu:0", "gpu:1&gpu:0", ""),
        (" gpu:0 & gpu:1 ", "gpu:0&gpu:1", ""),
        ("gpu:0:gpu:1", "gpu:0:gpu:1", ""),
        (
            "auto",
            "auto",
            "placement auto: loaders of ComfyUI's models read auto as default: ComfyUI chooses the device",
        ),
        ("gpu:0:gpu:3", "auto", "this machine has no gpu:3, so default is used"),
        (
            "gpu:2",
            "auto",
            "this machine has no gpu:2, so default is used; allowed: default, cpu, gpu:0, gpu:1, gpu:0&gp",
        ),
        ("gpu:0&gpu:9", "auto", "this machine has no gpu:9, so default is used"),
        ("xpu:3&xpu:4", "auto", "this machine has no gpu:3 or gpu:4"),
    ],
)
def test_a_device_of_another_machine_is_said_and_not_refused(
    two_gpus: None, placement: str, words: str, said: str
) -> None:
    for name in NODES:
        assert placement in inputs_of(name)["placement"].options["options"]
    resolved, notes = device_choices.resolve_placement(placement)
    assert str(resolved) == words
    assert len(notes) == bool(said) and said in "".join(notes)


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (
            "nonsense",
            "placement 'nonsense', column 1: this machine has no device 'nonsense'; allowed: auto, cpu, gpu:0",
        ),
        ("gpu:0&", "column 7: a device is missing"),
        ("gpu:0&cpu", "'cpu' cannot share a split"),
        ("gpu:0&gpu:0", "'gpu:0' is named twice"),
        ("gpu:0&gpu:1@30%", "is not one device or two joined by & or :; allowed: default, cpu, gpu:0"),
        ("gpu:0&gpu:1&gpu:2", "is not one device or two joined by &"),
        ("diffusion=gpu:0", "is not one device or two joined by &"),
        ("gpu:0:gpu:0", "is not one device or two joined by & or :"),
        ("gpu:0:cpu", "is not one device or two joined by & or :"),
        ("gpu:0&gpu:1:gpu:1", "is not one device or two joined by & or :"),
        ("gpu:0:disk", "is not one device or two joined by &"),
        ("gpu:0,vae=cpu", "is not one device or two joined by &"),
        ("", "a device is missing"),
        (3, "placement 3 is not text"),
        ({"device": "cpu"}, "is not text"),
    ],
)
def test_a_placement_for_no_machine_is_refused_before_the_run(two_gpus: None, placement: Any, said: str) -> None:
    """By the host's check of combos: a node's own would be shown on every input that it names."""
    for name in NODES:
        is_of_parts = name == "LoadCheckpoint" and placement in ("diffusion=gpu:0", "gpu:0,vae=cpu")
        assert (placement in inputs_of(name)["placement"].options["options"]) == is_of_parts
    with pytest.raises(InvalidInput) as caught:  # a link may give it
        device_choices.resolve_placement(placement)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_note_of_a_missing_device_is_on_the_node(host: Recorder, models: Path, two_gpus: None) -> None:
    host.notes = ["not managed: why"]
    output = run("LoadVAE", vae_name="sub/a.safetensors", **{**REQUEST, "placement": "gpu:7"})
    first, second = output.ui_dict()["text"]
    assert (
        first.startswith("placement gpu:7: this machine has no gpu:7, so default is used") and second == host.notes[0]
    )
    assert host.calls[0][2].placement == AUTO_PLACEMENT


@pytest.mark.parametrize("engine", ["auto", "dynamic", "blocks"])
def test_the_engine_is_passed_on(host: Recorder, models: Path, engine: str) -> None:
    run("LoadVAE", vae_name="sub/a.safetensors", **REQUEST, engine=engine)
    run("ManageModel", model="a model", **REQUEST, engine=engine)
    assert [call[-1].engine for call in host.calls] == [engine, engine]


@pytest.mark.parametrize("engine", ["static", "", "Dynamic", 3])
def test_a_linked_engine_that_does_not_exist_is_refused(host: Recorder, models: Path, engine: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^engine {engine!r} is unknown; .*dynamic"):
        run("LoadVAE", vae_name="sub/a.safetensors", **REQUEST, engine=engine)


@pytest.mark.parametrize("profile", ["6", 6, "fast", "gpu:x=1GiB", "6GiB;", "500%"])
def test_a_bad_profile_is_refused_before_the_run_and_in_it(
    host: Recorder, models: Path, two_gpus: None, profile: Any
) -> None:
    for node in NODES.values():
        verdict = node.validate_inputs(profile)
        assert isinstance(verdict, str) and str(profile).split("=")[0] in verdict
    with pytest.raises(InvalidInput):  # a linked widget's value is known here only
        run("LoadVAE", vae_name="sub/a.safetensors", **{**REQUEST, "profile": profile})
    assert host.calls == []


@pytest.mark.parametrize(
    ("profile", "followed", "said"),
    [
        ("-2GiB", "-2GiB", []),
        ("gpu:0=90GiB", "gpu:0=90GiB", []),  # a limit that is never reached
        ("gpu:5=1GiB", "auto", ["no gpu:5, so that is left out; it has cpu, gpu:0, gpu:1"]),
        ("4,gpu:5=1GiB", "4", ["no gpu:5"]),
        ("3,cuda:7=2GiB,gpu:0=1GiB,reserve:gpu:5=1GiB", "3,gpu:0=1GiB", ["no gpu:5 or gpu:7"]),
        ("-24GiB", "auto", ["no device has more than the 24GiB that should stay free"]),
        ("4,-200GiB", "4", ["200GiB"]),
        ("gpu:0=-8GiB,gpu:1=-8GiB", "gpu:1=-8GiB", ["8GiB"]),
        ("6GiB,reserve=30GiB", "6GiB", ["30GiB"]),
    ],
)
def test_a_profile_of_a_larger_machine_is_followed_as_far_as_it_goes(
    host: Recorder,
    models: Path,
    two_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    followed: str,
    said: list[str],
) -> None:
    """GPUs of 8 and 24 GiB. It passes the check before the run, and the node says what it leaves out."""
    sizes = {"cpu": 64, "gpu:0": 8, "gpu:1": 24}
    found = [SimpleNamespace(name=n, is_cpu=n == "cpu", total_bytes=lambda s=s: s << 30) for n, s in sizes.items()]
    monkeypatch.setattr("highwater.memory.transfer.devices.list_devices", lambda: found)
    assert all(node.validate_inputs(profile) is True for node in NODES.values())
    output = run("LoadVAE", vae_name="sub/a.safetensors", **{**REQUEST, "profile": profile})
    (call,) = host.calls
    assert call[-1].profile == parse_profile(followed, devices=sizes)
    told = output.ui_dict()["text"]
    assert len(told) == len(said) and all(word in line for word, line in zip(said, told, strict=True))


def test_placements_are_the_hosts_words_and_every_pair(two_gpus: None) -> None:
    expected = ["default", "cpu", "gpu:0", "gpu:1", "gpu:0&gpu:1", "gpu:1&gpu:0", "gpu:0:gpu:1", "gpu:1:gpu:0"]
    assert device_choices.placement_choices() == expected
    for name in NODES:
        options = inputs_of(name)["placement"].options
        own = ["text=gpu:1"] if name == "LoadCheckpoint" else []
        assert (options["options"], options["default"]) == ([*expected, *own], "default")


@pytest.mark.parametrize(
    ("placement", "resolved", "said"),
    [
        ("default", "auto", []),
        ("text=gpu:1", "text=gpu:1", []),
        ("dit=cuda:0&gpu:1, clip=gpu:1, vae=cpu", "diffusion=gpu:0&gpu:1,text=gpu:1,vae=cpu", []),
        ("gpu:1,text=auto", "gpu:1,text=auto", []),
        ("auto", "auto", ["read auto as default: ComfyUI chooses the device"]),
        ("gpu:1&gpu:0", "gpu:1&gpu:0", []),
        ("text=gpu:7,vae=gpu:1", "vae=gpu:1", ["no gpu:7, so what names it is left out; it has cpu, gpu:0, gpu:1"]),
        ("gpu:0&gpu:7", "auto", ["this machine has no gpu:7, so default is used"]),
    ],
)
def test_the_parts_of_a_checkpoint_have_placements_of_their_own(
    two_gpus: None, placement: str, resolved: str, said: list[str]
) -> None:
    found, notes = device_choices.resolve_part_placement(placement)
    assert str(found) == resolved
    assert len(notes) == len(said) and all(word in note for word, note in zip(said, notes, strict=True))
    assert placement in device_choices.part_placement_choices()


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("text=gpu:1@", "column"),
        ("text=gpu:1:disk", "is not one device or two joined by & or :; allowed: default, cpu, gpu:0"),
        ("vae=cpu,text=gpu:0&gpu:1@30%", "is not one device or two"),
        ("control=gpu:1", "a checkpoint has no part 'control'; allowed: diffusion, text, vae"),
        ("text=gpu:1,te=gpu:0", "'text' is placed twice"),
        (7, "is not text; allowed: default"),
    ],
)
def test_a_wrong_placement_of_parts_is_refused(two_gpus: None, placement: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        device_choices.resolve_part_placement(placement)
    assert placement not in device_choices.part_placement_choices()


def test_nodes_for_comfyuis_models_are_listed_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    assert importlib.util.find_spec("comfy") is None, "these tests are for the stand-in"
    assert asyncio.run(HighwaterExtension().get_node_list()) == list(NODE_CLASSES)
    monkeypatch.setitem(sys.modules, "comfy", with_spec("comfy"))
    assert asyncio.run(HighwaterExtension().get_node_list()) == [*NODE_CLASSES, *MODEL_NODES]


def with_spec(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    return module


def test_importing_the_pack_and_listing_its_nodes_loads_nothing_heavy(run_python: Callable[[str], None]) -> None:
    """Where ComfyUI is: torch is there already, its own modules stay untouched. The import benchmark has the times."""
    script = (
        "import asyncio, importlib.util, sys, types\n"
        "from highwater.headless.comfy_stub import comfy_api; comfy_api.install()\n"
        "sys.modules['comfy'] = comfy = types.ModuleType('comfy')\n"
        "comfy.__spec__ = importlib.util.spec_from_loader('comfy', loader=None)\n"
        "for name in [n for n in sys.modules if n.startswith('highwater') and '.headless' not in n]:\n"
        "    del sys.modules[name]\n"
        "async def main():\n"
        "    import highwater\n"
        "    extension = await highwater.comfy_entrypoint()\n"
        "    return await extension.get_node_list()\n"
        "nodes = asyncio.run(main())\n"
        "assert len(nodes) >= 14, nodes\n"
        "heavy = {'torch', 'diffusers', 'safetensors', 'optimum', 'PIL', 'psutil', 'highwater.nodes.host'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    run_python(script)
