"""Writes the shapes of well-known models, by ComfyUI's own classes without memory. Runs in the host's own Python.

usage: real_shapes.py OUTPUT.json   (in ComfyUI's folder; a name and a shape for each weight, by model)
"""

import json
import sys

sys.path.insert(0, ".")
sys.argv[1:], output = ["--cpu"], sys.argv[1]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.clip_model  # noqa: E402
import comfy.ldm.flux.model  # noqa: E402
import comfy.ldm.models.autoencoder  # noqa: E402
import comfy.ldm.wan.model  # noqa: E402
import comfy.ldm.wan.vae  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sd1_clip  # noqa: E402
import comfy.text_encoders.t5  # noqa: E402
import torch  # noqa: E402

OPERATIONS = comfy.ops.disable_weight_init
FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072,
    "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38, "axes_dim": [16, 56, 56],
    "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": False, "txt_ids_dims": [],
}  # fmt: skip
WAN = {"model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40, "text_dim": 4096,
       "in_dim": 16, "out_dim": 16}  # fmt: skip
AUTOENCODER = {
    "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip


def text_encoder(name: str, kind: type) -> torch.nn.Module:
    with open(f"comfy/{name}") as file:
        return kind(json.load(file), torch.float16, "meta", OPERATIONS)


def autoencoder() -> torch.nn.Module:
    part = "comfy.ldm.modules.diffusionmodules.model."
    return comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{part}Encoder", "params": AUTOENCODER},
        decoder_config={"target": f"{part}Decoder", "params": AUTOENCODER},
    )


MODELS = {
    "flux": lambda: comfy.ldm.flux.model.Flux(**FLUX, operations=OPERATIONS),
    "clip_l": lambda: text_encoder("sd1_clip_config.json", comfy.clip_model.CLIPTextModel),
    "t5xxl": lambda: text_encoder("text_encoders/t5_config_xxl.json", comfy.text_encoders.t5.T5),
    "ae": autoencoder,
    "wan": lambda: comfy.ldm.wan.model.WanModel(**WAN, operations=OPERATIONS),
    "umt5": lambda: text_encoder("text_encoders/umt5_config_xxl.json", comfy.text_encoders.t5.T5),
    "wan_vae": lambda: comfy.ldm.wan.vae.WanVAE(
        dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True]
    ),
}

shapes = {}
for name, make in MODELS.items():
    with torch.device("meta"):
        shapes[name] = {key: list(value.shape) for key, value in make().state_dict().items()}
with open(output, "w") as file:
    json.dump(shapes, file)
