"""All recipes of diffusers' pipelines, by the pipeline's name."""

from highwater.tests.compat import images, unets, videos  # noqa: F401  # each registers its own
from highwater.tests.compat.recipes import RECIPES

__all__ = ["RECIPES"]
