"""What a forward takes, found without running it: a trace on torch's meta device tells the activations, the flops and
the memory traffic of a module, by block. No weight is read, none is copied, and no device is needed.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "call_shapes": ["Shapes", "shapes_of"],
        "trace": ["BlockTrace", "EntryTrace", "Kernel", "Segment", "Trace", "Untraceable", "Work"],
        "forward_seconds": ["BlockSeconds", "LaunchedKernels", "Seconds", "launched", "seconds_of"],
        "meta_twin": ["meta_like"],
        "forward_trace": ["Activations", "trace_forward"],
        "call_traces": ["CallTrace", "trace_calls"],
    },
)
