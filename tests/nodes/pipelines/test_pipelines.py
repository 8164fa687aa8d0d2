"""The nodes with real diffusers pipelines: what they make, what they keep, what they refuse."""

from __future__ import annotations

import builtins
import copy
import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from highwater.headless.runner import output_cache
from highwater.headless.runner.runner import InterruptedRun, WorkflowRunner
from highwater.headless.runner.workflow import InvalidWorkflow, parse_workflow
from highwater.memory import default_manager
from highwater.memory.errors import InvalidInput
from highwater.memory.manager import live_capacity, module_plans
from highwater.memory.options.placement import Scanner
from highwater.nodes.pipelines import tiny_pipelines as tiny
from highwater.nodes.pipelines.diffusers_pipelines import find_sources, load_pipeline
from highwater.nodes.pipelines.pipeline_folders import check_pipeline, weights_files
from highwater.nodes.pipelines.sampling import Sampling, arguments_of


def make_graph(pipeline: str, *, sampled: dict[str, Any] | None = None, **loaded: Any) -> dict[str, Any]:
    return {
        "load": {
            "class_type": "HighwaterLoadPipeline",
            "inputs": {
                "pipeline": pipeline,
                "profile": "auto",
                "precision": "as stored",
                "placement": "cpu",
                **loaded,
            },
        },
        "sample": {
            "class_type": "HighwaterSamplePipeline",
            "inputs": {
                "pipeline": ["load", 0],
                "prompt": "a red fox",
                "negative_prompt": "",
                "width": 64,
                "height": 64,
                "frames": 1,
                "steps": 2,
                "guidance": 4.0,
                "seed": 1,
                **(sampled or {}),
            },
        },
        "save": {
            "class_type": "HighwaterSaveImage",
            "inputs": {"images": ["sample", 0], "filename_prefix": f"{pipeline}/image"},
        },
    }


def run(runner: WorkflowRunner, graph: dict[str, Any], **options: Any) -> list[torch.Tensor]:
    """Run a graph; return the pixels of the images that it saved, [H, W, C] from 0 to 255."""
    result = runner.run(parse_workflow(graph), name="test", **options)
    return [read_pixels(saved) for saved in result.outputs["save"]["images"]]


def read_pixels(saved: dict[str, str]) -> torch.Tensor:
    with Image.open(output_path(saved)) as image:
        return torch.tensor(list(image.tobytes())).reshape(image.height, image.width, 3)


def output_path(saved: dict[str, str]) -> Path:
    import folder_paths

    return Path(folder_paths.get_output_directory(), saved["subfolder"], saved["filename"])


@pytest.mark.parametrize(("pipeline", "frames"), [("tiny-flux", 1), ("tiny-sd", 1), ("tiny-wan", 5)])
def test_a_seed_gives_the_same_pictures_and_another_seed_others(
    runner: WorkflowRunner, pipeline: str, frames: int
) -> None:
    first = run(runner, make_graph(pipeline, sampled={"frames": frames}))
    runner.cache.clear()
    again = run(runner, make_graph(pipeline, sampled={"frames": frames}))
    other = run(runner, make_graph(pipeline, sampled={"frames": frames, "seed": 2}))
    assert [tuple(image.shape) for image in first] == [(64, 64, 3)] * frames
    # Reloaded weights lie at other addresses, which decides the kernels: equal to one step of a byte.
    assert all((a - b).abs().max() <= 1 for a, b in zip(first, again, strict=True))
    assert all((a - b).abs().double().mean() > 5 for a, b in zip(first, other, strict=True))
    assert all(image.double().std() > 15 for image in first), "flat pictures show nothing"


@pytest.mark.parametrize(("pipeline", "frames"), [("tiny-flux", 1), ("tiny-sd", 1), ("tiny-wan", 5)])
def test_a_batch_is_made_at_once(runner: WorkflowRunner, pipeline: str, frames: int) -> None:
    """The first of it is what the seed gives alone, but for the rounding of larger kernels."""
    (*alone,) = run(runner, make_graph(pipeline, sampled={"frames": frames}))
    made = run(runner, make_graph(pipeline, sampled={"frames": frames, "batch_size": 2}))
    assert [tuple(image.shape) for image in made] == [(64, 64, 3)] * 2 * frames
    assert all((a - b).abs().double().mean() < 1 for a, b in zip(alone, made[:frames], strict=True))
    assert all((a - b).abs().double().mean() > 5 for a, b in zip(alone, made[frames:], strict=True))


def test_a_pipeline_that_makes_one_at_a_time_says_so() -> None:
    class OneAtATime:
        def __call__(self, prompt: str) -> None: ...

    asked = Sampling(
        prompt="", negative_prompt="", width=64, height=64, frames=1, steps=1, guidance=1.0, seed=1, batch_size=2
    )
    with pytest.raises(InvalidInput, match="batch_size 2 is not allowed; allowed: 1, as OneAtATime makes one at a tim"):
        arguments_of(OneAtATime(), asked)


@pytest.mark.parametrize(
    ("profile", "precision", "said"),
    [
        ("4", "by profile", "fp8 scaled"),
        ("LowRAM_LowVRAM,quantize=none", "by profile", "as stored"),
        ("auto,quantize=all,prefetch=2,reserve=1MiB", "by profile", "fp8 scaled"),
        ("auto", "by profile", "as stored"),
        ("4", "as stored", "as stored"),
    ],
)
def test_the_precision_may_be_what_the_profile_says(
    runner: WorkflowRunner, profile: str, precision: str, said: str
) -> None:
    graph = make_graph("tiny-sd", profile=profile, precision=precision)
    graph["report"] = {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["load", 0]}}
    del graph["sample"], graph["save"]
    runner.run(parse_workflow(graph), name="test")
    precisions = {part["name"]: part["precision"] for part in default_manager().report()["components"]}
    assert precisions["unet"] == said


@pytest.mark.parametrize(
    "placement",
    [
        "cpu,unet=gpu:77",
        "cpu,unet=cpu:gpu:77",
        "cpu,unet=gpu:77&gpu:78@30%",
    ],
)
def test_a_device_of_another_machine_is_left_out_and_the_node_says_so(runner: WorkflowRunner, placement: str) -> None:
    graph = {"load": make_graph("tiny-sd", placement=placement, profile="auto,gpu:76=1GiB")["load"]}
    graph["report"] = {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["load", 0]}}
    told = runner.run(parse_workflow(graph), name="test").outputs["load"]["text"]
    names = "gpu:77 or gpu:78" if "gpu:78" in placement else "gpu:77"
    assert len(told) == 2 and "this machine has no gpu:76, so that is left out" in told[0]
    begin = f"placement {placement}: this machine has no {names}, so what names it is left out; it has cpu"
    assert told[1].startswith(begin)
    plans = {part["name"]: part["plan"]["placement"] for part in default_manager().report()["components"]}
    assert {plans[name].partition(":")[0] for name in ("unet", "vae")} == {"unet=cpu", "vae=cpu"}


def test_changing_the_prompt_runs_all_but_the_loader(runner: WorkflowRunner) -> None:
    runner.run(parse_workflow(make_graph("tiny-sd")), name="test")
    result = runner.run(parse_workflow(make_graph("tiny-sd", sampled={"prompt": "a whale"})), name="test")
    assert (result.executed, result.cached) == (("sample", "save"), ("load",))


def test_a_changed_file_loads_the_pipeline_again(runner: WorkflowRunner, models_directory: Path) -> None:
    folder = models_directory / "diffusers" / "changing"
    shutil.copytree(models_directory / "diffusers" / "tiny-sd", folder)
    try:
        workflow = parse_workflow(make_graph("changing"))
        runner.run(workflow, name="test")
        assert runner.run(workflow, name="test").executed == ()
        config = folder / "unet" / "config.json"
        config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        assert runner.run(workflow, name="test").executed == ("load", "sample", "save")
    finally:
        shutil.rmtree(folder)


def test_dropping_the_cached_loader_releases_its_memory(runner: WorkflowRunner) -> None:
    runner.run(parse_workflow(make_graph("tiny-sd")), name="test")
    assert len(default_manager().report()["components"]) == 3
    gc.disable()  # the release must not wait for a collection
    try:
        runner.cache.clear()
        assert default_manager().report()["components"] == []
    finally:
        gc.enable()


def test_dropping_the_cached_loader_reads_nothing_back(runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    from highwater.memory.runtime import packing
    from highwater.memory.runtime.blocks.weight_group import WeightGroup

    restored: list[WeightGroup] = []
    runner.run(parse_workflow(make_graph("tiny-sd", precision="fp8 scaled")), name="test")
    monkeypatch.setattr(packing, "unpack", lambda group, *args: restored.append(group))
    runner.cache.clear()
    assert default_manager().report()["components"] == [] == restored
    default_manager().ledger.check()


def rename_with_prefix(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {f"text_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def add_a_variant(path: Path) -> None:
    shutil.copy(path, path.with_name("diffusion_pytorch_model.non_ema.safetensors"))


def shard(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    weight_map = {}
    for index, names in enumerate((sorted(tensors)[:20], sorted(tensors)[20:])):
        file = path.with_name(f"diffusion_pytorch_model-0000{index + 1}-of-00002.safetensors")
        save_file({name: tensors[name] for name in names}, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file.name)
    path.unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        lambda f: None,
        lambda f: rename_with_prefix(f / "text_encoder" / "model.safetensors"),
        lambda f: add_a_variant(f / WEIGHTS),
        lambda f: shard(f / WEIGHTS),
    ],
    ids=["as it is", "names with a prefix", "two variants", "shards"],
)
def test_the_files_of_a_pipeline_are_those_that_its_weights_came_from(copied: Path, change: Any) -> None:
    from highwater.memory.weights.module_component import component_from_module

    change(copied)
    pipe = load_pipeline(copied)
    sources = find_sources(pipe, copied)
    assert sources.keys() == {"unet", "vae", "text_encoder"}
    for name, source in sources.items():
        model = pipe.components[name]
        assert source.covers(component_from_module(model, name=name))
        read = {key: torch.empty_like(weight) for key, weight in model.named_parameters()}
        source.read_into(read.items())
        assert all(torch.equal(weight, read[key]) for key, weight in model.named_parameters())


def test_files_among_which_the_weights_are_not_plain_are_not_offered(copied: Path) -> None:
    (copied / WEIGHTS).rename(copied / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    assert weights_files(copied / "unet") == []


def test_when_ram_is_short_other_workflows_give_up_their_pipelines(
    runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run(parse_workflow(make_graph("tiny-sd")), name="one")
    monkeypatch.setattr(output_cache, "host_memory_is_short", lambda: True)
    runner.run(parse_workflow(make_graph("tiny-wan")), name="two")
    assert {component["id"].split("/")[0] for component in default_manager().report()["components"]} == {"tiny-wan"}
    assert runner.run(parse_workflow(make_graph("tiny-wan")), name="two").executed == ()


def test_an_interrupted_sampling_leaves_the_pipeline_usable(runner: WorkflowRunner) -> None:
    graph = make_graph("tiny-sd", sampled={"steps": 4})

    def stop_at_the_second_step(*event: Any) -> None:
        if event[:3] == ("progress", "sample", 2):
            runner.interrupt()

    with pytest.raises(InterruptedRun):
        run(runner, graph, listener=stop_at_the_second_step)
    assert runner.run(parse_workflow(graph), name="test").cached == ("load",)


def test_saved_images_bring_their_workflow_along(runner: WorkflowRunner) -> None:
    graph = make_graph("tiny-sd")
    page = {"workflow": {"nodes": [1, 2, 3]}}
    result = runner.run(parse_workflow(graph), name="test", extra_pnginfo=page)
    (saved,) = result.outputs["save"]["images"]
    assert saved == {"filename": "image_00001_.png", "subfolder": "tiny-sd", "type": "output"}
    with Image.open(output_path(saved)) as image:
        assert json.loads(image.text["prompt"]) == graph
        assert json.loads(image.text["workflow"]) == page["workflow"]
    graph["save"]["inputs"]["filename_prefix"] = "../outside"
    with pytest.raises(InvalidWorkflow, match=r"node save .* '../outside' leads out of the output folder; allowed: "):
        runner.run(parse_workflow(graph), name="test")


def test_file_numbers_go_on_where_they_ended(runner: WorkflowRunner) -> None:
    graph = make_graph("tiny-sd")
    names = []
    for seed in (1, 2):
        graph["sample"]["inputs"]["seed"] = seed
        result = runner.run(parse_workflow(graph), name="test")
        names += [saved["filename"] for saved in result.outputs["save"]["images"]]
    assert names == ["image_00001_.png", "image_00002_.png"]


def test_the_watermark_of_a_workflow_is_set_again_when_it_samples(
    runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(default_manager(), "set_watermark", lambda *marks: calls.append(marks))
    mark = {"class_type": "HighwaterWatermark", "inputs": {"device": "*", "low": "1MiB", "high": "2MiB"}}
    graph = make_graph("tiny-sd", watermark=["mark", 0]) | {"mark": mark}
    runner.run(parse_workflow(graph), name="test")
    assert calls == [("*", 1 << 20, 2 << 20)] * 2  # by its own node, and by the sampler

    graph["sample"]["inputs"]["seed"] = 2
    calls.clear()
    assert "mark" in runner.run(parse_workflow(graph), name="test").cached
    assert calls == [("*", 1 << 20, 2 << 20)]


def test_the_memory_report_is_made_every_time_after_its_input(runner: WorkflowRunner) -> None:
    graph = make_graph("tiny-sd")
    graph["report"] = {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["sample", 0]}}
    del graph["save"]
    for executed in (("load", "sample", "report"), ("report",)):
        result = runner.run(parse_workflow(graph), name="test")
        assert result.executed == executed
        (text,) = result.outputs["report"]["text"]
        assert text.startswith("Devices\n") and "tiny-sd/unet" in text


@pytest.mark.parametrize(
    ("pipeline", "sampled", "said"),
    [
        ("tiny-sd", {"width": 65}, "width 65 is not allowed; allowed: multiples of 16"),
        (
            "tiny-sd",
            {"frames": 5},
            "frames 5 is not allowed; allowed: 1, as StableDiffusionPipeline makes single images",
        ),
        ("tiny-wan", {"frames": 4}, "frames 4 is not allowed; allowed: 1, 5, 9, 13"),
    ],
)
def test_sizes_that_would_be_rounded_are_refused(
    runner: WorkflowRunner, pipeline: str, sampled: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidWorkflow, match=said):
        run(runner, make_graph(pipeline, sampled=sampled))


# Folders that cannot be loaded ----------------------------------------------------------------------------


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)


def lose_a_tensor(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, path)


WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
DAMAGE: dict[str, Any] = {
    "no index": (lambda f: (f / "model_index.json").unlink(), r"model_index\.json: no such file"),
    "broken index": (lambda f: (f / "model_index.json").write_text("{"), r"model_index\.json: is not valid JSON"),
    "no class": (lambda f: (f / "model_index.json").write_text("{}"), "names no pipeline class"),
    "no component": (lambda f: shutil.rmtree(f / "vae"), r"vae: no such folder; .* lists it as"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "unet: has no weights"),
    "pickle": (
        lambda f: (f / WEIGHTS).rename(f / "unet" / "diffusion_pytorch_model.bin"),
        r"diffusion_pytorch_model\.bin: is a pickle, which may run code",
    ),
    "pickle in disguise": (
        lambda f: torch.save({"a": torch.zeros(1)}, f / WEIGHTS),
        r"diffusion_pytorch_model\.safetensors: is a pickle",
    ),
    "truncated": (lambda f: truncate(f / WEIGHTS), r"diffusion_pytorch_model\.safetensors: truncated"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "too short for a safetensors file"),
    "missing shard": (
        lambda f: (f / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "part-00002.safetensors"}}'
        ),
        r"part-00002\.safetensors: no such file",
    ),
    "no tokenizer": (
        lambda f: [path.unlink() for path in (f / "tokenizer").iterdir()],
        "tokenizer: is empty",
    ),
}  # fmt: skip


@pytest.fixture
def copied(models_directory: Path) -> Any:
    """A copy of tiny-sd that a test may damage, which the host offers like any other."""
    folder = models_directory / "diffusers" / "damaged"
    shutil.copytree(models_directory / "diffusers" / "tiny-sd", folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_before_the_first_node(
    runner: WorkflowRunner, copied: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, said = DAMAGE[kind]
    damage(copied)
    with pytest.raises(InvalidInput, match=said) as caught:
        check_pipeline(copied)
    assert "\n" not in str(caught.value)
    assert str(copied) in str(caught.value)
    if kind != "no index":  # without one it is no pipeline at all
        with pytest.raises(InvalidWorkflow, match=said):
            parse_workflow(make_graph("damaged"))
    assert default_manager().report()["components"] == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda f: (f / "model_index.json").write_text(
                (f / "model_index.json").read_text().replace('"StableDiffusionPipeline"', '"NoSuchPipeline"')
            ),
            "pipeline class 'NoSuchPipeline' is unknown to diffusers",
        ),
        (
            lambda f: (f / "unet" / "config.json").write_text(
                (f / "unet" / "config.json").read_text().replace("112", "128")
            ),
            "diffusers cannot load it: ",
        ),
        (lambda f: lose_a_tensor(f / WEIGHTS), "conv_in.bias"),
        (lambda f: lose_a_tensor(f / "text_encoder" / "model.safetensors"), "embeddings"),
    ],
    ids=["unknown class", "other sizes", "lost tensor", "lost tensor of the text encoder"],
)
def test_a_folder_that_contradicts_itself_is_refused_when_loaded(copied: Path, damage: Any, said: str) -> None:
    damage(copied)
    with pytest.raises(InvalidInput, match=said) as caught:
        load_pipeline(copied)
    assert "\n" not in str(caught.value)


def test_without_diffusers_one_line_says_what_to_install(
    models_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = builtins.__import__

    def import_without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "diffusers":
            raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without)
    with pytest.raises(
        InvalidInput, match="diffusers is not installed, and pipelines need it; run: pip install 'diffusers>="
    ):
        load_pipeline(models_directory / "diffusers" / "tiny-sd")


# The tiny pipelines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-flux", "tiny-sd", "tiny-wan"])
def test_tiny_pipelines_are_small_and_mostly_diffusion_model(models_directory: Path, name: str) -> None:
    folder = models_directory / "diffusers" / name
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    diffusion = sum(size for path, size in sizes.items() if path.parent.name in ("transformer", "unet"))
    assert 5e6 < sum(sizes.values()) < 60e6
    assert diffusion > 0.75 * sum(sizes.values())


def test_tiny_pipelines_are_built_once_and_again_when_the_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "RECIPES", {"tiny-sd": tiny.build_sd})
    (folder,) = tiny.ensure_pipelines(tmp_path).values()
    weights = folder / WEIGHTS
    first = weights.stat().st_mtime_ns, weights.read_bytes()
    random_state = torch.get_rng_state()
    tiny.ensure_pipelines(tmp_path)
    assert weights.stat().st_mtime_ns == first[0]
    monkeypatch.setattr(tiny, "RECIPE", tiny.RECIPE + 1)
    tiny.ensure_pipelines(tmp_path)
    assert weights.stat().st_mtime_ns != first[0]
    assert weights.read_bytes() == first[1], "the seed decides the weights"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-sd"]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scratch: Path) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "RECIPES", {"tiny-sd": fail})
    with pytest.raises(OSError, match="disk full"):
        tiny.ensure_pipelines(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_graphs_are_not_changed_by_running_them(runner: WorkflowRunner) -> None:
    graph = make_graph("tiny-sd")
    before = copy.deepcopy(graph)
    run(runner, graph)
    assert graph == before


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled", "diffusion=fp8 per row,text=fp8 plain,vae=as stored"])
def test_a_pipeline_is_verified_by_a_node(runner: WorkflowRunner, precision: str) -> None:
    result = runner.run(parse_workflow(make_verify_graph(precision=precision)), name="test")
    assert "equal, bit for bit" in "\n".join(result.outputs["verify"]["text"])


def make_verify_graph(**loaded: Any) -> dict[str, Any]:
    graph = make_graph("tiny-flux", **loaded)
    words = {name: graph["sample"]["inputs"][name] for name in ("pipeline", "prompt", "width", "height", "frames")}
    verify = {"class_type": "HighwaterVerifyPipeline", "inputs": {**words, "guidance": 3.5, "seed": 2}}
    return {"load": graph["load"], "verify": verify}


def test_its_texts_are_read_once_and_planned_once(runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check before the run, the node and the plan together."""
    called: list[str] = []
    read, plan = Scanner.__init__, module_plans.plan_request

    def count_texts(self: Scanner, text: str, *, what: str) -> None:
        called.append(what)
        read(self, text, what=what)

    def count_plans(*args: Any, **kwargs: Any) -> Any:
        called.append("plan")
        return plan(*args, **kwargs)

    monkeypatch.setattr(Scanner, "__init__", count_texts)
    replan = live_capacity.replan
    monkeypatch.setattr(module_plans, "plan_request", count_plans)
    monkeypatch.setattr(live_capacity, "replan", lambda *args: (called.append("replan"), replan(*args))[1])
    graph = make_graph("tiny-flux", profile="4711MiB,prefetch=2", placement="cpu,vae=cpu")
    runner.run(parse_workflow(graph), name="texts")
    assert [called.count(word) for word in ("profile", "placement", "plan", "replan")] == [1, 1, 1, 0]
    called.clear()
    graph["sample"]["inputs"]["seed"] += 1
    runner.run(parse_workflow(graph), name="another seed")
    assert called == []
