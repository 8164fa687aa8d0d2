"""Nodes for ComfyUI's own models: loading them managed, managing those that other loaders made, and verifying them."""
