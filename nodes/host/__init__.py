"""The only place that speaks to ComfyUI's own code; what needs ``comfy.*`` is imported when it is first used.

A node of a ComfyUI model uses that when it executes, never before.
"""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "waiting_queue": ["QueuedPrompt", "WaitingQueue", "read_queue"],
        "hosted": ["Request", "patcher_of"],
        "adopting": ["notes_for"],
        "core_needs": [
            "CodingNeeds",
            "SamplingNeeds",
            "TiledNeeds",
            "coding_needs",
            "kept_free_bytes",
            "on_meta",
            "reserves_for_gpus",
            "sampling_needs",
            "text_encoder",
        ],
        "core_loras": ["changes_in_core"],
        "core_traces": [
            "CoreCall",
            "Prompted",
            "coding_call",
            "paths_of_modules",
            "prompted_of",
            "step_call",
            "text_call",
            "usual_prompt",
        ],
        "dynamic_models": ["attach_to_core"],
        "loading": [
            "load_checkpoint",
            "load_clip_vision",
            "load_controlnet",
            "load_diffusion_model",
            "load_text_encoder",
            "load_vae",
        ],
        "keeping": ["keep", "release", "seeing_loaded_models"],
        "managing": ["manage_clip", "manage_model", "manage_vae"],
        "node_results": ["note_result"],
        "node_widgets": ["widgets_of"],
        "observing": ["observe_core"],
        "patcher": ["HighwaterPatcher"],
        "verifying": ["verify_clip", "verify_model", "verify_vae"],
    },
)
