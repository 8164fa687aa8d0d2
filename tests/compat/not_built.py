"""Classes of diffusers with "Pipeline" in their name that have no row, and why."""

from __future__ import annotations

__all__ = ["NOT_BUILT"]

LATER = "no recipe yet"
SENTENCEPIECE = "its class needs sentencepiece, which is not installed"
ONNX = "runs on onnxruntime: it has no torch modules"

NOT_BUILT = {
    "AltDiffusionImg2ImgPipeline": LATER,
    "AltDiffusionPipeline": LATER,
    "AudioDiffusionPipeline": "its class needs librosa, which is not installed",
    "AudioLDM2Pipeline": LATER,
    "AudioLDMPipeline": LATER,
    "BlipDiffusionControlNetPipeline": LATER,
    "BlipDiffusionPipeline": LATER,
    "I2VGenXLPipeline": "it reads `CLIPTextModel.text_model`, which transformers 5 has not",
    "KolorsImg2ImgPipeline": SENTENCEPIECE,
    "KolorsPAGPipeline": SENTENCEPIECE,
    "KolorsPipeline": SENTENCEPIECE,
    "MusicLDMPipeline": LATER,
    "OnnxStableDiffusionImg2ImgPipeline": ONNX,
    "OnnxStableDiffusionInpaintPipeline": ONNX,
    "OnnxStableDiffusionInpaintPipelineLegacy": ONNX,
    "OnnxStableDiffusionPipeline": ONNX,
    "OnnxStableDiffusionUpscalePipeline": ONNX,
    "PaintByExamplePipeline": LATER,
    "SpectrogramDiffusionPipeline": "its class needs note_seq, which is not installed",
    "StableDiffusionGLIGENTextImagePipeline": LATER,
    "StableDiffusionOnnxPipeline": ONNX,
    "StableDiffusionPix2PixZeroPipeline": LATER,
    "StableDiffusionXLModularPipeline": LATER,
    "UniDiffuserPipeline": LATER,
    "VQDiffusionPipeline": LATER,
    "VersatileDiffusionDualGuidedPipeline": LATER,
    "VersatileDiffusionImageVariationPipeline": LATER,
    "VersatileDiffusionPipeline": LATER,
    "VersatileDiffusionTextToImagePipeline": LATER,
}
