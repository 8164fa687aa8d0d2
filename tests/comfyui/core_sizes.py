"""Runs nodes of ComfyUI alone: the shapes of the latents and images that they make, and the steps of their schedules.

usage: core_sizes.py CASES.json OUTPUT.json   (in ComfyUI's folder, by its Python)

Each case is a class, its inputs, and a size by the name of each input that takes a picture; a result is the outputs and
what was given to the VAE, or null where the node failed.
"""

import asyncio
import json
import sys

cases, output = sys.argv[1:]
sys.path.insert(0, ".")
sys.argv[1:] = ["--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import torch  # noqa: E402

import nodes  # noqa: E402

asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))


def picture(name: str, size: dict[str, int]) -> object:
    """Images as ComfyUI has them, or latents of 16 channels, of videos with five dimensions."""
    if not name.startswith(("samples", "latent")):
        return torch.zeros(size["batch"], size["height"], size["width"], 3)
    edges = [size["height"] // 8, size["width"] // 8]
    if size["frames"] > 1:
        edges.insert(0, (size["frames"] - 1) // 4 + 1)
    return {"samples": torch.zeros(size["batch"], 16, *edges)}


class RecordingVAE:
    """In place of a VAE: notes what it is to encode."""

    def __init__(self, cell: int, channels: int) -> None:
        self.cell, self.latent_channels = cell, channels
        self.encoded: list[list[int]] = []

    def spacial_compression_encode(self) -> int:
        return self.cell

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        self.encoded.append(list(pixels.shape[:3]))
        frames, height, width = pixels.shape[:3]
        edges = (frames - 1) // 4 + 1, height // self.cell, width // self.cell
        return torch.zeros(1, self.latent_channels, *edges)


def seen(value: object) -> object:
    """What a test can compare of an output."""
    if isinstance(value, dict) and torch.is_tensor(value.get("samples")):
        return {"latent": list(value["samples"].shape)}
    if torch.is_tensor(value):
        return {"image": list(value.shape)} if value.ndim == 4 else {"steps": len(value) - 1}
    return value if isinstance(value, int | float) else None


def nested(inputs: dict[str, object]) -> dict[str, object]:
    """Inputs whose names have a dot are parts of the one before it."""
    found: dict[str, object] = {name: value for name, value in inputs.items() if "." not in name}
    for name, value in inputs.items():
        outer, dot, inner = name.partition(".")
        if dot:
            if not isinstance(found.get(outer), dict):
                found[outer] = {outer: found[outer]} if outer in found else {}
            found[outer][inner] = value
    return found


results = []
with open(cases) as file:
    for name, inputs, pictures in json.load(file):
        node = nodes.NODE_CLASS_MAPPINGS[name]
        given = nested({**inputs, **{key: picture(key, size) for key, size in pictures.items()}})
        given |= {key: [[torch.zeros(1, 4, 8), {}]] for key in ("positive", "negative") if key in given}
        vae = RecordingVAE(*given["vae"]) if "vae" in given else None
        given |= {"vae": vae} if vae else {}
        try:
            made = node.execute(**given) if hasattr(node, "execute") else getattr(node(), node.FUNCTION)(**given)
            outputs = [seen(value) for value in getattr(made, "args", made)]
            results.append([outputs, vae.encoded if vae else []])
        except Exception as error:
            print(name, inputs, repr(error), file=sys.stderr)
            results.append(None)
with open(output, "w") as file:
    json.dump(results, file)
