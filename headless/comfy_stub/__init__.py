"""The part of ComfyUI's API that our node files use, for running them without ComfyUI."""
