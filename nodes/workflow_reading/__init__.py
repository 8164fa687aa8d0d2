"""What a whole workflow loads and computes, read off its graph without running it: for plans."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "description": [
            "AppliedLora",
            "Asked",
            "CONTROL",
            "Call",
            "LoadedModel",
            "DIFFUSION",
            "NodeName",
            "PIPELINE",
            "Size",
            "TEXT",
            "Tiling",
            "WatermarkSetting",
            "WorkflowDescription",
            "WorkflowUse",
        ],
        "model_paths": ["FoundFiles", "find_files", "find_loras", "image_size"],
        "reading": ["read_workflow"],
    },
)
