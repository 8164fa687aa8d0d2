"""The names of nodes' widgets: a graph in the page's format has their values by place alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["KNOWN_WIDGETS", "read_widgets"]

# What the page adds behind a number: how it changes after each run. Prompts do not have it.
CONTROL_WORDS = ("fixed", "increment", "decrement", "randomize", "increment-wrap")

# Of classes whose first widget chooses which others there are: these follow it.
RESIZE = "resize_type."
CHOSEN_WIDGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "ResizeImageMaskNode": {
        "scale dimensions": (f"{RESIZE}width", f"{RESIZE}height", f"{RESIZE}crop"),
        "scale by multiplier": (f"{RESIZE}multiplier",),
        "scale longer dimension": (f"{RESIZE}longer_size",),
        "scale shorter dimension": (f"{RESIZE}shorter_size",),
        "scale width": (f"{RESIZE}width",),
        "scale height": (f"{RESIZE}height",),
        "scale total pixels": (f"{RESIZE}megapixels",),
        "match size": (f"{RESIZE}crop",),
        "scale to multiple": (f"{RESIZE}multiple",),
    }
}


def read_widgets(node: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of a node's widgets by their names.

    Newer pages list the widgets among the node's inputs, as they were when it was saved; those count if their number
    is that of the values.

    Args:
        names: those of the class as it is now, or as `KNOWN_WIDGETS` has it; None where neither is known.
    """
    values = node.get("widgets_values")
    if isinstance(values, Mapping):
        return {name: value for name, value in values.items() if isinstance(name, str)}
    if not isinstance(values, list):
        return {}
    listed = listed_widgets(node)
    known = names if names is not None else KNOWN_WIDGETS.get(node["type"])
    if node["type"] in CHOSEN_WIDGETS and known and values and isinstance(values[0], str):
        known = [known[0], *CHOSEN_WIDGETS[node["type"]].get(values[0], ()), *known[1:]]
    choices = [choice for choice in (listed, known) if choice]
    fitting = [choice for choice in choices if not assign(choice, values)[1]]
    choice = next(iter(fitting or choices[::-1]), ())
    return assign(choice, values)[0]


def assign(names: Sequence[str], values: Sequence[Any]) -> tuple[dict[str, Any], int]:
    """Return values by name, and how many values or names are left over."""
    found: dict[str, Any] = {}
    place = 0
    for index, name in enumerate(names):
        if place >= len(values):
            return found, len(names) - index
        found[name] = values[place]
        place += 1
        is_number = isinstance(found[name], int | float) and not isinstance(found[name], bool)
        if is_number and place < len(values) and values[place] in CONTROL_WORDS:
            place += 1
    return found, len(values) - place


def listed_widgets(node: Mapping[str, Any]) -> list[str]:
    inputs = node.get("inputs")
    return [
        given["name"]
        for given in (inputs if isinstance(inputs, list) else ())
        if isinstance(given, Mapping)
        and isinstance(given.get("widget"), Mapping)
        and isinstance(given.get("name"), str)
    ]


KNOWN_WIDGETS: dict[str, tuple[str, ...]] = {}


# Classes with the same widgets, then these in their order; of the classes that are understood and have any to be read.
CLASSES_AND_WIDGETS = """
    AlignYourStepsScheduler OptimalStepsScheduler: model_type steps denoise
    AnimaLLLiteApply ControlNetApplyAdvanced ControlNetApplySD3 ControlNetInpaintingAliMamaApply
        WanUni3CControlnetApply: strength start_percent end_percent
    ARVideoI2V CosmosImageToVideoLatent CosmosPredict2ImageToVideoLatent EmptyARVideoLatent EmptyCosmosLatentVideo
        EmptyHunyuanLatentVideo EmptyHunyuanVideo15Latent EmptyLTXVLatentVideo EmptyMochiLatentVideo
        HunyuanVideo15ImageToVideo Kandinsky5ImageToVideo VOIDInpaintConditioning Wan22FunControlToVideo
        Wan22ImageToVideoLatent WanCameraImageToVideo WanFirstLastFrameToVideo WanFunControlToVideo
        WanFunInpaintToVideo WanHuMoImageToVideo WanImageToVideo WanPhantomSubjectToVideo WanSoundImageToVideo: width
        height length batch_size
    AudioEncoderLoader: audio_encoder_name
    BasicScheduler: scheduler steps denoise
    BerniniConditioning: width height length batch_size ref_max_size
    BetaSamplingScheduler: steps alpha beta
    CFGGuider DualModelGuider: cfg
    CheckpointLoader: config_name ckpt_name
    CheckpointLoaderSimple ImageOnlyCheckpointLoader LTXVAudioVAELoader unCLIPCheckpointLoader: ckpt_name
    CLIPLoader: clip_name type device
    CLIPLoaderGGUF: clip_name type
    CLIPTextEncode CLIPTextEncodeControlnet PhotoMakerEncode: text
    CLIPTextEncodeFlux: clip_l t5xxl guidance
    CLIPTextEncodeHiDream: clip_l clip_g t5xxl llama
    CLIPTextEncodeHunyuanDiT: bert mt5xl
    CLIPTextEncodeKandinsky5: clip_l qwen25_7b
    CLIPTextEncodeLumina2: system_prompt user_prompt
    CLIPTextEncodePixArtAlpha: width height text
    CLIPTextEncodeSD3: clip_l clip_g t5xxl empty_padding
    CLIPTextEncodeSDXL: width height crop_w crop_h target_width target_height text_g text_l
    CLIPTextEncodeSDXLRefiner: ascore width height text
    CLIPVisionLoader: clip_name
    ComfyMathExpression: expression
    ComfySwitchNode: switch
    ControlNetApply QwenImageDiffsynthControlnet ZImageFunControlnet: strength
    ControlNetLoader DiffControlNetLoader: control_net_name
    CustomCombo: choice
    DualCFGGuider: cfg_conds cfg_cond2_negative style
    DualCLIPLoader: clip_name1 clip_name2 type device
    DualCLIPLoaderGGUF: clip_name1 clip_name2 type
    EmptyAceStep1.5LatentAudio EmptyAceStepLatentAudio EmptyLatentAudio EmptyMiniMaxMusic3LatentAudio: seconds
        batch_size
    EmptyChromaRadianceLatentImage EmptyFlux2LatentImage EmptyHiDreamO1LatentImage EmptyHunyuanImageLatent
        EmptyLatentImage EmptySD3LatentImage: width height batch_size
    EmptyImage: width height batch_size color
    EmptyLatentHunyuan3Dv2: resolution batch_size
    EmptyMiniMaxH3LatentAV WanDancerVideo: width height length
    EmptyQwenImageLayeredLatentImage: width height layers batch_size
    ExponentialScheduler: steps sigma_max sigma_min
    ExtendIntermediateSigmas: steps start_at_sigma end_at_sigma spacing
    Flux2Scheduler: steps width height
    FrameInterpolationModelLoader LatentUpscaleModelLoader UpscaleModelLoader: model_name
    GITSScheduler: coeff steps denoise
    GLIGENLoader: gligen_name
    GLIGENTextBoxApply: text width height x y
    HighwaterKeep: keep at_most
    HighwaterLimits: max_loaded idle_minutes
    HighwaterPlan: devices
    HighwaterLoadCheckpoint: ckpt_name profile precision placement engine
    HighwaterLoadCLIPVision: clip_name profile precision placement engine
    HighwaterLoadControlNet: control_net_name profile precision placement engine
    HighwaterLoadDiffusionModel: unet_name profile precision placement engine
    HighwaterLoadPipeline: pipeline profile precision placement
    HighwaterLoadTextEncoder: clip_name1 type clip_name2 clip_name3 clip_name4 profile precision placement engine
    HighwaterLoadVAE: vae_name profile precision placement engine
    HighwaterManageCLIP HighwaterManageModel HighwaterManageVAE: profile precision placement engine
    HighwaterPrecision: storage scale compute granularity skips exclude exclude_classes error_limit component
    HighwaterQuantizeFile: file to exclude name replace
    HighwaterSamplePipeline: prompt negative_prompt width height frames steps guidance seed batch_size
    HighwaterVerify: text cfg seed
    HighwaterVerifyPipeline: prompt width height frames guidance seed
    HighwaterWatermark: device low high
    HunyuanImageToVideo: width height length batch_size guidance_type
    HunyuanVideo15LatentUpscaleWithModel ImageScale LatentUpscale: upscale_method width height crop
    Ideogram4Scheduler: steps width height mu std
    ImageCrop LatentCrop: width height x y
    ImageFromBatch LatentFromBatch: batch_index length
    ImagePadForOutpaint: left top right bottom feathering
    ImageScaleBy LatentUpscaleBy: upscale_method scale_by
    ImageScaleToMaxDimension: upscale_method largest_size
    ImageScaleToTotalPixels: upscale_method megapixels resolution_steps
    InpaintModelConditioning: noise_mask
    KarrasScheduler PolyexponentialScheduler: steps sigma_max sigma_min rho
    KSampler: seed steps cfg sampler_name scheduler denoise
    KSamplerAdvanced: add_noise noise_seed steps cfg sampler_name scheduler start_at_step end_at_step
        return_with_leftover_noise
    LaplaceScheduler: steps sigma_max sigma_min mu beta
    LatentConcat: dim
    LatentCut: dim index amount
    LatentCutToBatch: dim slice_size
    LoadImage LoadImageOutput: image
    LoraLoader LoraLoaderBypass: lora_name strength_model strength_clip
    LoraLoaderBypassModelOnly LoraLoaderModelOnly: lora_name strength_model
    LTXAVTextEncoderLoader: text_encoder ckpt_name device
    LTXVDualCFGGuider: video_cfg audio_cfg
    LTXVEmptyLatentAudio: frames_number batch_size
    LTXVImgToVideo WanVaceToVideo: width height length batch_size strength
    LTXVReferenceAudio: identity_guidance_scale start_percent end_percent
    LTXVScheduler: steps max_shift base_shift stretch terminal
    ManualSigmas: sigmas
    MiniMaxH3ImageToVideo: prompt width height length
    MiniMaxH3ReferenceToVideo: prompt width height length ref_image_size
    MiniMaxMusic3TextEncode: caption lyrics seed max_duration cfg_scale top_k
    ModelPatchLoader: name
    PerpNegGuider: cfg neg_scale
    PhotoMakerLoader: photomaker_model_name
    PrimitiveBoolean PrimitiveFloat PrimitiveInt PrimitiveString PrimitiveStringMultiline: value
    QuadrupleCLIPLoader QuadrupleCLIPLoaderGGUF: clip_name1 clip_name2 clip_name3 clip_name4
    RepeatImageBatch RepeatLatentBatch: amount
    ResizeAndPadImage: target_width target_height padding_color interpolation
    ResizeImageMaskNode: resize_type scale_method
    ResizeImagesByLongerEdge: longer_edge
    ResizeImagesByShorterEdge: shorter_edge
    ResolutionSelector: aspect_ratio megapixels multiple
    SamplerCustom: add_noise noise_seed cfg
    HighwaterSaveImage SaveImage: filename_prefix
    SDTurboScheduler: steps denoise
    SeedNode: seed
    SelectCLIPDevice SelectModelDevice SelectVAEDevice: device
    SplitSigmas: step
    SplitSigmasDenoise: denoise
    StableZero123_Conditioning: width height batch_size elevation azimuth
    StringConcatenate: string_a string_b delimiter
    StyleModelApply: strength strength_type
    StyleModelLoader: style_model_name
    SUPIRApply: strength_start strength_end restore_cfg restore_cfg_s_tmin
    SV3D_Conditioning: width height video_frames elevation
    SVD_img2vid_Conditioning: width height video_frames motion_bucket_id fps augmentation_level
    TextEncodeAceStepAudio: tags lyrics lyrics_strength
    TextEncodeAceStepAudio1.5: tags lyrics seed bpm duration timesignature language keyscale generate_audio_codes
        cfg_scale temperature top_p top_k min_p
    TextEncodeBooguEdit: prompt negative_prompt
    TextEncodeHunyuanVideo_ImageToVideo: prompt image_interleave
    TextEncodeJoyImageEdit TextEncodeQwenImageEdit TextEncodeQwenImageEditPlus: prompt
    TextEncodeMageFlowEdit: prompt negative_prompt width height batch_size
    TextEncodeZImageOmni: prompt auto_resize_images
    TextGenerate TextGenerateLTX2Prompt: prompt max_length sampling_mode thinking use_default_template
    TrimVideoLatent: trim_amount
    TripleCLIPLoader TripleCLIPLoaderGGUF: clip_name1 clip_name2 clip_name3
    UNETLoader: unet_name weight_dtype
    UnetLoaderGGUF: unet_name
    UnetLoaderGGUFAdvanced: unet_name dequant_dtype patch_dtype patch_on_device
    VAEDecodeAudioTiled: tile_size overlap
    VAEDecodeHunyuan3D: num_chunks octree_resolution
    VAEDecodeTiled VAEEncodeTiled: tile_size overlap temporal_size temporal_overlap
    VAEDecodeTripoSplat: num_gaussians seed
    VAEEncodeForInpaint: grow_mask_by
    VAELoader: vae_name
    VPScheduler: steps beta_d beta_min eps_s
    WanAnimate2ToVideo: width height length batch_size video_frame_offset pose_strength pose_start_percent
        pose_end_percent reference_image_strength
    WanAnimateToVideo: width height length batch_size continue_motion_max_frames video_frame_offset
    WanCameraEmbedding: camera_pose width height length speed fx fy cx cy
    WanInfiniteTalkToVideo: mode width height length motion_frame_count audio_scale
    WanMoveTrackToVideo: strength width height length batch_size
    WanSCAILToVideo: width height length batch_size pose_strength pose_start pose_end video_frame_offset
        previous_frame_count replacement_mode
    WanSoundImageToVideoExtend: length
    WanTrackToVideo: tracks width height length batch_size temperature topk
"""


def read_table(table: str) -> dict[str, tuple[str, ...]]:
    rows = " ".join(line if line.startswith("        ") else f"\n{line}" for line in table.splitlines())
    pairs = [row.partition(":") for row in rows.splitlines() if ":" in row]
    return {name: tuple(widgets.split()) for classes, _, widgets in pairs for name in classes.split()}


KNOWN_WIDGETS = read_table(CLASSES_AND_WIDGETS)
"""By class, in the order of ComfyUI 0.33 and of ours."""
