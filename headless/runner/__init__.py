"""Workflow files, the order in which their nodes run, and what is kept of their results."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "node_inputs": ["Link"],
        "output_cache": ["CacheEntry", "OutputCache"],
        "runner": ["InterruptedRun", "NodeFailed", "Upcoming", "WorkflowRunner"],
        "workflow": [
            "InvalidWorkflow",
            "Workflow",
            "WorkflowNode",
            "load_workflow",
            "parse_workflow",
            "visit",
        ],
        "workflow_file": ["read_graph", "reject_constant"],
    },
)
