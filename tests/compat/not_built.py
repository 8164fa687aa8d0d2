"""Classes of diffusers with "Pipeline" in their name that have no row, each with the reason."""

from __future__ import annotations

__all__ = ["NOT_BUILT"]

# fmt: off
REASONS = {
    "not a pipeline": (
        "AudioPipelineOutput AutoPipelineBlocks AutoPipelineForImage2Image AutoPipelineForInpainting "
        "AutoPipelineForText2Audio AutoPipelineForText2Image ConditionalPipelineBlocks DiffusionGemmaPipelineOutput "
        "DiffusionPipeline DreamLitePipelineOutput ImagePipelineOutput ImageTextPipelineOutput "
        "JoyImageEditPipelineOutput JoyImageEditPlusPipelineOutput Kandinsky6SRPipelineOutput "
        "Kandinsky6TI2VAPipelineOutput LLaDA2PipelineOutput LTX2DFRPipelineOutput LoopSequentialPipelineBlocks "
        "ModularPipelineBlocks MotifVideoPipelineOutput PipelineQuantizationConfig SanaWMPipelineOutput "
        "SequentialPipelineBlocks"
    ),
    "a modular pipeline: the same models as its plain namesake, loaded by its own blocks": (
        "AnimaModularPipeline Cosmos3DistilledModularPipeline Cosmos3OmniModularPipeline EchoModularPipeline "
        "ErnieImageModularPipeline Flux2KleinBaseModularPipeline Flux2KleinModularPipeline Flux2ModularPipeline "
        "Flux3DistilledModularPipeline Flux3ModularPipeline FluxKontextModularPipeline FluxModularPipeline "
        "HeliosModularPipeline HeliosPyramidDistilledModularPipeline HeliosPyramidModularPipeline "
        "HunyuanVideo15ModularPipeline Ideogram4ModularPipeline Krea2ModularPipeline Krea2TurboModularPipeline "
        "LTX25ModularPipeline LTX2ModularPipeline LTXModularPipeline MiniMaxH3ModularPipeline "
        "MiniMaxMusic3ModularPipeline ModularPipeline QwenImage21ModularPipeline QwenImage21TurboModularPipeline "
        "QwenImageEditModularPipeline QwenImageEditPlusModularPipeline QwenImageLayeredModularPipeline "
        "QwenImageModularPipeline StableDiffusion3ModularPipeline StableDiffusionXLModularPipeline "
        "Wan22Image2VideoModularPipeline Wan22ModularPipeline Wan22VaceModularPipeline "
        "WanAnimate2DistilledModularPipeline WanAnimate2ModularPipeline WanImage2VideoModularPipeline "
        "WanModularPipeline ZImageModularPipeline"
    ),
    "needs onnxruntime": (
        "OnnxStableDiffusionImg2ImgPipeline OnnxStableDiffusionInpaintPipeline "
        "OnnxStableDiffusionInpaintPipelineLegacy OnnxStableDiffusionPipeline OnnxStableDiffusionUpscalePipeline "
        "StableDiffusionOnnxPipeline"
    ),
    "needs librosa": "AudioDiffusionPipeline",
    "needs note_seq": "SpectrogramDiffusionPipeline",
    "needs opencv": "ConsisIDPipeline",
    "needs torchvision": "OmniGenPipeline",
    "uses FlexAttention, which the simulated device does not have": (
        "AnyFlowFARPipeline Kandinsky6SRPipeline LTX2VideoDiffusionDecodePipeline"
    ),
    "fails by itself: it reads transformer.config.guidance_embeds, which the class does not have": (
        "ChromaInpaintPipeline"
    ),
    "fails by itself: __call__ gives encode_prompt a text_encoder_index, which it does not take": (
        "EasyAnimateControlPipeline"
    ),
    "fails by itself: it reads text_encoder.text_model, which transformers 5 does not have": "I2VGenXLPipeline",
    "gives values that are not finite with tiny random weights": "LuminaPipeline",
    "needs torchvision: diffusers' CosmosControlNetModel resizes the padding mask with it in each forward": (
        "Cosmos2_5_TransferPipeline"
    ),
    "fails by itself: Blip2QFormerModel.forward calls invert_attention_mask, which transformers 5 does not have": (
        "BlipDiffusionControlNetPipeline BlipDiffusionPipeline"
    ),
    "fails by itself: its UNet hands `encoder_attention_mask` to DualTransformer2DModel.forward, which takes none": (
        "VersatileDiffusionDualGuidedPipeline"
    ),
}
# fmt: on

NOT_BUILT = {name: reason for reason, names in REASONS.items() for name in names.split()}
