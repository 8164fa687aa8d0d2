"""Each component of diffusers' tiny pipelines has a say in what comes out, so that a row speaks of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from highwater.tests.compat.effect import parts_without_effect
from highwater.tests.compat.modes import Recipe, only_new_garbage
from highwater.tests.compat.pipelines import RECIPES

COPIED = "its layers became layers of the UNet when the pipeline was built"
UNUSED = "the pipeline has it and never calls it"
OF_IMAGES = "this call has no image; another row has one"
OF_SOUND = "this call makes no sound; another row does"
OF_SOURCES = "this call has no sound to begin with; another row has one"
NO_TEXT = "this call begins with embeddings, for diffusers' own call of a text encoder fails with transformers 5"
OTHER_UNET = "pictures of pictures need neither texts nor the UNet that is for them"
LEFT_OVER = "its attention layers became the other UNet's when the pipeline was built; it is not called"
FROM_PRIOR = "the first pipeline's text encoder has said it all: the second is handed that"
NO_PICTURES = "this call ends with latents: the fewest rays that the renderer takes keep a CPU busy for minutes"
WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "AceStepPipeline": {"audio_tokenizer": OF_SOURCES, "audio_token_detokenizer": OF_SOURCES},
    "AnimateDiffControlNetPipeline": {"motion_adapter": COPIED},
    "AnimateDiffPAGPipeline": {"motion_adapter": COPIED},
    "AnimateDiffPipeline": {"motion_adapter": COPIED},
    "AnimateDiffSDXLPipeline": {"motion_adapter": COPIED},
    "AnimateDiffSparseControlNetPipeline": {"motion_adapter": COPIED},
    "AnimateDiffVideoToVideoControlNetPipeline": {"motion_adapter": COPIED},
    "AnimateDiffVideoToVideoPipeline": {"motion_adapter": COPIED},
    "Cosmos3OmniPipeline": {"sound_tokenizer": OF_SOUND},
    "LEditsPPPipelineStableDiffusionXL": {"image_encoder": UNUSED},
    "LTX2DFRTemporalRefinePipeline": {
        "temporal_latent_upsampler": "the first sigma of 1 puts noise in place of what it made"
    },
    "LTX2HDRPipeline": {"audio_vae": UNUSED, "vocoder": UNUSED},
    "MusicLDMPipeline, from embeddings": {"text_encoder": NO_TEXT},
    "PIAPipeline": {"motion_adapter": COPIED},
    "ShapEImg2ImgPipeline": {"shap_e_renderer": NO_PICTURES},
    "ShapEPipeline": {"shap_e_renderer": NO_PICTURES},
    "StableCascadeCombinedPipeline": {"text_encoder": FROM_PRIOR},
    "StableDiffusionControlNetXSPipeline": {"controlnet": COPIED},
    "StableDiffusionXLControlNetXSPipeline": {"controlnet": COPIED},
    "UniDiffuserPipeline, image to text": {"text_encoder": "this call has no text; another row has one"},
    "UniDiffuserPipeline, text to image": {
        "image_encoder": OF_IMAGES,
        "text_decoder": "only its layer for prompts is called, none of its blocks; another row has it write",
    },
    "VersatileDiffusionPipeline, image variation": {"text_encoder": OTHER_UNET, "text_unet": OTHER_UNET},
    "VersatileDiffusionTextToImagePipeline": {"text_unet": LEFT_OVER},
    "ZImageOmniPipeline": {"siglip": OF_IMAGES},
}
"""By recipe: the components that the output does not depend on, each with the reason."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_component_has_a_say_in_the_output(name: str) -> None:
    with only_new_garbage():
        assert set(parts_without_effect(RECIPES[name])) == WITHOUT_EFFECT.get(name, {}).keys()


def test_exceptions_are_of_recipes_that_there_are() -> None:
    assert WITHOUT_EFFECT.keys() - RECIPES.keys() == set()


class TwoParts:
    """Adds what a second model says by as much as its gate says."""

    def __init__(self, gate: float) -> None:
        self.components = {"first": rows_of_layers(), "second": rows_of_layers(), "nothing": nn.Identity()}
        self.gate = gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.components["first"](x) + self.gate * self.components["second"](x)


def rows_of_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


class ZeroBlocks(nn.Module):
    """Its blocks are left out, as those of a model whose gates begin as zeros; its last layer is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = rows_of_layers()
        self.gate = nn.Parameter(torch.zeros(16))
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.gate * self.blocks(x))


def test_a_component_that_is_left_out_is_found() -> None:
    def call(pipe: Any) -> torch.Tensor:
        return pipe(torch.ones(1, 16))

    assert parts_without_effect(Recipe(name="two", build=lambda: TwoParts(1.0), call=call)) == []
    assert parts_without_effect(Recipe(name="two", build=lambda: TwoParts(0.0), call=call)) == ["second"]
    assert parts_without_effect(Recipe(name="zero", build=ZeroBlocks, call=call)) == ["model"]
