"""Which components the prompt that runs and those that wait behind it will use, read off their graphs."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "prompt_graph": ["MODEL_FILE", "PromptGraph"],
        "queue_forecast": ["Known", "MAX_PROMPTS", "QueueForecast", "remember"],
    },
)
