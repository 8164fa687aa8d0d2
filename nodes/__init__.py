"""What a user sees in ComfyUI: node schemas (V3) and one engine call each."""
