"""ComfyUI's web page without ComfyUI's backend: its routes, its queue of prompts, its files."""
