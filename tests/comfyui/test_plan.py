"""The Plan node in the real host: it says before what the workflow then does, for models of every loader."""

from __future__ import annotations

import re

import pytest

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, images, sample_flux
from highwater.tests.comfyui.host_process import HostProcess


def planned(host: HostProcess, graph: Graph, devices: str = "") -> str:
    """Run a graph with a Plan node; return the plan's text."""
    node = graph.add("HighwaterPlan", devices=devices)
    graph.add("PreviewImage", images=(node[0], 1))
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    (text,) = result.outputs[node[0]]["text"]
    return str(text)


@pytest.mark.parametrize("loaders", [Loaders(), CORE], ids=["ours", "core's"])
def test_a_workflow_is_planned_before_it_runs(gpu_host: HostProcess, loaders: Loaders) -> None:
    gpu_host.forget()
    graph = Graph()
    images(graph, loaders)
    text = planned(gpu_host, graph)
    assert "component" in text
    assert "placement: gpu:0\n" in text  # as the widget takes it
    sampling = next(line for line in text.splitlines() if re.search(r"2 steps at 64x64", line))
    decoding = next(line for line in text.splitlines() if "decode at 64x64" in line)
    for line in (sampling, decoding):
        assert re.search(r"\d+(\.\d+)?[KMG]iB$", line.rstrip()), line  # what core reserves for it
    unknown = text.partition("not in the plan")[2]
    assert re.findall(r"\((\w+)\)", unknown) == ["TestConditioning"] * 2, unknown  # the tests' own nodes


def test_what_is_planned_is_what_is_loaded(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    images(graph, Loaders(profile="4MiB"))
    text = planned(gpu_host, graph)
    row = next(line for line in text.splitlines() if line.startswith("tiny_flux"))
    planned_resident = re.search(r"(\d+) of (\d+)", row)
    assert planned_resident is not None and int(planned_resident[1]) < int(planned_resident[2]), text
    (model,) = (part for part in gpu_host.get("/highwater/report")["components"] if part["kind"] == "diffusion")
    assert model["in_effect"], model
    (share,) = model["plan"]["shares"]
    assert share["resident_blocks"] == int(planned_resident[1])


def test_a_machine_that_is_not_here_is_planned_for(gpu_host: HostProcess) -> None:
    graph = Graph()
    images(graph, Loaders())
    text = planned(gpu_host, graph, devices="gpu:0=6GiB@25GB/s@80TFLOPS,host=16GiB")
    assert re.search(r"^gpu:0 +5\.\d+GiB ", text, re.MULTILINE), text
    assert re.search(r"2 steps at 64x64 +2 +\d+(\.\d+)? m?s ", text), text  # from traces of core's own classes
    assert re.search(r"^a run takes \d", text, re.MULTILINE), text


def test_a_guided_step_is_predicted_to_take_two_calls(gpu_host: HostProcess) -> None:
    found = []
    for cfg in (1.0, 3.0):
        graph = Graph()
        graph.keep(sample_flux(graph, Loaders().diffusion_model(graph), cfg=cfg, size=256))
        text = planned(gpu_host, graph, devices="gpu:0=6GiB@25GB/s@0.1TFLOPS,host=16GiB")
        each = re.search(r"2 steps at 256x256 +2 +(\d+(?:\.\d+)?) (m?s) ", text)
        assert each is not None, text
        found.append(float(each[1]) * {"s": 1.0, "ms": 1e-3}[each[2]])
    assert found[1] == pytest.approx(2 * found[0], rel=0.05)


def sampled(size: int, seed: int = 1) -> Graph:
    """A graph with all parts of a checkpoint: text encoder, guided steps, and a VAE whose decoder is one module."""
    graph = Graph()
    model, clip, _ = Loaders().checkpoint(graph)
    latent = graph.add("EmptyLatentImage", width=size, height=size, batch_size=1)
    words = [graph.add("CLIPTextEncode", text=text, clip=clip) for text in (f"water {seed}", "")]
    latent = graph.sampler(model, *words, latent, cfg=3.0, steps=3)
    graph.keep(graph.add("VAEDecode", samples=latent, vae=Loaders().vae(graph, "autoencoder.safetensors")))
    return graph


def each_of(text: str) -> dict[str, float]:
    """Return the seconds of each forward in a plan's table of the run, by what it computes."""
    found = re.findall(r"^\S+ +(encode text|3 steps|decode) .*?(\d+(?:\.\d+)?) (m?s)  ", text, re.MULTILINE)
    return {what: float(number) * {"s": 1.0, "ms": 1e-3}[unit] for what, number, unit in found}


# What its devices are like.
STATED = "gpu:0=2GiB@25GB/s@10TFLOPS"


def test_what_ran_is_planned_with_the_seconds_that_were_measured(gpu_host: HostProcess) -> None:
    """On this machine, without speeds in `devices`: in virtual time what the devices' true speeds say, too."""
    gpu_host.forget()
    before = planned(gpu_host, sampled(64, 5))
    assert re.search(r"^time unknown: how long .*autoencoder take was not measured here yet", before, re.MULTILINE)
    for seed in range(2):
        assert gpu_host.run(sampled(64, seed).nodes).outcome == "success"
    text = planned(gpu_host, sampled(64))
    names = "shallow_sd/clip, shallow_sd/model and autoencoder"
    assert f"seconds of forwards: {names} as measured here\n" in text
    measured, stated = each_of(text), each_of(planned(gpu_host, sampled(64), devices=STATED))
    assert measured["encode text"] == pytest.approx(stated["encode text"], rel=0.05)
    assert measured["decode"] == pytest.approx(stated["decode"], rel=0.05)
    # Core computes both conditionings in one call, with half the launches of the two that the trace expects.
    assert 0.4 * stated["3 steps"] < measured["3 steps"] < 0.6 * stated["3 steps"]


def test_another_size_is_planned_by_the_rate_that_was_measured(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    for seed in range(2):
        assert gpu_host.run(sampled(128, seed).nodes).outcome == "success"
    text = planned(gpu_host, sampled(256, 7))
    assert "shallow_sd/clip as measured here; shallow_sd/model and autoencoder by a rate measured here\n" in text
    by_rate, stated = each_of(text), each_of(planned(gpu_host, sampled(256, 7), devices=STATED))
    for what in ("3 steps", "decode"):
        assert by_rate[what] == pytest.approx(stated[what], rel=0.2), what


def test_a_model_of_other_weights_has_no_rate(gpu_host: HostProcess) -> None:
    """Nothing is assumed: of float16 that was measured, bfloat16 says nothing."""
    gpu_host.forget()
    for seed in range(2):
        graph = Graph()
        graph.keep(graph.add("CLIPTextEncode", text=f"water {seed}", clip=Loaders().checkpoint(graph)[1]))
        assert gpu_host.run(graph.nodes).outcome == "success"
    graph = Graph()
    images(graph, Loaders())
    text = planned(gpu_host, graph)
    assert re.search(r"^time unknown: how long tiny_flux and tiny_vae take was not measured here", text, re.MULTILINE)
