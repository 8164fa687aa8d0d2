"""Pipeline folders that somebody made to do harm: each is refused by name, and nothing of it runs or is fetched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory.errors import InvalidInput
from highwater.nodes.comfy_models.model_files import find_model_file
from highwater.nodes.file_names import name_problem
from highwater.nodes.pipelines import pipeline_folders
from highwater.nodes.pipelines.diffusers_pipelines import load_pipeline
from highwater.nodes.pipelines.pipeline_folders import check_pipeline, find_pipeline, weights_fingerprint

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
EVIL_CODE = "import os, pathlib\npathlib.Path(os.environ['HIGHWATER_MARKER']).touch()\nclass Evil: pass\n"


@pytest.fixture
def hostile(models_directory: Path, runner: WorkflowRunner) -> Iterator[Path]:
    """A copy of tiny-sd that a test makes hostile, which the host offers like any other."""
    folder = models_directory / "diffusers" / "hostile"
    shutil.copytree(models_directory / "diffusers" / "tiny-sd", folder, copy_function=link_weights)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def link_weights(source: str, target: str) -> None:
    """Copy what a test edits; weights are only ever removed."""
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that hostile code makes; it may not be there in the end."""
    path = tmp_path / "ran"
    monkeypatch.setenv("HIGHWATER_MARKER", str(path))
    yield path
    assert not path.exists(), "code of the folder ran"


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def refuse(folder: Path, words: str, *, when: str = "checked") -> None:
    """Require one line from whoever looks at the folder, and with ``checked`` before anything is loaded."""
    looks: list[Callable[[], Any]] = [lambda: load_pipeline(folder)]
    if when == "checked":
        looks += [lambda: check_pipeline(folder), lambda: parse_workflow(loader_graph(folder.name))]
    for look in looks:
        with pytest.raises(InvalidInput, match=words) as error:
            look()
        told = str(error.value)
        assert told.isprintable() and len(told) < 500 + len(str(folder)) * 2


def loader_graph(pipeline: str, num_loaders: int = 1) -> dict[str, Any]:
    graph: dict[str, Any] = {}
    for index in range(num_loaders):
        values = {"pipeline": pipeline, "profile": "auto", "precision": "as stored", "placement": "cpu"}
        graph[f"load{index}"] = {"class_type": "HighwaterLoadPipeline", "inputs": values}
        after = {"after": [f"load{index}", 0]}
        graph[f"report{index}"] = {"class_type": "HighwaterMemoryReport", "inputs": after}
    return graph


# Code ------------------------------------------------------------------------------------------------------


def test_a_folder_does_not_run_its_own_python(
    hostile: Path, marker: Path, models_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI starts in the folder above ``models``, and Python imports from there."""
    monkeypatch.syspath_prepend(str(models_directory.parent))
    library = f"{models_directory.name}.diffusers.hostile.unet.modeling"
    edit(hostile / INDEX, unet=[library, "Evil"])
    refuse(hostile, "comes from .*modeling'; allowed: a class of diffusers")
    (hostile / "unet" / "modeling.py").write_text(EVIL_CODE)
    refuse(hostile, r"unet.modeling\.py: is a program, and no program in a model folder is run")
    edit(hostile / INDEX, unet=["modeling", "Evil"])
    refuse(hostile, r"unet.modeling\.py: is a program, and no program in a model folder is run")
    assert library not in sys.modules


def test_a_module_is_not_imported_because_a_folder_names_it(
    hostile: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text(EVIL_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for component in ("unet", "scheduler", "tokenizer"):
        before = (hostile / INDEX).read_text()
        edit(hostile / INDEX, **{component: ["evil_module", "Evil"]})
        refuse(hostile, r"comes from evil_module\.Evil, which is not a component", when="loaded")
        (hostile / INDEX).write_text(before)
    assert "evil_module" not in sys.modules


@pytest.mark.parametrize(
    "origin",
    [
        ["os", "system"],
        ["builtins", "exec"],
        ["torch", "load"],
        ["diffusers", "DiffusionPipeline"],
        ["diffusers", "StableDiffusionPipeline"],
        ["diffusers", "AutoModel"],
        ["diffusers", "OnnxRuntimeModel"],
        ["diffusers", "models"],
        ["diffusers", "__getattr__"],
        ["transformers", "AutoModel"],
        ["transformers", "AutoTokenizer"],
        ["transformers", "pipeline"],
        ["transformers", "PreTrainedConfig"],
        ["pipeline_utils", "importlib"],
        ["FluxPipeline", "from_pretrained"],
        ["stable_diffusion", "StableDiffusionPipeline"],
        ["onnxruntime.training", "ORTModule"],
    ],
    ids=".".join,
)
@pytest.mark.parametrize("component", ["unet", "scheduler"])
def test_a_component_is_a_component_of_the_two_libraries(hostile: Path, origin: list[str], component: str) -> None:
    edit(hostile / INDEX, **{component: origin})
    refuse(hostile, "is not a component|allowed: a class of diffusers|requires the onnxruntime", when="loaded")


@pytest.mark.parametrize("origin", [{"os": 1, "system": 2}, "ab", ["os", "system", "x"], ["os", 3], 7, [["os"], "x"]])
def test_what_is_no_library_and_class_is_refused(hostile: Path, origin: Any) -> None:
    edit(hostile / INDEX, unet=origin)
    refuse(hostile, r"component 'unet' is .*; allowed: \[library, class\]", when="loaded")


@pytest.mark.parametrize(
    "name", ["pipeline.py", "x.PY", "unet/x.pyc", "tokenizer/tokenization.py", "a/b/c.so", "x.pyd"]
)
def test_programs_are_refused_wherever_they_lie(hostile: Path, marker: Path, name: str) -> None:
    path = hostile / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(EVIL_CODE)
    refuse(hostile, "is a program, and no program in a model folder is run; remove it")


@pytest.mark.parametrize(
    "class_name", [["pipeline", "Evil"], "Evil", "os.system", "DiffusionPipeline\0", "ModelMixin", 3]
)
def test_a_pipeline_class_is_one_of_the_librarys(hostile: Path, class_name: Any) -> None:
    edit(hostile / INDEX, _class_name=class_name)
    refuse(hostile, "is unknown to diffusers|names no pipeline class", when="loaded")


def test_a_pipeline_that_loads_another_by_name_is_refused(hostile: Path) -> None:
    edit(hostile / INDEX, _class_name="KandinskyCombinedPipeline")
    (hostile / "README.md").write_text("---\nprior:\n- /somewhere/else\n---\n")
    refuse(hostile, "loads a second pipeline by its name", when="loaded")


CONFIGS = [
    "unet/config.json",
    "text_encoder/config.json",
    "tokenizer/tokenizer_config.json",
    "scheduler/scheduler_config.json",
]
HOSTILE_ITEMS = {
    "auto_map": {"auto_map": {"AutoModel": "modeling.Evil", "AutoTokenizer": ["evil/repo--t.Evil", None]}},
    "nested auto_map": {"text_config": [{"deep": {"auto_map": {"AutoConfig": "x.Y"}}}]},
    "custom_pipeline": {"custom_pipeline": "evil/repo"},
    "trust_remote_code": {"trust_remote_code": True},
    "custom_generate": {"custom_generate": "evil/repo"},
    "audio_tokenizer": {"audio_tokenizer": {"audio_tokenizer_name_or_path": "evil/repo"}},
    "attn_implementation": {"attn_implementation": "evil/kernel"},
    "flash_attention_2": {"_attn_implementation": "flash_attention_2"},
    "_attn_implementation_internal": {"_attn_implementation_internal": "evil/kernel@main:f"},
    "experts_implementation": {"vision_config": {"experts_implementation": {"": "sonicmoe"}}},
    "nunchaku_lite": {"quantization_config": {"quant_method": "nunchaku_lite"}},
    "timm_wrapper": {"backbone_config": {"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "x.pth"}}},
    "hf-hub": {"architecture": "hf-hub:evil/repo"},
    "vocab_file": {"vocab_file": "\\\\host\\share\\vocab.json"},
    "tokenizer_file": {"tokenizer_file": "/etc/passwd"},
    "fast_tokenizer_files": {"fast_tokenizer_files": ["../../tokenizer.1.json"]},
    "transformers_weights": {"transformers_weights": "../vae/model.safetensors"},
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", HOSTILE_ITEMS)
def test_a_config_that_names_code_or_other_places_is_refused(hostile: Path, config: str, kind: str) -> None:
    edit(hostile / config, **HOSTILE_ITEMS[kind])
    with pytest.raises(InvalidInput, match=f"{Path(config).name}: .*{kind.split()[-1]}") as error:
        check_pipeline(hostile)
    assert str(error.value).isprintable()


def test_settings_beside_the_usual_ones_are_looked_at_too(hostile: Path) -> None:
    for name in ("feature/preprocessor_config.json", "tokenizer/processor_config.json", "unet/Generation_Config.JSON"):
        path = hostile / name
        path.parent.mkdir(exist_ok=True)
        edit(path, auto_map={"AutoProcessor": "x.Y"})
        refuse(hostile, "'auto_map'")
        path.unlink()


def test_an_adapter_beside_the_weights_is_refused(hostile: Path) -> None:
    edit(hostile / "text_encoder" / "adapter_config.json", base_model_name_or_path="/somewhere/else")
    refuse(hostile, r"adapter_config\.json: is the config of an adapter")


# Pickles ---------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch $HIGHWATER_MARKER",)


@pytest.mark.parametrize("suffix", ["bin", "pt", "ckpt", "pkl", "PTH", "npz", "msgpack", "onnx", "h5"])
@pytest.mark.parametrize("place", ["unet", "text_encoder", "vae"])
def test_pickles_in_place_of_weights_are_refused(hostile: Path, marker: Path, place: str, suffix: str) -> None:
    for weights in (hostile / place).glob("*.safetensors"):
        weights.with_suffix(f".{suffix}").write_bytes(pickle.dumps(Evil()))
        weights.unlink()
    refuse(hostile, r"is a pickle, which may run code when loaded; convert it to \.safetensors")


@pytest.mark.parametrize("place", ["unet", "text_encoder"])
def test_a_component_without_a_config_is_no_way_to_a_pickle(hostile: Path, marker: Path, place: str) -> None:
    (hostile / place / "config.json").unlink()
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin"):
        (hostile / place / name).write_bytes(pickle.dumps(Evil()))
    refuse(hostile, "is a pickle, which may run code")
    for path in (hostile / place).glob("*.bin"):
        path.unlink()
    refuse(hostile, r"config\.json: no such file", when="loaded")


def test_a_pickle_beside_a_tokenizer_or_a_scheduler_is_refused(hostile: Path, marker: Path) -> None:
    for name in ("tokenizer/vocab.pkl", "scheduler/state.bin"):
        (hostile / name).write_bytes(pickle.dumps(Evil()))
        refuse(hostile, "is a pickle")
        (hostile / name).unlink()


def test_a_pickle_beside_weights_is_left_alone(hostile: Path, marker: Path) -> None:
    for place in ("unet", "vae", "text_encoder"):
        (hostile / place / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
        (hostile / place / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    assert load_pipeline(hostile).unet is not None


# Names and places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc", "a:b", "C:", "\\\\host\\share", "aux", "NUL", "com1", "ünet", "unet\0", "", "a/../unet", "a b"],
)
def test_a_component_is_a_plain_name(hostile: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(hostile / INDEX, **{name: ["diffusers", "UNet2DConditionModel"]})
    refuse(hostile, "component .* is not a plain name; allowed: letters, digits and _")


OUTSIDE = [
    "/dev/zero",
    "../vae/diffusion_pytorch_model.safetensors",
    "sub/part.safetensors",
    "..",
    "",
    "nul\0l.safetensors",
    "C:part.safetensors",
    "C:\\part.safetensors",
    "\\\\host\\share\\part.safetensors",
    "//host/share/part.safetensors",
    "part.safetensors:stream",
    "aux.safetensors",
    "NUL",
    "part.bin",
    "part.safetensors\n",
    "p" * 5000,
    7,
    None,
    ["part.safetensors"],
]


@pytest.mark.parametrize("shard", OUTSIDE, ids=lambda shard: repr(shard)[:30])
@pytest.mark.parametrize("place", ["unet", "text_encoder"])
def test_shards_stay_in_their_folder(hostile: Path, place: str, shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = next((hostile / place).glob("*.safetensors"))
    edit(hostile / place / f"{weights.name}.index.json", metadata={}, weight_map={"a": weights.name, "b": shard})
    opened: list[str] = []
    opening = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: (opened.append(str(path)), opening(path, *rest, **more))[1]
    )
    refuse(hostile, r"index\.json: .*(allowed|file name)")
    assert all(Path(path).is_relative_to(hostile) for path in opened if path != os.devnull)


needs_links = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no links and pipes here")


@needs_links
@pytest.mark.parametrize("target", ["/dev/zero", "/etc/hostname", ""])
@pytest.mark.parametrize("name", ["unet/config.json", f"unet/{WEIGHTS}", "notes.txt"])
def test_links_do_not_lead_out_of_the_folder(hostile: Path, name: str, target: str, models_directory: Path) -> None:
    path = hostile / name
    path.unlink(missing_ok=True)
    path.symlink_to(target or os.path.relpath(models_directory.parent / "elsewhere", path.parent))
    refuse(hostile, "is a link to .*, outside of the folder")


@needs_links
def test_a_linked_folder_does_not_lead_out_of_the_folder(hostile: Path, tmp_path: Path) -> None:
    shutil.move(hostile / "unet", tmp_path / "unet")
    (hostile / "unet").symlink_to(tmp_path / "unet")
    refuse(hostile, "unet: is a link to .*, outside of the folder")


@needs_links
def test_a_link_to_itself_is_refused(hostile: Path) -> None:
    (hostile / "again").symlink_to(hostile)
    refuse(hostile, "lies more than 8 folders deep")


@needs_links
def test_components_that_two_pipelines_of_the_host_share_are_taken(hostile: Path, models_directory: Path) -> None:
    shutil.rmtree(hostile / "vae")
    (hostile / "vae").symlink_to(models_directory / "diffusers" / "tiny-sd" / "vae")
    assert "vae" in check_pipeline(hostile)
    (models_directory / "diffusers" / "tiny-sd" / "vae" / "evil.py").write_text(EVIL_CODE)
    try:
        refuse(hostile, r"evil\.py: is a program")
    finally:
        (models_directory / "diffusers" / "tiny-sd" / "vae" / "evil.py").unlink()


@needs_links
def test_a_folder_of_the_hubs_cache_is_taken(hostile: Path, tmp_path: Path) -> None:
    """There each file is a link to its content, beside the folder."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in hostile.rglob("*") if path.is_file())):
        shutil.copy(path, blobs / str(number))
        link = snapshot / path.relative_to(hostile)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert check_pipeline(snapshot) == check_pipeline(hostile)
    link.unlink()
    link.symlink_to("/etc/hostname")
    with pytest.raises(InvalidInput, match="outside of the folder"):
        check_pipeline(snapshot)


def test_hidden_files_are_no_part_of_a_pipeline(hostile: Path) -> None:
    hooks = hostile / ".git" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "pre-commit.py").write_text(EVIL_CODE)
    assert check_pipeline(hostile)


@needs_links
def test_a_pipe_in_the_folder_is_not_waited_for(hostile: Path) -> None:
    for name in ("unet/config.json", INDEX, "pipe"):
        path, kept = hostile / name, hostile.parent.parent / "kept"
        if path.exists():
            path.rename(kept)
        os.mkfifo(path)
        with pytest.raises(InvalidInput, match="is not a regular file"):
            check_pipeline(hostile)
        with pytest.raises(InvalidInput, match="is not a regular file"):
            weights_fingerprint(hostile)
        path.unlink()
        if kept.exists():
            kept.rename(path)


@pytest.mark.parametrize(
    "name", [INDEX, "unet/config.json", "tokenizer/tokenizer_config.json", "unet/x.safetensors.index.json"]
)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is longer than 32 MiB"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a":' * 50_000, "is not valid JSON"),
        ('{"a": ' + "9" * 4_000 + "}", "a number of 4000 digits"),
        ("[1]", "is a JSON list"),
        ("\ud800", "is not valid JSON"),
        ("", "is not valid JSON"),
    ],
    ids=["a terabyte", "deep lists", "deep objects", "long number", "list", "half a character", "empty"],
)
def test_settings_that_are_no_settings_are_one_line(hostile: Path, name: str, content: str | None, words: str) -> None:
    if content is None:
        with (hostile / name).open("wb") as file:
            file.truncate(1 << 40)  # holes only
    else:
        (hostile / name).write_bytes(content.encode(errors="surrogatepass"))
    refuse(hostile, words)


def test_the_longest_text_of_a_tokenizer_that_has_none_is_read(hostile: Path) -> None:
    edit(hostile / "tokenizer" / "tokenizer_config.json", model_max_length=int(1e30))
    assert load_pipeline(hostile).tokenizer.model_max_length == int(1e30)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("text_encoder/config.json", {"vocab_size": "many"}),
        ("text_encoder/config.json", {"hidden_size": float("nan")}),
        ("text_encoder/config.json", {"num_attention_heads": 0}),
        ("unet/config.json", {"block_out_channels": [[]]}),
        ("unet/config.json", {"down_block_types": ["os.system"] * 3}),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}),
        ("tokenizer/tokenizer_config.json", {"added_tokens_decoder": {"x": 1}}),
        ("tokenizer/tokenizer.json", {"model": {"type": "evil"}, "version": 7}),
    ],
)
def test_values_that_no_class_takes_are_one_line(hostile: Path, name: str, change: dict[str, Any]) -> None:
    """The libraries raise whatever they like for them, one of them an error that is no ``Exception``."""
    edit(hostile / name, **change)
    with pytest.raises(InvalidInput, match="diffusers cannot load it: ") as error:
        load_pipeline(hostile)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change"),
    [("vae/config.json", {"layers_per_block": 1 << 62}), ("text_encoder/config.json", {"num_hidden_layers": 1 << 62})],
)
def test_a_config_for_endless_layers_is_refused(
    hostile: Path, name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("highwater.memory.model_class.NUM_UNSTORED", 100)
    edit(hostile / name, **change)
    refuse(hostile, r"its config asks for a \w+ and more than \d+ weights, the files have", when="loaded")


def test_more_files_than_a_model_has_are_not_walked(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.nodes.pipelines.pipeline_files.MAX_FILES", 5)
    refuse(hostile, "contains more than 5 files")


# What a prompt names -----------------------------------------------------------------------------------------

NAMES_ELSEWHERE = [
    "../secret", "/etc", "a/../../b", "C:x", "C:\\x", "c:/x", "\\\\host\\share\\x", "//host/share", "a\\b", "a:b", "",
    ".", "..", "aux", "NUL.txt", "a/con/b", "com¹", "x\0", "x\n", "x\u202ey", "x ", "x.", " x", "a//b",
    "x" * 300, "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES_ELSEWHERE, ids=lambda name: ascii(name)[:20])
def test_a_name_is_refused_by_its_letters_before_any_path_is_made(
    name: str, runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("a path was made of it")

    monkeypatch.setattr(pipeline_folders, "pipeline_roots", fail)
    monkeypatch.setattr("folder_paths.get_full_path", fail)
    with pytest.raises(InvalidInput, match="allowed: a relative path") as error:
        find_pipeline(name)
    assert str(error.value).isprintable()
    with pytest.raises(InvalidInput, match="is not in the folder checkpoints"):
        find_model_file("checkpoints", name)


def test_good_names_pass() -> None:
    for name in (
        "tiny-sd",
        "FLUX.1-dev",
        "Ünïcode 模型：二",
        "console",
        "com10",
        "model-00001-of-00002.safetensors",
        "..a",
    ):
        assert name_problem(name) is None


def test_many_loaders_of_one_pipeline_read_its_folder_once(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    reading = pipeline_folders.check_weights
    monkeypatch.setattr(pipeline_folders, "check_weights", lambda place: (read.append(place.name), reading(place))[1])
    for _ in range(3):
        parse_workflow(loader_graph("hostile", num_loaders=20))
    assert sorted(read) == ["text_encoder", "unet", "vae"]
    edit(hostile / "unet" / "config.json", note="changed")
    parse_workflow(loader_graph("hostile"))
    assert len(read) == 6


def test_a_refused_folder_is_read_once_too(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(hostile / "unet" / "config.json", auto_map={"a": "b"})
    read: list[str] = []
    reading = pipeline_folders.check_weights
    monkeypatch.setattr(pipeline_folders, "check_weights", lambda place: (read.append(place.name), reading(place))[1])
    for _ in range(20):
        with pytest.raises(InvalidInput, match="'auto_map'"):
            check_pipeline(hostile)
    assert len(read) == 3


# The libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.35.2", "0.40.0", "0.41.9.dev0"])
def test_a_diffusers_that_runs_what_a_folder_holds_is_refused(
    hostile: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    monkeypatch.setattr(diffusers, "__version__", version)
    with pytest.raises(
        InvalidInput, match=rf"diffusers {version} may run code .* allowed: 0\.42 or newer; run: pip install"
    ):
        load_pipeline(hostile)


def test_the_optional_requirements_have_the_same_floor() -> None:
    from highwater.nodes.pipelines.diffusers_pipelines import OLDEST_DIFFUSERS

    project = Path(__file__).parents[3] / "pyproject.toml"
    floor = ".".join(map(str, OLDEST_DIFFUSERS))
    assert f'"diffusers>={floor}"' in project.read_text(encoding="utf-8")


NO_NETWORK = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "0"
asked = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        asked.append(arguments)
        raise OSError("no network here")
sys.addaudithook(watch)
from pathlib import Path
from highwater.headless.comfy_stub.comfy_api import install
from highwater.headless.comfy_stub import folder_paths
install()
folder_paths.configure(models={models!r}, output={models!r})
from highwater.nodes.pipelines.diffusers_pipelines import load_pipeline
for name in ("tiny-sd", "tiny-flux"):
    load_pipeline(Path({models!r}, "diffusers", name))
assert not asked, asked
"""


def test_loading_asks_the_network_for_nothing(models_directory: Path, run_python: Callable[[str], None]) -> None:
    run_python(NO_NETWORK.format(models=str(models_directory)))
