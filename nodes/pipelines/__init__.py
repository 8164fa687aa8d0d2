"""Pipeline folders of diffusers: finding, checking, loading, tracing and sampling them."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "diffusers_pipelines": [
            "find_sources",
            "import_diffusers",
            "load_pipeline",
            "load_with_sources",
            "quiet_libraries",
        ],
        "pipeline_folders": [
            "check_pipeline",
            "find_pipeline",
            "is_to_be_made",
            "pipeline_choices",
            "ready_pipeline",
            "weights_files",
            "weights_fingerprint",
        ],
        "decode_tiling": ["DecodeTiling", "tiling_of"],
        "pipeline_traces": ["trace_pipeline"],
        "sampling": ["LoadedPipeline", "Sampling"],
        "sampling_inputs": ["PipelineType", "batch_input", "guidance_input", "size_inputs"],
        "tiny_pipelines": ["ensure_pipelines"],
        "verify": ["HighwaterVerifyPipeline"],
    },
)
