"""The nodes that keep one model on its device to the last, and that take one off at once."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .schema import make_schema

__all__ = ["HighwaterKeep", "HighwaterRelease"]

ALL = "unlimited"
ANY_MODEL = "A model, text encoder, VAE, ControlNet, CLIP vision model, or pipeline."


class HighwaterKeep(io.ComfyNode):
    """Passes its model on unchanged; an output node, so that it also works at the end of a link."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterKeep",
            display_name="Keep",
            description=(
                "Keeps a model on its device to the last: other idle models are evicted before it. "
                "Turn keep off and run it again to undo that."
            ),
            search_aliases=["pin model", "never unload", "keep loaded", "keep in vram", "evict last"],
            inputs=[
                io.AnyType.Input("model", tooltip=ANY_MODEL),
                io.Boolean.Input(
                    "keep", default=True, tooltip="On: evict this model last. Off: evict it in the usual order again."
                ),
                io.String.Input(
                    "at_most",
                    default=ALL,
                    tooltip=(
                        "How much of a device is kept: 6GiB, 50% of the device, or unlimited. What the model holds "
                        "beyond that is evicted in the usual order. Must not exceed the device."
                    ),
                ),
            ],
            outputs=[io.AnyType.Output(display_name="model", tooltip="The same model.")],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, at_most: str | None = None) -> bool | str:
        """Check the amount before the run; the device is not known here."""
        from ..memory.errors import InvalidInput
        from ..memory.manager.claims.kept import parse_limit

        try:
            if at_most is not None:  # a linked widget's value is known when the node runs
                parse_limit(at_most)
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model: Any, keep: bool, at_most: str = ALL) -> io.NodeOutput:
        from ..memory.manager.claims.kept import parse_limit

        limit = parse_limit(at_most)
        pipeline = managed_pipeline(model)
        if pipeline is None:
            from . import host

            notes = host.keep(model, keep, limit)
        else:
            pipeline.keep(keep, at_most=at_most)
            order = f"last, up to {limit} of a device" if keep else "in the usual order"
            notes = [f"{', '.join(pipeline.components)}: evicted {order}"]
        return io.NodeOutput(model, ui={"text": notes})


class HighwaterRelease(io.ComfyNode):
    """Runs after what is linked to ``after``, which it passes on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterRelease",
            display_name="Release / Unload",
            description=(
                "Takes one model off its device, at once, and says how much memory that freed. The model stays in RAM, "
                "and is loaded again when it is used. To release a text encoder when the prompt is encoded, link the "
                "conditioning to after, and go on with the output."
            ),
            search_aliases=["unload", "unload model", "free vram", "free memory", "purge vram", "clear vram"],
            inputs=[
                io.AnyType.Input("model", tooltip=ANY_MODEL),
                io.AnyType.Input(
                    "after", optional=True, tooltip="Link any output here: the model is released after that node."
                ),
            ],
            outputs=[
                io.AnyType.Output(display_name="model", tooltip="The same model."),
                io.AnyType.Output(display_name="after", tooltip="What is linked to after, unchanged."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, after: Any = None) -> io.NodeOutput:
        reason = "released by a Release node"
        pipeline = managed_pipeline(model)
        if pipeline is None:
            from . import host

            name, departures = host.release(model, reason)
        else:
            name, departures = ", ".join(pipeline.components), pipeline.unload(reason=reason)
        notes = [str(departure) for departure in departures] or [f"{name}: has nothing on a device"]
        return io.NodeOutput(model, after, ui={"text": notes})


def managed_pipeline(link: Any) -> Any:
    """Return the handle of a pipeline that our own loader made; None for all else, which ComfyUI loads."""
    from .pipelines.sampling import LoadedPipeline

    return link.managed if isinstance(link, LoadedPipeline) else None
