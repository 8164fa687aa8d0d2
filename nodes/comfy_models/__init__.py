"""Nodes for ComfyUI's own models: loading them managed, managing those that other loaders made, verifying and
quantizing them."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "manage": ["HighwaterManageCLIP", "HighwaterManageModel", "HighwaterManageVAE"],
        "model_files": ["KINDS", "SAFETENSORS", "find_model_file"],
        "models": [
            "HighwaterLoadCLIPVision",
            "HighwaterLoadCheckpoint",
            "HighwaterLoadControlNet",
            "HighwaterLoadDiffusionModel",
            "HighwaterLoadTextEncoder",
            "HighwaterLoadVAE",
        ],
        "quantize": ["HighwaterQuantizeFile"],
        "verify": ["HighwaterVerify"],
    },
)
