"""Nodes for pipeline folders of diffusers: finding, checking, loading and sampling them."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "diffusers_pipelines": ["import_diffusers", "quiet_libraries"],
        "pipeline": [
            "HighwaterLoadPipeline",
            "HighwaterSamplePipeline",
            "PipelineType",
        ],
        "pipeline_folders": ["check_pipeline", "find_pipeline", "weights_files"],
        "pipeline_traces": ["trace_folder", "trace_pipeline"],
        "sampling": ["LoadedPipeline"],
        "tiny_pipelines": ["ensure_pipelines"],
        "verify": ["HighwaterVerifyPipeline"],
    },
)
