"""Files made by `quantize_file`: what is in them, what other libraries read from them, and that none is left half."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory.errors import InvalidInput
from highwater.memory.quantizing import quantize_file
from highwater.memory.weights import file_writer
from highwater.memory.weights.known_forms import FORMS
from highwater.memory.weights.safetensors_header import read_header

WORDS = {"fp8-scaled": "fp8 scaled", "int8": "int8", "qint8": "qint8", "qint4": "qint4", "qfloat8": "qfloat8"}
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self, rows: int = 255) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 256)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(256, rows), "down": nn.Linear(rows, 256), "norm": nn.LayerNorm(256)})
            for _ in range(3)
        )
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](block["norm"](x))))  # type: ignore[index]
        return self.head(x)


def make_source(folder: Path, dtype: torch.dtype = torch.float32, **metadata: str) -> tuple[Path, Tensors]:
    torch.manual_seed(4)
    state = {name: tensor.to(dtype) for name, tensor in Net().state_dict().items()}
    save_file(state, folder / "in.safetensors", metadata or None)
    return folder / "in.safetensors", state


def is_quantized(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(("up.weight", "down.weight"))


def comfy_weight(found: Tensors, name: str) -> torch.Tensor:
    """Read a weight as ComfyUI does, in float32."""
    layer = name.removesuffix(".weight")
    told = json.loads(found[f"{layer}.comfy_quant"].numpy().tobytes())
    assert told == {"format": "int8_tensorwise" if found[name].dtype is torch.int8 else "float8_e4m3fn"}
    return found[name].float() * found[f"{layer}.weight_scale"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("word", WORDS)
def test_a_file_has_the_codes_of_its_form_and_all_else_as_it_was(tmp_path: Path, word: str, dtype: torch.dtype) -> None:
    source, state = make_source(tmp_path, dtype)
    made = quantize_file(source, tmp_path / "out.safetensors", word)
    found = load_file(tmp_path / "out.safetensors")
    assert made.form == WORDS[word] and made.num_weights == 6 and made.kept_bytes == {}
    assert made.file_bytes == (tmp_path / "out.safetensors").stat().st_size < made.source_bytes
    for name, weight in state.items():
        if not is_quantized(name):
            assert found[name].dtype is dtype and torch.equal(found[name], weight)
            continue
        form = FORMS[WORDS[word]][1]().measure(weight, name=name)
        leaves = form.encode(weight)
        own = [found[key] for key in sorted(found) if key.startswith(f"{name}._")]
        if word in ("fp8-scaled", "int8"):
            assert torch.equal(comfy_weight(found, name).to(dtype), form.decode(leaves, dtype))
            continue
        assert len(own) == len(leaves)  # in the order of their names: data, scale, shift
        for leaf, tensor in zip(leaves, own, strict=True):
            assert leaf.dtype is tensor.dtype and torch.equal(leaf.flatten().float(), tensor.flatten().float())


@pytest.mark.parametrize("word", WORDS)
def test_data_and_tensors_of_whole_lines_begin_at_a_line(tmp_path: Path, word: str) -> None:
    source, _ = make_source(tmp_path, torch.bfloat16)
    quantize_file(source, tmp_path / "out.safetensors", word)
    header = read_header(tmp_path / "out.safetensors")
    assert header.tensors[0].begin % 64 == 0
    are_whole = [tensor.weight_bytes % 64 == 0 for tensor in header.tensors]
    assert are_whole == sorted(are_whole, reverse=True)
    assert all(tensor.begin % 64 == 0 for tensor in header.tensors if tensor.weight_bytes % 64 == 0)


@pytest.mark.parametrize("word", ["qint8", "qint4", "qfloat8"])
def test_optimum_quanto_reads_its_tensors(tmp_path: Path, word: str) -> None:
    """Its own way to load a model by a map of the layers, which mmgp keeps in base64."""
    import base64

    from optimum.quanto import requantize

    source, state = make_source(tmp_path)
    quantize_file(source, tmp_path / "out.safetensors", word)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["quantization_format"] == "quanto"
    layers = json.loads(base64.b64decode(metadata["quantization_map_base64"]))
    with torch.device("meta"):
        net = Net()
    requantize(net, load_file(tmp_path / "out.safetensors"), layers, device=torch.device("cpu"))
    for name, weight in state.items():
        held: Any = net.get_parameter(name).detach()
        if is_quantized(name):
            form = FORMS[word][1]().measure(weight, name=name)
            weight, held = form.decode(form.encode(weight), weight.dtype), held.dequantize()
        assert torch.equal(held, weight), name


@pytest.mark.parametrize("name", WORDS.values())
@given(rows=st.integers(2, 40), columns=st.sampled_from([1, 7, 64, 128, 160, 256, 384]), most=st.integers(1, 4000))
def test_parts_of_an_encoding_are_those_of_the_whole(name: str, rows: int, columns: int, most: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    form = FORMS[name][1]().measure(weight, name="w")
    leaves = form.encode(weight)
    got = [torch.full_like(leaf, 0).flatten() for leaf in leaves]
    filled = [0] * len(leaves)
    for number, begin, part in form.encoded_parts(weight, most):
        got[number][begin : begin + part.numel()] = part.flatten()
        filled[number] += part.numel()
    assert filled == [leaf.numel() for leaf in leaves]
    for one, leaf in zip(got, leaves, strict=True):
        assert torch.equal(one.float(), leaf.flatten().float())


def test_metadata_and_the_config_beside_the_file_go_along(tmp_path: Path) -> None:
    import base64

    source, _ = make_source(tmp_path, note="kept", format="pt")
    (tmp_path / "config.json").write_text('{"_class_name": "Net"}')
    quantize_file(source, tmp_path / "out.safetensors", "int8")
    metadata = read_header(tmp_path / "out.safetensors").metadata
    assert metadata["note"] == "kept" and metadata["format"] == "pt"
    assert json.loads(base64.b64decode(metadata["config_base64"])) == {"_class_name": "Net"}
    told = json.loads(metadata["highwater"])
    assert told["form"] == "int8" and set(told["weights"].values()) == {"F32"} and len(told["weights"]) == 6


def test_what_is_excluded_or_would_lose_too_much_stays(tmp_path: Path) -> None:
    source, state = make_source(tmp_path)
    state["blocks.1.up.weight"][:, 0] = 0.6
    save_file(state, source)
    made = quantize_file(source, tmp_path / "out.safetensors", "int8", exclude=[r"blocks\.0\."])
    assert made.num_weights == 3
    assert sorted(made.kept_bytes) == [r"excluded by 'blocks\\.0\\.'", "would lose more than 0.02"]
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["blocks.1.up.weight"], state["blocks.1.up.weight"])
    assert quantize_file(source, tmp_path / "no.safetensors", "int8", exclude=["nothing"]).notes == (
        "exclude 'nothing' matches no weight",
    )
    with pytest.raises(InvalidInput, match="exclude 'up'; allowed: a list of them"):
        quantize_file(source, tmp_path / "no2.safetensors", "int8", exclude="up")
    all_cast = quantize_file(source, tmp_path / "all.safetensors", "int8", error_limit=9.0)
    assert all_cast.num_weights == 6 and all_cast.largest_error > 0.02


def test_of_a_checkpoint_the_diffusion_model_is_encoded(tmp_path: Path) -> None:
    source, state = make_source(tmp_path)
    parts = {f"{part}{name}": tensor.clone() for part in ("model.diffusion_model.", "cond_stage_model.")
             for name, tensor in state.items()}  # fmt: skip
    save_file(parts, source)
    made = quantize_file(source, tmp_path / "out.safetensors", "fp8-scaled")
    found = load_file(tmp_path / "out.safetensors")
    assert made.num_weights == 6
    assert found["model.diffusion_model.blocks.0.up.weight"].dtype is torch.float8_e4m3fn
    assert torch.equal(found["cond_stage_model.blocks.0.up.weight"], state["blocks.0.up.weight"])


def test_shards_become_one_file(tmp_path: Path) -> None:
    _, state = make_source(tmp_path)
    names = sorted(state)
    for number, own in enumerate((names[::2], names[1::2]), 1):
        save_file({name: state[name] for name in own}, tmp_path / f"m-{number:05}-of-00002.safetensors")
    made = quantize_file(tmp_path / "m-00002-of-00002.safetensors", tmp_path / "out.safetensors", "qint8")
    assert made.num_weights == 6
    assert torch.equal(load_file(tmp_path / "out.safetensors")["head.bias"], state["head.bias"])
    twice = [tmp_path / "in.safetensors", tmp_path / "m-00001-of-00002.safetensors"]
    with pytest.raises(InvalidInput, match="as another of the files does"):
        quantize_file(twice, tmp_path / "more.safetensors", "qint8")


# -- nothing is left half


def only(folder: Path, *names: str) -> None:
    assert sorted(os.listdir(folder)) == sorted(names)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("share", [0.0, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("there", [False, True])
def test_what_stops_it_leaves_what_was_there(tmp_path: Path, share: float, there: bool) -> None:
    source, _ = make_source(tmp_path)
    if there:
        (tmp_path / "out.safetensors").write_bytes(b"older")

    def stop(done: int, total: int) -> None:
        if done >= share * total:
            raise Stopped

    with pytest.raises(Stopped):
        quantize_file(source, tmp_path / "out.safetensors", "int8", replaces=True, progress=stop)
    only(tmp_path, "in.safetensors", *(["out.safetensors"] if there else []))
    if there:
        assert (tmp_path / "out.safetensors").read_bytes() == b"older"


@pytest.mark.parametrize(
    ("call", "number"), [("posix_fallocate", 0), ("write", 0), ("write", 1), ("write", 5), ("fsync", 0)]
)
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    source, _ = make_source(tmp_path)
    real: Callable[..., Any] = getattr(os, call)
    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(file_writer.os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        quantize_file(source, tmp_path / "out.safetensors", "int8")
    only(tmp_path, "in.safetensors")


def test_a_file_system_without_links_gets_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = make_source(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(file_writer.os, "link", fail)
    quantize_file(source, tmp_path / "out.safetensors", "int8")
    only(tmp_path, "in.safetensors", "out.safetensors")


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    source, _ = make_source(tmp_path)
    told: list[tuple[int, int]] = []
    quantize_file(source, tmp_path / "out.safetensors", "qint4", progress=lambda *numbers: told.append(numbers))
    assert told == sorted(told) and len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1]


def test_memory_holds_one_tensor(tmp_path: Path) -> None:
    """In a process of its own: private memory, beside what it had before."""
    state = {f"blocks.{number}.up.weight": torch.randn(4096, 4096) for number in range(5)}
    save_file(state, tmp_path / "in.safetensors")
    del state
    script = f"""
import re, torch
from optimum import quanto
from highwater.memory.quantizing import quantize_file
def private():
    text = open("/proc/self/smaps_rollup").read()
    return 1024 * int(re.search(r"Private_Dirty: +([0-9]+)", text)[1])
for form in ("fp8-scaled", "int8", "qint8", "qint4"):
    before, seen = private(), []
    quantize_file(r"{tmp_path}/in.safetensors", r"{tmp_path}/out.safetensors", form, replaces=True,
                  progress=lambda done, total: seen.append(private()))
    assert max(seen) - before <= (64 + 256) << 20, (form, (max(seen) - before) >> 20)
"""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("NOT TESTED: the system does not tell private memory")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# -- bad input


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-100])
    elif how == "overlapping":
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        first, second = [name for name in header if name != "__metadata__"][:2]
        header[second]["data_offsets"] = header[first]["data_offsets"]
        header[second]["shape"], header[second]["dtype"] = header[first]["shape"], header[first]["dtype"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :])
    elif how == "NaN":
        state = load_file(path)
        state["blocks.2.down.weight"][3, 3] = float("nan")
        save_file(state, path)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("truncated", "truncated"),
        ("overlapping", "overlaps"),
        ("NaN", r"weight 'blocks\.2\.down\.weight' holds NaN or infinity"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, how: str, why: str) -> None:
    source, _ = make_source(tmp_path)
    damaged(source, how)
    with pytest.raises(InvalidInput, match=why) as refused:
        quantize_file(source, tmp_path / "out.safetensors", "int8")
    assert "\n" not in str(refused.value)
    only(tmp_path, "in.safetensors")


@pytest.mark.parametrize(
    ("ending", "who"),
    [
        (".comfy_quant", "ComfyUI's own loaders"),
        (".weight.absmax", "bitsandbytes"),
        (".wscales", "ComfyUI-nunchaku"),
        (".qzeros", "gptqmodel"),
        (".weight._data", "optimum-quanto"),
    ],
)
def test_a_file_that_is_quantized_is_refused_with_who_reads_it(tmp_path: Path, ending: str, who: str) -> None:
    source, state = make_source(tmp_path)
    save_file({**state, f"blocks.0.up{ending}": torch.zeros(3, dtype=torch.uint8)}, source)
    with pytest.raises(InvalidInput, match=f"format.*, which is for .*{who}"):
        quantize_file(source, tmp_path / "out.safetensors", "int8")
    only(tmp_path, "in.safetensors")


def test_wrong_targets_and_forms_are_refused(tmp_path: Path) -> None:
    source, state = make_source(tmp_path)
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"mine")
    for path, form, why in (
        (target, "int8", r"exists already; name another file, or replace it \(--force\)"),
        (source, "int8", "is the file that is read"),
        (tmp_path, "int8", "is a folder"),
        (tmp_path / "no" / "out.safetensors", "int8", "no such folder"),
        (tmp_path / "new.safetensors", "int7", "did you mean 'int8'"),
        (tmp_path / "new.safetensors", "qint2", "allowed: fp8-scaled, int8, qint8, qint4, qfloat8"),
    ):
        with pytest.raises(InvalidInput, match=why):
            quantize_file(source, path, form)
    assert target.read_bytes() == b"mine" and torch.equal(load_file(source)["head.bias"], state["head.bias"])
    quantize_file(source, target, "int8", replaces=True)
    save_file({"blocks.0.norm.weight": torch.ones(4), "blocks.1.norm.weight": torch.ones(4)}, source)
    with pytest.raises(InvalidInput, match="no weight of its blocks can be in int8: it has no blocks with matrices"):
        quantize_file(source, tmp_path / "new.safetensors", "int8")
    only(tmp_path, "in.safetensors", "out.safetensors")


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    source, _ = make_source(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    linked = tmp_path / "linked.safetensors"
    linked.symlink_to(pipe)
    for target in (pipe, linked):
        with pytest.raises(InvalidInput, match="is no regular file; name another one"):
            quantize_file(source, target, "int8", replaces=True)
    assert pipe.is_fifo() and linked.is_symlink()
    with pytest.raises(InvalidInput, match=r"^/proc: nothing can be written there: "):
        quantize_file(source, "/proc/new.safetensors", "int8")


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    source, _ = make_source(tmp_path)
    (tmp_path / "real.safetensors").write_bytes(b"older")
    (tmp_path / "link.safetensors").symlink_to("real.safetensors")
    quantize_file(source, tmp_path / "link.safetensors", "int8", replaces=True)
    assert (tmp_path / "link.safetensors").is_symlink() and len(load_file(tmp_path / "real.safetensors")) > 6


def test_a_file_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    source, _ = make_source(tmp_path)
    target = tmp_path / "out.safetensors"

    def come(done: int, total: int) -> None:
        if done == total:
            target.write_bytes(b"another's")

    with pytest.raises(InvalidInput, match="exists already"):
        quantize_file(source, target, "int8", progress=come)
    assert target.read_bytes() == b"another's"
    only(tmp_path, "in.safetensors", "out.safetensors")


def test_the_package_gives_the_function_whatever_was_imported_before() -> None:
    import highwater
    from highwater import memory

    assert highwater.quantize_file is memory.quantize_file is quantize_file
