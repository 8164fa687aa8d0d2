"""The small host: runs, plans and serves API-format workflows without ComfyUI."""
