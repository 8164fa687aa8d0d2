"""The rows of the table by name, for those who do not have the host's code."""

from __future__ import annotations

from highwater.tests.comfyui.sweep.architectures import ARCHITECTURES
from highwater.tests.comfyui.sweep.guided import GUIDED

__all__ = ["AUTOENCODERS", "CLASSES", "RECOGNISED", "ROWS"]

AUTOENCODERS = [
    f"VAE {name}"
    for name in (
        "AutoencoderKL", "AutoencodingEngine", "SVD", "TAESD", "TAEHV", "Stable Cascade A", "Stable Cascade C",
        "HunyuanImage", "HunyuanVideo 1.5", "HunyuanVideo", "LTX-Video", "CogVideoX", "Cosmos", "Wan 2.1", "Wan 2.2",
        "Stable Audio",
    )
]  # fmt: skip
# Made by core's own loader, of weights alone.
RECOGNISED = [
    f"VAE {name}"
    for name in (
        "MiniMax H3", "MiniMax H3 audio", "MiniMax Music 3", "Mochi", "LTX-Video 0.9.5", "LTX 2", "LTX 2.4",
        "LTX audio", "Stable Audio 3", "ACE-Step", "MMAudio", "Hunyuan3D", "SeedVR2", "Mage", "TripoSplat",
        "pixel space", "Flux 2",
    )
]  # fmt: skip
ROWS = [*ARCHITECTURES, *AUTOENCODERS, *RECOGNISED, *GUIDED]
# The host's class of each autoencoder; the tests find all of them in the code that picks one by a file.
CLASSES = {
    "AutoencoderKL", "AutoencodingEngine", "TAESD", "TAEHV", "StageA", "StageC_coder", "VideoVAE", "WanVAE",
    "AutoencoderKLCogVideoX", "CausalContinuousVideoTokenizer", "AudioOobleckVAE", "MiniMaxH3VideoVAE",
    "MiniMaxH3AudioVAE", "MiniMaxMusic3DAV", "CausalDiffusionVAE", "AudioVAE", "SA3AudioVAE", "MusicDCAE",
    "AudioAutoencoder", "ShapeVAE", "VideoAutoencoderKLWrapper", "MageVAE", "OctreeGaussianDecoder",
    "PixelspaceConversionVAE",
}  # fmt: skip
