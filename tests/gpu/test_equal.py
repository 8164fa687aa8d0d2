"""On the card a managed module computes bit for bit what it computes without the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from highwater.benchmarks.gpu_worker import build_transformer
from highwater.benchmarks.gpu_worker import make_inputs as make_flux_inputs
from highwater.memory import load_model, load_weights, manage, quantize_file
from highwater.memory.hosted_component import HostedComponent, SideFactors
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile
from highwater.tests.gpu.conftest import Card
from highwater.tests.gpu.models import build, make_inputs, reference, weight_bytes

SHARES = {"resident": None, "most": 0.7, "half": 0.5, "least": 0.2}


def as_profile(share: float | None, num_bytes: int) -> str:
    return "unlimited" if share is None else f"{share * num_bytes / 2**20:.4f}MiB"


@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:host"], ids=["page-locked", "pageable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("share", SHARES)
def test_managed_equals_unmanaged(card: Card, share: str, dtype: torch.dtype, placement: str) -> None:
    net, inputs = build(card, dtype=dtype), make_inputs(card, 3, dtype)
    wanted = reference(net, card, inputs)
    profile = as_profile(SHARES[share], weight_bytes(net))
    with card.manager() as manager, manage(net, profile=profile, placement=placement, manager=manager) as managed:
        for x, want in zip(inputs, wanted, strict=True):
            assert torch.equal(net(x.to(card.torch_device)).cpu(), want)
            manager.ledger.check()
        assert all(component["in_effect"] for component in managed.report()["components"])
        assert bool(managed.plan["model"].shares[0].streamed) == (share != "resident")


@pytest.mark.parametrize("share", [0.7, 0.4])
@pytest.mark.parametrize("form", ["fp8 scaled", "fp8 per row", "int8", "qint8", "qint4", "qfloat8"])
def test_encoded_weights_decode_to_the_same_streamed_and_resident(card: Card, form: str, share: float) -> None:
    inputs = make_inputs(card, 3, torch.bfloat16)
    outputs, decoded = [], []
    for name in (None, share):
        net = build(card, dtype=torch.bfloat16)
        profile = as_profile(name, weight_bytes(net) // 2)
        with (
            card.manager() as manager,
            manage(net, profile=profile, placement="gpu:0", precision=form, manager=manager),
        ):
            outputs.append([net(x.to(card.torch_device)).cpu() for x in inputs])
        decoded.append(reference(net, card, inputs))  # released: what was encoded comes back decoded
    for results in zip(*outputs, *decoded, strict=True):
        assert all(torch.equal(result, results[0]) for result in results)


def test_weights_in_their_file_reach_the_card_unchanged(card: Card, tmp_path: Path) -> None:
    net, inputs = build(card), make_inputs(card, 3)
    wanted = reference(net, card, inputs)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({name: weight for name, weight in net.state_dict().items() if "out." not in name}, path)
    profile = as_profile(0.5, weight_bytes(net))
    with (
        card.manager() as manager,
        manage(net, profile=profile, placement="gpu:0:disk", files={"model": path}, manager=manager),
    ):
        for x, want in zip(inputs, wanted, strict=True):
            assert torch.equal(net(x.to(card.torch_device)).cpu(), want)


@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:host", "gpu:0:disk"], ids=["page-locked", "pageable", "disk"])
@pytest.mark.parametrize("word", ["fp8-scaled", "int8", "qint8", "qint4", "qfloat8"])
def test_a_quantized_file_computes_what_its_codes_stand_for(
    card: Card, word: str, placement: str, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("wide", "quantized")]
    net, inputs = build(card, dtype=torch.bfloat16), make_inputs(card, 3, torch.bfloat16)
    tied = ("out.weight",)
    safetensors.torch.save_file({n: weight for n, weight in net.state_dict().items() if n not in tied}, paths[0])
    quantize_file(*paths, word)
    load_weights(net, paths[1])
    wanted = reference(net, card, inputs)
    for share in (None, 0.7, 0.4):
        loaded = load_model(paths[1], lambda: build(card, dtype=torch.bfloat16))
        profile = as_profile(share, weight_bytes(net) // 2)
        with card.manager() as manager, manage(loaded, profile=profile, placement=placement, manager=manager):
            for x, want in zip(inputs, wanted, strict=True):
                assert torch.equal(loaded(x.to(card.torch_device)).cpu(), want)


@pytest.mark.parametrize("form", ["fp8 scaled", "int8", "qint4"])
def test_side_factors_are_added_alike_streamed_and_resident(
    card: Card, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(card, 2, torch.bfloat16)
    outputs = {}
    for name in (None, 0.7):
        net = build(card, dtype=torch.bfloat16)
        names = [name for name, weight in net.named_parameters() if weight.dim() == 2 and "embed" not in name]
        with card.manager() as manager:
            monkeypatch.setattr("highwater.memory.hosted_component.default_manager", lambda manager=manager: manager)
            profile = parse_profile(as_profile(name, weight_bytes(net) // 2), devices=["gpu:0"])
            hosted = HostedComponent("net", "diffusion", profile=profile, precision=Precision(form))
            hosted.join(net, card.torch_device)
            encoded = [name for name in names if name in hosted.encoded_names]
            found = []
            for strength in (0.0, 1.0, 0.5):
                hosted.set_factors({name: factors_for(net, name, strength) for name in encoded} if strength else {})
                hosted.load()
                found.append([net(x.to(card.torch_device)).cpu() for x in inputs])
                manager.ledger.check()
            outputs[name] = found
            hosted.release()
    for resident, streamed in zip(outputs[None], outputs[0.7], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(resident, streamed, strict=True))
    plain, whole, half = (each[0] for each in outputs[None])
    assert not torch.equal(plain, whole) and not torch.equal(whole, half)


def factors_for(net: torch.nn.Module, name: str, strength: float) -> SideFactors:
    rows, columns = net.get_parameter(name).shape
    generator = torch.Generator().manual_seed(len(name))
    up, down = (torch.randn(shape, generator=generator) * 0.02 for shape in ((rows, 8), (8, columns)))
    return SideFactors(up=up * strength, down=down)


def test_an_evicted_module_comes_back_unchanged(card: Card) -> None:
    net, inputs = build(card), make_inputs(card, 1)
    (want,) = reference(net, card, inputs)
    profile = as_profile(0.7, weight_bytes(net))
    with card.manager() as manager, manage(net, profile=profile, placement="gpu:0", manager=manager):
        for _ in range(3):
            assert torch.equal(net(inputs[0].to(card.torch_device)).cpu(), want)
            manager.commands.free_idle("a test")
            assert manager.ledger.used("gpu:0") == 0


@pytest.mark.parametrize("share", ["resident", "least"])
def test_a_transformer_of_diffusers_is_equal(card: Card, share: str) -> None:
    model, inputs = build_transformer("tiny"), make_flux_inputs("tiny", card.torch_device)
    model.to(card.torch_device)
    want = model(**inputs, return_dict=False)[0].cpu()
    model.to("cpu")
    profile = as_profile(SHARES[share] and 0.6, weight_bytes(model))
    with card.manager() as manager, manage(model, profile=profile, placement="gpu:0", manager=manager):
        for _ in range(3):
            assert torch.equal(model(**inputs, return_dict=False)[0].cpu(), want)
